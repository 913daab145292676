"""What happens in a run, as typed values: the trainer yields them, files and terminals render them.

Times are seconds, memory is GiB, losses are nats a token. `as_json` gives the line of `metrics.jsonl` (None: not
written).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True)
class Memory:
    """One reading of the allocator and the process, GiB."""

    peak_gib: float
    active_gib: float
    cache_gib: float
    rss_gib: float


@dataclass(frozen=True)
class RunStarted:
    """The run is set up and training is about to begin, or go on from `first_step`.

    `base`: the directory that the adapter goes with, where that is a quantised copy of `model`.
    """

    command: str
    directory: Path
    model: str
    model_type: str
    layers: int
    trainable_parameters: int
    total_parameters: int
    steps: int
    first_step: int = 0
    base: str = ""

    def as_json(self) -> dict[str, Any] | None:
        return None


@dataclass(frozen=True)
class DataRead:
    """The accounting of the data set; `counts` is a flat JSON object."""

    counts: Mapping[str, Any]

    def as_json(self) -> dict[str, Any] | None:
        return {"event": "data", **self.counts}


@dataclass(frozen=True)
class PlanChosen:
    """How backward runs: full or segmented, with which sizes, and what peak that should give."""

    plan: Mapping[str, Any]

    def as_json(self) -> dict[str, Any] | None:
        return {"event": "plan", **self.plan}


@dataclass(frozen=True)
class TrainStep:
    """One optimiser update. `metrics` holds what the loss adds (ORPO: nll, log_odds, accuracy, ...)."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    step_seconds: float
    memory: Memory
    metrics: Mapping[str, float] = field(default_factory=dict)
    padding_tokens: int = 0  # filler that was computed on top of `tokens`

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def as_json(self) -> dict[str, Any] | None:
        return {
            "event": "train",
            "step": self.step,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "tokens": self.tokens,
            "padding_tokens": self.padding_tokens,
            "supervised_tokens": self.supervised_tokens,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            **asdict(self.memory),
            **self.metrics,
        }


@dataclass(frozen=True)
class Evaluated:
    """Loss (and the loss function's metrics) over the validation rows, the same rows each time."""

    step: int
    loss: float
    rows: int
    seconds: float
    best: bool
    metrics: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any] | None:
        return {"event": "eval", "step": self.step, "loss": self.loss, "rows": self.rows, **self.metrics}


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete on disk."""

    step: int
    path: Path

    def as_json(self) -> dict[str, Any] | None:
        return None


@dataclass(frozen=True)
class Sampled:
    """A generation with the current adapter (`eval.prompts`)."""

    step: int
    prompt: str
    text: str

    def as_json(self) -> dict[str, Any] | None:
        return None


@dataclass(frozen=True)
class Notice:
    """Something the user should know once: a slower path taken, a setting skipped, memory creeping."""

    text: str
    level: Literal["info", "warning"] = "info"

    def as_json(self) -> dict[str, Any] | None:
        return {"event": "notice", "level": self.level, "text": self.text}


@dataclass(frozen=True)
class RunEnded:
    """The last event: why the run ended and what it leaves behind."""

    reason: Literal["done", "interrupted"]
    step: int
    seconds: float
    adapter: Path
    summary: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 0  # where it went on from

    def as_json(self) -> dict[str, Any] | None:
        return None


Event: TypeAlias = RunStarted | DataRead | PlanChosen | TrainStep | Evaluated | Saved | Sampled | Notice | RunEnded
