"""Memory for weights that are read from disk: arrays that nobody has written yet, and filling them on the GPU.

MLX has no array without a value, and filling one with zeros costs more than reading a file that the system has in
memory. But MLX loads arrays from any object that reads like a file; one that reads nothing leaves the memory as it is.

On CUDA such memory is the driver's managed memory, whose pages come into being, and move between host and GPU, where
either touches them, a page fault at a time. `gpu_memory` has whole ranges put on the GPU, where they cost next to
nothing, and copies what is read into them from pinned memory of the host, as fast as the bus goes.
"""

import ctypes
import json
import struct
import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import mlx.core as mx

NON_BLOCKING = 1  # of a stream: it waits for no other
PORTABLE = 1  # of pinned memory: pinned for every context


def unwritten(shape: Sequence[int], dtype: mx.Dtype, stream: mx.Stream) -> mx.array:
    """An array on `stream`, a stream of the CPU, whose values are whatever its memory holds once it is evaluated."""
    size = prod(shape) * dtype.size
    with mx.stream(stream):
        nothing: Any = _Nothing(size)
        found: Any = mx.load(nothing, format="safetensors", stream=stream)
        return found["bytes"].view(dtype).reshape(shape)


class _Nothing:
    """A safetensors file of one array of `size` bytes, which are never read."""

    closed = False

    def __init__(self, size: int):
        text = json.dumps({"bytes": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        self._header = struct.pack("<Q", len(text)) + text
        self._size, self._at = len(self._header) + size, 0

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = to + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        part = self._header[self._at : self._at + len(view)]
        view[: len(part)] = part
        self._at += len(view)
        return len(view)


@lru_cache(maxsize=1)
def gpu_memory() -> "GpuMemory | None":
    """Fills managed memory; None where there is none: on a CPU and on Metal host and GPU share their memory."""
    if not mx.cuda.is_available():
        return None
    try:
        return GpuMemory(ctypes.CDLL("libcuda.so.1"))
    except (OSError, DriverError):
        return None


class DriverError(Exception):
    """CUDA's driver refused a call."""


class GpuMemory:
    """Of CUDA's driver, which is `library`, what moves memory. Raises DriverError where that says no.

    `device`: of those that this process sees; each rank sees its own one.
    """

    def __init__(self, library: Any, device: int = 0):
        self._library, self._device = library, device
        self._context, self._threads = ctypes.c_void_p(), threading.local()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def place(self, views: Sequence[memoryview]) -> None:
        """Have this memory on the GPU. Values that the host wrote come along."""
        stream = self._stream()
        for view in filter(len, views):
            self._call("cuMemPrefetchAsync", _address(view), ctypes.c_size_t(len(view)), self._device, stream)
        self._call("cuStreamSynchronize", stream)

    def staging(self, size: int) -> memoryview:
        """Pinned memory of the host, `size` bytes, this thread's own; the next call gives the same again."""
        held: memoryview | None = getattr(self._threads, "staging", None)
        if held is None or len(held) < size:
            at = ctypes.c_void_p()
            self._stream()
            self._call("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(size), PORTABLE)
            pinned = (ctypes.c_char * size).from_address(at.value or 0)
            weakref.finalize(pinned, self._library.cuMemFreeHost, at).atexit = False
            held = memoryview(pinned).cast("B")
            self._threads.staging = held
        return held[:size]

    def copy(self, source: memoryview, target: memoryview) -> None:
        """`source`, of `staging`, into memory on the GPU."""
        stream = self._stream()
        size = ctypes.c_size_t(len(source))
        self._call("cuMemcpyHtoDAsync_v2", _address(target), ctypes.c_void_p(_address(source).value), size, stream)
        self._call("cuStreamSynchronize", stream)

    def _stream(self) -> ctypes.c_void_p:
        """This thread's own, so that copies of several threads overlap."""
        if not hasattr(self._threads, "stream"):
            self._call("cuCtxSetCurrent", self._context)
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
            self._threads.stream = stream
        found: ctypes.c_void_p = self._threads.stream
        return found

    def _call(self, name: str, *given: Any) -> None:
        if code := getattr(self._library, name)(*given):
            raise DriverError(f"{name} returned {code}")


def _address(view: memoryview) -> ctypes.c_uint64:
    return ctypes.c_uint64(ctypes.addressof(ctypes.c_char.from_buffer(view)))
