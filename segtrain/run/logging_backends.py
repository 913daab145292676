"""Optional live logging (`output.report_to`): the figures of train and eval events go to a tracker as they come.

Off by default. A tracker's package is imported only when it is named.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from segtrain.errors import UserError, reason
from segtrain.event import Evaluated, Event, RunEnded, TrainStep

Logger: TypeAlias = Callable[[Event], None]


def make_loggers(names: Sequence[str], run_dir: Path, project: str) -> list[Logger]:
    """One function of events for each tracker in `names`: wandb, tensorboard, trackio.

    Call each with every event; RunEnded closes the tracker. Raises UserError for an unknown name or a package that
    isn't installed, before any tracker has been started.
    """
    unknown = [name for name in names if name not in _BACKENDS]
    if unknown:
        raise UserError(f"output.report_to: unknown tracker {unknown[0]!r}; choose from {', '.join(_BACKENDS)}")
    modules = {name: _imported(name) for name in names}
    return [_BACKENDS[name][1](module, Path(run_dir), project) for name, module in modules.items()]


def require(names: Sequence[str]) -> None:
    """Raise UserError where a tracker's package isn't installed; starts nothing."""
    for name in names:
        _imported(name)


def figures(event: Event) -> tuple[int, dict[str, float]] | None:
    """(step, {"train/loss": ...}) of a train or eval event; None for the others."""
    if not isinstance(event, (TrainStep, Evaluated)):
        return None
    line = event.as_json() or {}
    kind = line.pop("event")
    return line.pop("step"), {f"{kind}/{key}": value for key, value in line.items()}


def _imported(name: str) -> ModuleType:
    module, _ = _BACKENDS[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"output.report_to names {name}, but its package can't be imported ({error}): {_INSTALL.format(name)}"
        ) from None


def _wandb(wandb: ModuleType, run_dir: Path, project: str) -> Logger:
    run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir))
    return _logger(lambda step, values: run.log(values, step=step), run.finish)


def _trackio(trackio: ModuleType, run_dir: Path, project: str) -> Logger:
    trackio.init(project=project, name=run_dir.name)
    return _logger(lambda step, values: trackio.log(values, step=step), trackio.finish)


def _tensorboard(tensorboard: ModuleType, run_dir: Path, project: str) -> Logger:
    writer = tensorboard.SummaryWriter(str(run_dir / "tensorboard"))

    def log(step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return _logger(log, writer.close)


def _logger(log: Callable[[int, dict[str, float]], Any], close: Callable[[], Any]) -> Logger:
    """A tracker until it fails: a network or a disk of its own doesn't end the run."""
    works = True

    def show(event: Event) -> None:
        nonlocal works
        found = figures(event)
        try:
            if found is not None and works:
                log(*found)
            if isinstance(event, RunEnded) and works:
                close()
        except Exception as error:  # each tracker has errors of its own
            works = False
            print(f"segtrain: a tracker failed ({reason(error)}); the run goes on without it", file=sys.stderr)

    return show


_INSTALL = 'pip install "segtrain-mlx[{}]"'  # each tracker's name is an extra of the package

# name in the recipe and of the extra: (module to import, what makes its logger)
_BACKENDS: dict[str, tuple[str, Callable[[ModuleType, Path, str], Logger]]] = {
    "wandb": ("wandb", _wandb),
    "tensorboard": ("tensorboardX", _tensorboard),
    "trackio": ("trackio", _trackio),
}
