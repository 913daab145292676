"""Where a run stands: what a checkpoint's state holds beside the arrays and the data's place."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from segtrain.memory.corrections import Corrections
from segtrain.run.verdict import Trend

SETTLED = 20  # losses seen before one can be called a spike
SPIKE = 6.0  # mean deviations above the mean
DECAY = 0.98


@dataclass
class RunningLoss:
    """Exponential means of the loss and of its distance from that mean."""

    mean: float = 0.0
    spread: float = 0.0
    seen: int = 0

    def spikes(self, loss: float) -> bool:
        """Take a loss in; whether it is far above those before it. The means count a spike as the threshold."""
        threshold = self.mean + max(SPIKE * self.spread, 0.5 * abs(self.mean))
        spike = self.seen >= SETTLED and loss > threshold
        loss = min(loss, threshold) if spike else loss
        decay = min(DECAY, self.seen / (self.seen + 1))
        self.spread = decay * self.spread + (1 - decay) * abs(loss - self.mean) if self.seen else 0.0
        self.mean = decay * self.mean + (1 - decay) * loss
        self.seen += 1
        return spike


@dataclass
class RunState:
    """Counters of a run after `step` updates. `rows`: taken by all ranks so far, the dropout key of the next one."""

    step: int = 0
    rows: int = 0
    evaluated: int = -1  # the last step that was evaluated; 0: before the first update
    best_loss: float = math.inf
    best_step: int | None = None
    waited: int = 0  # evaluations since the best one
    bad_steps: int = 0
    shared_pairs: int = 0
    losses: RunningLoss = field(default_factory=RunningLoss)
    trend: Trend = field(default_factory=Trend)
    memory: Corrections = field(default_factory=Corrections)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"best_loss": None if math.isinf(self.best_loss) else self.best_loss}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "RunState":
        known = {name: saved[name] for name in cls.__dataclass_fields__ if name != "waited"}
        known["waited"] = saved.get("waited", 0)  # of runs before there was a patience
        known["losses"] = RunningLoss(**known["losses"])
        known["trend"] = Trend(**known["trend"])
        known["memory"] = Corrections(**known["memory"])
        known["best_loss"] = math.inf if known["best_loss"] is None else known["best_loss"]
        return cls(**known)
