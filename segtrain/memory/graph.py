"""What evaluating a function holds in memory, read off its graph; nothing is evaluated.

MLX hands out a function's graph operation by operation, with the shape and dtype of each array (`mx.export_function`).
Here each array is traced to the buffer it lies in: reshapes, transpositions and slices make none, and an elementwise
operation takes over the buffer of an input that nothing else needs.

For a backward pass, `residual` is what its forward part (what the outputs need) leaves for the rest, and `peak` the
most that all buffers hold together. Operations go in MLX's own order: breadth first from the results, within a width,
backwards. Evaluation runs ahead of the device (`Queue`): a buffer is free only once its last use has been computed, and
only then can a result take it over.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import mlx.core as mx

NOT_MADE = -2  # the maker of a buffer that no operation in the order has made
WIDTH = 20  # of the tape that MLX builds breadth first
ONES = ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze")
VIEWS = {"Transpose", "Broadcast", "BroadcastAxes", "AsStrided", "Slice", "Split", "StopGradient", "Depends", "View"}
PRODUCTS = {"Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM", "Convolution", "BlockMaskedMM"}
OTHERS = {
    *("Reduce", "ArgReduce", "Softmax", "LogSumExp", "Sort", "ArgSort", "Partition", "ArgPartition", "Scan"),
    *("Gather", "GatherAxis", "Scatter", "ScatterAxis", "Slice", "SliceUpdate", "DynamicSlice", "DynamicSliceUpdate"),
    *("Concatenate", "Pad", "Arange", "Full", "RandomBits", "FFT", "Inverse", "Cholesky"),
}
STAND_INS = {"Sinh", "Cosh"}  # `doors`: a norm that is one kernel; `Cosh` is in the gradient of tanh too


@dataclass(frozen=True)
class Queue:
    """How far evaluation runs ahead: `length` tasks wait, `computed` an operation, `viewed` one that is a view."""

    length: int
    computed: int = 1
    viewed: int = 1


QUEUES = {"cpu": Queue(110, computed=2), "cuda": Queue(22), "metal": Queue(22)}
"""By backend. The CPU's is MLX's own (11 tasks of 10 dispatches), the others' are what measured peaks tell."""


@dataclass
class Buffer:
    """`size` in bytes; who made it and who needs it, by operation; -1: given from outside."""

    size: int
    maker: int
    shape: tuple[int, ...]
    uses: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Operation:
    name: str
    inputs: tuple[int, ...]  # buffers
    outputs: tuple[int, ...]
    backward: bool

    @property
    def views(self) -> bool:
        """Whether it computes nothing."""
        return set(self.outputs) <= set(self.inputs)

    @property
    def fuses(self) -> bool:
        """Whether a compiled graph would work it into a kernel with its neighbours."""
        return self.name not in PRODUCTS | OTHERS | STAND_INS

    @property
    def takes_over(self) -> bool:
        """Whether its result can lie where an operand lay."""
        return self.name not in PRODUCTS | OTHERS


@dataclass(frozen=True)
class Graph:
    operations: list[Operation]
    buffers: list[Buffer]

    @property
    def residual(self) -> int:
        """Bytes that the forward part leaves for the backward part."""
        return sum(self.buffers[i].size for i in self._left)

    @property
    def fused_residual(self) -> int:
        """The same where elementwise operations are compiled: what products make or need is left, and nothing else."""
        return sum(self.buffers[i].size for i in self._left if self._of_product(i))

    def peak(self, queue: Queue) -> int:
        """The most bytes that all buffers hold together."""
        return self._most(queue, set(range(len(self.operations))))

    def forward(self, queue: Queue) -> int:
        """The same of the forward part, run by itself."""
        return self._most(queue, {place for place, operation in enumerate(self.operations) if not operation.backward})

    def _most(self, queue: Queue, places: Set[int]) -> int:
        begun = list(accumulate(queue.viewed if x.views else queue.computed for x in self.operations))
        heirs = self._heirs(queue, begun)
        changes: dict[int, int] = {}
        for number, buffer in enumerate(self.buffers):
            if buffer.maker in places:
                last = max((use for use in buffer.uses if use in places), default=len(begun) - 1)
                free = last if last == heirs.get(number) else bisect_left(begun, begun[last] + queue.length)
                for place, size in ((buffer.maker, buffer.size), (free, -buffer.size)):
                    changes[place] = changes.get(place, 0) + size
        return max(accumulate(changes[place] for place in sorted(changes)), default=0)

    def _heirs(self, queue: Queue, begun: list[int]) -> dict[int, int]:
        """By buffer, the elementwise operation whose result takes it over: its last user, when the others are done."""
        heirs: dict[int, int] = {}
        for place, operation in enumerate(self.operations):
            made = [number for number in operation.outputs if self.buffers[number].maker == place]
            for result in made if operation.takes_over else ():
                for given in operation.inputs:
                    *others, last = self.buffers[given].uses or [-1]
                    done = last == place and all(begun[use] + queue.length <= begun[place] for use in others)
                    same = self.buffers[given].size == self.buffers[result].size
                    if self.buffers[given].maker >= 0 and done and same and given not in heirs:
                        heirs[given] = place
                        break
        return heirs

    @property
    def _left(self) -> Iterator[int]:
        for number, buffer in enumerate(self.buffers):
            made_forward = buffer.maker >= 0 and not self.operations[buffer.maker].backward
            if made_forward and any(self.operations[use].backward for use in buffer.uses):
                yield number

    def _of_product(self, number: int) -> bool:
        buffer = self.buffers[number]
        uses = [self.operations[use] for use in buffer.uses]
        return not self.operations[buffer.maker].fuses or any(not use.fuses for use in uses)


def trace(function: Callable[..., list[mx.array]], *arrays: mx.array) -> Graph:
    """The graph of `function(*arrays)`, all of it forward."""
    return _read(function, arrays, None)


def trace_vjp(function: Callable[..., list[mx.array]], primals: list[mx.array], cotangents: list[mx.array]) -> Graph:
    """The graph of `mx.vjp(function, primals, cotangents)`; its forward part is what the outputs need."""

    def both(*arrays: mx.array) -> list[mx.array]:
        outputs, gradients = mx.vjp(function, list(arrays[: len(primals)]), list(arrays[len(primals) :]))
        return [*outputs, *gradients]

    return _read(both, [*primals, *cotangents], len(cotangents))


def _read(function: Callable[..., Any], arrays: Sequence[mx.array], forward: int | None) -> Graph:
    reader = _Reader(forward)
    mx.export_function(reader.read, function, *arrays)
    return reader.graph()


@dataclass
class _Array:
    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    name: str
    given: list[_Array]
    made: list[_Array]
    needs: list[int]  # calls that made what it is given


class _Reader:
    """Builds the graph from MLX's callbacks, which come in an order in which it could be evaluated.

    `forward`: how many outputs are the forward part's; None: all.
    """

    def __init__(self, forward: int | None):
        self.forward = forward
        self.calls: list[_Call] = []
        self.buffers: list[Buffer] = []
        self.arrays: dict[str, _Array] = {}
        self.makers: dict[str, int] = {}
        self.outputs: list[str] = []

    def read(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "inputs":
                for name, shape, dtype in event["inputs"]:
                    self._new(name, shape, dtype)
            case "keyword_inputs":
                assert not event["keywords"]
            case "outputs":
                self.outputs = [name for name, _, _ in event["outputs"]]
            case "constants":
                for name, array in event["constants"]:
                    self._new(name, array.shape, array.dtype)
            case "primitive":
                self._operation(event["name"], event["inputs"], event["outputs"], event["arguments"])

    def graph(self) -> Graph:
        ends = [self.makers.get(name) for name in self.outputs]
        forward = self._needed([end for end in ends[: self.forward] if end is not None])
        wanted = ends if self.forward is None else ends[self.forward :]
        order = self._order([end for end in wanted if end is not None])
        operations = []
        for place, number in enumerate(order):
            call = self.calls[number]
            views = {array.buffer for array in call.made}  # it gives on what it is given, and holds nothing itself
            for array in call.given:
                if array.buffer not in views:
                    self.buffers[array.buffer].uses.append(place)
            for array in call.made:
                if self.buffers[array.buffer].maker == NOT_MADE:
                    self.buffers[array.buffer].maker = place
            given, made = (tuple(x.buffer for x in arrays) for arrays in (call.given, call.made))
            operations.append(Operation(call.name, given, made, number not in forward))
        return Graph(operations, self.buffers)

    def _needed(self, roots: Sequence[int]) -> set[int]:
        """The calls that these calls need, themselves among them."""
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.calls[number].needs
        return found

    def _order(self, roots: list[int]) -> list[int]:
        """The calls in MLX's order of evaluation: breadth first from the roots, within a width, backwards."""
        users: dict[int, int] = {}
        for number in self._needed(roots):
            for need in self.calls[number].needs:
                users[need] = users.get(need, 0) + 1
        for root in roots:
            users[root] = users.get(root, 0) + 1
        tape: list[int] = []
        place, later = 0, [(roots, 0)]
        while place < len(tape) or later:
            if place < len(tape):
                needs, start = self.calls[tape[place]].needs, 0
                place += 1
            else:
                needs, start = later.pop()
            for j in range(start, len(needs)):
                if len(tape) - place >= WIDTH:
                    later.append((needs, j))
                    break
                users[needs[j]] -= 1
                if not users[needs[j]]:
                    tape.append(needs[j])
        return tape[::-1]

    def _operation(self, name: str, inputs: list[Any], outputs: list[Any], arguments: list[Any]) -> None:
        given = [self.arrays[key] for key, _, _ in inputs]
        needs = [self.makers[key] for key, _, _ in inputs if key in self.makers]
        made = []
        for place, (key, shape, dtype) in enumerate(outputs):
            shape = tuple(shape)
            source = given[place] if name == "Depends" else given[0] if given else None
            strides = None if source is None else _view(name, source, shape, arguments)
            if source is not None and strides is not None:
                self.arrays[key] = _Array(source.buffer, shape, strides)
            else:
                self._new(key, shape, dtype, NOT_MADE)
            self.makers[key] = len(self.calls)
            made.append(self.arrays[key])
        self.calls.append(_Call(name, given, made, needs))

    def _new(self, key: str, shape: Any, dtype: Any, maker: int = -1) -> None:
        shape = tuple(shape)
        self.arrays[key] = _Array(len(self.buffers), shape, _row_major(shape))
        self.buffers.append(Buffer(prod(shape) * dtype.size, maker, shape))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1]) if shape else ()


def _view(name: str, source: _Array, shape: tuple[int, ...], arguments: list[Any]) -> tuple[int, ...] | None:
    """The strides of an output that lies in its input's buffer; None where it needs one of its own."""
    if name in ONES:
        return _reshaped(source.shape, source.strides, shape)
    if name == "Transpose":
        axes = next((a for a in arguments if isinstance(a, (list, tuple)) and len(a) == len(shape)), None)
        return tuple(source.strides[a] for a in axes) if axes is not None else tuple(-1 for _ in shape)
    if name == "Broadcast":
        padded = (1,) * (len(shape) - len(source.shape)) + source.shape
        strides = (0,) * (len(shape) - len(source.shape)) + source.strides
        return tuple(0 if a == 1 != b else s for a, b, s in zip(padded, shape, strides, strict=True))
    if name in VIEWS and len(shape) == len(source.strides):
        return source.strides
    return _row_major(shape) if name in VIEWS else None


def _reshaped(old: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a reshape that needs no copy, as numpy finds them; None where there are none."""
    kept = [(size, stride) for size, stride in zip(old, strides, strict=True) if size != 1]
    merged: list[list[int]] = []  # runs of axes that lie as one
    for size, stride in kept:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    found: list[int] = []
    runs = [*merged[::-1]]
    size, stride = runs.pop(0) if runs else (1, 1)
    for want in reversed(new):
        if want == 1:
            found.append(stride)
            continue
        if size == 1 and runs:
            size, stride = runs.pop(0)
        if size % want:
            return None
        found.append(stride)
        size, stride = size // want, stride * want
    return tuple(found[::-1])
