"""Reference log-probs by row: computed once, kept in the run's directory, for losses that compare with the start.

A line of `reference.jsonl` is a row's key and its sums of log-probs. The key is a hash of the model, of the adapter's
values at the start and of the row's tokens, so a line can only be found for what it was computed from. A row costs some
200 bytes of memory. Of several ranks the first one keeps its rows on disk, the others theirs in memory.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from segtrain.data.rows import PreferenceRow
from segtrain.engine.backward import Backward, reference_sums
from segtrain.engine.layouts import Layout


class References:
    """Gives layouts their reference sums; `keep` gets a line for each row that is new."""

    def __init__(self, model: str, start: str, keep: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self.source, self.keep = f"{model}\0{start}".encode(), keep
        self.sums: dict[str, dict[str, float]] = {}

    def load(self, path: Path) -> None:
        """Take what an earlier part of the run has kept."""
        if path.exists():
            with open(path, encoding="utf-8") as lines:
                for line in map(json.loads, lines):
                    self.sums[line.pop("row")] = line

    def __call__(self, rows: Sequence[PreferenceRow], layout: Layout, backward: Backward) -> Layout:
        """The layout of these rows with their sums: those kept, or those of a pass of `backward`."""
        keys = [self._key(row) for row in rows]
        if any(key not in self.sums for key in keys):
            found = {name: _listed(sums) for name, sums in reference_sums(backward, layout).items()}
            for number, key in enumerate(keys):
                self._note(key, {name: sums[number] for name, sums in found.items()})
        known = [self.sums[key] for key in keys]
        reference = {name: mx.array([sums[name] for sums in known]) for name in known[0]}
        return replace(layout, reference={n: sums if len(rows) > 1 else sums[0] for n, sums in reference.items()})

    def _note(self, key: str, sums: dict[str, float]) -> None:
        if key not in self.sums:
            self.sums[key] = sums
            if self.keep:
                self.keep({"row": key, **sums})

    def _key(self, row: PreferenceRow) -> str:
        hasher = blake2b(self.source, digest_size=16)
        for part in (row.prompt, row.chosen, row.rejected, row.rejected_prompt or ()):
            hasher.update(len(part).to_bytes(8, "little") + array("q", part).tobytes())
        return hasher.hexdigest()


def _listed(sums: mx.array) -> list[float]:
    return cast(list[float], sums.reshape(-1).tolist())
