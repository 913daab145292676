"""A part of a split, as the hub's tools write it: `train[:80%]`, `train[100:200]`, `train[-10%:]`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from segtrain.data.feeds import Table
from segtrain.data.raw import Raw
from segtrain.errors import UserError


def parted(split: str) -> tuple[str, str]:
    """The split's name and its slice without brackets, empty where it has none. Raises UserError."""
    base, bracket, part = split.partition("[")
    if bracket and not (part.endswith("]") and ":" in part):
        raise UserError(f"can't read the slice in {split!r}; write it like train[:80%]")
    return base.strip(), part.removesuffix("]")


def bounds(part: str, rows: int, split: str) -> tuple[int, int]:
    """The rows [low, high) of a slice such as `:80%`. Raises UserError."""
    low, _, high = part.partition(":")
    try:
        lo, hi = (_bound(text.strip(), rows, default) for text, default in ((low, 0), (high, rows)))
    except ValueError:
        raise UserError(f"can't read the slice in {split!r}; write it like train[:80%]") from None
    return lo, max(lo, hi)


def _bound(text: str, rows: int, default: int) -> int:
    if not text:
        return default
    value = round(float(text[:-1]) / 100 * rows) if text.endswith("%") else int(text)
    return max(0, min(rows, value + rows if value < 0 else value))


class Sliced:
    """The rows [low, high) of a table, under their own numbers in it."""

    def __init__(self, table: Table, low: int, high: int) -> None:
        self.table, self.low, self.high, self.name = table, low, high, table.name

    def __len__(self) -> int:
        return self.high - self.low

    def __getitem__(self, number: int) -> Raw:
        return self.table[self.low + number]

    @property
    def size(self) -> int:
        return self.table.size * len(self) // max(1, len(self.table))

    def sizes(self) -> np.ndarray:
        return self.table.sizes()[self.low : self.high]

    @property
    def fingerprint(self) -> list[Any]:
        return [self.table.fingerprint, self.low, self.high]


def sliced(tables: Sequence[Table], part: str, split: str) -> list[Table]:
    """The tables' part of one slice over all of them. Raises UserError."""
    low, high = bounds(part, sum(map(len, tables)), split)
    found: list[Table] = []
    start = 0
    for table in tables:
        lo, hi = max(low - start, 0), min(high - start, len(table))
        if lo < hi:
            found.append(Sliced(table, lo, hi))
        start += len(table)
    return found
