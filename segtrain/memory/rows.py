"""A training row as the estimate sees it: lengths and numbers of scored rows. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class _Sized(Protocol):
    def __len__(self) -> int: ...


class _Array(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class _Ragged(Protocol):
    @property
    def tokens(self) -> _Array: ...


class _Stream(_Sized, Protocol):
    @property
    def batch(self) -> int: ...
    @property
    def ragged(self) -> _Ragged | None: ...
    @property
    def branches(self) -> Sequence[int]: ...


class _Span(_Sized, Protocol):
    @property
    def stream(self) -> int: ...


class _Layout(Protocol):
    @property
    def streams(self) -> Sequence[_Stream]: ...
    @property
    def spans(self) -> Mapping[str, _Span]: ...


class Extent(NamedTuple):
    """Tokens of a stream, of which attention and scans see `sequences` of `length` tokens each."""

    tokens: int
    sequences: int
    length: int

    @property
    def slots(self) -> int:
        """Tokens of all sequences: more than of the stream where they are filled up, or share a prompt."""
        return self.sequences * self.length

    @property
    def folded(self) -> bool:
        """Whether the stream is taken apart into sequences."""
        return self.slots != self.tokens


def one(tokens: int) -> Extent:
    """A stream that is one sequence."""
    return Extent(tokens, 1, tokens)


@dataclass(frozen=True)
class RowShape:
    """`streams`: rows of each forward pass; `scored`: per stream, rows of each span; `branches`: as in `Stream`.

    `sequences`: of rows together, per stream, how many sequences of which length attention sees.
    """

    streams: tuple[int, ...]
    scored: tuple[tuple[int, ...], ...]
    branches: tuple[int, ...] = ()
    sequences: tuple[tuple[int, int], ...] = ()

    @property
    def extents(self) -> tuple[Extent, ...]:
        if not self.sequences:
            return tuple(map(one, self.streams))
        return tuple(Extent(rows, *apart) for rows, apart in zip(self.streams, self.sequences, strict=True))

    @property
    def tokens(self) -> int:
        return sum(self.streams)


def sft(tokens: int, supervised: int | None = None) -> RowShape:
    """One row of `tokens` tokens (the last one is never an input), all supervised unless said."""
    return RowShape((max(1, tokens - 1),), ((min(supervised or tokens, max(1, tokens - 1)),),))


def pair(prompt: int, chosen: int, rejected: int, *, score_prompt: bool = True) -> RowShape:
    """Two streams: chosen (its prompt scored too, where the loss wants it) and rejected."""
    extra = (prompt - 1,) if score_prompt and prompt > 1 else ()
    return RowShape((prompt + chosen - 1, prompt + rejected - 1), ((chosen, *extra), (rejected,)))


def shared(prompt: int, chosen: int, rejected: int, *, score_prompt: bool = True) -> RowShape:
    """One stream [prompt; chosen; rejected]."""
    extra = (prompt - 1,) if score_prompt and prompt > 1 else ()
    return RowShape((prompt + chosen + rejected,), ((chosen, rejected, *extra),), (chosen, rejected))


def together(row: RowShape, count: int) -> RowShape:
    """So many such rows as a batch."""
    return RowShape(
        tuple(count * rows for rows in row.streams),
        tuple(tuple(count * rows for rows in spans) for spans in row.scored),
        tuple(count * rows for rows in row.branches),
        tuple((count, rows) for rows in row.streams),
    )


def in_one_stream(row: RowShape, count: int, tokens: int, sequences: tuple[int, int]) -> RowShape:
    """So many such rows in one ragged stream of `tokens` tokens, with as many `sequences` of one length."""
    return RowShape((tokens,), (tuple(count * rows for spans in row.scored for rows in spans),), (), (sequences,))


def joined(rows: Sequence[RowShape]) -> RowShape:
    """Rows whose passes are held together."""
    return RowShape(
        tuple(n for row in rows for n in row.streams),
        tuple(spans for row in rows for spans in row.scored),
        next((row.branches for row in rows if row.branches), ()),
    )


def of_layout(layout: _Layout) -> RowShape:
    """The shape of a `Layout`, of which only lengths are read."""
    scored = [
        tuple(len(span) for span in layout.spans.values() if span.stream == number)
        for number in range(len(layout.streams))
    ]
    lengths = tuple(stream.batch * len(stream) for stream in layout.streams)
    first = layout.streams[0]
    branches = tuple(first.batch * length for length in first.branches)
    return RowShape(lengths, tuple(scored), branches, _sequences(layout.streams))


def _sequences(streams: Sequence[_Stream]) -> tuple[tuple[int, int], ...]:
    """How many sequences of which length attention sees of each stream; () where each stream is one."""
    found = []
    for stream in streams:
        count, length = stream.ragged.tokens.shape if stream.ragged else (stream.batch, len(stream))
        found.append((count, length))
    return tuple(found) if any(count > 1 for count, _ in found) else ()
