"""The loss over the validation rows: the same rows each time, shared out among the ranks."""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from segtrain.data.rows import Row
from segtrain.event import Evaluated
from segtrain.run.session import Session
from segtrain.run.state import RunState
from segtrain.run.updates import Choose, Totals, Updates

Limit: TypeAlias = int | str


class Validation:
    """Evaluates the first `eval.rows` rows (all of them by default)."""

    def __init__(self, session: Session, rows: Sequence[Row], choose: Choose, updates: Updates) -> None:
        self.session, self.choose, self.updates = session, choose, updates
        limit = session.recipe.eval.rows
        self.rows = rows if limit == "all" else rows[:limit]

    def __call__(self, state: RunState, stop: Callable[[], bool]) -> Evaluated | None:
        """Evaluate and note the best in `state`. None, and nothing noted, where a rank was asked to stop meanwhile."""
        begun = time.perf_counter()
        totals = self._totals(stop)
        totals.exchange(self.updates.ranks, {})
        if totals.stop:
            return None
        loss = totals.mean_loss
        best = state.step > 0 and loss < state.best_loss  # before the first update there is no adapter to keep
        if best:
            state.best_loss, state.best_step = loss, state.step
        state.evaluated = state.step
        state.trend.evaluate(loss)
        return Evaluated(state.step, loss, totals.rows, time.perf_counter() - begun, best, totals.mean_metrics)

    def _totals(self, stop: Callable[[], bool]) -> Totals:
        """This rank's rows: every `size`-th one."""
        totals, ranks = self.updates.totals(), self.updates.ranks
        for number in range(ranks.rank, len(self.rows), ranks.size):
            if stop():
                totals.stop = True
                break
            row = self.rows[number]
            layout = self.session.layout(row)
            backward = self.choose(layout)
            totals.add(backward.evaluate(self.session.referenced(row, layout, backward)), layout)
        return totals
