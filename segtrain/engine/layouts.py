"""Layouts: what a training row looks like to the model.

A `Stream` is one forward pass. A `Span` names rows of a stream to score and the tokens they should predict. A
`Layout` is both. The three builders below are the only layouts there are (`groups.together` runs several at once):

- `single`: one stream, one span (supervised fine-tuning);
- `pair`: two streams, chosen and rejected (ORPO);
- `shared_prefix`: one stream `[prompt; chosen; rejected]`, in which the prompt is computed once.

Shapes: `B` training rows that run together, 1 from these builders; `T` rows of a stream, `M` scored rows of a span.
Token ids are int32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import cast

import mlx.core as mx

from segtrain.engine.picking import most
from segtrain.engine.ragged import Ragged

RESPONSE, PROMPT, CHOSEN, REJECTED = "response", "prompt", "chosen", "rejected"


@dataclass(frozen=True)
class Stream:
    """One forward pass: `tokens` [B, T], of which `padding` are filler, and who sees whom.

    Without `branches`, row i sees rows j <= i, at positions 0..T-1. With `branches` (lengths that, with `prefix`, add
    up to T) the rows are a common prefix followed by independent continuations: a branch sees the prefix and its own
    earlier rows only, and its positions start at `prefix` again. With `ragged` the rows are of several training rows,
    and it says who sees whom.
    """

    tokens: mx.array
    prefix: int = 0
    branches: tuple[int, ...] = ()
    padding: int = 0
    ragged: Ragged | None = None
    parts: tuple[tuple[int, int, int], ...] = ()

    def __len__(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def batch(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def structure(self) -> tuple:
        """What is fixed when streams of these lengths run by one compiled graph; all else is in `arrays`."""
        return self.prefix, self.branches, self.ragged is not None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(self.ragged.arrays if self.ragged else [])]

    def with_arrays(self, arrays: Sequence[mx.array]) -> "Stream":
        tokens, *others = arrays
        return replace(self, tokens=tokens, ragged=Ragged(*others) if others else None)

    @property
    def sequences(self) -> list[list[int]]:
        """The numbers of the rows that see one another, in order: one sequence, or one for each branch."""
        if not self.branches:
            return [list(range(len(self)))]
        edges = list(accumulate(self.branches, initial=self.prefix))
        return [[*range(self.prefix), *range(lo, hi)] for lo, hi in pairwise(edges)]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Consecutive positions as (first position, length), in row order."""
        if not self.branches:
            return ((0, len(self)),)
        first, *rest = self.branches
        return ((0, self.prefix + first), *((self.prefix, length) for length in rest))


@dataclass(frozen=True)
class Span:
    """Score `rows` [M] of stream number `stream` against `targets` [M]; `weights` [M], float32, or each counts 1.

    Of a stream with B training rows, row number b * T + t is row t of the b-th. Of several training rows, `sizes` says
    how many targets each of them has, one after the other, and sums are by training row: [B] instead of a scalar.
    """

    stream: int
    rows: mx.array
    targets: mx.array
    weights: mx.array | None = None
    sizes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    @property
    def count(self) -> float | mx.array:
        """The sum of the weights: how many targets there are where each counts 1. [B] where `sizes` are given."""
        if self.sizes:
            return self.sums(mx.ones((len(self),)) if self.weights is None else self.weights)
        return len(self) if self.weights is None else math.fsum(cast(list[float], self.weights.tolist()))

    @property
    def owners(self) -> mx.array:
        """The number of each target's training row, [M]."""
        return _ids([row for row, size in enumerate(self.sizes or (len(self),)) for _ in range(size)])

    def sums(self, values: mx.array, owners: mx.array | None = None) -> mx.array:
        """The sum of `values` [M'], of the targets of `owners` [M'] (all by default): a scalar, or [B] with `sizes`."""
        if not self.sizes:
            return values.sum()
        mine = (self.owners if owners is None else owners) == mx.arange(len(self.sizes))[:, None]
        return mx.where(mine, values, 0.0).sum(axis=-1)


@dataclass(frozen=True)
class Layout:
    """The streams of one training row and the spans scored on them, by name.

    `reference`: the spans' sums of log-probs by the reference model, where they are known already.
    """

    streams: tuple[Stream, ...]
    spans: dict[str, Span]
    reference: Mapping[str, mx.array] | None = None

    @property
    def tokens(self) -> int:
        """Without filler."""
        return sum(stream.batch * len(stream) for stream in self.streams) - self.padding

    @property
    def padding(self) -> int:
        return sum(stream.padding for stream in self.streams)

    @property
    def rows(self) -> int:
        """Training rows that run together."""
        return max(len(span.sizes) or 1 for span in self.spans.values())

    @property
    def scored(self) -> int:
        return sum(len(span) for name, span in self.spans.items() if name != PROMPT)

    def scores_most(self, name: str) -> bool:
        """Whether span `name` scores most rows of its stream: all of them are, the others with weight 0."""
        span = self.spans[name]
        stream = self.streams[span.stream]
        return most(len(span), stream.batch * len(stream))


def single(tokens: Sequence[int], supervised: Sequence[bool], weights: Sequence[float] | None = None) -> Layout:
    """One row of supervised fine-tuning: token i is a target where `supervised[i]`, and is predicted from row i - 1.

    `weights[i]` multiplies its log-prob in the loss, which is normalised by the sum of weights.

    The first token can't be predicted and the last one is never an input, so the stream has `len(tokens) - 1` rows.
    Raises ValueError when no token is left to predict.
    """
    rows = [i - 1 for i in range(1, len(tokens)) if supervised[i]]
    if not rows:
        raise ValueError("a row has no supervised token after its first one")
    span = _span(0, rows, [tokens[i + 1] for i in rows])
    if weights is not None:
        span = replace(span, weights=mx.array([weights[i + 1] for i in rows], dtype=mx.float32))
    return Layout((_stream(tokens[:-1]),), {RESPONSE: span})


def pair(
    prompt: Sequence[int],
    chosen: Sequence[int],
    rejected: Sequence[int],
    *,
    rejected_prompt: Sequence[int] | None = None,
    score_prompt: bool = True,
) -> Layout:
    """A preference row as two independent streams.

    `rejected_prompt` is the rejected branch's own prompt where tokenising made it differ. With `score_prompt` the
    chosen stream's prompt is a third span (`sft_scope: full`).
    """
    other = prompt if rejected_prompt is None else rejected_prompt
    _check_pair(prompt, chosen, rejected)
    _check_pair(other, chosen, rejected)
    streams, spans = [], {}
    for number, (name, start, response) in enumerate([(CHOSEN, prompt, chosen), (REJECTED, other, rejected)]):
        streams.append(_stream([*start, *response][:-1]))
        spans[name] = _span(number, range(len(start) - 1, len(start) + len(response) - 1), response)
    return Layout(tuple(streams), spans | _prompt_span(prompt, score_prompt))


def shared_prefix(
    prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int], *, score_prompt: bool = True
) -> Layout:
    """A preference row as one stream `[prompt P; chosen Rc; rejected Rr]`; loss and gradients equal `pair`'s.

    chosen[k] is scored at row P - 1 + k; rejected[0] at row P - 1 too, and rejected[k] at row P + Rc + k - 1.
    """
    _check_pair(prompt, chosen, rejected)
    P, Rc, Rr = len(prompt), len(chosen), len(rejected)
    stream = Stream(_ids([[*prompt, *chosen, *rejected]]), P, (Rc, Rr))
    spans = {
        CHOSEN: _span(0, range(P - 1, P - 1 + Rc), chosen),
        REJECTED: _span(0, [P - 1, *range(P + Rc, P + Rc + Rr - 1)], rejected),
    }
    return Layout((stream,), spans | _prompt_span(prompt, score_prompt))


def padded(layout: Layout, multiple: int) -> Layout:
    """The same layout with each stream's length rounded up to a multiple, by rows that nothing sees and nobody scores.

    Some fused attention kernels have a backward only for such lengths. The filler follows the last
    real row, so causal visibility hides it; in a stream with branches it lengthens the last branch.
    """
    return Layout(tuple(_padded(stream, multiple) for stream in layout.streams), layout.spans)


def _padded(stream: Stream, multiple: int) -> Stream:
    extra = -len(stream) % multiple
    if not extra:
        return stream
    tokens = _ids([[*row, *[0] * extra] for row in cast(list[list[int]], stream.tokens.tolist())])
    branches = (*stream.branches[:-1], stream.branches[-1] + extra) if stream.branches else ()
    return Stream(tokens, stream.prefix, branches, stream.padding + extra)


def _check_pair(prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]) -> None:
    for name, part in (("prompt", prompt), ("chosen response", chosen), ("rejected response", rejected)):
        if not len(part):
            raise ValueError(f"a preference row has an empty {name}")


def _prompt_span(prompt: Sequence[int], score_prompt: bool) -> dict[str, Span]:
    if not score_prompt or len(prompt) < 2:
        return {}
    return {PROMPT: _span(0, range(len(prompt) - 1), prompt[1:])}


def _stream(tokens: Sequence[int]) -> Stream:
    return Stream(_ids([list(tokens)]))


def _span(stream: int, rows: Sequence[int], targets: Sequence[int]) -> Span:
    return Span(stream, _ids(list(rows)), _ids(list(targets)))


def _ids(values: list) -> mx.array:
    return mx.array(values, dtype=mx.int32)
