"""Memory for weights that are read from disk: arrays that nobody has written yet, and moving them to the GPU.

MLX has no array without a value, and filling one with zeros costs more than reading a file that the system has in
memory. But MLX loads arrays from any object that reads like a file; one that reads nothing leaves the memory as it is.

On CUDA such memory is the driver's managed memory, whose pages move between host and GPU when either touches them, a
page fault at a time. `mover` moves whole ranges instead, as fast as the bus goes.
"""

import ctypes
import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from math import prod
from typing import Any

import mlx.core as mx

HOST = -1  # the driver's number for the host
NON_BLOCKING = 1


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


Mover = Callable[[Sequence[memoryview], bool], None]
"""(memory of arrays, whether to the GPU): moves it there at once."""


@lru_cache(maxsize=1)
def mover() -> Mover | None:
    """Moves managed memory; None where there is none: on a CPU and on Metal host and GPU share their memory."""
    if not mx.cuda.is_available():
        return None
    try:
        driver = Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, RuntimeError):
        return None

    def move(views: Sequence[memoryview], to_device: bool) -> None:
        with suppress(RuntimeError):  # then pages move as they are touched
            driver(views, to_device)

    return move


class Driver:
    """CUDA's driver, of which `library` has the functions. Raises RuntimeError where it says no.

    `device`: of those that this process sees; each rank sees its own one.
    """

    def __init__(self, library: Any, device: int = 0):
        self._library, self._device = library, device
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    def __call__(self, views: Sequence[memoryview], to_device: bool) -> None:
        self._call("cuCtxSetCurrent", self._context)  # of this thread
        target = ctypes.c_int(self._device if to_device else HOST)
        for view in filter(len, views):
            begin = ctypes.addressof(ctypes.c_char.from_buffer(view))
            self._call("cuMemPrefetchAsync", ctypes.c_uint64(begin), ctypes.c_size_t(len(view)), target, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def _call(self, name: str, *given: Any) -> None:
        if code := getattr(self._library, name)(*given):
            raise RuntimeError(f"{name} returned {code}")
