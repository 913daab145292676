"""Hidden states to token log-probabilities and their gradient, a chunk of rows at a time.

No `[T, V]` array ever exists: each chunk of M' scored rows is projected, reduced in float32, differentiated and evaluated before
the next begins. There is no autodiff across the softmax: with z = logits(h) the gradient of log p[y] is

    d log p[y] / dz = onehot(y) - softmax(z)

and only norm and projection (soft-cap, scale, bias: whatever the model's own head does) are differentiated, by a vjp of that cotangent.
A chunk takes about 12 bytes x V a row: logits, float32 copy, softmax, cotangent.

Shapes: `h` [..., T, H] hidden states that leave the last layer; `M` scored rows of a span; V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from segtrain.layouts import Span

BYTES_PER_LOGIT = 12
MIN_CHUNK, MAX_CHUNK = 64, 2048

Logits: TypeAlias = Callable[[mx.array], mx.array]
"""[..., M', H] to [1, M', V], row by row: final norm and output projection."""


@dataclass(frozen=True)
class SpanScore:
    """`logp`: sum of the span's token log-probs, float32. `units`: d(sum)/dh per chunk, each [..., M', H]."""

    logp: mx.array
    units: list[mx.array]


def chunk_rows(vocabulary: int, budget: int = 512 << 20) -> int:
    """Rows of logits that fit `budget` bytes, within sensible limits."""
    return max(MIN_CHUNK, min(MAX_CHUNK, budget // (BYTES_PER_LOGIT * vocabulary)))


def score(
    logits: Logits, h: mx.array, span: Span, chunk: int, *, gradient: bool, awaited: bool = True
) -> SpanScore:
    """Sum of log-probs of `span.targets` given rows `span.rows` of `h`, and its unit gradient if wanted.

    Chunks are evaluated one by one; with `awaited` false nothing is evaluated here, but each chunk depends on the one before.
    """
    total, units = mx.array(0.0), []
    for rows, targets in _chunks(span, chunk):
        part = mx.take(h, rows, axis=-2)
        if units and not awaited:
            (part,) = mx.depends([part], [units[-1], total])
        logp, unit = _score_rows(logits, part, targets, gradient)
        total = total + logp
        if awaited:
            mx.eval(total, unit)
        if unit is not None:
            units.append(unit)
    return SpanScore(total, units)


def cotangent(h: mx.array, spans: list[tuple[Span, list[mx.array], mx.array]]) -> mx.array:
    """dL/dh from each span's unit gradient and dL/d(sum): zero where nothing is scored. Shape and dtype of `h`."""
    dh = mx.zeros_like(h)
    for span, units, slope in spans:
        unit = mx.concatenate(units, axis=-2) if len(units) > 1 else units[0]
        dh = dh.at[..., span.rows, :].add((slope * unit).astype(h.dtype))
    return dh


def log_softmax_at(z: mx.array, targets: mx.array) -> mx.array:
    """Token log-probs [1, M] in float32 from logits [1, M, V]; plain operations, differentiable."""
    z = z.astype(mx.float32)
    return mx.take_along_axis(z, targets[None, :, None], axis=-1).squeeze(-1) - mx.logsumexp(z, axis=-1)


def _score_rows(
    logits: Logits, h: mx.array, targets: mx.array, gradient: bool
) -> tuple[mx.array, mx.array | None]:
    z = logits(h)
    z32, at = z.astype(mx.float32), targets[None, :, None]
    lse = mx.logsumexp(z32, axis=-1, keepdims=True)
    logp = (mx.take_along_axis(z32, at, axis=-1) - lse).sum()
    if not gradient:
        return logp, None
    minus_p = -mx.exp(z32 - lse)
    dz = mx.put_along_axis(minus_p, at, 1 + mx.take_along_axis(minus_p, at, axis=-1), axis=-1).astype(z.dtype)
    _, (dh,) = mx.vjp(lambda x: [logits(x)], [h], [dz])
    return logp, dh


def _chunks(span: Span, size: int) -> Iterator[tuple[mx.array, mx.array]]:
    for lo in range(0, len(span), size):
        yield span.rows[lo : lo + size], span.targets[lo : lo + size]
