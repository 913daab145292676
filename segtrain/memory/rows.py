"""A training row as the estimate sees it: lengths and numbers of scored rows. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class _Sized(Protocol):
    def __len__(self) -> int: ...


class _Span(_Sized, Protocol):
    @property
    def stream(self) -> int: ...


class _Layout(Protocol):
    @property
    def streams(self) -> Sequence[_Sized]: ...
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
    """The shape of a `Layout`, of which only lengths are read."""
    scored = [
        tuple(len(span) for span in layout.spans.values() if span.stream == number)
        for number in range(len(layout.streams))
    ]
    branches = getattr(layout.streams[0], "branches", ())
    return RowShape(tuple(map(len, layout.streams)), tuple(scored), tuple(branches))
