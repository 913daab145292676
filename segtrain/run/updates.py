"""Updates: the gradients of some rows, summed over accumulation and ranks, and applied once.

    update = sum over rows of (gradient of the row's total loss) / sum over rows of the row's weight

The weight is the number of supervised tokens for SFT and 1 a pair for ORPO. Since the sums run over rows and ranks
alike, n ranks equal one process with n times the accumulation, whichever rank computes which row (`parallel.dealing`):
every rank reads all rows. For the same reason short rows may run together, in groups (`engine.groups`). Dropout masks
are keyed by the row's number in the run.

What an update computed is read once, at its end: until then the device is given work without being waited for.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from segtrain.data.rows import PreferenceRow, Row
from segtrain.engine.backward import Meter, Step, no_meter
from segtrain.engine.layouts import Layout
from segtrain.engine.objectives import LossValue
from segtrain.lora.flat import FlatArrays
from segtrain.parallel.dealing import deal
from segtrain.parallel.ranks import Ranks
from segtrain.run.optimizer import Optimizer, clip_factor, global_norm
from segtrain.run.passes import Passes, explained
from segtrain.run.session import Session
from segtrain.run.state import RunState


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
    _pending: list[tuple[LossValue, int]] = field(default_factory=list)

    def add(self, value: LossValue, layout: Layout) -> None:
        self.tokens += layout.tokens
        self.padding += layout.padding
        self.targets += layout.scored
        self.rows += layout.rows
        self._pending.append((value, layout.rows))

    def settle(self) -> None:
        """Read the values that were added, all at once."""
        mx.eval([(value.total, value.weight, value.metrics) for value, _ in self._pending])
        for value, rows in self._pending:
            self.loss += sum(_numbers(value.total))
            weights = _numbers(value.weight)
            self.weight += sum(weights) * (rows // len(weights))  # one for all rows where they weigh alike
            for name, metric in value.metrics.items():
                self.metrics[name] += sum(_numbers(metric))
        self._pending.clear()

    @property
    def mean_loss(self) -> float:
        return self.loss / self.weight

    @property
    def mean_metrics(self) -> dict[str, float]:
        return {name: value / self.rows for name, value in self.metrics.items()}

    def exchange(self, ranks: Ranks, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Sum these totals, and `arrays`, over the ranks; one rank's wish to stop becomes everyone's."""
        self.settle()
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
    origins: list[str] = field(default_factory=list)  # of the rows of all ranks
    norm: float = math.nan
    applied: bool = False


class Updates:
    """Makes and applies updates from the data's next rows."""

    def __init__(
        self,
        session: Session,
        rows: Iterator[Row],
        passes: Passes,
        optimizer: Optimizer,
        ranks: Ranks,
        meter: Meter = no_meter,
    ) -> None:
        self.session, self.rows, self.passes, self.optimizer, self.ranks = session, rows, passes, optimizer, ranks
        self.meter = meter

    def totals(self) -> Totals:
        return Totals(dict.fromkeys(self.session.objective.metrics, 0.0))

    def next(self, state: RunState, stop: Callable[[], bool]) -> Update:
        """Take the next rows and apply their gradient; counts in `state` all but the step itself."""
        update = Update(self.totals())
        update.rows, update.origins = self._take(state)
        found = self.passes.groups([row for _, row in update.rows])
        groups = [[update.rows[number] for number in group] for group in found]
        for batch in self.passes.batches([[row for _, row in group] for group in groups]):
            if len(batch) > 1:
                self._accumulate_joined(update, [groups[number] for number in batch])
            else:
                self._accumulate(update, groups[batch[0]])
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

    def _take(self, state: RunState) -> tuple[list[tuple[int, Row]], list[str]]:
        """This rank's of the next rows, with their numbers in the run, and where all of them came from."""
        count, first = self.session.recipe.train.grad_accumulation_steps * self.ranks.size, state.rows
        rows = [next(self.rows) for _ in range(count)]
        state.rows += count
        mine = deal([self.passes.cost(row) for row in rows], self.ranks.size)[self.ranks.rank]
        return [(first + number, rows[number]) for number in mine], [str(row.origin) for row in rows]

    def _accumulate(self, update: Update, rows: list[tuple[int, Row]]) -> None:
        step, layout = self._step(*rows[0]) if len(rows) == 1 else self._step_together(rows)
        grads = step.grads if update.grads is None else step.grads.with_array(update.grads.array + step.grads.array)
        mx.async_eval(grads.array)
        update.grads = grads
        self._count(update, rows, step.loss, layout)

    def _accumulate_joined(self, update: Update, groups: list[list[tuple[int, Row]]]) -> None:
        """Groups of rows that go through the layers together: the same sums in the same order."""
        keys = self.session.lora.dropout_keys

        def enter(number: int) -> None:
            keys.row, keys.rows = groups[number][0][0], [number for number, _ in groups[number]]

        with explained([row for group in groups for _, row in group]):
            layouts = [self.passes.prepared([row for _, row in group])[0] for group in groups]
            backward = self.passes.join(layouts) if self.passes.join else None
            assert backward is not None
            values, update.grads = backward.steps(layouts, enter, update.grads)
        mx.async_eval(update.grads.array)
        for group, value, layout in zip(groups, values, layouts, strict=True):
            self._count(update, group, value, layout)

    def _count(self, update: Update, rows: list[tuple[int, Row]], loss: LossValue, layout: Layout) -> None:
        update.totals.add(loss, layout)
        for _, row in rows:
            if isinstance(row, PreferenceRow) and self.session.shares(row):
                update.totals.shared_tokens += len(row.prompt)
                update.totals.shared_pairs += 1

    def _step(self, number: int, row: Row) -> tuple[Step, Layout]:
        self.session.lora.dropout_keys.row = number
        with explained([row]):
            layout, backward = self.passes.prepared([row])
            return backward.step(layout), layout

    def _step_together(self, rows: list[tuple[int, Row]]) -> tuple[Step, Layout]:
        self.session.lora.dropout_keys.rows = [number for number, _ in rows]
        of_group = [row for _, row in rows]
        with explained(of_group):
            layout, backward = self.passes.prepared(of_group)
            return backward.step(layout), layout

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

    def blame(self, update: Update) -> list[str]:
        """Where the rows came from whose own loss or gradient isn't finite (all rows where only their sum isn't).

        Computes each row again, so it is for an update that failed.
        """
        bad = [str(row.origin) for number, row in update.rows if not _finite(self._step(number, row)[0])]
        found = [origin for text in self.ranks.gather("\n".join(bad)) for origin in text.split("\n") if origin]
        return found or update.origins


def _finite(step: Step) -> bool:
    return math.isfinite(global_norm(step.grads)) and all(map(math.isfinite, _numbers(step.loss.total)))


def _numbers(value: mx.array | float) -> list[float]:
    return cast(list[float], value.reshape(-1).tolist()) if isinstance(value, mx.array) else [float(value)]
