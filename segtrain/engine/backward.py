"""Backward passes: one gradient, two ways to get it.

Segmented. Let the layers be cut into segments S_1 .. S_n, with carries c_0 (embeddings) .. c_n. Then

    forward:   c_k = S_k(c_{k-1}; p_k)             only the carries are kept
    head:      L(c_n) and dL/dc_n                   a chunk of rows at a time (logprobs.py)
    backward:  dL/dc_{k-1}, dL/dp_k = vjp of S_k at (c_{k-1}, p_k) applied to dL/dc_k        for k = n .. 1

so only one segment has its activations live at a time. c_k is a dict of named arrays: the hidden states `h`, and
whatever else crosses a segment edge. A carry that several segments read collects the sum of their cotangents before
its writer's turn. Segments below the lowest trainable layer get no backward.

Of the last `keep` layers the matrix products, most of what a recomputation costs, may be kept from forward to backward
(`models/products.py`): spare memory for time.

For long rows the carries themselves are too much. With `boundaries` only so many edges' carries are kept in forward:
those where a group of segments starts. The others are made again, by one more forward pass over their group, when
backward reaches it, by when those of later groups are gone (`segments.grouped`).

Full. `FullBackward` is plain reverse-mode autodiff over the model's own forward pass: the reference in tests, and
the faster way for short rows.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from segtrain.engine import vocabulary
from segtrain.engine.head import (
    PADDED_ROWS,
    Scorer,
    SpanScore,
    cotangent,
    every_row,
    flattened,
    log_softmax_at,
    padded_rows,
    score,
    scorer,
)
from segtrain.engine.layouts import Layout, Span, Stream
from segtrain.engine.objectives import LossValue, Objective, Scores, Sums, value_and_grad
from segtrain.engine.ragged import up
from segtrain.engine.segments import HIDDEN, Segment, grouped, layer_cuts, split
from segtrain.engine.traces import Traces
from segtrain.lora.flat import FlatArrays
from segtrain.lora.layers import Lora, swapped
from segtrain.lora.modules import Slot

Carry: TypeAlias = dict[str, mx.array]
Products: TypeAlias = dict[Segment, list[mx.array]]
Scored: TypeAlias = dict[str, tuple[mx.array, mx.array, mx.array, mx.array]]
"""By span: rows [M], targets [M], weights [M] that are 0 for filler, and owners [M] as in `Span`."""
Meter: TypeAlias = Callable[[str, int], AbstractContextManager[None]]
"""(phase, stream number) -> a context around that phase: where memory and time are read."""


class Tape(Protocol):
    """What a stack remembers of one stream."""

    @property
    def stream(self) -> Stream: ...
    @property
    def embedded(self) -> mx.array: ...


class Pure(Protocol):
    """A range of layers as a function of carries and frozen arrays; equal keys, equal functions."""

    @property
    def key(self) -> tuple | None: ...
    @property
    def run(self) -> Callable[[Mapping[str, mx.array], Sequence[mx.array]], Carry]: ...
    @property
    def arrays(self) -> list[mx.array]: ...


class Stack(Protocol):
    """A model whose layers run by ranges (`models.stack.LayerStack`)."""

    @property
    def execution(self) -> Hashable: ...
    @property
    def streams(self) -> bool: ...
    def __len__(self) -> int: ...
    def reads(self, i: int) -> tuple[str, ...]: ...
    def writes(self, i: int) -> tuple[str, ...]: ...
    def begin(self, stream: Stream) -> Tape: ...
    def run(self, tape: Any, carry: Mapping[str, mx.array], lo: int, hi: int) -> Carry: ...
    def pure(self, tape: Any, lo: int, hi: int, *, shared: bool) -> Pure: ...
    def expect(self, order: Iterable[Any]) -> None: ...
    def holding(self, lo: int, hi: int) -> AbstractContextManager[None]: ...
    def prepared(self, lo: int, hi: int) -> AbstractContextManager[None]: ...
    def remembering(self, lo: int, hi: int) -> AbstractContextManager[list[mx.array]]: ...
    def recalling(self, lo: int, hi: int, products: Sequence[mx.array]) -> AbstractContextManager[None]: ...
    def logits(self, h: mx.array) -> mx.array: ...
    @property
    def vocabulary(self) -> vocabulary.Vocabulary | None: ...
    def whole(self, stream: Stream) -> mx.array: ...


@dataclass(frozen=True)
class Step:
    """The loss of one row, and the gradient of its *total* (not yet divided by its weight) by parameter name.

    Of B rows that run together: the losses [B], and the gradient of the sum of their totals.
    """

    loss: LossValue
    grads: FlatArrays


class Backward(Protocol):
    @property
    def lora(self) -> Lora: ...
    @property
    def objective(self) -> Objective: ...
    def score(self, layout: Layout) -> Scores: ...
    def step(self, layout: Layout) -> Step: ...
    def evaluate(self, layout: Layout) -> LossValue: ...


def no_meter(phase: str, stream: int) -> AbstractContextManager[None]:
    return nullcontext()


class Evaluator:
    """Evaluates results in order: those of a segment, of a chunk of the head.

    `lookahead` 0 awaits each at once. 1 awaits a result when the next one's graph has been built, and only then
    starts that one: the device waits less for Python, and still holds one segment. 2 starts the next one before the
    last is awaited: faster still, with two segments' memory.
    """

    def __init__(self, lookahead: int = 0):
        self.lookahead = lookahead
        self._pending: list[object] = []

    def __call__(self, results: object) -> None:
        if self.lookahead < 2:
            self.drain()
        mx.async_eval(results)
        self.drain()
        if self.lookahead:
            self._pending.append(results)
        else:
            mx.eval(results)

    def drain(self) -> None:
        """Await everything that was started."""
        mx.eval(self._pending)
        self._pending.clear()


@dataclass
class _Pass:
    """One stream of one row on its way through the layers. `saved`: its carries at the starts of groups; `edges`:
    those inside the group that is under backward; `products`: of kept segments.
    """

    row: int
    number: int
    tape: Tape
    carry: Carry
    saved: list[Carry] = field(default_factory=list)
    edges: list[Carry] = field(default_factory=list)
    products: Products = field(default_factory=dict)
    cotangents: Carry = field(default_factory=dict)


class SegmentedBackward:
    """Backward segment by segment.

    Of the layers, `segment_size` are live at a time; the head takes `head_chunk` rows at a time; the matrix products
    of the last `keep` layers stay from forward to backward, and so do the carries of `boundaries` segment edges
    (None: of all). `compiled`: one graph for all segments that compute the same, and one for the head's chunks, held
    in `traces`, which engines of one model and adapter may share.
    Raises ValueError for a setting that no step could run with.
    """

    def __init__(
        self,
        stack: Stack,
        lora: Lora,
        objective: Objective,
        *,
        segment_size: int = 1,
        head_chunk: int = 256,
        keep: int = 0,
        boundaries: int | None = None,
        lookahead: int = 0,
        compiled: bool = False,
        meter: Meter = no_meter,
        traces: Traces | None = None,
    ):
        if head_chunk < 1:
            raise ValueError(f"head_chunk must be at least 1, not {head_chunk}")
        self.stack, self.lora, self.objective, self.meter = stack, lora, objective, meter
        self.head_chunk, self.lookahead = head_chunk, lookahead
        self.compiled = compiled and not lora.dropout  # a traced graph would hold the first row's dropout masks
        self.traces = Traces() if traces is None else traces
        frozen, trained = layer_cuts(len(stack), segment_size, lowest=lora.lowest, keep=keep)
        segments = split(len(stack), frozen + trained, stack.reads, stack.writes)
        self.frozen, rest = segments[: len(frozen)], segments[len(frozen) :]
        self.groups = grouped(rest, boundaries)
        self.kept = {s for s in rest if s.lo >= len(stack) - keep}

    def step(self, layout: Layout) -> Step:
        """One row's loss and gradients. `layout`'s streams are independent but for the loss."""
        (value,), flat = self.steps([layout])
        return Step(value, flat)

    def steps(
        self,
        layouts: Sequence[Layout],
        enter: Callable[[int], None] = lambda number: None,
        onto: Mapping[str, mx.array] | None = None,
    ) -> tuple[list[LossValue], FlatArrays]:
        """The losses of some rows and the sum of their gradients, equal to the bit to one `step` after the other.

        The gradients are added to those in `onto`.
        Where weights are streamed all rows go through a segment before the next one is read, and the carries of all are
        held. `enter` is called with a row's number before each part of its computation.
        """
        references = [reference_sums(self, layout) for layout in layouts]
        evaluator = Evaluator(self.lookahead)
        passes = [
            _Pass(row, number, tape := self.stack.begin(stream), {HIDDEN: tape.embedded})
            for row, layout in enumerate(layouts)
            for number, stream in enumerate(layout.streams)
        ]
        apart = [passes] if self.stack.streams else [[one] for one in passes]
        self.stack.expect(self._order(len(apart), backward=True))
        for some in apart:
            self._forward(some, self.frozen, evaluator, enter)
            for group in self.groups:
                for one in some:
                    one.saved.append(one.carry)
                self._forward(some, group, evaluator, enter, keep=True)
        values = self._head(layouts, passes, references, evaluator)
        grads = dict(onto or {})
        for some in apart:
            self._backward(some, grads, evaluator, enter)
        flat = self.lora.flat_layout.flatten(grads)
        evaluator(flat.array)  # with look-ahead not awaited: the next row's graph is built meanwhile
        return values, flat

    def evaluate(self, layout: Layout) -> LossValue:
        """The loss alone, without dropout."""
        return self.objective.loss(replace(self.score(layout), reference=reference_sums(self, layout)))

    def score(self, layout: Layout) -> Scores:
        """Each span's sum of log-probs, without dropout. Of a stream's carries only the last ones are held."""
        evaluator = Evaluator(self.lookahead)
        self.stack.expect(self._order(len(layout.streams), backward=False))
        segments = [*self.frozen, *(segment for group in self.groups for segment in group)]
        sums: dict[str, mx.array] = {}
        with self.lora.dropout_keys.disabled():
            for number, stream in enumerate(layout.streams):
                tape = self.stack.begin(stream)
                one = _Pass(0, number, tape, {HIDDEN: tape.embedded})
                self._forward([one], segments, evaluator)
                wanted = {
                    name: (one.carry[HIDDEN], span) for name, span in layout.spans.items() if span.stream == number
                }
                scores = self._score(list(wanted.values()), number, evaluator, gradient=False)
                sums |= {name: scored.logp for name, scored in zip(wanted, scores, strict=True)}
        evaluator.drain()
        return Scores(sums, _counts(layout))

    def _order(self, times: int, *, backward: bool) -> Iterator[Any]:
        """The segments' layers, and the blocks of the vocabulary, in the order in which they run; None: the head."""
        forward = [*self.frozen, *(segment for group in self.groups for segment in group)]
        blocks = self.stack.vocabulary.blocks if self.stack.vocabulary else [None]
        bounds = [segment.bounds for segment in forward]
        yield from (bounds * times + [*blocks]) if backward else [*bounds, *blocks] * times
        for group in list(reversed(self.groups)) * (times if backward else 0):
            yield from (segment.bounds for segment in (*group[:-1], *reversed(group)))

    def _forward(
        self,
        passes: Sequence["_Pass"],
        segments: Sequence[Segment],
        evaluator: Evaluator,
        enter: Callable[[int], None] = lambda number: None,
        *,
        keep: bool = False,
    ) -> None:
        """Run segments in order: moves the passes' carries on. With `keep` the products of kept segments stay."""
        for segment in segments:
            with ExitStack() as held:
                for one in passes:
                    self._enter(one, enter)
                    with self.meter(f"forward{segment}", one.number):
                        if one is passes[0]:
                            held.enter_context(self.stack.holding(segment.lo, segment.hi))
                        kept = keep and segment in self.kept
                        written, made = self._segment_forward(one.tape, segment, one.carry, keep=kept)
                        one.carry = one.carry | written
                        if kept:
                            one.products[segment] = made
                        evaluator([written, made])
                        del written, made

    def _enter(self, one: "_Pass", enter: Callable[[int], None]) -> None:
        """The dropout masks of this pass are drawn from here on."""
        enter(one.row)
        self.lora.dropout_keys.enter(one.number, one.tape.stream.parts)

    def _score(
        self, scored: Sequence[tuple[mx.array, Span]], number: int, evaluator: Evaluator, *, gradient: bool
    ) -> list[SpanScore]:
        """The scores of spans of last hidden states; `number`: of the (first) stream."""
        with self.meter("head", number):
            if blocks := self.stack.vocabulary:
                return vocabulary.score(
                    blocks,
                    scored,
                    self.head_chunk,
                    gradient=gradient,
                    run=self._block_run,
                    pad=self.compiled,
                    evaluate=evaluator,
                )
            compiled = self._scorer(gradient) if self.compiled else None
            return [
                score(
                    self.stack.logits,
                    h,
                    span,
                    self.head_chunk,
                    gradient=gradient,
                    compiled=compiled,
                    evaluate=evaluator,
                )
                for h, span in scored
            ]

    def _head(
        self, layouts: Sequence[Layout], passes: Sequence["_Pass"], references: Sequence[Sums], evaluator: Evaluator
    ) -> list[LossValue]:
        """The losses; the passes get the cotangent of their last hidden states, which are released."""
        hidden = {(one.row, one.number): one.carry[HIDDEN] for one in passes}
        for one in passes:
            one.carry = {}
        spans = [(row, name, span) for row, layout in enumerate(layouts) for name, span in layout.spans.items()]
        found = self._score([(hidden[row, span.stream], span) for row, _, span in spans], 0, evaluator, gradient=True)
        values = []
        for row, (layout, reference) in enumerate(zip(layouts, references, strict=True)):
            scores = {name: one for (owner, name, _), one in zip(spans, found, strict=True) if owner == row}
            sums = {name: scored.logp for name, scored in scores.items()}
            value, slopes = value_and_grad(self.objective, Scores(sums, _counts(layout), reference))
            values.append(value)
            for one in passes:
                if one.row == row:
                    own = {name: span for name, span in layout.spans.items() if span.stream == one.number}
                    of_spans = [(span, scores[name].units, slopes[name]) for name, span in own.items()]
                    one.cotangents = {HIDDEN: cotangent(hidden.pop((row, one.number)), of_spans)}
        del found, scores, of_spans
        evaluator([[(value.total, value.metrics) for value in values], [one.cotangents for one in passes]])
        return values

    def _block_run(self, name: tuple, function: Callable, *inputs: Any) -> Any:
        return (
            self.traces(("head", *name, self.stack.execution), function, *inputs)
            if self.compiled
            else function(*inputs)
        )

    def _backward(
        self,
        passes: Sequence["_Pass"],
        grads: dict[str, mx.array],
        evaluator: Evaluator,
        enter: Callable[[int], None],
    ) -> None:
        """From the last group to the first; adds to `grads`, a row's sum at a time."""
        for group in reversed(self.groups):
            for one in passes:
                one.carry = one.saved.pop()
                one.edges = [one.carry]
            for segment in group[:-1]:
                self._forward(passes, [segment], evaluator, enter)
                for one in passes:
                    one.edges.append(one.carry)
            for one in passes:
                one.carry = {}
            for segment in reversed(group):
                self._segment_backward(segment, passes, grads, evaluator, enter)

    def _segment_backward(
        self,
        segment: Segment,
        passes: Sequence["_Pass"],
        grads: dict[str, mx.array],
        evaluator: Evaluator,
        enter: Callable[[int], None],
    ) -> None:
        with ExitStack() as held:
            for _, of_row in groupby(passes, lambda one: one.row):
                own: dict[str, mx.array] = {}
                for one in of_row:
                    self._enter(one, enter)
                    with self.meter(f"backward{segment}", one.number):
                        if one is passes[0]:
                            held.enter_context(self.stack.holding(segment.lo, segment.hi))
                        kept = one.products.pop(segment, None)
                        self._segment_vjp(one.tape, segment, one.edges.pop(), one.cotangents, own, evaluator, kept)
                        del kept
                _add(grads, list(own), list(own.values()))

    def _segment_forward(
        self, tape: Tape, segment: Segment, carry: Carry, *, keep: bool
    ) -> tuple[Carry, list[mx.array]]:
        """What `segment` writes, and the products that its backward pass can use (if kept), unevaluated."""
        pure = self.stack.pure(tape, segment.lo, segment.hi, shared=self.compiled)
        slots = self.lora.slots(segment.lo, segment.hi)
        stack, lo, hi, writes = self.stack, segment.lo, segment.hi, segment.writes

        def forward(given: Carry, values: list[mx.array], arrays: list[mx.array]) -> tuple[Carry, list[mx.array]]:
            remembering = stack.remembering(lo, hi) if keep else nullcontext([])
            with stack.prepared(lo, hi), swapped(slots, values), remembering as products:
                written = _pick(pure.run(given, arrays), writes)
            return written, products

        inputs = _pick(carry, segment.reads), [slot.value for slot in slots], pure.arrays
        return self._run(("forward", keep, segment.reads, writes), pure, forward, *inputs)

    def _segment_vjp(
        self,
        tape: Tape,
        segment: Segment,
        carry: Carry,
        cotangents: Carry,
        grads: dict[str, mx.array],
        evaluator: Evaluator,
        products: list[mx.array] | None = None,
    ) -> None:
        """Replace the cotangents of what `segment` writes by those of what it reads; add its parameters' gradients."""
        reads = segment.reads if segment.lo > self.lora.lowest else ()  # nothing below the lowest needs a cotangent
        names = [slot.name for slot in self.lora.slots(segment.lo, segment.hi)]
        outer = {name: cotangents.pop(name) for name in segment.writes}
        dcarry, dvalues = self._cotangents(tape, segment, reads, _pick(carry, segment.reads), outer, products or [])
        del carry, products, outer  # from here on only the graph holds them: evaluating it frees them
        _add(cotangents, reads, dcarry)
        _add(grads, names, dvalues)
        del dcarry, dvalues
        evaluator([[cotangents[name] for name in reads], [grads[name] for name in names]])

    def _cotangents(
        self,
        tape: Tape,
        segment: Segment,
        reads: tuple[str, ...],
        given: Carry,
        outer: Carry,
        products: list[mx.array],
    ) -> tuple[list[mx.array], list[mx.array]]:
        """The cotangents of the carries `reads` and of the segment's parameters, given those of what it writes."""
        pure = self.stack.pure(tape, segment.lo, segment.hi, shared=self.compiled)
        slots = self.lora.slots(segment.lo, segment.hi)
        backward = _vjp_of(self.stack, pure, segment, slots, reads)
        inputs = given, [slot.value for slot in slots], pure.arrays, outer, products
        if products and not reads:  # mlx's compiler fails on some of these (mixtures of experts)
            return backward(*inputs)
        return self._run(("backward", reads, segment.reads, segment.writes), pure, backward, *inputs)

    def _scorer(self, gradient: bool) -> Scorer:
        rows = scorer(self.stack.logits, gradient=gradient)
        return lambda *inputs: self.traces(("head", gradient, self.stack.execution), rows, *inputs)

    def _run(self, key: tuple, pure: Pure, function: Callable, *inputs: Any) -> Any:
        """`function(*inputs)`, by one compiled graph for all segments that compute the same where they share one."""
        return function(*inputs) if pure.key is None else self.traces((*key, pure.key), function, *inputs)


def _vjp_of(stack: Stack, pure: Pure, segment: Segment, slots: Sequence[Slot], reads: tuple[str, ...]) -> Callable:
    """(carry, trainable values, frozen arrays, outer cotangents, kept products) to the cotangents of the first two.

    Of the carry, `reads` alone get one.
    """
    lo, hi, writes = segment.lo, segment.hi, segment.writes

    def backward(
        given: Carry, values: list[mx.array], arrays: list[mx.array], outer: Carry, products: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        def outputs(*inputs: mx.array) -> list[mx.array]:
            recalling = stack.recalling(lo, hi, products) if products else nullcontext()
            with swapped(slots, inputs[len(reads) :]), recalling:
                out = pure.run(given | dict(zip(reads, inputs[: len(reads)], strict=True)), arrays)
            return [out[name] for name in writes]

        with stack.prepared(lo, hi):
            inputs = [*(given[name] for name in reads), *values]
            _, results = mx.vjp(outputs, inputs, [outer[name] for name in writes])
        return results[: len(reads)], results[len(reads) :]

    return backward


class FullBackward:
    """Reverse-mode autodiff over the model's own forward pass, all activations and logits of a row live at once.

    `compiled`: one graph for all rows whose streams have the same lengths; scored rows are padded to a multiple of
    `PADDED_ROWS`, or where they are most rows of their stream, all are scored.
    """

    def __init__(
        self,
        stack: Stack,
        lora: Lora,
        objective: Objective,
        *,
        compiled: bool = False,
        meter: Meter = no_meter,
        traces: Traces | None = None,
    ):
        self.stack, self.lora, self.objective, self.meter = stack, lora, objective, meter
        self.compiled = compiled and not lora.dropout  # as in `SegmentedBackward`
        self.traces = Traces() if traces is None else traces

    def step(self, layout: Layout) -> Step:
        inputs = self._inputs(layout, reference_sums(self, layout))
        params = self.lora.flat()
        with self.meter("step", 0):
            (_, loss, metrics), grads = self._run(layout, params.array, *inputs)
            mx.eval(loss, metrics, grads)
        return Step(LossValue(loss, self._weight(layout), metrics), params.with_array(grads))

    def evaluate(self, layout: Layout) -> LossValue:
        """The loss alone, without dropout, by one pass over the whole row."""
        return self.objective.loss(replace(self.score(layout), reference=reference_sums(self, layout)))

    def score(self, layout: Layout) -> Scores:
        """Each span's sum of log-probs, without dropout."""
        streams, scored, *_ = self._inputs(layout, {})
        with self.lora.dropout_keys.disabled():
            sums = self._sums(layout, streams, scored)
        mx.eval(sums)
        return Scores(sums, _counts(layout))

    def _run(self, layout: Layout, *inputs: Any) -> Any:
        function = self._function(layout)
        if not self.compiled:
            return function(*inputs)
        spans = tuple((name, span.stream, layout.scores_most(name)) for name, span in layout.spans.items())
        streams = tuple(stream.structure for stream in layout.streams)
        return self.traces(("full", self.objective, spans, streams), function, *inputs)

    def _function(self, layout: Layout) -> Callable:
        """(flat parameters, *inputs) to ((loss, losses, metrics), flat gradients)."""

        def function(params: mx.array, *inputs: Any) -> Any:
            lora, slots, views = self.lora, self.lora.flat_slots, self.lora.flat_layout.views

            def total(masters: list[mx.array], casts: list[mx.array]) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
                with swapped(slots, masters), lora.casts.at_hand(slots, casts):
                    return self._total(layout, *inputs)

            casts = views(lora.cast(params, lora.dtype))
            value, (of_masters, of_casts) = mx.value_and_grad(total, argnums=(0, 1))(views(params), casts)
            grads = lora.cast_back(of_casts)
            if lora.casts.missed:  # some masters were used: by modules that work in another dtype, or as they are
                grads = grads + lora.flat_layout.join(of_masters)
            return value, grads

        return function

    def _total(
        self,
        layout: Layout,
        streams: list[list[mx.array]],
        scored: Scored,
        counts: dict[str, mx.array],
        reference: Sums,
    ) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        """The loss, by training row too, with everything that varies from row to row among the arguments; `layout`
        gives the structure.
        """
        value = self.objective.loss(Scores(self._sums(layout, streams, scored), counts, reference))
        return value.total.sum(), value.total, value.metrics

    def _sums(self, layout: Layout, streams: list[list[mx.array]], scored: Scored) -> dict[str, mx.array]:
        sums = {}
        for number, stream in enumerate(layout.streams):
            self.lora.dropout_keys.enter(number, stream.parts)
            logits = flattened(self.stack.whole(stream.with_arrays(streams[number])))
            for name, (rows, targets, weights, owners) in scored.items():
                span = layout.spans[name]
                if span.stream == number:
                    picked = logits if layout.scores_most(name) else mx.take(logits, rows, axis=-2)
                    sums[name] = span.sums(log_softmax_at(picked, targets) * weights, owners)
        return sums

    def _inputs(
        self, layout: Layout, reference: Sums
    ) -> tuple[list[list[mx.array]], Scored, dict[str, mx.array], dict[str, mx.array]]:
        streams = [stream.arrays for stream in layout.streams]
        rows = [stream.batch * len(stream) for stream in layout.streams]
        scored = {
            name: every_row(span, rows[span.stream])
            if layout.scores_most(name)
            else padded_rows(span, self._multiple(span))
            for name, span in layout.spans.items()
        }
        counts = {name: mx.array(n, dtype=mx.float32) for name, n in _counts(layout).items()}
        return streams, scored, counts, dict(reference)

    def _multiple(self, span: Span) -> int:
        """What scored rows are padded to; those of several training rows to one of few numbers."""
        if not self.compiled:
            return 1
        return max(PADDED_ROWS, up(len(span))) if span.sizes else PADDED_ROWS

    def _weight(self, layout: Layout) -> float | mx.array:
        zeros = {name: mx.array(0.0) for name in layout.spans}
        return self.objective.loss(Scores(zeros, _counts(layout), zeros)).weight


def reference_sums(backward: Backward, layout: Layout) -> Sums:
    """The spans' sums of log-probs by the model with its adapter as at the start, where the objective needs them."""
    if not backward.objective.needs_reference:
        return {}
    if layout.reference is not None:
        return layout.reference
    with backward.lora.as_at_start():
        return backward.score(layout).sums


def _counts(layout: Layout) -> dict[str, Any]:
    return {name: span.count for name, span in layout.spans.items()}


def _pick(carry: Mapping[str, mx.array], names: Sequence[str]) -> Carry:
    return {name: carry[name] for name in names}


def _add(sums: dict[str, mx.array], names: Sequence[str], arrays: Sequence[mx.array]) -> None:
    for name, array in zip(names, arrays, strict=True):
        sums[name] = sums[name] + array if name in sums else array
