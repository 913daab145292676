"""Whether a run's frozen weights stay on disk (`engine.weights`), and what it says about that."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from segtrain.errors import UserError
from segtrain.event import Notice
from segtrain.memory import anatomy, choices, source
from segtrain.memory.meter import GIB
from segtrain.models.weights import Streamed
from segtrain.recipe.schema import Recipe
from segtrain.run.budget import budget_of, own_backend

FEW = 0.5  # of the budget: a model that takes less is not looked at, it fits


def streams(recipe: Recipe, path: Path, sharing: int = 1) -> bool:
    """As the recipe says; on `auto` where with the whole model at `path` in memory not even a short row fits.

    `sharing`: ranks of this host, as for `Planner`.
    """
    if recipe.engine.weights != "auto":
        return recipe.engine.weights == "streamed"
    if recipe.engine.backward == "full":
        return False
    backend = own_backend()
    budget = budget_of(recipe, backend, sharing)
    try:
        found = source.find(str(path))
        if found.weights is None or found.weights < FEW * budget:
            return False
        shape = anatomy.of_config(found.config, backend.name, partial(choices.adapter, recipe))
    except UserError:  # loading says it better
        return False
    return choices.too_large(choices.chooser(shape, backend, recipe, resident=found.weights), budget)


def announced(recipe: Recipe, weights: Streamed) -> Iterator[Notice]:
    """That the weights are streamed, and why."""
    size = weights.bytes(0, weights.layers) / GIB
    why = "as the recipe says" if recipe.engine.weights == "streamed" else "as the model doesn't fit the memory budget"
    yield Notice(f"{why}, {size:.2f} GiB of weights stay on disk and are read whenever their layers run")
    if recipe.eval.prompts:
        yield Notice("eval.prompts: each token that is generated reads all of them once")


class Watch:
    """How fast weights are read: said after the first update, and once where reading takes most of the time."""

    SLOW, NOTABLE = 0.5, 1.0  # of the time between two updates, and seconds of it

    def __init__(self, weights: Streamed | None, clock: Callable[[], float] = time.perf_counter):
        self.weights, self.clock = weights, clock
        self._updates = 0
        self._before = (0.0, 0.0)  # the clock, and seconds waited until then

    def after_step(self) -> Iterator[Notice]:
        if (weights := self.weights) is None or not weights.waited:
            return
        self._updates += 1
        (then, waited), self._before = self._before, (self.clock(), weights.waited)
        if self._updates == 1:
            yield Notice(
                f"memory: the first update read {weights.bytes_read / GIB:.2f} GiB of weights and waited "
                f"{weights.waited:.1f} s for the disk"
            )
        elif (share := self._slow(self._before[0] - then, weights.waited - waited)) and weights.reading:
            self.weights = None
            yield Notice(
                f"memory: {share:.0%} of the time goes by waiting for weights, which come at "
                f"{weights.bytes_read / GIB / weights.reading:.2f} GiB/s; put the model on a faster disk, or raise "
                "train.grad_accumulation_steps: the rows of an update share each reading"
            )

    def _slow(self, seconds: float, waited: float) -> float:
        """The share of `seconds` that was waited, where that is much."""
        share = waited / max(seconds, 1e-9)
        return min(1.0, share) if share > self.SLOW and waited > self.NOTABLE else 0.0
