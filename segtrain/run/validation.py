"""The loss over the validation rows: the same rows each time, shared out among the ranks, short ones together."""

import time
from collections.abc import Callable, Sequence

from segtrain.data.rows import Row
from segtrain.errors import UserError
from segtrain.event import Evaluated
from segtrain.recipe.schema import Recipe
from segtrain.run.passes import Passes
from segtrain.run.state import RunState
from segtrain.run.updates import Totals, Updates


class Validation:
    """Evaluates the first `eval.rows` rows (all of them by default)."""

    def __init__(self, rows: Sequence[Row], passes: Passes, updates: Updates) -> None:
        self.passes, self.updates = passes, updates
        limit = passes.session.recipe.eval.rows
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
        state.waited = 0 if best or not state.step else state.waited + 1
        state.evaluated = state.step
        state.trend.evaluate(loss)
        return Evaluated(state.step, loss, totals.rows, time.perf_counter() - begun, best, totals.mean_metrics)

    def _totals(self, stop: Callable[[], bool]) -> Totals:
        """Of this rank's rows."""
        totals = self.updates.totals()
        for layout, backward, _ in self.passes.over(self.rows, self.updates.ranks):
            if stop():
                totals.stop = True
                break
            totals.add(backward.evaluate(layout), layout)
            totals.settle()
        return totals


def require_evaluations(recipe: Recipe, valid: Sequence[Row] | None) -> None:
    """Raises UserError where the recipe goes by evaluations that it doesn't make."""
    goes_by = [("train.patience", recipe.train.patience), ("output.final: best", recipe.output.final == "best")]
    key = next((name for name, asked in goes_by if asked), None)
    if key and valid is None:
        raise UserError(f"{key} goes by the loss on validation rows, and there are none; give data.valid, or remove it")
    if recipe.train.patience and not recipe.output.eval_every:
        raise UserError(
            "train.patience counts evaluations, and output.eval_every: 0 makes one at the end only; give a number of "
            "updates there, or remove train.patience"
        )
