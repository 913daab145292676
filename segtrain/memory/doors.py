"""What stands in for some operations while a layer's graph is read (`anatomy`); nothing computes anything useful here.

Attention and scans are recorded with their sizes instead: `estimate` counts them by its own arithmetic, since what
they hold depends on the backend and grows by blocks and groups. What stands in for them only ties results to inputs,
so that gradients flow. Of the rest, some operations can't be handed out as a graph, and on a GPU some are one kernel
where the CPU has many: each gets a stand-in that holds as much.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from segtrain.memory.graph import Queue, trace_vjp
from segtrain.memory.shapes import Attention, Scan
from segtrain.models import stream_ops
from segtrain.models.stream_ops import Causal, StreamCache
from segtrain.recurrence import diagonal, short_conv

NORMS = ("rms_norm", "layer_norm")
GROUP = 1024  # tokens at most that a scan's group is looked at with; a longer one holds more in proportion


@dataclass
class Seen:
    """The calls of attention and scans since it was last cleared; a scan's with its chunk and a group's inputs."""

    queue: Queue  # of the device
    attention: list[Attention] = field(default_factory=list)
    scans: list[tuple[Scan, Callable, list[mx.array], int]] = field(default_factory=list)
    _held: dict[Scan, float] = field(default_factory=dict)

    def measured_scans(self) -> tuple[Scan, ...]:
        """The scans, with what one group's backward holds."""
        return tuple(replace(scan, held=self._group(scan, chunk, given, n)) for scan, chunk, given, n in self.scans)

    def _group(self, scan: Scan, chunk: Callable, inputs: list[mx.array], sequences: int) -> float:
        """Bytes that a group's forward and backward pass hold, by its graph."""
        if scan not in self._held:
            rows = min(scan.group, GROUP)
            parts = [mx.zeros((x.shape[0], rows, *x.shape[2:]), x.dtype) for x in inputs[:sequences]]
            given = [*parts, *(mx.zeros(x.shape, x.dtype) for x in inputs[sequences:])]
            outer = [mx.zeros(x.shape, x.dtype) for x in chunk(*given)]

            graph = trace_vjp(lambda *x: list(chunk(*x)), given, outer)
            self._held[scan] = graph.peak(self.queue) * scan.group / rows
        return self._held[scan]

    def clear(self) -> None:
        self.attention.clear()
        self.scans.clear()


@contextmanager
def doors(seen: Seen, backend: str) -> Iterator[None]:
    """Put the stand-ins in place, those for `backend` (cpu, cuda, metal)."""
    with ExitStack() as stack:
        stack.enter_context(_set(stream_ops, "attend", _attend(seen)))
        stack.enter_context(_set(StreamCache, "make_mask", _whole_window))
        for module in [m for name, m in sys.modules.items() if name.startswith("segtrain.recurrence.")]:
            for name, stand_in in (
                ("scan", _scan(seen)),
                ("on_device", lambda table: table[backend]),
                ("unit_lower_inverse", mx.exp),
                ("has_kernel", lambda *_: False),
                ("_chain", _keeping(getattr(module, "_chain", None))),
            ):
                if hasattr(module, name):
                    stack.enter_context(_set(module, name, stand_in))
        stack.enter_context(_set(short_conv, "_depthwise", _depthwise))
        stack.enter_context(_set(diagonal, "_states", _diagonal))
        stack.enter_context(_set(mx, "contiguous", _copy))
        stack.enter_context(_set(mx, "gather_mm", _gather_mm))
        if backend != "cpu":
            stack.enter_context(_set(stream_ops, "_rope", lambda x, *_, **__: mx.negative(x)))
            for name in NORMS:
                stack.enter_context(_set(mx.fast, name, _norm))
        yield


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    try:
        setattr(owner, name, value)
        yield
    finally:
        setattr(owner, name, before)


def _whole_window(cache: StreamCache, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
    """`StreamCache.make_mask`, with the window even where the row is shorter."""
    return stream_ops.dense_mask(cache._stream, N, window_size) if return_array else Causal(window_size or None)


def _attend(seen: Seen) -> Callable[..., mx.array]:
    def attend(q: mx.array, k: mx.array, v: mx.array, **rule: Any) -> mx.array:
        window, softcap, sinks = (rule.get(name) for name in ("window", "softcap", "sinks"))
        dims = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        seen.attention.append(Attention(*dims, window, softcap is not None, sinks is not None))
        return _tied([q, k, v, *([] if sinks is None else [sinks])], (*q.shape[:3], v.shape[3]), q.dtype)

    return attend


def _scan(seen: Seen) -> Callable[..., tuple[mx.array, mx.array]]:
    def scan(
        chunk: Callable[..., tuple[mx.array, mx.array]],
        sequences: Sequence[mx.array],
        state: mx.array,
        *,
        group: int,
        fixed: Sequence[mx.array] = (),
    ) -> tuple[mx.array, mx.array]:
        rows = sequences[0].shape[1]
        one, _ = chunk(*(x[:, :1] for x in sequences), *fixed, state)
        inputs = [*sequences, *fixed, state]
        rule = getattr(chunk, "func", chunk).__module__.rsplit(".", 1)[-1]
        found = Scan(sum(x.nbytes for x in sequences) // rows, one.nbytes, state.nbytes, group, rule=rule)
        seen.scans.append((found, chunk, [_empty(x) for x in inputs], len(sequences)))
        return _tied(inputs, (one.shape[0], rows, *one.shape[2:]), one.dtype), _tied(inputs, state.shape, state.dtype)

    return scan


def _empty(x: mx.array) -> mx.array:
    return mx.broadcast_to(mx.zeros((), x.dtype), x.shape)


def _keeping(original: Any) -> Callable[..., tuple[mx.array, ...]]:
    """What stands in for a function whose gradient needs its inputs and its outputs."""

    def function(*inputs: mx.array) -> tuple[mx.array, ...]:
        total = sum((mx.square(x).sum() for x in inputs), mx.array(0.0))
        return tuple(mx.exp(mx.broadcast_to(total, y.shape)) for y in original(*inputs))

    return function


def _depthwise(x: mx.array, taps: mx.array) -> mx.array:
    """One result; the gradient of the rows needs the frozen taps alone."""
    return mx.negative(x[:, taps.shape[1] - 1 :])


def _diagonal(a: mx.array, b: mx.array, state: mx.array) -> mx.array:
    """`recurrence.diagonal._states`: one result; its gradient needs the decays and the result."""
    return mx.exp(a * b + state[:, None])


def _tied(inputs: Sequence[mx.array], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An array that depends on all inputs, and whose gradient with respect to them takes no memory to speak of."""
    total = sum((x.sum().astype(mx.float32) for x in inputs), mx.array(0.0))
    return mx.broadcast_to(total.astype(dtype), shape)


def _copy(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return mx.negative(x) if mx.issubdtype(x.dtype, mx.inexact) else mx.bitwise_invert(x)


def _gather_mm(a: mx.array, b: mx.array, lhs_indices: Any = None, rhs_indices: Any = None, **_: Any) -> mx.array:
    """All rows by the first expert. The gradient of sorted rows' experts can't be handed out."""
    batch = a.shape[:-2] if rhs_indices is None else mx.broadcast_to(mx.zeros(a.shape[:-2]), rhs_indices.shape).shape
    return mx.broadcast_to(a, (*batch, *a.shape[-2:])) @ b.reshape(-1, *b.shape[-2:])[0]


def _norm(x: mx.array, *_: Any, **__: Any) -> mx.array:
    """One result; its gradient needs the input."""
    return mx.sinh(x)
