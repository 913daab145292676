"""Rows to look at: each token's text, whether it is learnt, and what it counts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from segtrain.data.limits import Dropped, Encoded
from segtrain.data.raw import Raw
from segtrain.data.rows import PreferenceRow, Row, SupervisedRow
from segtrain.data.tokenizer import Codec
from segtrain.errors import UserError

EXAMPLES, LENGTH = 50, 600  # of the first so many examples, the first row that is short enough to be looked at


class Sought:
    """The row to show of a data set: one that is short enough among the first, or else the shortest of them."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self._seen = 0

    def look(self, raws: Iterable[Raw], encode: Callable[[Raw], Sequence[Encoded | Dropped]]) -> None:
        """Look through examples, in the data's order, until a row is found; broken ones are passed over."""
        for raw in raws:
            if self.row is not None and (len(self.row) <= LENGTH or self._seen >= EXAMPLES):
                return
            self._seen += 1
            try:
                results = encode(raw)
            except UserError:
                continue
            for result in results:
                if isinstance(result, Encoded) and (self.row is None or len(result.row) < len(self.row)):
                    self.row = result.row


@dataclass(frozen=True)
class Sample:
    """One row, token by token: the text of each and whether it is supervised.

    `weight` is that of its targets in the loss, `weights` each token's where they differ. A preference row is two
    samples, one an `answer`.
    """

    origin: str
    pieces: list[str]
    supervised: list[bool]
    weight: float = 1.0
    weights: list[float] | None = None
    answer: str | None = None

    @property
    def tokens(self) -> list[tuple[str, bool]]:
        return list(zip(self.pieces, self.supervised, strict=True))

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("origin", "pieces", "supervised", "weight")}
        more = {name: value for name in ("weights", "answer") if (value := getattr(self, name)) is not None}
        return {**found, **more}


def samples_of(codec: Codec, row: Row) -> list[Sample]:
    """A row as it is shown: one sample, or two for a preference row."""
    if isinstance(row, SupervisedRow):
        return [_supervised(codec, row)]
    prompts = {"chosen": row.prompt, "rejected": row.rejected_prompt or row.prompt}
    return [_answer(codec, row, prompt, answer) for answer, prompt in prompts.items()]


def _supervised(codec: Codec, row: SupervisedRow) -> Sample:
    weights = None
    if row.weights is not None:
        weights = [weight * on for weight, on in zip(row.weights, row.supervised, strict=True)]
    kinds = {weight for weight, on in zip(weights or [], row.supervised, strict=False) if on}
    same = kinds.pop() if len(kinds) == 1 else 1.0
    return Sample(str(row.origin), codec.pieces(row.tokens), row.supervised, same, weights if kinds else None)


def _answer(codec: Codec, row: PreferenceRow, prompt: list[int], answer: str) -> Sample:
    tokens: list[int] = [*prompt, *getattr(row, answer)]
    supervised = [number >= len(prompt) for number in range(len(tokens))]
    return Sample(str(row.origin), codec.pieces(tokens), supervised, answer=answer)
