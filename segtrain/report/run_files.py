"""A run directory as data, read tolerantly: a run in progress, a torn last line or a missing file are normal.

Nothing here trusts the files: numbers that aren't numbers become None, strings stay strings for the page to escape.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from segtrain.errors import UserError

Record = dict[str, Any]

PAST = 0.9  # weight of what came before in a smoothed curve


@dataclass(frozen=True)
class RunFiles:
    """What a run has written so far. `train` and `evals` have one record a step, in order; `problems` are sentences."""

    path: Path
    train: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    notices: list[Record] = field(default_factory=list)
    data: Record = field(default_factory=dict)
    row: Record = field(default_factory=dict)
    plan: Record = field(default_factory=dict)
    memory: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    recipe: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def at_start(self) -> list[Record]:
        """The evaluation before the first update, where there was one: an empty list or one record."""
        return [record for record in self.evals[:1] if record.get("step") == 0]

    @property
    def settings(self) -> Record:
        """The recipe as a mapping; empty where it can't be read."""
        try:
            loaded = yaml.safe_load(self.recipe or "")
        except yaml.YAMLError:
            return {}
        return loaded if isinstance(loaded, dict) else {}


def read_run(path: Path) -> RunFiles:
    """Read `path`. Raises UserError where it isn't a run directory."""
    if not any((path / name).is_file() for name in ("metrics.jsonl", "recipe.yaml")):
        raise UserError(f"{path} is no run directory: it has neither metrics.jsonl nor recipe.yaml")
    problems: list[str] = []
    events = _lines(path / "metrics.jsonl", problems)
    memory = _lines(path / "memory.jsonl", problems)
    samples = _lines(path / "samples.jsonl", problems, optional=True)
    resolved = path / "recipe.resolved.yaml"  # where recipe.yaml is the user's own
    recipe = resolved if resolved.is_file() else path / "recipe.yaml"
    if not recipe.is_file():
        problems.append("recipe.yaml is missing")
    return RunFiles(
        path,
        train=_by_step(_named(events, "train")),
        evals=_by_step(_named(events, "eval")),
        notices=_named(events, "notice"),
        data=_last(_named(events, "data")),
        row=_last(_lines(path / "data_row.json", problems, optional=True)),
        plan=_last(_named(events, "plan")),
        memory=memory,
        samples=samples,
        recipe=recipe.read_text("utf-8", "replace") if recipe.is_file() else None,
        problems=problems,
    )


def number(value: Any) -> float | None:
    """`value` where it is a finite number, else None (a gap in a curve)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def column(records: Iterable[Record], key: str) -> list[float | None]:
    return [number(record.get(key)) for record in records]


def largest(records: Iterable[Record], key: str) -> float | None:
    return max((value for value in column(records, key) if value is not None), default=None)


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Exponential average of a curve, without the pull towards its start at 0; gaps stay gaps.

    It looks back over ten values, and of a short curve over a tenth of it, so that it doesn't lag behind a short run.
    """
    past = min(PAST, max(0.0, 1 - 10 / max(1, len(values))))
    average = weight = 0.0
    result: list[float | None] = []
    for value in values:
        if value is not None:
            average, weight = past * average + (1 - past) * value, past * weight + (1 - past)
        result.append(None if value is None else average / weight)
    return result


def thinned(values: list[float | None], points: int, reduce: Callable[[list[float]], float]) -> list[float | None]:
    """At most `points` values: equal runs of neighbours, each reduced to one."""
    size = -(-len(values) // points)
    if size <= 1:
        return values
    runs = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    return [reduce(run) if run else None for run in runs]


def worst_step(memory: list[Record]) -> list[Record]:
    """The phases, in their order, of the step that holds the highest peak.

    A step of several rows runs each phase several times: the one with the highest peak stands for all.
    """
    peak = largest(memory, "peak_gib")
    steps = [record.get("step") for record in memory if peak is not None and number(record.get("peak_gib")) == peak]
    if not steps:
        return []
    phases: dict[tuple[str, str], Record] = {}
    for record in memory:
        if record.get("step") == steps[-1]:
            key = str(record.get("stream")), str(record.get("phase"))
            phases[key] = max(phases.get(key, record), record, key=lambda r: number(r.get("peak_gib")) or 0.0)
    return list(phases.values())


def _lines(path: Path, problems: list[str], optional: bool = False) -> list[Record]:
    if not path.is_file():
        if not optional:
            problems.append(f"{path.name} is missing")
        return []
    records, bad = [], []
    lines = path.read_text("utf-8", "replace").split("\n")
    for position, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif position < len(lines):  # a last line without its newline is still being written
            bad.append(position)
    if bad:
        problems.append(f"{path.name}: {len(bad)} unreadable line(s), the first is line {bad[0]}")
    return records


def _named(events: list[Record], name: str) -> list[Record]:
    return [event for event in events if event.get("event") == name]


def _by_step(events: list[Record]) -> list[Record]:
    """One record a step, in order: after a resume the later of two counts."""
    steps = {event["step"]: event for event in events if number(event.get("step")) is not None}
    return [steps[step] for step in sorted(steps)]


def _last(events: list[Record]) -> Record:
    return {key: value for key, value in events[-1].items() if key != "event"} if events else {}
