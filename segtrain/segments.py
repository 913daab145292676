"""Segments: consecutive layers whose activations are live together during backward.

A *carry* is a named array that crosses a segment edge. `h`, the hidden states, always does; layer `i` may read and
write further ones (`reads(i)`, `writes(i)`), for instance the keys and values that a later layer reuses. This module
is pure bookkeeping on those names.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

HIDDEN = "h"

LayerNames = Callable[[int], Collection[str]]


@dataclass(frozen=True)
class Segment:
    """Layers `lo..hi-1`, the carries that enter them and those that leave for a later segment."""

    lo: int
    hi: int
    reads: tuple[str, ...] = (HIDDEN,)
    writes: tuple[str, ...] = (HIDDEN,)

    def __len__(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"[{self.lo}:{self.hi}]"


def cuts(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Split `range(start, stop)` into runs of `size` layers; the last one may be shorter."""
    if size < 1:
        raise ValueError(f"segment_size must be at least 1, not {size}")
    return [(lo, min(lo + size, stop)) for lo in range(start, stop, size)]


def split(layers: int, bounds: Sequence[tuple[int, int]], reads: LayerNames, writes: LayerNames) -> list[Segment]:
    """Segments over `bounds`, with exactly the extra carries that must cross each edge.

    A segment reads what its layers read and do not write themselves; it writes what its layers write
    and a later segment reads. A name that donor and reader share inside one segment crosses nothing.
    """
    assert bounds[0][0] == 0
    assert bounds[-1][1] == layers
    segments = []
    for lo, hi in bounds:
        inside = range(lo, hi)
        own = {name for i in inside for name in writes(i)}
        needed = {name for i in inside for name in reads(i)} - own
        later = {name for i in range(hi, layers) for name in reads(i)}
        segments.append(Segment(lo, hi, (HIDDEN, *sorted(needed)), (HIDDEN, *sorted(own & later))))
    return segments
