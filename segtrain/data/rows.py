"""The rows that data sources yield and layouts are built from: token ids, and where they came from."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Origin:
    """Where a row stands: a file (or data set name) and its 1-based line (or row) number."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class SupervisedRow:
    """A row of supervised fine-tuning: `supervised[i]` says that `tokens[i]` is a target.

    `weights[i]` is how much `tokens[i]` counts in the loss, which is normalised by their sum; None: each target 1.
    """

    tokens: list[int]
    supervised: list[bool]
    origin: Origin
    weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> int:
        """How many tokens are predicted; the first one can't be."""
        return sum(self.supervised[1:])


@dataclass(frozen=True)
class PreferenceRow:
    """A preference row. Both responses end with their end-of-turn token.

    `rejected_prompt` is set only where the two branches' tokenised prompts differ, which rules out sharing them.
    """

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    origin: Origin
    rejected_prompt: list[int] | None = None

    def __len__(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def targets(self) -> int:
        return len(self.chosen) + len(self.rejected)


Row: TypeAlias = SupervisedRow | PreferenceRow
