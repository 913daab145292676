"""Memory for weights: arrays that nobody has written, moved between host and GPU."""

import ctypes
from typing import Any

import mlx.core as mx
import pytest

from segtrain.models import room


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
        self.refuses, self.moved = refuses, []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name == "cuMemPrefetchAsync":
                self.moved.append(tuple(x.value for x in given[:3]))
            return 1 if name == self.refuses else 0

        return call


def test_memory_is_moved_to_the_gpu_and_to_the_host() -> None:
    driver = FakeDriver()
    buffers = [bytearray(64), bytearray(0), bytearray(32)]
    move = room.Driver(driver, device=3)
    for to_device in (False, True):
        move([memoryview(buffer) for buffer in buffers], to_device)
    places = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (buffers[0], buffers[2])]
    assert driver.moved == [(at, size, to) for to in (room.HOST, 3) for at, size in zip(places, (64, 32), strict=True)]


@pytest.mark.parametrize("name", ["cuInit", "cuMemPrefetchAsync"])
def test_a_driver_that_refuses_is_an_error(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} returned 1"):
        room.Driver(FakeDriver(name))([memoryview(bytearray(8))], True)


def test_nothing_moves_where_memory_is_shared() -> None:
    assert (room.mover() is None) != mx.cuda.is_available()
