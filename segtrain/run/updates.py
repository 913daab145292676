"""Updates: the gradients of some rows, summed over accumulation and ranks, and applied once.

    update = sum over rows of (gradient of the row's total loss) / sum over rows of the row's weight

The weight is the number of supervised tokens for SFT and 1 a pair for ORPO. Since the sums run over rows and ranks
alike, n ranks equal one process with n times the accumulation. For the same reason short rows may run together, in
groups (`engine.groups`). Dropout masks are keyed by the row's number in the run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import mlx.core as mx

from segtrain.data.rows import PreferenceRow, Row
from segtrain.engine.backward import Backward, Meter, Step, no_meter
from segtrain.engine.groups import grouped, together
from segtrain.engine.layouts import Layout
from segtrain.engine.objectives import LossValue
from segtrain.errors import RunFailed, reason
from segtrain.lora.flat import FlatArrays
from segtrain.parallel.ranks import Ranks
from segtrain.run.optimizer import Optimizer, clip_factor, global_norm
from segtrain.run.session import Session
from segtrain.run.state import RunState

Choose: TypeAlias = Callable[[Layout], Backward]
Cut: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""Sizes of the groups of rows that run together, by the rows' lengths in ascending order."""


@dataclass
class Totals:
    """Sums over rows: of losses, weights, tokens and the objective's metrics."""

    metrics: dict[str, float]
    loss: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    padding: int = 0
    targets: int = 0
    rows: int = 0
    shared_tokens: int = 0
    shared_pairs: int = 0
    stop: bool = False

    def add(self, value: LossValue, layout: Layout) -> None:
        self.loss += sum(_numbers(value.total))
        weights = _numbers(value.weight)
        self.weight += sum(weights) * (layout.rows // len(weights))  # one for all rows where they weigh alike
        self.tokens += layout.tokens
        self.padding += layout.padding
        self.targets += layout.scored
        self.rows += layout.rows
        for name, metric in value.metrics.items():
            self.metrics[name] += sum(_numbers(metric))

    @property
    def mean_loss(self) -> float:
        return self.loss / self.weight

    @property
    def mean_metrics(self) -> dict[str, float]:
        return {name: value / self.rows for name, value in self.metrics.items()}

    def exchange(self, ranks: Ranks, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Sum these totals, and `arrays`, over the ranks; one rank's wish to stop becomes everyone's."""
        names = sorted(self.metrics)
        own = [self.tokens, self.targets, self.rows, self.shared_tokens, self.shared_pairs, self.padding]
        counts = [*own, self.stop]
        values = [self.loss, self.weight, *(self.metrics[name] for name in names)]
        arrays, summed = ranks.sum(arrays, [*counts, *values])
        self.tokens, self.targets, self.rows, self.shared_tokens, self.shared_pairs, self.padding = (
            round(n) for n in summed[:6]
        )
        self.stop = summed[6] > 0
        self.loss, self.weight = summed[7:9]
        self.metrics = dict(zip(names, summed[9:], strict=True))
        return arrays


@dataclass
class Update:
    """One optimiser update: its totals, the gradient's norm, and whether it was applied (not where it isn't finite)."""

    totals: Totals
    grads: FlatArrays | None = None
    rows: list[tuple[int, Row]] = field(default_factory=list)  # this rank's, with their numbers in the run
    norm: float = math.nan
    applied: bool = False


class Updates:
    """Makes and applies updates from the data's next rows."""

    def __init__(
        self,
        session: Session,
        rows: Iterator[Row],
        choose: Choose,
        optimizer: Optimizer,
        ranks: Ranks,
        meter: Meter = no_meter,
        cut: Cut | None = None,
    ) -> None:
        """`cut`: which rows run together, or each runs alone."""
        self.session, self.rows, self.choose, self.optimizer, self.ranks = session, rows, choose, optimizer, ranks
        self.meter, self.cut = meter, cut

    def totals(self) -> Totals:
        return Totals(dict.fromkeys(self.session.objective.metrics, 0.0))

    def next(self, state: RunState, stop: Callable[[], bool]) -> Update:
        """Take the next rows and apply their gradient; counts in `state` all but the step itself."""
        update = Update(self.totals())
        for _ in range(self.session.recipe.train.grad_accumulation_steps):
            update.rows.append((state.rows + self.ranks.rank, next(self.rows)))
            state.rows += self.ranks.size
        for group in self._groups(update.rows):
            self._accumulate(update, group)
        update.totals.stop = stop()
        assert update.grads is not None
        with self.meter("exchange", 0) if self.ranks.size > 1 else nullcontext():
            summed = update.totals.exchange(self.ranks, {"grads": update.grads.array})
        with self.meter("optimizer", 0):
            self._apply(update, update.grads.with_array(summed["grads"]))
        update.grads = None
        state.bad_steps = 0 if update.applied else state.bad_steps + 1
        state.shared_pairs += update.totals.shared_pairs
        return update

    def _groups(self, rows: list[tuple[int, Row]]) -> list[list[tuple[int, Row]]]:
        """The rows that run together, the longest group of an update last; alone where masks are drawn row by row."""
        if self.cut is None or len(rows) == 1 or self.session.lora.dropout:
            return [[row] for row in rows]
        found = grouped([self.session.layout(row) for _, row in rows], self.cut)
        return [[rows[number] for number in numbers] for numbers in found]

    def _accumulate(self, update: Update, rows: list[tuple[int, Row]]) -> None:
        step, layout = self._step(*rows[0]) if len(rows) == 1 else self._step_together([row for _, row in rows])
        grads = step.grads if update.grads is None else step.grads.with_array(update.grads.array + step.grads.array)
        mx.eval(grads.array)
        update.grads = grads
        update.totals.add(step.loss, layout)
        for _, row in rows:
            if isinstance(row, PreferenceRow) and self.session.shares(row):
                update.totals.shared_tokens += len(row.prompt)
                update.totals.shared_pairs += 1

    def _step(self, number: int, row: Row) -> tuple[Step, Layout]:
        self.session.lora.dropout_keys.row = number
        layout = self.session.layout(row)
        with _explained(str(row.origin), layout):
            backward = self.choose(layout)
            return backward.step(self.session.referenced(row, layout, backward)), layout

    def _step_together(self, rows: list[Row]) -> tuple[Step, Layout]:
        layouts = [self.session.layout(row) for row in rows]
        if self.session.references is not None:
            pairs = zip(rows, layouts, strict=True)
            layouts = [self.session.referenced(row, layout, self.choose(layout)) for row, layout in pairs]
        layout = together(layouts, self.session.align)
        with _explained(f"{rows[-1].origin} and {len(rows) - 1} more rows with it", layout):
            return self.choose(layout).step(layout), layout

    def _apply(self, update: Update, grads: FlatArrays) -> None:
        """Clip and update the adapter, unless the loss or the gradient isn't finite."""
        train, lora = self.session.recipe.train, self.session.lora
        update.norm = global_norm(grads) / update.totals.weight
        update.applied = math.isfinite(update.norm) and math.isfinite(update.totals.loss)
        if update.applied:
            factor = clip_factor(update.norm, train.max_grad_norm) / update.totals.weight
            lora.set(self.optimizer.update(lora.flat(), grads, factor))
        else:
            self.optimizer.skip()

    def origins(self, update: Update) -> list[str]:
        """Where the update's rows came from, on all ranks."""
        return "\n".join(self.ranks.gather("\n".join(str(row.origin) for _, row in update.rows))).split("\n")

    def blame(self, update: Update) -> list[str]:
        """Where the rows came from whose own loss or gradient isn't finite (all rows where only their sum isn't).

        Computes each row again, so it is for an update that failed.
        """
        bad = [str(row.origin) for number, row in update.rows if not _finite(self._step(number, row)[0])]
        found = [origin for text in self.ranks.gather("\n".join(bad)) for origin in text.split("\n") if origin]
        return found or self.origins(update)


@contextmanager
def _explained(origin: str, layout: Layout) -> Iterator[None]:
    """Raises RunFailed, with what helps, where the computation of `layout` doesn't end well."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise RunFailed(
                f"out of memory on {origin} ({layout.tokens} tokens): {error}; lower data.max_seq_length or "
                "engine.memory_budget; `segtrain plan-segments` shows what would fit"
            ) from error
        if is_watchdog(error):
            raise RunFailed(
                f"the system ended a computation of the GPU that kept the display waiting, on {origin} "
                f"({layout.tokens} tokens): {reason(error)}. Let the display sleep, keep the machine awake with "
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


def _finite(step: Step) -> bool:
    return math.isfinite(global_norm(step.grads)) and all(map(math.isfinite, _numbers(step.loss.total)))


def _numbers(value: mx.array | float) -> list[float]:
    return cast(list[float], value.reshape(-1).tolist()) if isinstance(value, mx.array) else [float(value)]
