"""Guards of a run: updates that aren't finite, loss spikes, a process that grows."""

from pathlib import Path

from segtrain.errors import RunFailed
from segtrain.event import Memory, Notice
from segtrain.run.state import RunState
from segtrain.run.updates import Update, Updates
from segtrain.storage import checkpoint

MAX_BAD_STEPS = 3
WARM_UP = 100  # steps whose highest reading is the baseline
ALLOWANCE = 1.2  # times the baseline
SLACK = 1.0  # GiB on top


def check_update(update: Update, updates: Updates, state: RunState, directory: Path) -> list[Notice]:
    """What to say of an update. Raises RunFailed at the third in a row that isn't finite. On every rank alike."""
    loss = update.totals.loss / update.totals.weight
    if not update.applied:
        return [_not_finite(f"loss {loss:.4g}, gradient norm {update.norm:.4g}", update, updates, state, directory)]
    state.trend.add(loss)
    mean = state.losses.mean
    if not state.losses.spikes(loss):
        return []
    rows = _listed(update.origins)
    return [Notice(f"step {state.step}: loss {loss:.4g}, where {mean:.4g} was usual, on {rows}", "warning")]


def _not_finite(what: str, update: Update, updates: Updates, state: RunState, directory: Path) -> Notice:
    text = f"step {state.step}: {what} on {_listed(updates.blame(update))}"
    if state.bad_steps < MAX_BAD_STEPS:
        return Notice(f"{text}: update skipped", "warning")
    raise RunFailed(
        f"{text}, the {MAX_BAD_STEPS}rd update in a row that isn't finite; {_advice(updates, state, directory)}"
    )


def _advice(updates: Updates, state: RunState, directory: Path) -> str:
    """What helps: before the first update the rate had no part in it."""
    if state.step == state.bad_steps:
        return (
            "no update was made before, so the learning rate has no part in it: look at these rows, and at the model's "
            "weights (`segtrain verify-grads`)"
        )
    rate = updates.session.recipe.train.learning_rate
    return f"lower train.learning_rate ({rate:g}) or look at these rows. {_way_back(rate, state, directory)}"


def _way_back(rate: float, state: RunState, directory: Path) -> str:
    """From the newest checkpoint, which is known to be good where an update after it was made."""
    lower = f"--set train.learning_rate={rate / 10:g}"
    newest = checkpoint.newest_path(directory)
    if newest is None:
        return f"No checkpoint was saved before: {lower} --overwrite begins anew."
    found = f"The newest checkpoint is {newest}: {lower} --resume --force goes on from it"
    if int(newest.name.rpartition("-")[2]) < state.step - state.bad_steps:
        return f"{found}."
    return (
        f"{found}. Where it fails at once, the checkpoint holds what the last update spoilt: remove it to go on from "
        f"the one before, or begin anew by {lower} --overwrite."
    )


def _listed(origins: list[str], most: int = 8) -> str:
    more = f" and {len(origins) - most} more" if len(origins) > most else ""
    return ", ".join(origins[:most]) + more


class Growth:
    """Warns once when the process has grown far beyond what its first steps needed, whatever mlx's allocator says.

    The allocator's cache is left out where it is memory of the process (`unified`): it may grow to its limit. On CUDA
    it lies on the device, and the process's memory is the host's alone. (The planner watches the allocator's active
    memory.)
    """

    def __init__(self, unified: bool = True) -> None:
        self._unified = unified
        self._seen = 0
        self._baseline = 0.0
        self._warned = False

    def __call__(self, step: int, memory: Memory) -> list[Notice]:
        self._seen += 1
        process = max(0.0, memory.rss_gib - memory.cache_gib) if self._unified else memory.rss_gib
        if self._seen <= WARM_UP:
            self._baseline = max(self._baseline, process)
        if self._warned or process <= self._baseline * ALLOWANCE + SLACK:
            return []
        self._warned = True
        return [
            Notice(
                f"memory of the process: {process:.1f} GiB at step {step}, {self._baseline:.1f} GiB in its first "
                f"{WARM_UP} steps; if it keeps growing, stop it and --resume",
                "warning",
            )
        ]
