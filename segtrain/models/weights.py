"""Frozen weights read from disk for as long as they are used, instead of held in memory.

A model is loaded lazily, so that none of its layers' arrays is ever read as a whole. `Loads` notes which array came
from which tensor of which safetensors file; an array that reaches its layer as it came, under whatever name, is read
again from that place whenever the layer runs. Between two uses the layer holds the lazy array, which has the shape and
dtype but no memory.

While one range runs, threads read the next one that `expect` announced. So two ranges are in memory at a time, and one
more for each that runs ahead. Reads go straight into the arrays' memory, on CUDA through pinned memory of the host
(`models.room`).

Outside the layers the large arrays are those of the ends (`models.ends`): of token embeddings the rows that a stream
looks up are read, and of the vocabulary's projection a block of rows at a time.
"""

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from segtrain.engine.segments import Bounds
from segtrain.errors import RunFailed, UserError
from segtrain.models.alike import Place, places
from segtrain.models.ends import SMALL, Block, ends_of
from segtrain.models.page_cache import outgrown_by, read_past
from segtrain.models.room import DriverError, GpuMemory, gpu_memory, unwritten

THREADS = 8  # read at a time: what it takes to reach the speed of a fast disk, and of the bus to a GPU
PIECE = 16 << 20  # bytes that one thread reads at a time

Key: TypeAlias = tuple[int, str]
"""(id of a module, key of an array in it)."""
Unit: TypeAlias = Bounds | Block
"""What is read at once: a range of layers, or a block of the vocabulary's projection."""


@dataclass(frozen=True)
class File:
    """A weight file as it was when the model was loaded."""

    path: Path
    size: int
    changed: int  # ns
    past_cache: bool  # whether reads are to leave the page cache alone

    @classmethod
    def of(cls, path: Path, *, past_cache: bool) -> "File":
        found = path.stat()
        return cls(path, found.st_size, found.st_mtime_ns, past_cache)

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

    def rows(self, lo: int, hi: int, count: int) -> "Tensor":
        """Rows lo..hi-1 of the `count` along the array's first axis."""
        each = self.bytes // count
        return Tensor(self.file, self.offset + lo * each, (hi - lo) * each)


@dataclass(frozen=True)
class Part:
    """An array to be read."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    tensor: Tensor

    def rows(self, lo: int, hi: int) -> "Part":
        return Part((hi - lo, *self.shape[1:]), self.dtype, self.tensor.rows(lo, hi, self.shape[0]))


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

    @property
    def _size(self) -> int:
        """Of all files, bytes."""
        return sum(Path(file).stat().st_size for file in {file for _, file, _ in self._made.values()})

    def tensor(self, array: mx.array) -> Tensor | None:
        """Where `array` comes from, if it is one of the loaded arrays as they were."""
        if id(array) not in self._made:
            return None
        _, file, name = self._made[id(array)]
        if file not in self._headers:
            self._headers[file] = _header(Path(file), past_cache=outgrown_by(self._size))
        known, start, header = self._headers[file]
        first, last = header[name]["data_offsets"]
        return Tensor(known, start + first, last - first) if last - first == array.nbytes else None


def _header(path: Path, *, past_cache: bool) -> tuple[File, int, dict[str, Any]]:
    """A safetensors file, where its tensors' bytes begin, and its header."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return File.of(path, past_cache=past_cache), 8 + length, json.loads(stream.read(length))


@dataclass
class _Reading:
    """A unit whose arrays are being read."""

    unit: Unit
    arrays: list[mx.array]
    read: Future[None]

    def done(self) -> list[mx.array]:
        """The arrays, once they are read. Raises RunFailed where they can't be."""
        self.read.result()
        return self.arrays


class Streamed:
    """The frozen weights of a model's layers and large ends, read from the model's files for each use."""

    def __init__(self, model: nn.Module, tensors: Sequence[dict[Key, Tensor]], outside: dict[Key, Tensor]):
        """By (id of a module, key), where its array lies: per layer, and of whole modules outside the layers."""
        self._where: list[list[Place]] = [
            [(module, key) for module, key in places([layer]) if (id(module), key) in found]
            for layer, found in zip(model.layers, tensors, strict=True)
        ]
        self._parts = [[_part(place, tensors[i]) for place in where] for i, where in enumerate(self._where)]
        self._lazy = [[module[key] for module, key in where] for where in self._where]
        self._inside = {key for found in tensors for key in found}
        self._outside: dict[int, dict[str, Part]] = {}
        for place in places([model]):
            if (id(place[0]), place[1]) in outside:
                self._outside.setdefault(id(place[0]), {})[place[1]] = _part(place, outside)
        self.ends = [module for module in ends_of(model) if id(module) in self._outside]
        self._head: nn.Module | None = None
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="weights-start")
        self._stream = mx.new_stream(mx.cpu)  # memory is set aside without waiting for what runs
        self._order: Iterator[Unit | None] = iter(())
        self._next: _Reading | None = None
        self._dtype: mx.Dtype | None = None
        self.bytes_read = 0
        self.reading, self.waited = 0.0, 0.0  # seconds in which ranges or blocks were read; in which nothing else ran

    @property
    def layers(self) -> int:
        return len(self._where)

    def bytes(self, lo: int, hi: int) -> int:
        """Of the weights of layers lo..hi-1."""
        return sum(part.tensor.bytes for layer in self._parts[lo:hi] for part in layer)

    @property
    def ends_bytes(self) -> int:
        """Of the weights outside the layers that stay on disk."""
        return sum(part.tensor.bytes for parts in self._outside.values() for part in parts.values())

    def expect(self, order: Iterable[Unit | None]) -> None:
        """Units in the order in which they will be used. After None nothing is read ahead."""
        self._order, self._next = iter(order), None

    @contextmanager
    def held(self, lo: int, hi: int) -> Iterator[None]:
        """While the block runs, layers lo..hi-1 hold their weights. Raises RunFailed where they can't be read."""
        arrays = self._taken((lo, hi))
        where = [place for layer in self._where[lo:hi] for place in layer]
        lazy = [array for layer in self._lazy[lo:hi] for array in layer]
        try:
            _put(where, arrays)
            del arrays
            yield
        finally:
            _put(where, lazy)

    def streams(self, module: nn.Module, key: str) -> bool:
        """Whether this array of the model stays on disk."""
        return key in self._outside.get(id(module), {}) or (id(module), key) in self._inside

    @contextmanager
    def in_dtype(self, dtype: mx.Dtype) -> Iterator[None]:
        """While the block runs, floating-point arrays are of this dtype when they come."""
        before, self._dtype = self._dtype, dtype
        try:
            yield
        finally:
            self._dtype = before

    def _cast(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        dtype = self._dtype
        return [x if dtype is None or not mx.issubdtype(x.dtype, mx.floating) else x.astype(dtype) for x in arrays]

    def keep(self, ends: Sequence[nn.Module]) -> None:
        """Hold these of the ends in memory."""
        for module in ends:
            mx.eval([module[key] for key in self._outside.pop(id(module))])
        self.ends = [module for module in self.ends if id(module) in self._outside]

    def project_by(self, module: nn.Module) -> None:
        """`module`, one of `ends`, is the one that `block` reads."""
        self._head = module

    def block(self, block: Block) -> dict[str, mx.array]:
        """These rows of the projection's arrays, by key. Raises RunFailed where they can't be read."""
        return dict(zip(self._outside[id(self._head)], self._taken(block), strict=True))

    def rows(self, module: nn.Module, numbers: Sequence[int]) -> dict[str, mx.array]:
        """Rows of `module`'s arrays, one of `ends`, in ascending order. Raises RunFailed where they can't be read."""
        parts = self._outside[id(module)]
        runs = _runs(numbers)
        pieces, arrays = [], {}
        for key, part in parts.items():
            arrays[key] = self._set_aside([Part((len(numbers), *part.shape[1:]), part.dtype, part.tensor)])[0]
            for lo in range(0, len(runs), -(-len(runs) // THREADS)):
                some = runs[lo : lo + -(-len(runs) // THREADS)]
                pieces.append(self._readers.submit(_fill_rows, _bytes_of(arrays[key]), part, some))
            self.bytes_read += arrays[key].nbytes
        for piece in pieces:
            piece.result()
        return dict(zip(arrays, self._cast([*arrays.values()]), strict=True))

    def _taken(self, wanted: Unit) -> list[mx.array]:
        """The arrays of `wanted`. From now on the next expected unit is being read."""
        begun = time.perf_counter()
        arrays = self._arrived(wanted).done()
        self.waited += time.perf_counter() - begun
        ahead = next(self._order, None)
        self._next = self._read(ahead) if ahead else None
        return self._cast(arrays)

    def _arrived(self, wanted: Unit) -> _Reading:
        """The reading of `wanted`: the one under way, or one that begins now."""
        reading, self._next = self._next, None
        if reading is not None and reading.unit == wanted:
            return reading
        del reading
        for expected in self._order:
            if expected == wanted:
                break
        return self._read(wanted)

    def _read(self, wanted: Unit) -> _Reading:
        parts = self._parts_of(wanted)
        arrays = self._set_aside(parts)
        self.bytes_read += sum(part.tensor.bytes for part in parts)
        return _Reading(wanted, arrays, self._starter.submit(self._fill, arrays, parts))

    def _parts_of(self, unit: Unit) -> list[Part]:
        if isinstance(unit, Block):
            return [part.rows(unit.lo, unit.hi) for part in self._outside[id(self._head)].values()]
        lo, hi = unit
        return [part for layer in self._parts[lo:hi] for part in layer]

    def _set_aside(self, parts: Sequence[Part]) -> list[mx.array]:
        """Arrays for `parts`, whose memory is being set aside."""
        arrays = [unwritten(part.shape, part.dtype, self._stream) for part in parts]
        mx.async_eval(arrays)
        return arrays

    def _fill(self, arrays: Sequence[mx.array], parts: Sequence[Part]) -> None:
        """Read `parts` once there is memory for them: in a thread of its own, as that may take a while."""
        views = [_bytes_of(array) for array in arrays]
        begun = time.perf_counter()
        gpu = _placed(views)
        pieces = [
            self._readers.submit(_fill, view[at : at + PIECE], part.tensor.file, part.tensor.offset + at, gpu)
            for view, part in zip(views, parts, strict=True)
            for at in range(0, part.tensor.bytes, PIECE)
        ]
        for piece in pieces:
            piece.result()
        self.reading += time.perf_counter() - begun


def _part(place: Place, found: dict[Key, Tensor]) -> Part:
    module, key = place
    return Part(tuple(module[key].shape), module[key].dtype, found[id(module), key])


def _runs(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending numbers as runs of neighbours: (place of the first, first number, how many)."""
    runs: list[tuple[int, int, int]] = []
    for at, number in enumerate(numbers):
        place, first, count = runs[-1] if runs else (0, number, 0)
        if number == first + count:
            runs[-1:] = [(place, first, count + 1)]
        else:
            runs.append((at, number, 1))
    return runs


def _bytes_of(array: Any) -> memoryview:
    """The memory of an evaluated array, writable."""
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def _put(where: Sequence[Place], arrays: Sequence[mx.array]) -> None:
    for (module, key), array in zip(where, arrays, strict=True):
        module[key] = array


def _placed(views: Sequence[memoryview]) -> GpuMemory | None:
    """What fills this memory, which is on the GPU now; None: it is written where it lies."""
    gpu = gpu_memory()
    try:
        if gpu:
            gpu.place(views)
        return gpu
    except DriverError:  # then pages move as they are touched
        return None


def _fill(view: memoryview, file: File, offset: int, gpu: GpuMemory | None) -> None:
    """Read `view`, which is on the `gpu` or where it is, from `file` at `offset`. Raises RunFailed."""
    with _opened(file) as descriptor:
        if gpu:
            with suppress(DriverError):  # then it is written where it lies, a page at a time
                staging = gpu.staging(len(view))
                _fill_from(descriptor, staging, file, offset)
                gpu.copy(staging, view)
                return
        _fill_from(descriptor, view, file, offset)


def _fill_rows(view: memoryview, part: Part, runs: Sequence[tuple[int, int, int]]) -> None:
    """Read these runs of rows (see `_runs`) of `part` into `view`, which has room for all of them. Raises RunFailed."""
    each = part.tensor.bytes // part.shape[0]
    with _opened(part.tensor.file) as descriptor:
        for place, first, count in runs:
            target = view[place * each : (place + count) * each]
            _fill_from(descriptor, target, part.tensor.file, part.tensor.offset + first * each)


@contextmanager
def _opened(file: File) -> Iterator[int]:
    """A descriptor of `file`, unchanged. Raises RunFailed, for what goes wrong inside too."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            file.check(descriptor)
            if file.past_cache:
                read_past(descriptor)
            yield descriptor
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
    """The weights of a lazily loaded model's layers and ends as a source; all else is evaluated, to stay in memory.

    Raises UserError where a layer's large array is not a tensor of the files as it lies there.
    """
    names = {id(module): path for path, module in model.named_modules()}
    found: list[dict[Key, Tensor]] = []
    for layer in model.layers:
        tensors, others = _located([layer], loads)
        if made := [f"{names[id(m)]}.{key}" for m, key in others if m[key].nbytes > SMALL]:
            raise UserError(
                f"engine.weights: streamed reads tensors as they lie in the files, and mlx-lm makes {made[0]} of "
                f"{name} from others; convert the model first: mlx_lm.convert --hf-path {name} --mlx-path NEW"
            )
        found.append(tensors)
    outside: dict[Key, Tensor] = {}
    for module in ends_of(model):
        tensors, others = _located([module], loads)
        outside |= {} if others else tensors
    source = Streamed(model, found, outside)
    inside = {place for tensors in (*found, outside) for place in tensors}
    mx.eval([v for _, m in model.named_modules() for k, v in m.items() if _resident(m, k, v, inside)])
    return source


def _located(modules: Sequence[nn.Module], loads: Loads) -> tuple[dict[Key, Tensor], list[Place]]:
    """Where the arrays of `modules` lie, and those that mlx-lm made."""
    where = places(modules)
    tensors = {(id(m), key): tensor for m, key in where if (tensor := loads.tensor(m[key]))}
    return tensors, [(m, key) for m, key in where if (id(m), key) not in tensors]


def _resident(module: nn.Module, key: str, value: Any, streamed: set[Key]) -> bool:
    return isinstance(value, mx.array) and (id(module), key) not in streamed
