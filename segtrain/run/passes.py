"""Rows in passes: which of them run together, and the layout and backward pass of each group."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from segtrain.data.rows import Row
from segtrain.engine.backward import Backward, SegmentedBackward
from segtrain.engine.layouts import Layout
from segtrain.errors import RunFailed, counted, reason
from segtrain.parallel.ranks import Ranks
from segtrain.run.session import Session

WINDOW = 64  # rows to evaluate that are looked at for which of them run together

Choose: TypeAlias = Callable[[Layout], Backward]
Join: TypeAlias = Callable[[Sequence[Layout]], SegmentedBackward | None]
"""The backward pass by which these layouts go through the layers together; None where they don't fit so."""
Cut: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Sizes of the groups of rows that run together, by the rows' lengths in ascending order."""


@dataclass
class Passes:
    """`cut`: which rows run together, or each runs alone. `join`: where weights are streamed, so that an update reads
    them twice however many passes it has."""

    session: Session
    choose: Choose
    cut: Cut | None = None
    join: Join | None = None

    def cost(self, row: Row) -> float:
        """What computing a row takes, in tokens: attention costs as much as all else at about 13 times the width.

        It depends on row and model alone, not on this rank's memory or device.
        """
        tokens = self.session.tokens(row)
        return tokens * (1 + tokens / (13 * self.session.width))

    def groups(self, rows: Sequence[Row]) -> list[list[int]]:
        """Numbers of the rows that run together, the longest group last.

        Where every row runs alone they keep their order, in which their gradients are added up.
        """
        alone = [[number] for number in range(len(rows))]
        if self.cut is None or len(rows) == 1 or self.session.why_alone:
            return alone
        found = self.session.grouped(rows, self.cut)
        return found if len(found) < len(rows) else alone

    def batches(self, groups: Sequence[Sequence[Row]]) -> list[list[int]]:
        """Numbers of the groups that go through the layers together, in order: as many as fit."""
        found: list[list[int]] = []
        layouts = [self._layout(rows) for rows in groups] if self.join and len(groups) > 1 else []
        done = 0
        while done < len(groups):
            count = len(groups) - done if self.join else 1
            while count > 1 and not self.join(layouts[done : done + count]):  # type: ignore[misc]
                count = -(-count // 2)
            found.append(list(range(done, done + count)))
            done += count
        return found

    def _layout(self, rows: Sequence[Row]) -> Layout:
        return self.session.layout(rows[0]) if len(rows) == 1 else self.session.together(rows)

    def prepared(self, rows: Sequence[Row]) -> tuple[Layout, Backward]:
        """The layout of one row, or of several together, with its reference sums, and the pass that runs it."""
        layout = self._layout(rows)
        backward = self.choose(layout)
        return self.session.referenced(rows, layout, backward), backward

    def over(self, rows: Sequence[Row], ranks: Ranks) -> Iterator[tuple[Layout, Backward, int]]:
        """This rank's share of `rows`, every `size`-th one, in groups; and how many of all are reached by then.

        Only `WINDOW` of them are in memory at a time.
        """
        numbers = range(ranks.rank, len(rows), ranks.size)
        for at in range(0, len(numbers), WINDOW):
            window, done = [rows[number] for number in numbers[at : at + WINDOW]], at
            for group in self.groups(window):
                done += len(group)
                yield *self.prepared([window[number] for number in group]), numbers[done - 1] + 1


@contextmanager
def explained(rows: Sequence[Row]) -> Iterator[None]:
    """Raises RunFailed, with what helps, where the computation of `rows` doesn't end well."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        where = " with ".join(filter(None, [str(rows[-1].origin), f"{len(rows) - 1} more" if len(rows) > 1 else ""]))
        size = counted(sum(map(len, rows)), "token")
        if is_out_of_memory(error):
            raise RunFailed(
                f"out of memory on {where} ({size}): {error}; lower data.max_seq_length or "
                "engine.memory_budget; `segtrain plan-segments` shows what would fit"
            ) from error
        if is_watchdog(error):
            raise RunFailed(
                f"the system ended a computation of the GPU that kept the display waiting, on {where} "
                f"({size}): {reason(error)}. Let the display sleep, keep the machine awake with "
                "`caffeinate -s segtrain ...`, and go on with --resume; shorter rows (data.max_seq_length) help too"
            ) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is one of the ways in which mlx says that memory is used up."""
    text = str(error).lower()
    words = ("out of memory", "insufficient memory", "unable to allocate", "attempting to allocate", "resource limit")
    return isinstance(error, MemoryError) or any(word in text for word in words)


def is_watchdog(error: BaseException) -> bool:
    """Whether the system's watchdog ended one of the GPU's command buffers (Metal's two texts)."""
    return any(words in str(error) for words in ("Impacting Interactivity", "GPU Timeout"))
