"""Hidden states to token log-probabilities and their gradient, a chunk of rows at a time.

No `[T, V]` array ever exists: each chunk of M' scored rows is projected, reduced in float32 and differentiated before
the next one is. There is no autodiff across the softmax: with z = logits(h) the gradient of log p[y] is

    d log p[y] / dz = onehot(y) - softmax(z)

and only norm and projection (soft-cap, scale, bias: whatever the model's own head does) are differentiated, by a vjp
of that cotangent. A chunk takes at most 12 bytes x V a row: logits, float32 copy, softmax, cotangent.

A scorer may be compiled. To serve many lengths of spans by few graphs, spans are then cut into chunks of equal
length, a multiple of `PADDED_ROWS`; filler rows weigh nothing.

Shapes: `h` [..., T, H] hidden states that leave the last layer; `M` scored rows of a span; V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import mlx.core as mx

from segtrain.engine.layouts import Span

PADDED_ROWS = 128

Logits: TypeAlias = Callable[[mx.array], mx.array]
"""[..., M', H] to [1, M', V], row by row: final norm and output projection."""

Scorer: TypeAlias = Callable[..., list[mx.array]]
"""What `scorer` makes, or that compiled."""


@dataclass(frozen=True)
class SpanScore:
    """`logp`: sum of the span's token log-probs, float32, by training row as `Span.sums`. `units`: d(sum)/dh per
    chunk, each [..., 1, M', H]."""

    logp: mx.array
    units: list[mx.array]


def scorer(logits: Logits, *, gradient: bool) -> Scorer:
    """A function of hidden states [..., M', H], targets [M'] and weights [M'] or None.

    It gives the weighted log-probs [M'], float32, and their sum's gradient with respect to the hidden states, if
    wanted.
    """

    def rows(h: mx.array, targets: mx.array, weights: mx.array | None = None) -> list[mx.array]:
        z, at = logits(h), targets[None, :, None]
        lse = mx.logsumexp(z.astype(mx.float32), axis=-1, keepdims=True)
        logp = mx.take_along_axis(z, at, axis=-1).astype(mx.float32) - lse
        weight = mx.ones_like(logp) if weights is None else weights[None, :, None]
        weighted = (logp * weight).reshape(-1)
        if not gradient:
            return [weighted]
        minus_p = -mx.exp(z.astype(mx.float32) - lse)
        dz = (minus_p if weights is None else minus_p * weight).astype(z.dtype)
        dz = mx.put_along_axis(dz, at, ((1 - mx.exp(logp)) * weight).astype(z.dtype), axis=-1)
        return [weighted, *mx.vjp(lambda x: [logits(x)], [h], [dz])[1]]

    return rows


def score(
    logits: Logits,
    h: mx.array,
    span: Span,
    chunk: int,
    *,
    gradient: bool,
    compiled: Scorer | None = None,
    evaluate: Callable[[list[mx.array]], None] = mx.eval,
) -> SpanScore:
    """Weighted sum of log-probs of `span.targets` given rows `span.rows` of `h`, and its unit gradient if wanted.

    `evaluate` gets what each chunk made, to evaluate it before the next one is begun. `compiled` is the compiled
    `scorer`.
    """
    rows_scorer = compiled or scorer(logits, gradient=gradient)
    total, units, done, h = mx.array(0.0), [], 0, flattened(h)
    owners = span.owners if span.sizes else None
    for rows, *given in chunks(span, chunk, PADDED_ROWS if compiled else None):
        logp, *unit = rows_scorer(mx.take(h, rows, axis=-2), *given)
        total = total + span.sums(
            logp, None if owners is None else padded_to(owners[done : done + len(rows)], len(rows))
        )
        done += len(rows)
        units += unit
        evaluate([total, *unit])
    return SpanScore(total, units)


def cotangent(h: mx.array, spans: list[tuple[Span, list[mx.array], mx.array]]) -> mx.array:
    """dL/dh from each span's unit gradient and dL/d(sum): zero where nothing is scored. Shape and dtype of `h`."""
    dh = flattened(mx.zeros_like(h))
    for span, units, slope in spans:
        count = sum(unit.shape[-2] for unit in units)
        slopes = _by_chunk(span, slope, units)
        scaled = [(slope * unit).astype(h.dtype) for slope, unit in zip(slopes, units, strict=True)]
        dh = dh.at[..., padded_to(span.rows, count), :].add(mx.concatenate(scaled, axis=-2))
    return dh.reshape(h.shape)


def _by_chunk(span: Span, slope: mx.array, units: list[mx.array]) -> list[mx.array]:
    """What each chunk's unit gradient is multiplied with: the slope of the sum, or of each target's [M', 1]."""
    if not span.sizes:
        return [slope] * len(units)
    edges = list(accumulate((unit.shape[-2] for unit in units), initial=0))
    by_target = mx.take(slope, padded_to(span.owners, edges[-1]))[:, None]
    return [by_target[lo:hi] for lo, hi in pairwise(edges)]


def flattened(h: mx.array) -> mx.array:
    """Hidden states [..., B, T, H] as [..., 1, B * T, H]: the rows that a span's numbers count."""
    return h.reshape(*h.shape[:-3], 1, -1, h.shape[-1]) if h.ndim > 2 else h


def padded_to(numbers: mx.array, count: int) -> mx.array:
    """`numbers` [M] with zeros at the end: `count` in all."""
    return mx.pad(numbers, (0, count - numbers.shape[0]))


def log_softmax_at(z: mx.array, targets: mx.array) -> mx.array:
    """Token log-probs [1, M] in float32 from logits [1, M, V]; plain operations, differentiable."""
    z = z.astype(mx.float32)
    return mx.take_along_axis(z, targets[None, :, None], axis=-1).squeeze(-1) - mx.logsumexp(z, axis=-1)


def padded_rows(span: Span, multiple: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Rows and targets [M'] with M' a multiple, weights that are 0 for the filler, and owners."""
    extra = -len(span) % multiple
    rows, targets, owners = (mx.pad(x, (0, extra)) for x in (span.rows, span.targets, span.owners))
    if span.weights is not None:
        return rows, targets, mx.pad(span.weights, (0, extra)), owners
    return rows, targets, (mx.arange(len(span) + extra) < len(span)).astype(mx.float32), owners


def every_row(span: Span, count: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """All `count` rows of the span's stream as `padded_rows` gives some: those that aren't scored weigh 0."""

    def placed(values: mx.array) -> mx.array:
        found = mx.zeros(count, values.dtype)
        found[span.rows] = values
        return found

    weights = mx.ones((len(span),)) if span.weights is None else span.weights
    return mx.arange(count), placed(span.targets), placed(weights), placed(span.owners)


def chunks(span: Span, size: int, multiple: int | None) -> Iterator[tuple[mx.array, ...]]:
    """(rows, targets) of at most `size` rows, and their weights where the span has some; given a `multiple`, always
    with weights and of equally many rows."""
    parts: tuple[mx.array, ...] = (span.rows, span.targets)
    if span.weights is not None:
        parts = (*parts, span.weights)
    if multiple:
        count = -(-len(span) // max(size, multiple))
        size = -(-len(span) // (count * multiple)) * multiple
        parts = padded_rows(span, size)[:3]
    for lo in range(0, parts[0].shape[0], size):
        yield tuple(part[lo : lo + size] for part in parts)
