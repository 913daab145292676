"""Guards of a run: updates that aren't finite, loss spikes, memory that creeps up."""

import math
from pathlib import Path

from segtrain import checkpoint
from segtrain.errors import RunFailed
from segtrain.events import Memory, Notice
from segtrain.runstate import RunState
from segtrain.updates import Update, Updates

MAX_BAD_STEPS = 3
WARM_UP = 100  # steps whose highest reading is the baseline
ALLOWANCE = 1.2  # times the baseline
SLACK = 1.0  # GiB on top


def check_update(update: Update, updates: Updates, state: RunState, directory: Path) -> list[Notice]:
    """What to say of an update. Raises RunFailed at the third in a row that isn't finite. On every rank alike."""
    loss = update.totals.loss / update.totals.weight
    if not update.applied:
        return [_not_finite(f"loss {loss:.4g}, gradient norm {update.norm:.4g}", update, updates, state, directory)]
    mean = state.losses.mean
    if not state.losses.spikes(loss):
        return []
    rows = _listed(updates.origins(update))
    return [Notice(f"step {state.step}: loss {loss:.4g}, where {mean:.4g} was usual, on {rows}", "warning")]


def _not_finite(what: str, update: Update, updates: Updates, state: RunState, directory: Path) -> Notice:
    text = f"step {state.step}: {what} on {_listed(updates.blame(update))}"
    if state.bad_steps < MAX_BAD_STEPS:
        return Notice(f"{text}: update skipped", "warning")
    newest = checkpoint.newest_path(directory)
    last = f"The last good checkpoint is {newest}." if newest else "No checkpoint was saved before."
    raise RunFailed(
        f"{text}, the {MAX_BAD_STEPS}rd update in a row that isn't finite; lower train.learning_rate or look at these "
        f"rows. {last}"
    )


def _listed(origins: list[str], most: int = 8) -> str:
    more = f" and {len(origins) - most} more" if len(origins) > most else ""
    return ", ".join(origins[:most]) + more


class Creep:
    """Warns once when memory has grown far beyond what the first steps of this process needed.

    The allocator's cache is left out: it may grow to its limit, and the planner sets that.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._active = self._process = 0.0
        self._warned = False

    def __call__(self, step: int, memory: Memory) -> list[Notice]:
        self._seen += 1
        process = max(0.0, memory.rss_gib - memory.cache_gib)
        if self._seen <= WARM_UP:
            self._active, self._process = max(self._active, memory.active_gib), max(self._process, process)
            return []
        found = [("active", memory.active_gib, self._active), ("process", process, self._process)]
        grown = [(name, now, then) for name, now, then in found if now > then * ALLOWANCE + SLACK]
        if self._warned or not grown or not all(map(math.isfinite, (now for _, now, _ in grown))):
            return []
        self._warned = True
        name, now, then = grown[0]
        text = (
            f"step {step}: {name} memory has grown to {now:.1f} GiB, from {then:.1f} GiB in the first {WARM_UP} steps"
        )
        return [Notice(f"{text}; save and --resume starts it anew", "warning")]
