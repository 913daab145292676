"""The training loop: sets a run up, yields typed events, leaves files that are complete at any moment.

A step is one optimiser update over `grad_accumulation_steps` rows on each rank. Gradients are summed over rows (and ranks) and divided by
the summed weight: supervised tokens for SFT, pairs for ORPO. Everything random is keyed by seed and row number, so a
checkpoint needs no random state: step, data cursor, optimiser and adapter determine the rest of the run.
"""

import math
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from segtrain import adapters, checkpoint, distributed
from segtrain.data import Data, open_data
from segtrain.data.rows import PreferenceRow, Row
from segtrain.errors import RunFailed, UserError
from segtrain.events import (
    DataRead,
    Evaluated,
    Event,
    Notice,
    PlanChosen,
    RunEnded,
    RunStarted,
    Saved,
    TrainStep,
)
from segtrain.fingerprint import model_fingerprint
from segtrain.memory.meter import Meter
from segtrain.memory.planning import Planner
from segtrain.models.load import load
from segtrain.optim import Optimizer, clip
from segtrain.recipe import Recipe, differences
from segtrain.rundir import RunDirectory
from segtrain.sampling import generate
from segtrain.session import LossName, Session, open_session, summary
from segtrain.signals import StopRequest

MAX_BAD_STEPS = 3


@dataclass
class Progress:
    """What a checkpoint's state holds beside the arrays."""

    step: int = 0
    rows: int = 0  # rows taken by all ranks so far: the dropout key of the next one
    best_loss: float = math.inf
    best_step: int | None = None
    bad_steps: int = 0
    shared_pairs: int = 0
    split_pairs: int = 0

    def as_state(self) -> dict[str, Any]:
        state = dict(vars(self))
        return state | {"best_loss": None if math.isinf(self.best_loss) else self.best_loss}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        known = {name: state[name] for name in vars(cls())}
        return cls(**known | {"best_loss": math.inf if known["best_loss"] is None else known["best_loss"]})


@dataclass
class Update:
    """What one update's rows gave, summed over rows and ranks."""

    grads: dict[str, mx.array] = field(default_factory=dict)
    loss: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    targets: int = 0
    rows: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)
    stop: bool = False


class Trainer:
    """One run. Iterate `events()`; it raises UserError (exit code 2) or RunFailed (exit code 1)."""

    def __init__(
        self,
        recipe: Recipe,
        loss: LossName = "sft",
        *,
        resume: bool = False,
        overwrite: bool = False,
        force: bool = False,
        dry_run: bool = False,
    ):
        self.recipe, self.loss = recipe, loss
        self.resume, self.overwrite, self.force, self.dry_run = resume, overwrite, force, dry_run
        self.directory = Path(recipe.output.dir)

    def events(self) -> Iterator[Event]:
        ranks = distributed.join()
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            run = None
            if ranks.writes and not self.dry_run:
                run = stack.enter_context(RunDirectory(self.directory, self.overwrite, self.resume))
                yield from (Notice(text) for text in run.notices)
            yield from (Notice(text) for text in self.recipe.notices)
            loaded = load(self.recipe.model, trust_remote_code=self.recipe.trust_remote_code)
            data = open_data(self.recipe, self.loss, loaded.tokenizer, rank=ranks.rank, world=ranks.size)
            session = open_session(self.recipe, self.loss, loaded)
            yield from _Loop(self, ranks, stop, run, session, data).events()


class _Loop:
    """A run whose model, data and directory are open."""

    def __init__(
        self,
        trainer: Trainer,
        ranks: distributed.Ranks,
        stop: StopRequest,
        run: RunDirectory | None,
        session: Session,
        data: Data,
    ):
        self.trainer, self.recipe = trainer, trainer.recipe
        self.ranks, self.stop, self.run, self.session, self.data = ranks, stop, run, session, data
        self.progress = Progress()
        self.steps = self._total_steps()
        self.optimizer = Optimizer(self.recipe.train, self.steps)
        self.meter = Meter(run.append_memory if run else None)
        self.planner = Planner(session, self.meter)
        self.model_fingerprint = model_fingerprint(session.loaded.path)
        self.begun = time.perf_counter()

    def events(self) -> Iterator[Event]:
        """Everything from the run's first event to its last; metrics are written before an event is shown."""
        with self.stop.held():
            for event in self._all_events():
                line = event.as_json()
                if self.run and line is not None:
                    self.run.append_metrics(line)
                yield event

    def _all_events(self) -> Iterator[Event]:
        resumed = yield from self._resume() if self.trainer.resume else _nothing()
        yield self._started()
        if not resumed:
            yield from (Notice(text) for text in [*self.session.notices, *self.data.notices])
            yield DataRead(self.data.counts)
            yield from self.planner.announce(self.data.counts)
        if self.trainer.dry_run or self.progress.step >= self.steps:
            yield self._ended("done")
            return
        if self.run:
            self.run.write_recipe(self.recipe)
        while self.progress.step < self.steps:
            stopping = yield from self._step()
            if stopping and self.progress.step < self.steps:
                yield self._ended("interrupted")
                return
        yield self._ended("done")

    def _total_steps(self) -> int:
        train = self.recipe.train
        if train.steps is not None:
            return train.steps
        if self.data.rows_per_epoch is None:
            raise UserError("train.steps: the data set's length isn't known when streaming, so epochs can't be; give steps")
        rows = self.data.rows_per_epoch * (train.epochs or 1)
        return math.ceil(rows / (train.grad_accumulation_steps * self.ranks.size))

    def _resume(self) -> Generator[Event, None, bool]:
        """Go on from the newest complete checkpoint; whether there was one."""
        found, notices = checkpoint.newest(self.trainer.directory)
        yield from (Notice(text, "warning") for text in notices)
        if found is None:
            yield Notice(f"no checkpoint in {self.trainer.directory} yet: starting from step 0")
            if self.run:
                self.run.rewind({})
            return False
        self._refuse_changes(found)
        found.check({name: (value.shape, value.dtype) for name, value in self.session.lora.values().items()})
        self.session.lora.set(found.adapters)
        self.optimizer.load_state_dict(found.optimizer)
        self.data.train.load_state_dict(found.state["data"])
        self.progress = Progress.from_state(found.state["progress"])
        if self.run:
            self.run.rewind(found.state["run"])
        return True

    def _refuse_changes(self, found: checkpoint.Checkpoint) -> None:
        changed = found.differing(recipe=self.recipe.fingerprint(), model=self.model_fingerprint)
        if not changed or self.trainer.force:
            return
        details = []
        if "model" in changed:
            details.append(f"the weights of {self.recipe.model}")
        if "recipe" in changed:
            before = Recipe.from_mapping(found.state["recipe"])
            details += differences(before, self.recipe, training_only=True)
        raise UserError(
            f"{found.path} was made with other settings: {'; '.join(details)}. Put them back, or use --force to go on with the new ones"
        )

    def _started(self) -> RunStarted:
        return RunStarted(
            command=self.trainer.loss,
            directory=self.trainer.directory,
            steps=self.steps,
            first_step=self.progress.step,
            **summary(self.session),
        )

    def _ended(self, reason: Literal["done", "interrupted"]) -> RunEnded:
        counts: dict[str, Any] = {"rows": self.progress.rows}
        if self.trainer.loss == "orpo":
            counts |= {"shared_pairs": self.progress.shared_pairs, "split_pairs": self.progress.split_pairs}
        if self.progress.best_step is not None:
            counts |= {"best_step": self.progress.best_step, "best_loss": self.progress.best_loss}
        seconds = time.perf_counter() - self.begun
        return RunEnded(reason, self.progress.step, seconds, self.trainer.directory / "adapters.safetensors", counts)

    def _step(self) -> Generator[Event, None, bool]:
        """One update and what follows it; whether the run was asked to stop."""
        begun = time.perf_counter()
        step = self.progress.step + 1
        self.meter.start_step(step)
        update = Update()
        for _ in range(self.recipe.train.grad_accumulation_steps):
            self._accumulate(update)
        self._exchange(update)
        norm = self._apply(update)
        self.progress.step = step
        if self.progress.bad_steps:
            yield self._bad_step(update, norm)
        else:
            yield self._train_step(update, norm, time.perf_counter() - begun)
        yield from self.planner.after_step(step, self.meter)
        yield from self._due(step, update.stop)
        return update.stop

    def _accumulate(self, update: Update) -> None:
        """Add the next row's gradient."""
        row = next(self.data.train)
        self.session.lora.dropout_keys.row = self.progress.rows + self.ranks.rank
        self.progress.rows += self.ranks.size
        layout = self.session.layout(row)
        step = self.planner.backward(layout).step(layout)
        for name, grad in step.grads.items():
            update.grads[name] = update.grads[name] + grad if name in update.grads else grad
        mx.eval(update.grads)
        update.loss += step.loss.total.item()
        update.weight += step.loss.weight
        update.tokens += layout.tokens
        update.targets += layout.scored
        update.rows += 1
        update.origins.append(str(row.origin))
        for name, value in step.loss.metrics.items():
            update.metrics[name] = update.metrics.get(name, 0.0) + value.item()
        if isinstance(row, PreferenceRow):
            shared = len(row.prompt) if self.session.shares(row) else 0
            update.metrics["shared_tokens"] = update.metrics.get("shared_tokens", 0.0) + shared
            self.progress.shared_pairs += bool(shared)
            self.progress.split_pairs += not shared

    def _exchange(self, update: Update) -> None:
        """Sum the update over ranks; any rank's wish to stop becomes everyone's."""
        names = sorted(update.metrics)
        numbers = [update.loss, update.weight, update.tokens, update.targets, update.rows, self.stop.requested]
        grads, summed = self.ranks.sum(update.grads, [*numbers, *(update.metrics[name] for name in names)])
        update.grads = grads
        update.loss, update.weight = summed[0], summed[1]
        update.tokens, update.targets, update.rows = (round(n) for n in summed[2:5])
        update.stop = summed[5] > 0
        update.metrics = dict(zip(names, summed[6:], strict=True))

    def _apply(self, update: Update) -> float:
        """Clip and update the adapter, unless the loss or the gradient is not finite; returns the gradient's norm."""
        grads = {name: grad / update.weight for name, grad in update.grads.items()}
        grads, norm = clip(grads, self.recipe.train.max_grad_norm)
        if math.isfinite(norm) and math.isfinite(update.loss):
            self.progress.bad_steps = 0
            self.session.lora.set(self.optimizer.update(self.session.lora.values(), grads))
        else:
            self.progress.bad_steps += 1
        return norm

    def _train_step(self, update: Update, norm: float, seconds: float) -> TrainStep:
        metrics = {name: value / update.rows for name, value in update.metrics.items() if name != "shared_tokens"}
        if "shared_tokens" in update.metrics:
            metrics["shared_tokens"] = round(update.metrics["shared_tokens"])
        return TrainStep(
            self.progress.step,
            update.loss / update.weight,
            self.optimizer.learning_rate(self.optimizer.step - 1),
            norm,
            update.tokens,
            update.targets,
            seconds,
            self.meter.memory(),
            metrics,
        )

    def _bad_step(self, update: Update, norm: float) -> Notice:
        rows = ", ".join(update.origins)
        text = f"step {self.progress.step}: loss {update.loss / update.weight:.4g} with gradient norm {norm:.4g}"
        if self.progress.bad_steps >= MAX_BAD_STEPS:
            raise RunFailed(
                f"{text} on {rows}, the {MAX_BAD_STEPS}rd update in a row that is not finite; lower train.learning_rate "
                f"or look at these rows. {self._last_checkpoint()}"
            )
        return Notice(f"{text} on {rows}: update skipped", "warning")

    def _last_checkpoint(self) -> str:
        newest = checkpoint.newest_path(self.trainer.directory)
        return f"The last good checkpoint is {newest}." if newest else "No checkpoint was saved yet."

    def _due(self, step: int, stopping: bool) -> Iterator[Event]:
        """Evaluation and saving, where this step or the run's end calls for them."""
        last = step == self.steps
        evaluates = self.data.valid is not None and (last or _is_due(step, self.recipe.output.eval_every))
        best = False
        if evaluates and (last or not stopping):
            event = self._evaluate(step)
            best = event.best
            yield event
            yield from self._samples(step)
        if last or stopping or best or _is_due(step, self.recipe.output.save_every):
            yield from self._save()

    def _evaluate(self, step: int) -> Evaluated:
        """The loss over the validation rows, split among the ranks."""
        assert self.data.valid is not None
        begun = time.perf_counter()
        totals = Update()
        for row in self._validation_rows():
            layout = self.session.layout(row)
            value = self.planner.backward(layout).evaluate(layout)
            totals.loss += value.total.item()
            totals.weight += value.weight
            totals.rows += 1
            for name, metric in value.metrics.items():
                totals.metrics[name] = totals.metrics.get(name, 0.0) + metric.item()
        self._exchange(totals)
        loss = totals.loss / totals.weight
        best = loss < self.progress.best_loss
        if best:
            self.progress.best_loss, self.progress.best_step = loss, step
        metrics = {name: value / totals.rows for name, value in totals.metrics.items()}
        return Evaluated(step, loss, totals.rows, time.perf_counter() - begun, best, metrics)

    def _validation_rows(self) -> list[Row]:
        assert self.data.valid is not None
        limit = self.recipe.eval.rows
        rows = list(self.data.valid if limit == "all" else self.data.valid[:limit])
        return rows[self.ranks.rank :: self.ranks.size]

    def _samples(self, step: int) -> Iterator[Event]:
        if self.run and self.recipe.eval.prompts:
            for sample in generate(self.session, self.recipe.eval, step):
                self.run.append_sample({"step": step, "prompt": sample.prompt, "text": sample.text})
                yield sample

    def _save(self) -> Iterator[Event]:
        """A checkpoint, the run's own adapter, and the pruning of old checkpoints. Rank 0 only."""
        if self.run is None:
            return
        params, config = self.session.lora.values(), self._adapter_config()
        state = {
            "progress": self.progress.as_state(),
            "data": self.data.train.state_dict(),
            "recipe": self.recipe.dump(),
            "recipe_fingerprint": self.recipe.fingerprint(),
            "model_fingerprint": self.model_fingerprint,
            "run": self.run.position(),
        }
        path = checkpoint.save(
            self.trainer.directory,
            self.progress.step,
            adapters=params,
            adapter_config=config,
            optimizer=self.optimizer.state_dict(),
            state=state,
        )
        checkpoint.write_adapters(self.trainer.directory, params, config)
        best = self.progress.best_step
        if best == self.progress.step:
            self.run.set_best(path)
        notices = checkpoint.prune(self.trainer.directory, keep=self.recipe.output.keep_checkpoints, best=best)
        yield from (Notice(text, "warning") for text in notices)
        yield Saved(self.progress.step, path)

    def _adapter_config(self) -> dict[str, Any]:
        lora = self.session.lora
        return adapters.mlx_config(
            self.recipe.lora,
            model=self.recipe.model,
            layers_total=len(self.session.stack),
            lowest=lora.lowest,
            keys=lora.keys,
            rank=lora.rank,
            scale=lora.scale,
            dropout=lora.dropout,
            model_type=str(self.session.loaded.config.get("model_type", "")),
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _nothing() -> Generator[Event, None, bool]:
    yield from ()
    return False
