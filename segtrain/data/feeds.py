"""Endless sequences of raw rows whose place can be written down and returned to, exactly.

- `Shuffled`: tables (rows by number), in a new order each epoch;
- `Windowed`: sources that can only be read in order, shuffled within windows;
- `Mixed`: several feeds in fixed proportions.

No generator's state is kept: the order follows from (seed, epoch, window), so a place is a few integers.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from segtrain.data.permutation import Permutation
from segtrain.data.raw import Raw
from segtrain.errors import UserError

WINDOW_BYTES = 256 << 20
READ_ROWS = 64


class Table(Protocol):
    """Rows by number."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Raw: ...

    @property
    def size(self) -> int:
        """Bytes, about."""

    def sizes(self) -> np.ndarray:
        """Bytes of each row, about."""

    @property
    def fingerprint(self) -> list[Any]: ...


class InOrder(Protocol):
    """Rows one after another, from a cursor that JSON can hold."""

    def start(self) -> Any: ...

    def read(self, cursor: Any, limit: int) -> tuple[list[Raw], Any | None]: ...

    @property
    def fingerprint(self) -> list[Any]: ...


class Feed(Protocol):
    """An endless sequence of raw rows."""

    @property
    def epoch(self) -> int: ...

    def next(self) -> Raw: ...

    def last(self) -> Raw:
        """What `next` gave last, also before the place was written down that was returned to."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Chained:
    """Several tables as one."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self.name = ", ".join(table.name for table in self.tables)
        self._starts = np.cumsum([0, *(len(table) for table in self.tables)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> Raw:
        which = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.tables[which][number - int(self._starts[which])]

    @property
    def size(self) -> int:
        return sum(table.size for table in self.tables)

    def sizes(self) -> np.ndarray:
        return np.concatenate([table.sizes() for table in self.tables])

    @property
    def fingerprint(self) -> list[Any]:
        return [table.fingerprint for table in self.tables]


class ChainedInOrder:
    """Several ordered sources, one after another; a cursor is [source, its cursor]."""

    def __init__(self, sources: Sequence[InOrder]) -> None:
        self.sources = list(sources)

    def start(self) -> Any:
        return [0, self.sources[0].start()]

    def read(self, cursor: Any, limit: int) -> tuple[list[Raw], Any | None]:
        rows: list[Raw] = []
        number, inner = cursor
        while len(rows) < limit:
            found, inner = self.sources[number].read(inner, limit - len(rows))
            rows += found
            if inner is not None:
                continue
            number += 1
            if number == len(self.sources):
                return rows, None
            inner = self.sources[number].start()
        return rows, [number, inner]

    @property
    def fingerprint(self) -> list[Any]:
        return [source.fingerprint for source in self.sources]


class Shuffled:
    """A table's rows, each once an epoch, in an order drawn from (seed, epoch)."""

    def __init__(self, table: Table, seed: int) -> None:
        self.table, self.seed = table, seed
        self._go(0, 0)

    def next(self) -> Raw:
        if self.position == len(self.table):
            self._go(self.epoch + 1, 0)
        self.position += 1
        return self.last()

    def last(self) -> Raw:
        return self.table[self.order[self.position - 1]]

    def _go(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self.order = Permutation(len(self.table), self.seed, epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "table", "epoch": self.epoch, "position": self.position, "data": self.table.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "table", self.table.fingerprint)
        self._go(state["epoch"], state["position"])


class Windowed:
    """Rows of an ordered source, shuffled within windows of `window` rows (fewer where they exceed WINDOW_BYTES).

    The state is the cursor at the window's start, its number and the place in it: the window is read again on resume.
    """

    def __init__(self, source: InOrder, seed: int, window: int) -> None:
        self.source, self.seed, self.window = source, seed, window
        self.epoch = 0
        self._enter(source.start(), 0)

    def _enter(self, cursor: Any, number: int) -> None:
        """Make the window number `number`, that begins at `cursor`, the next to be read."""
        self.cursor, self.number, self.position = cursor, number, 0
        self.rows: list[Raw] | None = None
        self.after: Any | None = None

    def _fill(self) -> list[Raw]:
        if self.rows is None:
            self.rows, self.after = read_window(self.source, self.cursor, self.window, WINDOW_BYTES)
            self.order = Permutation(len(self.rows), self.seed, self.epoch, self.number) if self.rows else None
        return self.rows

    def next(self) -> Raw:
        rows, turns = self._fill(), 0
        while self.position == len(rows):
            if self.after is not None:
                self._enter(self.after, self.number + 1)
            elif turns < 2:
                turns += 1
                self.epoch += 1
                self._enter(self.source.start(), 0)
            else:
                raise UserError("the data holds no row any more")
            rows = self._fill()
        self.position += 1
        return self.last()

    def last(self) -> Raw:
        rows = self._fill()
        assert self.order is not None
        return rows[self.order[self.position - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": "window",
            "epoch": self.epoch,
            "cursor": self.cursor,
            "window": self.number,
            "position": self.position,
            "size": [self.window, WINDOW_BYTES],
            "data": self.source.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "window", self.source.fingerprint)
        if state["size"] != [self.window, WINDOW_BYTES]:
            raise UserError(f"shuffle_window is {self.window}, but the run to resume had {state['size'][0]}")
        self.epoch = state["epoch"]
        self._enter(state["cursor"], state["window"])
        self.position = state["position"]


def read_window(source: InOrder, cursor: Any, rows: int, size: int) -> tuple[list[Raw], Any | None]:
    """Rows from `cursor` on until there are `rows` of them or they hold `size` bytes, and the cursor after them."""
    found: list[Raw] = []
    held = 0
    while cursor is not None and len(found) < rows and held < size:
        more, cursor = source.read(cursor, min(READ_ROWS, rows - len(found)))
        found += more
        held += sum(raw.size for raw in more)
    return found, cursor


class Mixed:
    """Feeds in the proportions of their weights: the next row comes from whichever is furthest behind its share."""

    def __init__(self, feeds: Sequence[Feed], weights: Sequence[float], rows: int | None) -> None:
        self.feeds, self.weights, self.rows = list(feeds), list(weights), rows
        self.taken = [0] * len(self.feeds)
        self._from = 0  # the feed that gave the last row

    @property
    def epoch(self) -> int:
        """Full turns of `rows` rows, or of the slowest feed where their number isn't known."""
        return max(0, sum(self.taken) - 1) // self.rows if self.rows else min(feed.epoch for feed in self.feeds)

    def next(self) -> Raw:
        due = [(taken + 1) / weight for taken, weight in zip(self.taken, self.weights, strict=True)]
        which = due.index(min(due))
        self.taken[which] += 1
        self._from = which
        return self.feeds[which].next()

    def last(self) -> Raw:
        return self.feeds[self._from].last()

    def state_dict(self) -> dict[str, Any]:
        feeds = [feed.state_dict() for feed in self.feeds]
        state = {"kind": "mix", "taken": self.taken.copy(), "weights": self.weights, "feeds": feeds}
        return {**state, "from": self._from}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "mix", None)
        if list(state["weights"]) != self.weights:
            raise UserError(f"the weights of the mix are {self.weights}, but the run to resume had {state['weights']}")
        self.taken, self._from = list(state["taken"]), state.get("from", 0)
        for feed, saved in zip(self.feeds, state["feeds"], strict=True):
            feed.load_state_dict(saved)


def check_state(state: dict[str, Any], kind: str, fingerprint: Any) -> None:
    """Raises UserError when a saved place belongs to other data."""
    if state.get("kind") != kind:
        raise UserError(f"the data of the run to resume was read in another way ({state.get('kind')}, now {kind})")
    if state.get("data") != fingerprint:
        raise UserError(
            f"the data has changed since the checkpoint (then {state.get('data')}, now {fingerprint}); "
            "an exact resume needs the same files"
        )
