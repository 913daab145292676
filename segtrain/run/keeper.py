"""What of a run is kept: checkpoints from which it goes on exactly, the adapter that others load, the mark of the best.

Rank 0 writes and reads; the others get what it read over the exchange, so the directory need not be shared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segtrain.data import Data
from segtrain.errors import RunFailed, UserError
from segtrain.event import Event, Notice, Saved
from segtrain.lora import adapters
from segtrain.parallel.ranks import Ranks
from segtrain.recipe.schema import Recipe
from segtrain.run.changes import changes, told
from segtrain.run.optimizer import Optimizer
from segtrain.run.session import Session
from segtrain.run.state import RunState
from segtrain.storage import checkpoint
from segtrain.storage.fingerprint import model_fingerprint
from segtrain.storage.run_directory import RunDirectory


@dataclass
class Keeper:
    """Saves and restores one run; `run` is None where nothing is to be written (other ranks, a dry run)."""

    recipe: Recipe
    ranks: Ranks
    run: RunDirectory | None
    session: Session
    optimizer: Optimizer
    data: Data
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = Path(self.recipe.output.dir)
        self.model = model_fingerprint(self.session.loaded.path)

    def require_same_everywhere(self) -> None:
        """Raises UserError where a rank has another recipe, model or data than rank 0."""
        self.ranks.require_same("the recipe", self.recipe.fingerprint())
        self.ranks.require_same("the model", self.model)
        self.ranks.require_same("the adapter that it begins with", self.session.lora.start_fingerprint)
        self.ranks.require_same("the training data", str(self.data.train.state_dict()))

    def save(self, state: RunState) -> Iterator[Event]:
        """A checkpoint, the run's own adapter, and the pruning of old checkpoints."""
        if self.run is None:
            return
        params, config = self.session.lora.values(), self._adapter_config()
        path = checkpoint.save(
            self.directory,
            state.step,
            adapters=params,
            adapter_config=config,
            optimizer=self.optimizer.state_dict(),
            state=self._state(state),
        )
        checkpoint.write_adapters(self.directory, params, config)
        if state.best_step == state.step:
            self.run.set_best(path)
        yield from (Notice(text, "warning") for text in self._prune(state))
        yield Saved(state.step, path)

    def finish(self, state: RunState) -> Iterator[Event]:
        """With `output.final: best`, the best adapter takes the last one's place as the run's own."""
        best = state.best_step
        if self.run is None or self.recipe.output.final == "last" or best is None or best == state.step:
            return
        path = checkpoint.directory(self.directory, best)
        try:
            found = checkpoint.load(path)
        except checkpoint.Unreadable as error:
            yield Notice(f"{path} can't be read ({error}), so the run's adapter is the last one", "warning")
            return
        checkpoint.write_adapters(self.directory, found.adapters, found.adapter_config)
        yield Notice(f"the run's adapter is that of step {best}, the best one; the last one is in its checkpoint")

    def newest(self) -> tuple[checkpoint.Checkpoint | None, list[str]]:
        """The newest checkpoint that reads well, on every rank, and notices of those that didn't.

        Raises RunFailed, on every rank, where none of them does: to begin anew would replace the run's adapter.
        """
        found, notices = checkpoint.newest(self.directory) if self.ranks.writes else (None, [])
        if any(self.ranks.gather("" if found else " ".join(notices[-1:]))):
            raise RunFailed(
                f"no checkpoint in {self.directory} can be read, so the run can't go on; its adapter and logs stay as "
                "they are: give another output.dir, or replace the run by --overwrite"
            )
        if self.ranks.size > 1:
            sent = self.ranks.broadcast(checkpoint.pack(found) if found else b"")
            found = found or (checkpoint.unpack(sent) if sent else None)
        return found, notices

    def restore(self, found: checkpoint.Checkpoint, *, force: bool) -> RunState:
        """Take a checkpoint's place; `notices` says what changed since.

        Raises UserError where it was made with other settings. With `force` only where its adapter doesn't fit: the
        optimiser's moments and the place in the data begin anew where they don't.
        """
        self._require_same(found, force)
        found.check(self._expected)
        self.session.lora.set(found.adapters)
        self._restore_optimizer(found, force)
        try:
            self._restore_place(found, force)
            state, _ = RunState.from_json(found.state["progress"]), dict(found.state["run"])
        except (KeyError, TypeError, AttributeError) as error:
            raise RunFailed(f"{found.path} wasn't written by this version of segtrain ({error!r})") from error
        return state

    @property
    def _expected(self) -> checkpoint.Expected:
        return {name: (tuple(value.shape), value.dtype) for name, value in self.session.lora.values().items()}

    def _restore_optimizer(self, found: checkpoint.Checkpoint, force: bool) -> None:
        self.optimizer.load_state_dict(found.optimizer)
        try:
            self.optimizer.require_fit(self.session.lora.values())
        except RunFailed:
            if not force:
                raise
            self.optimizer.begin_anew()
            self.notices.append("the optimiser's moments begin anew, since the saved ones are of another optimiser")

    def _restore_place(self, found: checkpoint.Checkpoint, force: bool) -> None:
        rows = self.data.train
        beginning = rows.state_dict()
        try:
            rows.load_state_dict(found.state["data"])
        except UserError as error:
            if not force:
                raise UserError(f"{error}; --force goes on with this data, from its beginning") from error
            rows.load_state_dict(beginning)
            self.notices.append("the data isn't that of the checkpoint: its rows are taken from their beginning")

    def settle(self, found: checkpoint.Checkpoint | None, state: RunState) -> None:
        """Bring the run's files to where `found` was taken (None: to their beginning)."""
        assert self.run is not None
        self.run.rewind(found.state["run"] if found else {})
        if found:
            self._complete(found, state)

    def _complete(self, found: checkpoint.Checkpoint, state: RunState) -> None:
        """What a kill right after the checkpoint kept from being written."""
        assert self.run is not None
        checkpoint.write_adapters(self.directory, found.adapters, found.adapter_config)
        self.run.notices += self._prune(state)
        if state.best_step is not None and checkpoint.directory(self.directory, state.best_step).is_dir():
            self.run.set_best(checkpoint.directory(self.directory, state.best_step))

    def _prune(self, state: RunState) -> list[str]:
        keep = self.recipe.output.keep_checkpoints
        return checkpoint.prune(self.directory, keep, best=state.best_step, last=state.step)

    def _state(self, state: RunState) -> dict[str, Any]:
        assert self.run is not None
        return {
            "progress": state.as_json(),
            "data": self.data.train.state_dict(),
            "recipe": self.recipe.dump(),
            "recipe_fingerprint": self.recipe.fingerprint(),
            "model_fingerprint": self.model,
            "rows_per_update": self._rows_per_update,
            "loss": self._loss,
            "start": self.session.lora.start_fingerprint,
            "run": self.run.position(),
        }

    @property
    def _rows_per_update(self) -> int:
        return self.recipe.train.grad_accumulation_steps * self.ranks.size

    def _require_same(self, found: checkpoint.Checkpoint, force: bool) -> None:
        """Raises UserError for a change that needs `force` and hasn't got it; what it allows goes into `notices`."""
        free, details = changes(found.state["recipe"], self.recipe)
        if found.differing(model=self.model):
            details.insert(0, f"the weights of {self.recipe.model}")
        details += [
            f"{name}: {found.state[key]} → {value}"
            for key, name, value in (
                ("rows_per_update", "rows of an update over all ranks", self._rows_per_update),
                ("loss", "loss", self._loss),
            )
            if found.state.get(key, value) != value
        ]
        start = self.session.lora.start_fingerprint
        if found.state.get("start", start) != start:
            details.append("the adapter that the run began with")
        self.notices += told(free, found.step, self.optimizer.total_steps)
        if details and not force:
            fits = not found.misfits(self._expected)
            way = "use --force to go on with the new ones" if fits else "give another output.dir for the new ones"
            raise UserError(f"{found.path} was made with other settings: {'; '.join(details)}. Put them back, or {way}")

    @property
    def _loss(self) -> str:
        return self.session.objective.name

    def _adapter_config(self) -> dict[str, Any]:
        lora = self.session.lora
        return adapters.mlx_config(
            self.recipe.lora,
            model=str(self.session.loaded.path) if self.recipe.quantize else self.recipe.model,
            made_from=self.recipe.model if self.recipe.quantize else None,
            layers_total=len(self.session.stack),
            lowest=lora.lowest,
            keys=lora.keys,
            rank=lora.rank,
            scale=lora.scale,
            dropout=lora.dropout,
            model_type=str(self.session.loaded.config.get("model_type", "")),
        )
