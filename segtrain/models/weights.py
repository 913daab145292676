"""Frozen weights of the layers read from disk for as long as a range of layers uses them, instead of held in memory.

A model is loaded lazily, so that none of its layers' arrays is ever read as a whole. `Loads` notes which array came
from which tensor of which safetensors file; an array that reaches its layer as it came, under whatever name, is read
again from that place whenever the layer runs. Between two uses the layer holds the lazy array, which has the shape and
dtype but no memory.

While one range runs, threads read the next one that `expect` announced. So two ranges are in memory at a time, and one
more for each that runs ahead. Reads go straight into the arrays' memory: nothing is copied.
"""

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from segtrain.engine.segments import Bounds
from segtrain.errors import RunFailed, UserError
from segtrain.models.alike import Place, places

THREADS = 4  # read at a time: what it takes to reach the speed of a fast disk
PIECE = 16 << 20  # bytes that one thread reads at a time
SMALL = 1 << 20  # bytes up to which an array that mlx-lm makes of others stays in memory


@dataclass(frozen=True)
class File:
    """A weight file as it was when the model was loaded."""

    path: Path
    size: int
    changed: int  # ns

    @classmethod
    def of(cls, path: Path) -> "File":
        found = path.stat()
        return cls(path, found.st_size, found.st_mtime_ns)

    def check(self, descriptor: int) -> None:
        """Raise RunFailed unless the open file is the one that the model was loaded from."""
        now = os.fstat(descriptor)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.changed):
            raise RunFailed(
                f"{self.path} changed while its weights were in use ({self.size:,} bytes before, {now.st_size:,} now); "
                "put the model's files back and go on from the last checkpoint with --resume"
            )


@dataclass(frozen=True)
class Tensor:
    """Where an array's bytes lie, in the order and form in which mlx holds them."""

    file: File
    offset: int
    bytes: int


class Loads:
    """`mx.load`, and which array it made of which tensor."""

    def __init__(self) -> None:
        self._load = mx.load
        self._made: dict[int, tuple[mx.array, str, str]] = {}  # holds the arrays, so that ids stay theirs
        self._headers: dict[str, tuple[File, int, dict[str, Any]]] = {}

    def __call__(self, file: str, *args: Any, **kwargs: Any) -> Any:
        arrays: Any = self._load(file, *args, **kwargs)
        self._made |= {id(array): (array, file, name) for name, array in arrays.items()}
        return arrays

    def tensor(self, array: mx.array) -> Tensor | None:
        """Where `array` comes from, if it is one of the loaded arrays as they were."""
        if id(array) not in self._made:
            return None
        _, file, name = self._made[id(array)]
        if file not in self._headers:
            self._headers[file] = _header(Path(file))
        known, start, header = self._headers[file]
        first, last = header[name]["data_offsets"]
        return Tensor(known, start + first, last - first) if last - first == array.nbytes else None


def _header(path: Path) -> tuple[File, int, dict[str, Any]]:
    """A safetensors file, where its tensors' bytes begin, and its header."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return File.of(path), 8 + length, json.loads(stream.read(length))


@dataclass
class _Reading:
    """A range whose arrays are being read."""

    range: Bounds
    arrays: list[mx.array]
    pieces: list[Future]

    def done(self) -> list[mx.array]:
        """The arrays, once they are read. Raises RunFailed where they can't be."""
        for piece in self.pieces:
            piece.result()
        return self.arrays


class Streamed:
    """The layers' frozen weights, read from the model's files for each use."""

    def __init__(self, layers: Sequence[nn.Module], tensors: Sequence[dict[tuple[int, str], Tensor]]):
        """`tensors`: per layer, where the array at (id of a module, key) lies."""
        self._layers = layers
        self._where: list[list[Place]] = [
            [(module, key) for module, key in places([layer]) if (id(module), key) in found]
            for layer, found in zip(layers, tensors, strict=True)
        ]
        self._tensors = [
            [found[id(module), key] for module, key in where] for where, found in zip(self._where, tensors, strict=True)
        ]
        self._lazy = [[module[key] for module, key in where] for where in self._where]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
        self._stream = mx.new_stream(mx.cpu)  # memory is set aside without waiting for what runs
        self._order: Iterator[Bounds | None] = iter(())
        self._next: _Reading | None = None
        self.bytes_read, self.waited = 0, 0.0  # seconds

    @property
    def layers(self) -> int:
        return len(self._layers)

    def bytes(self, lo: int, hi: int) -> int:
        """Of the weights of layers lo..hi-1."""
        return sum(tensor.bytes for layer in self._tensors[lo:hi] for tensor in layer)

    def expect(self, order: Iterable[Bounds | None]) -> None:
        """Ranges in the order in which they will be used. After None nothing is read ahead."""
        self._order, self._next = iter(order), None

    @contextmanager
    def held(self, lo: int, hi: int) -> Iterator[None]:
        """While the block runs, layers lo..hi-1 hold their weights. Raises RunFailed where they can't be read."""
        begun = time.perf_counter()
        arrays = self._arrived((lo, hi)).done()
        self.waited += time.perf_counter() - begun
        ahead = next(self._order, None)
        self._next = self._read(ahead) if ahead else None
        where = [place for layer in self._where[lo:hi] for place in layer]
        lazy = [array for layer in self._lazy[lo:hi] for array in layer]
        try:
            _put(where, arrays)
            del arrays
            yield
        finally:
            _put(where, lazy)

    def _arrived(self, wanted: Bounds) -> _Reading:
        """The reading of `wanted`: the one under way, or one that begins now."""
        reading, self._next = self._next, None
        if reading is not None and reading.range == wanted:
            return reading
        del reading
        for expected in self._order:
            if expected == wanted:
                break
        return self._read(wanted)

    def _read(self, wanted: Bounds) -> _Reading:
        lo, hi = wanted
        lazy = [array for layer in self._lazy[lo:hi] for array in layer]
        tensors = [tensor for layer in self._tensors[lo:hi] for tensor in layer]
        with mx.stream(self._stream):
            arrays = [mx.zeros(array.shape, array.dtype) for array in lazy]
            mx.eval(arrays)
        self.bytes_read += sum(tensor.bytes for tensor in tensors)
        pieces = [
            self._pool.submit(_fill, view[at : at + PIECE], tensor.file, tensor.offset + at)
            for array, tensor in zip(arrays, tensors, strict=True)
            for view in [_bytes_of(array)]
            for at in range(0, tensor.bytes, PIECE)
        ]
        return _Reading(wanted, arrays, pieces)


def _bytes_of(array: Any) -> memoryview:
    """The memory of an evaluated array, writable."""
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def _put(where: Sequence[Place], arrays: Sequence[mx.array]) -> None:
    for (module, key), array in zip(where, arrays, strict=True):
        module[key] = array


def _fill(view: memoryview, file: File, offset: int) -> None:
    """Read `view` from `file` at `offset`. Raises RunFailed."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            file.check(descriptor)
            _fill_from(descriptor, view, file, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunFailed(
            f"the weights in {file.path} can't be read any more: {error.strerror or error}; put the model's files "
            "back and go on from the last checkpoint with --resume"
        ) from error


def _fill_from(descriptor: int, view: memoryview, file: File, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            file.check(descriptor)
            raise RunFailed(f"{file.path} ends before its tensors do; fetch the model's files again")
        done += count


def streamed(model: nn.Module, loads: Loads, name: str) -> Streamed:
    """The weights of a lazily loaded model's layers as a source; everything else is evaluated, to stay in memory.

    Raises UserError where a layer's large array is not a tensor of the files as it lies there.
    """
    names = {id(module): path for path, module in model.named_modules()}
    found: list[dict[tuple[int, str], Tensor]] = []
    for layer in model.layers:
        tensors = {(id(m), key): tensor for m, key in places([layer]) if (tensor := loads.tensor(m[key]))}
        others = [place for place in places([layer]) if (id(place[0]), place[1]) not in tensors]
        if made := [f"{names[id(m)]}.{key}" for m, key in others if m[key].nbytes > SMALL]:
            raise UserError(
                f"engine.weights: streamed reads tensors as they lie in the files, and mlx-lm makes {made[0]} of "
                f"{name} from others; convert the model first: mlx_lm.convert --hf-path {name} --mlx-path NEW"
            )
        found.append(tensors)
    source = Streamed(model.layers, found)
    inside = {place for tensors in found for place in tensors}
    mx.eval([v for _, m in model.named_modules() for k, v in m.items() if _resident(m, k, v, inside)])
    return source


def _resident(module: nn.Module, key: str, value: Any, streamed: set[tuple[int, str]]) -> bool:
    return isinstance(value, mx.array) and (id(module), key) not in streamed
