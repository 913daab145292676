"""Segments: consecutive layers whose activations are live together during backward.

A *carry* is a named array that crosses a segment edge. `h`, the hidden states, always does; layer `i` may read and
write further ones (`reads(i)`, `writes(i)`), for instance the keys and values that a later layer reuses. This module
is pure bookkeeping on those names.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

HIDDEN = "h"

T = TypeVar("T")
Bounds: TypeAlias = tuple[int, int]
LayerNames = Callable[[int], Collection[str]]


@dataclass(frozen=True)
class Segment:
    """Layers `lo..hi-1`, the carries that enter them and those that leave for a later segment."""

    lo: int
    hi: int
    reads: tuple[str, ...] = (HIDDEN,)
    writes: tuple[str, ...] = (HIDDEN,)

    @property
    def bounds(self) -> Bounds:
        return self.lo, self.hi

    def __len__(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"[{self.lo}:{self.hi}]"


def cuts(start: int, stop: int, size: int) -> list[Bounds]:
    """Split `range(start, stop)` into runs of `size` layers; the last one may be shorter."""
    if size < 1:
        raise ValueError(f"segment_size must be at least 1, not {size}")
    return [(lo, min(lo + size, stop)) for lo in range(start, stop, size)]


def layer_cuts(layers: int, size: int, *, lowest: int = 0, keep: int = 0) -> tuple[list[Bounds], list[Bounds]]:
    """Segments of `size` layers below layer `lowest`, and from there on, with an edge before the last `keep` layers."""
    kept_from = max(layers - keep, lowest)
    return cuts(0, lowest, size), cuts(lowest, kept_from, size) + cuts(kept_from, layers, size)


def split(layers: int, bounds: Sequence[Bounds], reads: LayerNames, writes: LayerNames) -> list[Segment]:
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


def most_held(segments: int, boundaries: int) -> int:
    """The edges that backward holds at a time with so many `boundaries`, if groups are as in `grouped`."""
    kept = min(boundaries, segments)
    return max(kept, -(-(segments + kept * (kept - 1) // 2) // kept)) if kept else 0


def leanest_boundaries(segments: int) -> tuple[int, int]:
    """The least and the largest number of boundaries with which backward holds the fewest edges. (0, 0) for none."""
    numbers = range(1, segments + 1)
    fewest = min((most_held(segments, number) for number in numbers), default=0)
    found = [number for number in numbers if most_held(segments, number) == fewest]
    return (found[0], found[-1]) if found else (0, 0)


def grouped(segments: Sequence[T], boundaries: int | None = None) -> list[Sequence[T]]:
    """As many groups of segments as edges are kept from forward to backward: those where groups start. None: all.

    The edges inside a group are made again when backward reaches it, each by one more run of a segment. Group k,
    counted from 0, has k + 1 kept edges left by then, so the first groups are the longest, of `most_held` - k segments.
    Raises ValueError for less than one boundary.
    """
    if boundaries is not None and boundaries < 1:
        raise ValueError(f"boundaries must be at least 1, not {boundaries}")
    count = len(segments)
    kept = count if boundaries is None else min(boundaries, count)
    most = most_held(count, kept)
    found, start = [], 0
    for k in range(kept):
        stop = start + min(most - k, count - start - (kept - k - 1))
        found.append(segments[start:stop])
        start = stop
    return found
