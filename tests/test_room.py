"""Memory for weights: arrays that nobody has written, filled on the GPU."""

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from segtrain.models import room, weights


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), (2, 3, 7)], ids=str)
def test_what_is_written_into_an_unwritten_array_is_its_value(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    expected = mx.random.randint(0, 100, shape).astype(dtype)
    array: Any = room.unwritten(shape, dtype, mx.new_stream(mx.cpu))
    assert (array.shape, array.dtype) == (expected.shape, dtype)
    mx.eval(array, expected)
    if array.size:
        memoryview(array).cast("B")[:] = memoryview(expected).cast("B")  # type: ignore[call-overload]
    assert mx.array_equal(array, expected).item()
    assert mx.array_equal(array + array, expected + expected).item()


def test_an_unwritten_array_takes_its_own_memory_alone() -> None:
    before = mx.get_active_memory()
    array = room.unwritten((1 << 20,), mx.float32, mx.new_stream(mx.cpu))
    mx.eval(array)
    assert mx.get_active_memory() - before == array.nbytes


class FakeDriver:
    """Of CUDA's driver, the calls; `refuses`: the function that answers with an error."""

    def __init__(self, refuses: str = ""):
        self.refuses, self.calls, self.pinned = refuses, [], []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.calls.append((name, *(getattr(x, "value", x) for x in given)))
            if name == self.refuses:
                return 1
            if name == "cuMemHostAlloc":
                self.pinned.append(ctypes.create_string_buffer(given[1].value))
                given[0]._obj.value = ctypes.addressof(self.pinned[-1])
            if name == "cuMemcpyHtoDAsync_v2":
                target, source, size = (x.value for x in given[:3])
                ctypes.memmove(target, source, size)
            return 0

        return call

    def named(self, name: str) -> list[Any]:
        return [given for called, *given in self.calls if called == name]


def test_whole_ranges_are_put_on_the_gpu() -> None:
    driver = FakeDriver()
    buffers = [bytearray(64), bytearray(0), bytearray(32)]
    room.GpuMemory(driver, device=3).place([memoryview(buffer) for buffer in buffers])
    places = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (buffers[0], buffers[2])]
    moved = driver.named("cuMemPrefetchAsync")
    assert [given[:3] for given in moved] == [[at, size, 3] for at, size in zip(places, (64, 32), strict=True)]
    assert driver.calls[-1][0] == "cuStreamSynchronize"


def test_staging_is_pinned_once_a_thread_and_copied() -> None:
    driver = FakeDriver()
    gpu = room.GpuMemory(driver)
    target = bytearray(8)
    for values in (b"12345678", b"abcd"):
        staging = gpu.staging(len(values))
        staging[:] = values
        gpu.copy(staging, memoryview(target)[: len(values)])
    assert target == b"abcd5678"
    assert len(driver.pinned) == len(driver.named("cuStreamCreate")) == 1
    thread = threading.Thread(target=gpu.staging, args=(8,))
    thread.start()
    thread.join()
    assert len(driver.pinned) == len(driver.named("cuStreamCreate")) == len(driver.named("cuCtxSetCurrent")) == 2
    gc.collect()
    assert len(driver.named("cuMemFreeHost")) == 1  # of the thread that has ended


@pytest.mark.parametrize("name", ["cuInit", "cuMemPrefetchAsync"])
def test_a_driver_that_refuses_is_an_error(name: str) -> None:
    with pytest.raises(room.DriverError, match=f"{name} returned 1"):
        room.GpuMemory(FakeDriver(name)).place([memoryview(bytearray(8))])


@pytest.mark.parametrize("refuses", ["", "cuMemPrefetchAsync", "cuMemHostAlloc", "cuMemcpyHtoDAsync_v2"])
def test_weights_are_right_whatever_the_driver_refuses(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(refuses)
    gpu = room.GpuMemory(driver)
    monkeypatch.setattr(weights, "gpu_memory", lambda: gpu)
    values = bytes(range(200))
    path = tmp_path / "weights"
    path.write_bytes(values)
    target = memoryview(bytearray(150))
    file = weights.File.of(path, past_cache=False)
    weights._fill(target, file, 30, weights._placed([target]))
    assert target == values[30:180]
    assert bool(driver.named("cuMemcpyHtoDAsync_v2")) == (refuses in ("", "cuMemcpyHtoDAsync_v2"))


def test_nothing_moves_where_memory_is_shared() -> None:
    assert (room.gpu_memory() is None) != mx.cuda.is_available()
