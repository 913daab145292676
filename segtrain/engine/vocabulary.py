"""The head by blocks of the vocabulary: each block's weights are used once, for all scored rows, and then let go.

With z the logits of a row, y its target and m the highest logit seen so far, a block adds to running sums (as a fused
attention does, its keys and values both being the projection's rows W_v):

    s += sum over v of exp(z_v - m),     a += sum over v != y of exp(z_v - m) W_v,     both scaled down when m rises

and in the end, where g_v is the slope of what follows the projection (1, or that of a soft-cap),

    log p[y] = z_y - m - log s,          d log p[y] / dx = (1 - p[y]) g_y W_y - a / s

The target is left out of `a`, so that nothing cancels where its probability is near 1. Sums are float32. Against
`head.score` the order of additions differs, and with it the last bits; blocks in memory and blocks from disk give the
same bits.

Shapes: `h` [..., T, H] hidden states that leave the last layer; `M` rows of a chunk; B rows of a block; H' what the
projection takes.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from segtrain.engine.head import PADDED_ROWS, SpanScore, chunks, flattened, padded_to
from segtrain.engine.layouts import Span

Arrays: TypeAlias = Mapping[str, mx.array]
Sums: TypeAlias = list[mx.array]
"""[1, M, 1] m, s and z_y; with a gradient also [1, M, H'] a, and g_y W_y."""
Run: TypeAlias = Callable[..., Any]
"""(name, function, *arrays) -> function(*arrays), compiled or not."""


class Block(Hashable, Protocol):
    """Rows lo..hi-1 of the vocabulary."""

    @property
    def lo(self) -> int: ...
    @property
    def hi(self) -> int: ...


class Vocabulary(Protocol):
    """A head by blocks (`models.vocabulary`)."""

    @property
    def blocks(self) -> Sequence[Any]: ...
    @property
    def read(self) -> Callable[[Any], Arrays]: ...
    def before(self, h: mx.array) -> mx.array: ...
    def project(self, x: mx.array, arrays: Arrays) -> mx.array: ...
    def after(self, h: mx.array, y: mx.array) -> mx.array: ...
    def rows(self, arrays: Arrays, numbers: mx.array, dtype: mx.Dtype) -> mx.array: ...


@dataclass
class _Chunk:
    """Some scored rows: numbers of rows of `h`, targets [M] and weights [M] or None."""

    h: mx.array
    rows: mx.array
    targets: mx.array
    weights: mx.array | None
    sums: Sums

    @property
    def hidden(self) -> mx.array:
        """[..., M, H]"""
        return mx.take(self.h, self.rows, axis=-2)


def score(
    vocabulary: Vocabulary,
    scored: Sequence[tuple[mx.array, Span]],
    chunk: int,
    *,
    gradient: bool,
    run: Run,
    pad: bool = False,
    evaluate: Callable[[list[mx.array]], None] = mx.eval,
) -> list[SpanScore]:
    """What `head.score` gives for each (h, span), by one pass over the vocabulary.

    `run` runs the functions of arrays that all blocks and chunks share; with `pad` chunks are of few lengths, for it.
    """
    found = [_chunks(h, span, chunk, pad) for h, span in scored]
    everything = [part for parts in found for part in parts]
    for block in vocabulary.blocks:
        arrays = vocabulary.read(block)
        for part in everything:
            first = not part.sums
            given = [part.hidden, part.targets, mx.array(block.lo), *part.sums]
            part.sums = run(("block", first, gradient), _adds(vocabulary, gradient), dict(arrays), *given)
            evaluate(part.sums)
        del arrays
    return [
        _finished(vocabulary, parts, span, gradient, run, evaluate)
        for parts, (_, span) in zip(found, scored, strict=True)
    ]


def _chunks(h: mx.array, span: Span, size: int, pad: bool) -> list[_Chunk]:
    h = flattened(h)
    return [
        _Chunk(h, rows, targets, weights[0] if weights else None, [])
        for rows, targets, *weights in chunks(span, size, PADDED_ROWS if pad else None)
    ]


def _adds(vocabulary: Vocabulary, gradient: bool) -> Callable[..., Sums]:
    """A function of a block's arrays, h, targets, the block's first row and the sums so far, to the sums with it."""

    def add(arrays: Arrays, h: mx.array, targets: mx.array, lo: mx.array, *sums: mx.array) -> Sums:
        x = vocabulary.before(h)
        y = vocabulary.project(x, arrays)
        z = vocabulary.after(h, y)
        at = (targets - lo)[None, :, None]
        here = (at >= 0) & (at < z.shape[-1])
        at = mx.clip(at, 0, z.shape[-1] - 1)
        wide = z.astype(mx.float32)
        highest = wide.max(axis=-1, keepdims=True)
        if sums:
            highest = mx.maximum(highest, sums[0])
        e = mx.exp(wide - highest)
        total, own = e.sum(axis=-1, keepdims=True), mx.take_along_axis(wide, at, axis=-1)
        if sums:
            less = mx.exp(sums[0] - highest)
            total, own = total + sums[1] * less, mx.where(here, own, sums[2])
        if not gradient:
            return [highest, total, own]
        others = mx.put_along_axis(e, at, mx.where(here, 0.0, mx.take_along_axis(e, at, axis=-1)), axis=-1)
        dy = mx.vjp(lambda y: [vocabulary.after(h, y)], [y], [others.astype(z.dtype)])[1]
        (dx,) = mx.vjp(lambda x: [vocabulary.project(x, arrays)], [x], dy)[1]
        a = dx.astype(mx.float32)
        target = _slope(vocabulary, h, mx.take_along_axis(y, at, axis=-1)) * vocabulary.rows(
            arrays, at.reshape(-1), x.dtype
        )
        if sums:
            a, target = a + sums[3] * less, mx.where(here, target, sums[4])
        return [highest, total, own, a, target]

    return add


def _slope(vocabulary: Vocabulary, h: mx.array, y: mx.array) -> mx.array:
    """[1, M, 1]: the derivative of what follows the projection at `y` [1, M, 1]."""
    (slope,) = mx.vjp(lambda y: [vocabulary.after(h, y)], [y], [mx.ones_like(y)])[1]
    return slope


def _finished(
    vocabulary: Vocabulary,
    parts: Sequence[_Chunk],
    span: Span,
    gradient: bool,
    run: Run,
    evaluate: Callable[[list[mx.array]], None],
) -> SpanScore:
    total, units, done = mx.array(0.0), [], 0
    owners = span.owners if span.sizes else None
    for part in parts:
        weights = [] if part.weights is None else [part.weights]
        name = ("finish", bool(weights), gradient)
        logp, *unit = run(name, _finish(vocabulary, gradient), part.hidden, part.sums, *weights)
        count = part.targets.shape[0]
        total = total + span.sums(logp, None if owners is None else padded_to(owners[done : done + count], count))
        done += count
        units += unit
        part.sums = []
        evaluate([total, *unit])
    return SpanScore(total, units)


def _finish(vocabulary: Vocabulary, gradient: bool) -> Callable[..., list[mx.array]]:
    """A function of h, its sums and weights to the weighted log-probs [M], and the gradient of their sum."""

    def finish(h: mx.array, sums: Sums, weights: mx.array | None = None) -> list[mx.array]:
        highest, total, own, *rest = sums
        logp = own - (highest + mx.log(total))
        weight = mx.ones_like(logp) if weights is None else weights[None, :, None]
        weighted = (logp * weight).reshape(-1)
        if not gradient:
            return [weighted]
        a, target = rest
        dx = weight * ((1 - mx.exp(logp)) * target - a / total)
        return [weighted, *mx.vjp(lambda h: [vocabulary.before(h)], [h], [dx.astype(target.dtype)])[1]]

    return finish
