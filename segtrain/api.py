"""What a Python program calls, and the command line too: one way to start a run, a plan, a check, an evaluation.

Nothing is printed unless it is asked for. Errors are UserError and RunFailed. What a call sets in the process (mlx's
limits, its random numbers, the handling of Ctrl-C) it puts back when it ends. mlx and whatever else is heavy is
imported when a function is called.
"""

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from segtrain.errors import UserError
from segtrain.event import Evaluated, Event, TrainStep
from segtrain.recipe.schema import Objective, Recipe, parse_bytes
from segtrain.signals import Interrupts, Stop

if TYPE_CHECKING:
    from segtrain.data.check import CheckReport
    from segtrain.run.evaluate import Evaluation
    from segtrain.run.preview import Preview

OBJECTIVES: tuple[str, ...] = get_args(Objective)
RECIPES = ("recipe.resolved.yaml", "recipe.yaml")  # a run's, the first one that is there
Progress: TypeAlias = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Run:
    """A run's directory. What is read from it is read anew at each access, also while the run goes on."""

    directory: Path

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "directory", Path(directory))

    @property
    def adapter(self) -> Path:
        """The adapter's file; mlx-lm loads the directory that it is in."""
        return self.directory / "adapters.safetensors"

    @property
    def recipe_file(self) -> Path:
        """The recipe as resolved. Raises UserError where this is no run's directory."""
        file = recipe_file(self.directory)
        if file is None:
            raise UserError(f"{self.directory} is no run directory: it has no {RECIPES[-1]}")
        return file

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; none where there is no such file yet."""
        try:
            text = (self.directory / "metrics.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def best_loss(self) -> float | None:
        """The lowest evaluation loss after the first update; None where nothing was evaluated."""
        losses = [line["loss"] for line in self.metrics if line["event"] == "eval" and line["step"]]
        return min((loss for loss in losses if loss is not None), default=None)


def recipe_file(run: Path) -> Path | None:
    """The resolved recipe of a run's directory; None where it has none."""
    return next((path for name in RECIPES if (path := run / name).is_file()), None)


def train(
    recipe: Recipe,
    objective: Objective = "sft",
    *,
    resume: bool = False,
    overwrite: bool = False,
    force: bool = False,
    progress: bool = False,
) -> Run:
    """Train to the end. `progress`: shown as the command shows it.

    Ctrl-C ends the step at hand, saves a checkpoint and raises KeyboardInterrupt. Raises UserError and RunFailed.
    """
    with ExitStack() as stack:
        sinks: list[Callable[[Event], None]] = []
        if progress:
            from segtrain.terminal.progress import make_progress

            sinks.append(stack.enter_context(make_progress(every=recipe.output.report_every)))
        for event in events(recipe, objective, resume=resume, overwrite=overwrite, force=force):
            for sink in sinks:
                sink(event)
    return Run(recipe.output.dir)


def events(
    recipe: Recipe,
    objective: Objective = "sft",
    *,
    resume: bool = False,
    overwrite: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> Generator[Event, None, None]:
    """Train, and yield what happens as it happens (`segtrain.event`).

    Leaving the loop early, by `break` or an exception, saves a checkpoint. So does Ctrl-C, which the loop gets as
    KeyboardInterrupt: during a step, after that step and the event RunEnded. Raises UserError and RunFailed.
    """
    stop = Interrupts()
    stream = stream_events(
        recipe, objective, stop=stop, resume=resume, overwrite=overwrite, force=force, dry_run=dry_run
    )
    try:
        while True:
            with stop.caught():
                event = next(stream, None)
            if event is None:
                break
            yield event
    finally:
        with stop.caught():
            stream.close()
    if stop.requested:
        raise KeyboardInterrupt


def stream_events(
    recipe: Recipe, objective: str, *, stop: Stop, dry_run: bool = False, **flags: bool
) -> Generator[Event, None, None]:
    """The events of a run that ends in order once `stop` is requested; its trackers get them too."""
    _require_objective(recipe, objective)
    _prepare(recipe.data.max_seq_length)
    with _without_advice():
        from segtrain.run.trainer import Trainer
    from segtrain.memory.meter import give_back
    from segtrain.run.logging_backends import require

    require(recipe.output.report_to)
    trainer = Trainer(recipe, objective, dry_run=dry_run, stop=stop, **flags)
    try:
        with closing(trainer.events()) as found:
            yield from found if dry_run else _tracked(found, recipe)
    finally:
        del trainer, found  # which hold the model
        give_back()


def _tracked(events: Iterable[Event], recipe: Recipe) -> Iterator[Event]:
    """Trackers start with the first figures, once the run is accepted."""
    from segtrain.parallel.ranks import join
    from segtrain.run.logging_backends import make_loggers

    waiting = recipe.output.report_to if join().writes else ()
    loggers: list[Callable[[Event], None]] = []
    for event in events:
        if waiting and isinstance(event, Evaluated | TrainStep):
            loggers = make_loggers(waiting, Path(recipe.output.dir), recipe.output.project or "segtrain")
            waiting = ()
        for log in loggers:
            log(event)
        yield event


def plan(
    recipe: Recipe | None = None,
    *,
    model: str | None = None,
    seq: int | None = None,
    budget: str | None = None,
    device: str | None = None,
    measure: bool = False,
) -> "Preview":
    """Memory and time by segment size, as `segtrain plan-segments` shows them. Raises UserError.

    For a recipe, or for a `model` with rows of `seq` tokens; within a `budget` such as "24GB"; for another `device`
    such as "mac-24gb". `measure` loads the model and times one step.
    """
    if recipe is None and model is None:
        raise UserError("give a recipe, or --model with --seq: segtrain plan-segments --model DIR --seq 8192")
    if budget is not None:
        parse_bytes(budget)
    if device is not None and measure:
        raise UserError("--measure runs on this machine: leave --device out")
    _prepare(seq or (recipe.data.max_seq_length if recipe else 0))  # as a training run does
    with _without_advice():
        from segtrain.memory.meter import allocator_as_it_was, give_back
        from segtrain.run.preview import preview

    with allocator_as_it_was():
        found = preview(recipe, model=model, seq=seq, budget=budget, device=device, measure=measure)
    give_back()
    return found


def check(recipe: Recipe, *, rows: int = 0, workers: int | None = 0, progress: Progress | None = None) -> "CheckReport":
    """What would be learnt of the data, as `segtrain check` shows it; `rows`: of how many rows, token by token.

    `workers`: processes that tokenise (None: as many as pay). With any the calling script needs
    `if __name__ == "__main__":`. Raises UserError for malformed rows and where nothing is left to learn.
    """
    from segtrain.data.check import check_data
    from segtrain.models.positions import check_positions
    from segtrain.run.base import refuse_quantised

    config = _config(recipe.model)
    refuse_quantised(recipe, config)
    with _without_advice():  # the tokenizer brings transformers
        report = check_data(recipe, progress=progress, rows=rows, workers=workers)
    longest = max(report.counts["longest"], report.counts.get("valid_longest", 0))
    remarks = check_positions(config, longest)
    return replace(report, suggestions=[*report.suggestions, *remarks]) if remarks else report


def evaluate(
    run: Run | str | os.PathLike[str],
    *,
    data: Any = None,
    base: bool = False,
    last: bool = False,
    progress: Progress | None = None,
) -> "Evaluation":
    """A run's best adapter (`last`: its newest) on the recipe's `data.test`, or on `data`: a path, or rows.

    `base`: the model without the adapter too. Raises UserError.
    """
    run = run if isinstance(run, Run) else Run(run)
    recipe = Recipe.from_yaml(run.recipe_file, **({} if data is None else {"data": {"test": data}}))
    _prepare(recipe.data.max_seq_length)
    with _without_advice():
        from segtrain.run.evaluate import evaluate as measure
    from segtrain.memory.meter import give_back

    try:
        return measure(run.directory, recipe, base=base, last=last, progress=progress or (lambda done, total: None))
    finally:
        give_back()


def _require_objective(recipe: Recipe, objective: str) -> None:
    if objective not in OBJECTIVES:
        raise UserError(f"objective {objective!r} isn't available; segtrain has {', '.join(OBJECTIVES)}")
    asked = recipe.asked_loss
    if asked is not None and asked != objective:
        raise UserError(f"training_mode: {asked} is another objective than {objective}; give one of them, or the same")


def _prepare(longest: int) -> None:
    """Set what mlx reads when it is imported; in a program that has imported it already there is nothing to set."""
    if "mlx.core" not in sys.modules:
        from segtrain.run.environment import prepare

        prepare(os.environ, longest=longest)


@contextmanager
def _without_advice() -> Iterator[None]:
    """While the block runs, transformers doesn't say that it misses PyTorch, which nothing here needs."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def _config(model: str) -> Mapping[str, Any]:
    """A model's config.json; empty where there is only a tokenizer, which is enough to count rows."""
    from segtrain.memory.source import find

    try:
        return find(model).config
    except UserError:
        return {}
