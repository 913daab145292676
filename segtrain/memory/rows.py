"""A training row as the estimate sees it: lengths and numbers of scored rows. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class _Sized(Protocol):
    def __len__(self) -> int: ...


class _Stream(_Sized, Protocol):
    @property
    def batch(self) -> int: ...
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


@dataclass(frozen=True)
class RowShape:
    """`streams`: rows of each forward pass; `scored`: per stream, rows of each span; `branches`: as in `Stream`."""

    streams: tuple[int, ...]
    scored: tuple[tuple[int, ...], ...]
    branches: tuple[int, ...] = ()

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


def of_layout(layout: _Layout) -> RowShape:
    """The shape of a `Layout`, of which only lengths are read.

    B rows together count as one of all their tokens, which bounds them: they see no more of each other's.
    """
    scored = [
        tuple(len(span) for span in layout.spans.values() if span.stream == number)
        for number in range(len(layout.streams))
    ]
    lengths = tuple(stream.batch * len(stream) for stream in layout.streams)
    first = layout.streams[0]
    return RowShape(lengths, tuple(scored), tuple(first.batch * length for length in first.branches))
