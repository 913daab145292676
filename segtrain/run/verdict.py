"""What to say of a run that is done: whether it learnt, and if not, the likely cause and the key to change.

Evaluations are of the same rows each time, so where there were two of them they decide; else the first and the last
training losses do, with the scatter that single rows give them.
"""

import statistics
from dataclasses import dataclass, field

from segtrain.errors import counted
from segtrain.recipe.schema import TrainRecipe

ENDS = 20  # training losses that are kept of a run's beginning and of its end
ROSE, MOVED = 0.05, 0.02  # shares of the loss: above it a run got worse, below it nothing was learnt
HIGH = 1e-2  # rates of adaptive optimisers above it are beyond what LoRA takes (about 1e-5 to 1e-3)
FEWEST = 4  # updates without which two losses may differ by their rows alone
FEW = 100  # updates: a run below it is too short before its rate is too low


@dataclass
class Trend:
    """The first and last losses of a run, and its first and last evaluation."""

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)

    def add(self, loss: float) -> None:
        if len(self.first) < ENDS:
            self.first.append(loss)
        self.last = [*self.last[-ENDS + 1 :], loss]

    def evaluate(self, loss: float) -> None:
        self.evaluated = [*self.evaluated[:1], loss]

    def ends(self) -> tuple[float, float, float]:
        """The loss at the beginning and at the end, and by how much the two may differ by chance."""
        if len(self.evaluated) == 2:
            return self.evaluated[0], self.evaluated[1], 0.0
        count = max(1, min(len(self.first), len(self.last)) // 2) if len(self.first) < ENDS else ENDS
        first, last = self.first[:count], self.last[-count:]
        scatter = (statistics.pvariance(first) + statistics.pvariance(last)) / count
        return statistics.fmean(first), statistics.fmean(last), scatter**0.5


def verdict(trend: Trend, steps: int, train: TrainRecipe) -> str | None:
    """A sentence on a run of `steps` updates that got worse or hardly moved; None for one that learnt."""
    if len(trend.evaluated) < 2 and len(trend.first) < FEWEST:
        return None
    before, after, scatter = trend.ends()
    what = f"the {'validation ' if len(trend.evaluated) == 2 else ''}loss"
    rate = train.learning_rate
    if after - before > max(ROSE * abs(before), 2 * scatter):
        cause = (
            f"the rows to validate differ from those trained on, or train.learning_rate ({rate:g}) is too high: try "
            f"{rate / 10:g}"
            if len(trend.evaluated) == 2 and trend.last[-1] <= trend.first[0]
            else f"train.learning_rate ({rate:g}) is probably too high: try {rate / 10:g}"
        )
        return f"{what} rose from {before:.4g} to {after:.4g}; {cause}"
    if before - after >= max(MOVED * abs(before), scatter):
        return None
    still = abs(before - after) < MOVED * abs(before)
    moved = "hardly moved" if still else "moved no more than it differs between rows"
    return f"{what} {moved} in {counted(steps, 'update')} ({before:.4g} to {after:.4g}); {_too_little(steps, train)}"


def _too_little(steps: int, train: TrainRecipe) -> str:
    if train.learning_rate > HIGH and train.optimizer != "sgd":
        return f"train.learning_rate ({train.learning_rate:g}) is probably too high: 1e-4 is usual"
    if steps >= FEW:
        return f"train.learning_rate ({train.learning_rate:g}) may be too low, or the model knows these rows already"
    fewer = f", or a lower train.grad_accumulation_steps ({train.grad_accumulation_steps})"
    longer = "a higher train.steps" if train.steps is not None else "a higher train.epochs"
    more = longer + (fewer if train.grad_accumulation_steps > 1 else "")
    return f"more updates ({more}) or a higher train.learning_rate ({train.learning_rate:g}) would teach more"
