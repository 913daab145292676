"""The training loop: sets a run up, yields typed events, leaves files that are complete at any moment.

A step is one optimiser update over `grad_accumulation_steps` rows on each rank (updates.py). Everything random is keyed
by seed and row number, so a checkpoint needs no random state: counters, the data's place, optimiser and adapter
determine the rest of the run, to the bit.
"""

import math
import os
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from segtrain.data import Data, open_data
from segtrain.engine import objectives
from segtrain.errors import UserError, counted
from segtrain.event import DataRead, Evaluated, Event, Notice, RunEnded, RunStarted, TrainStep
from segtrain.memory.backends import here
from segtrain.memory.meter import Meter, allocator_as_it_was
from segtrain.models.load import Loaded
from segtrain.models.positions import check_positions, learnt
from segtrain.models.support import why_unproven
from segtrain.parallel.ranks import Ranks, join
from segtrain.recipe.schema import Recipe
from segtrain.run.base import load_base, pending
from segtrain.run.environment import compiles_kernels
from segtrain.run.guards import Growth, check_update
from segtrain.run.keeper import Keeper
from segtrain.run.optimizer import Optimizer
from segtrain.run.passes import Passes
from segtrain.run.planning import Planner
from segtrain.run.references import References
from segtrain.run.sampling import generate, prompts
from segtrain.run.session import Session, open_session, summary
from segtrain.run.state import RunState
from segtrain.run.streaming import announced, streams
from segtrain.run.updates import Update, Updates
from segtrain.run.validation import Validation, require_evaluations
from segtrain.run.verdict import verdict
from segtrain.run.verify import check_unproven
from segtrain.run.wired import wired
from segtrain.signals import Stop
from segtrain.storage.checkpoint import Checkpoint
from segtrain.storage.run_directory import REFERENCE, RunDirectory


class Trainer:
    """One run. Iterate `events()`; it raises UserError (exit code 2) or RunFailed (exit code 1)."""

    def __init__(
        self,
        recipe: Recipe,
        loss: str = "sft",
        *,
        resume: bool = False,
        overwrite: bool = False,
        force: bool = False,
        dry_run: bool = False,
        stop: Stop | None = None,
    ):
        """`stop`: what ends the run in order when it is requested."""
        self.recipe, self.loss = recipe, loss
        self.resume, self.overwrite, self.force, self.dry_run = resume, overwrite, force, dry_run
        self.stop = stop or Stop()

    def events(self) -> Generator[Event, None, None]:
        """What happens, as it happens. Closed early, a run ends as on a request to stop: with a checkpoint."""
        with ExitStack() as stack:
            held = stack.enter_context(allocator_as_it_was())
            ranks = join()
            run = None
            if ranks.writes and not self.dry_run:
                run = stack.enter_context(
                    RunDirectory(
                        self.recipe.output.dir,
                        self.overwrite,
                        self.resume,
                        reads=[self.recipe.model, *self.recipe.files],
                    )
                )
                yield from (Notice(text) for text in run.notices)
                run.notices.clear()
            yield from (Notice(text) for text in (*ranks.notices, *self.recipe.notices))
            stream = partial(streams, self.recipe, sharing=ranks.local)
            if text := pending(self.recipe):
                yield Notice(text)
            loaded = load_base(self.recipe, stream)
            yield from announced(self.recipe, loaded.weights) if loaded.weights else ()
            objective = objectives.of_recipe(self.loss, self.recipe)
            data = open_data(self.recipe, loaded.tokenizer, pairs=objective.pairs)
            yield from (Notice(text) for text in _positions(loaded, data, self.recipe))
            require_evaluations(self.recipe, data.valid)
            prompts(loaded, self.recipe)  # what is wrong with one is said now, not when the run ends
            session = open_session(self.recipe, objective, loaded)
            if why := why_unproven(loaded.config):
                yield Notice(f"{why}: its gradients are checked first")
                check_unproven(session)
            yield from _Loop(self, ranks, run, session, data, held).events()
            ranks.leave()


class _Loop:
    """A run whose model, data and directory are open."""

    def __init__(
        self,
        trainer: Trainer,
        ranks: Ranks,
        run: RunDirectory | None,
        session: Session,
        data: Data,
        held: int,
    ):
        """`held`: bytes that the process held before the run."""
        self.trainer, self.recipe = trainer, trainer.recipe
        self.stop = trainer.stop
        self.ranks, self.run, self.session, self.data = ranks, run, session, data
        self.state = RunState()
        self.steps = total_steps(self.recipe, data, ranks.size)
        optimizer = Optimizer(self.recipe.train, self.steps, plus_ratio=self.recipe.lora.plus_ratio)
        self.meter = Meter(run.append_memory if run else None, held)
        self.planner = Planner(session, self.meter, sharing=ranks.local)
        passes = Passes(
            session, self.planner.backward, self.planner.cut, self.planner.joined if session.loaded.weights else None
        )
        self.updates = Updates(session, data.train, passes, optimizer, ranks, self.meter)
        self.validation = Validation(data.valid, passes, self.updates) if data.valid is not None else None
        self.keeper = Keeper(self.recipe, ranks, run, session, optimizer, data)
        if session.objective.keeps_reference:
            keep = run.append_reference if run else None
            session.references = References(self.keeper.model, session.lora.start_fingerprint, keep)
        self.growth = Growth(unified=here().name != "cuda")
        self.first_step = 0
        self.logging = True
        self.accepted = False  # model, data and plan: until then nothing is written
        self.waiting: list[dict[str, Any]] = []  # lines for the metrics
        self.begun = time.perf_counter()

    def events(self) -> Iterator[Event]:
        """Everything from the run's first event to its last.

        A line is in the metrics before its event is shown, but for those that come before the run is accepted.
        """
        events = self._all_events()
        with self.stop.held():
            try:
                for event in events:
                    self._log(event.as_json())
                    yield event
            except GeneratorExit:
                self._leave(events)
                raise

    def _leave(self, events: Iterator[Event]) -> None:
        """Nobody wants the rest of the events: end in order, if there is anything to save."""
        self.stop.requested = True
        for event in events if self.accepted else ():
            self._log(event.as_json())

    def _log(self, line: dict[str, Any] | None) -> None:
        if self.run and self.logging and line is not None:
            self.waiting.append(line)
        if self.run and self.accepted:
            for one in self.waiting:
                self.run.append_metrics(one)
            self.waiting.clear()

    def _all_events(self) -> Iterator[Event]:
        self.keeper.require_same_everywhere()
        found = (yield from self._resume()) if self.trainer.resume else None
        self.first_step = self.state.step
        yield self._started()
        self.logging = found is None  # these lines are in the metrics already
        yield from (Notice(text) for text in [*self.session.notices, *self.data.notices])
        yield DataRead(self.data.counts)
        self.planner.go_by(self.state.memory, resumed=found is not None)
        yield from self.planner.announce(self.data.counts)
        yield from self._limit()
        self.logging = True
        if self.trainer.dry_run:
            yield self._ended("done")
            return
        yield from self._accept(found)
        with wired(self.planner.budget, wanted=self.recipe.engine.wired):
            reason = yield from self._train()
        if reason == "done":
            yield from self.keeper.finish(self.state)
        yield self._ended(reason)

    def _limit(self) -> Iterator[Event]:
        """Rows that can't fit on every rank follow `on_long` where not all lengths are known."""
        limit = fitting = self.recipe.data.max_seq_length
        if self.data.counts.get("sampled"):
            fitting = min(map(int, self.ranks.gather(str(self.planner.fitting(limit)))))
        if fitting < limit:
            self.data.train.limit(min(fitting, learnt(self.session.loaded.config) or fitting))
            yield Notice(
                f"rows above {fitting:,} tokens don't fit the memory budget; data.on_long "
                f"({self.recipe.data.on_long}) says what becomes of any that come up"
            )

    def _resume(self) -> Generator[Event, None, Checkpoint | None]:
        """Go on from the newest complete checkpoint, if there is one."""
        self.logging = False
        found, notices = self.keeper.newest()
        yield from (Notice(text, "warning") for text in notices)
        if found is not None:
            self.state = self.keeper.restore(found, force=self.trainer.force)
            yield from (Notice(text) for text in self.keeper.notices)
        else:
            yield Notice(f"no checkpoint in {self.recipe.output.dir} yet: starting from step 0")
        return found

    def _accept(self, found: Checkpoint | None) -> Iterator[Event]:
        """The run begins, or goes on from `found`: from here on its directory is written."""
        if self.run:
            if self.trainer.resume:
                self.keeper.settle(found, self.state)
                if self.session.references:
                    self.session.references.load(self.run.path / REFERENCE)
            if not self._is_finished():
                self.run.write_recipe(self.recipe)
                if self.data.sample:
                    self.run.write_row(self.data.sample.as_json())
            yield from (Notice(text, "warning") for text in self.run.notices)
        self.accepted = True
        self._log(None)

    def _train(self) -> Generator[Event, None, Literal["done", "interrupted"]]:
        """Update, evaluate and save to the end, or until a stop is asked for."""
        if self._is_finished():
            self.logging = False  # the files stay as the run left them
            yield Notice(self._finished())
            return "done"
        stopped = yield from self._after_step(saved=True)
        if not stopped and compiles_kernels(os.environ):
            yield Notice("compiling kernels, once: the first update takes a minute or so longer than the next ones")
        while self.state.step < self.steps and not stopped:
            stopped = yield from self._step()
        return "done" if self._is_finished() else "interrupted"

    def _is_finished(self) -> bool:
        return self._gave_up() or (self.state.step >= self.steps and not self._evaluation_is_due())

    def _gave_up(self) -> bool:
        """Whether patience is at its end, with updates left to make."""
        patience = self.recipe.train.patience
        return patience is not None and self.state.waited >= patience and self.state.step < self.steps

    def _finished(self) -> str:
        """What to say to somebody who goes on with a finished run."""
        done = f"this run has finished already ({counted(self.state.step, 'step')}): nothing to do"
        if self._gave_up():
            return f"{done}; train.patience ended it, and a higher one goes on (--set train.patience=N --resume)"
        return f"{done}; a higher train.steps makes it longer (--set train.steps=N --resume)"

    def _step(self) -> Generator[Event, None, bool]:
        """One update and what follows it; whether the run was asked to stop."""
        begun = time.perf_counter()
        step = self.state.step + 1
        self.meter.start_step(step)
        update = self.updates.next(self.state, self._stop_requested)
        self.state.step = step
        notices = check_update(update, self.updates, self.state, Path(self.recipe.output.dir))
        if update.applied:
            event = self._train_step(update, time.perf_counter() - begun)
            notices += self.growth(step, event.memory)
            yield event
        yield from notices
        yield from self.planner.after_step(step, self.meter)
        return (yield from self._after_step(stopped=update.totals.stop))

    def _train_step(self, update: Update, seconds: float) -> TrainStep:
        totals, optimizer = update.totals, self.updates.optimizer
        shared = {"shared_tokens": totals.shared_tokens} if self.session.objective.pairs else {}
        return TrainStep(
            self.state.step,
            totals.mean_loss,
            optimizer.learning_rate(optimizer.step - 1),
            update.norm,
            totals.tokens,
            totals.targets,
            seconds,
            self.meter.memory(),
            totals.mean_metrics | shared,
            totals.padding,
        )

    def _after_step(self, *, stopped: bool = False, saved: bool = False) -> Generator[Event, None, bool]:
        """Evaluation and saving where they are due; whether to stop. An evaluation missed by a stop follows on resume.

        `saved`: the present state is a checkpoint already.
        """
        best = False
        stopped = stopped or self._stops_alone()
        if self._evaluation_is_due() and not stopped:
            event = yield from self._evaluate()
            stopped, best = event is False, isinstance(event, Evaluated) and event.best
        if self._gave_up():
            yield Notice(
                f"ends early, after step {self.state.step} of {self.steps}: {self.state.waited} evaluations without a "
                f"better loss than {self.state.best_loss:.4f} at step {self.state.best_step} (train.patience)"
            )
        if self._is_finished() and not stopped:
            said = verdict(self.state.trend, self.state.step, self.recipe.train)
            yield from [Notice(said, "warning")] if said else []
        due = self._is_finished() or _is_due(self.state.step, self.recipe.output.save_every)
        stopped = stopped or self._stops_alone()
        if best or ((due or stopped) and not saved):
            yield from self.keeper.save(self.state)
            saved = True
        return stopped or self._gave_up() or (saved and self._stops_alone())

    def _evaluate(self) -> Generator[Event, None, Evaluated | bool]:
        """The validation rows and the prompts, whichever there are; false where a stop was asked for meanwhile."""
        if self.validation is None:
            self.state.evaluated = self.state.step
            yield from self._samples()
            return True
        event = self.validation(self.state, self._stop_requested)
        self.planner.skip()  # these rows had no backward to predict
        if event is None:
            return False
        yield event
        yield from self._samples()
        return event

    def _stops_alone(self) -> bool:
        """A request to stop that needs no agreement with other ranks; they agree at the next update."""
        return self.ranks.size == 1 and self.stop.requested

    def _evaluation_is_due(self) -> bool:
        step, every = self.state.step, self.recipe.output.eval_every
        due = step == self.steps or _is_due(step, every)
        if step == 0:
            due = every > 0 and self.recipe.eval.at_start
        asked = self.validation is not None or bool(self.recipe.eval.prompts)
        return asked and step != self.state.evaluated and due

    def _samples(self) -> Iterator[Event]:
        if self.run and self.recipe.eval.prompts:
            for sample in generate(self.session, self.state.step):
                self.run.append_sample({"step": sample.step, "prompt": sample.prompt, "text": sample.text})
                yield sample

    def _stop_requested(self) -> bool:
        return self.stop.requested

    def _started(self) -> RunStarted:
        return RunStarted(
            command=self.session.objective.name,
            directory=Path(self.recipe.output.dir),
            steps=self.steps,
            first_step=self.state.step,
            base=str(self.session.loaded.path) if self.recipe.quantize else "",
            **summary(self.session),
        )

    def _ended(self, reason: Literal["done", "interrupted"]) -> RunEnded:
        state = self.state
        counts: dict[str, Any] = {"rows": state.rows}
        if self.session.objective.pairs:
            counts |= {"shared_pairs": state.shared_pairs, "split_pairs": state.rows - state.shared_pairs}
        if self.data.counts.get("sampled"):
            counts["dropped"] = self.data.train.dropped
        if state.best_step is not None:
            counts |= {"best_step": state.best_step, "best_loss": state.best_loss}
        adapter = Path(self.recipe.output.dir) / "adapters.safetensors"
        return RunEnded(reason, state.step, time.perf_counter() - self.begun, adapter, counts, self.first_step)


def _positions(loaded: Loaded, data: Data, recipe: Recipe) -> list[str]:
    """What to say of the longest row's positions; where not all lengths are known, none is beyond a learnt table."""
    table = learnt(loaded.config)
    if table is not None and data.counts.get("sampled"):
        data.train.limit(min(table, recipe.data.max_seq_length))
    return check_positions(loaded.config, max(data.counts["longest"], data.counts.get("valid_longest", 0)))


def total_steps(recipe: Recipe, data: Data, ranks: int) -> int:
    """Optimiser updates of a run. Raises UserError where epochs can't be counted."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    if data.rows_per_epoch is None:
        raise UserError("train.steps: the data set's length isn't known when streaming, so epochs can't be; give steps")
    rows = data.rows_per_epoch * (train.epochs or 1)
    return math.ceil(rows / (train.grad_accumulation_steps * ranks))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
