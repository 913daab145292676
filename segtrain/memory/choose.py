"""The fastest plan that fits. Pure.

Candidates are every combination of the settings that a recipe leaves on `auto`; each is estimated, those whose peak is
within the budget are compared by estimated time, and by memory where times are about equal (`sparing`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TypeVar

from segtrain.engine.segments import layer_cuts, leanest_boundaries
from segtrain.memory.corrections import Corrections, kind
from segtrain.memory.estimate import Estimator, Peak
from segtrain.memory.plan import Plan
from segtrain.memory.rows import RowShape
from segtrain.memory.timing import Timer

T = TypeVar("T")

HEAD_CHUNK_BYTES = 512 << 20
MIN_CHUNK, MAX_CHUNK = 64, 2048
MLP_ROWS = (4096, 2048, 1024, 512)
BOUNDARIES = (0.875, 0.75, 0.5)  # shares of them
DEARER, SMALLER = 1.12, 1 / 2  # see `sparing`
KEPT = (0.125, 0.25, 0.5, 0.75, 0.875)  # shares of the layers


@dataclass(frozen=True)
class Settings:
    """What the recipe fixes; None: to be chosen."""

    backward: str | None = None
    segment_size: int | None = None
    head_chunk: int | None = None
    keep: int | None = None
    lookahead: int | None = None
    dequantize: bool | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Option:
    """A plan with its estimate. `parts` (bytes) add up to the peak, at the moment named `moment`.

    `estimated`: the peak before what was measured here corrected it. `seconds` of a step, where that was measured.
    `read`: bytes of streamed weights.
    """

    plan: Plan
    moment: str
    parts: dict[str, float]
    relative_time: float
    estimated: int = 0
    seconds: float | None = None
    read: int = 0

    @property
    def peak(self) -> int:
        return round(sum(self.parts.values()))


def sparing(options: Sequence[T], budget: float, time: Callable[[T], float], peak: Callable[[T], float]) -> T | None:
    """The fastest option, or one that costs at most `DEARER` more time and takes at most `SMALLER` of its memory.

    What else runs on the machine can use the memory that a plan leaves; so it is only done where the fastest takes more
    than a quarter of the budget. Times that differ by less than the time model
    can tell are equal: then less memory wins.
    """
    best = min(options, key=lambda x: (round(time(x), 2), peak(x)), default=None)
    if best is None or peak(best) <= budget / 4:
        return best
    near = [x for x in options if time(x) <= DEARER * time(best) and peak(x) <= SMALLER * peak(best)]
    return min(near, key=lambda x: (round(time(x), 2), peak(x)), default=best)


class Chooser:
    """Candidate plans for a model under some settings, estimated."""

    def __init__(
        self,
        estimator: Estimator,
        timer: Timer,
        settings: Settings = Settings(),
        corrections: Corrections | None = None,
        disk: float | None = None,
    ):
        """`disk`: bytes of streamed weights that are read a second, where that was measured."""
        self.disk = disk
        self.estimator, self.timer, self.settings = estimator, timer, settings
        self.corrections = corrections or Corrections()
        self.layers = len(estimator.model.layers)
        self.option = lru_cache(maxsize=4096)(self._option)

    def relaxed(self) -> "Chooser":
        """The same with all that decides memory left open."""
        free = Settings(dequantize=self.settings.dequantize, compiled=self.settings.compiled)
        return self if free == self.settings else Chooser(self.estimator, self.timer, free, self.corrections, self.disk)

    def corrected(self, corrections: Corrections) -> "Chooser":
        """The same by other corrections, or by these once they have changed."""
        return Chooser(self.estimator, self.timer, self.settings, corrections, self.disk)

    def _option(self, row: RowShape, plan: Plan) -> Option:
        peak = self.estimator.peak(row, plan)
        parts = self._corrected(peak, plan)
        plan = replace(plan, peak_bytes=round(sum(parts.values())))
        read = self.estimator.read(row, plan)
        relative, seconds = self._time(row, plan, read)
        return Option(plan, peak.moment, parts, relative, peak.bytes, seconds, read)

    def _time(self, row: RowShape, plan: Plan, read: int) -> tuple[float, float | None]:
        """Of full backward's operations, and in seconds where that was measured here.

        Weights are read while layers compute, so that the slower of both counts.
        """
        relative, rate = self.timer.relative(row, plan), self.corrections.rates.get(kind(plan))
        if not rate:
            return relative, None
        seconds = rate * self.timer.cost(row, plan)
        slower = max(1.0, read / self.disk / seconds) if self.disk else 1.0
        return slower * relative, slower * seconds

    def _bytes(self, row: RowShape, plan: Plan) -> int:
        """The peak of `option`, without the rest."""
        return round(sum(self._corrected(self.estimator.peak(row, plan), plan).values()))

    def _corrected(self, peak: Peak, plan: Plan) -> dict[str, float]:
        """The parts of an estimate by what was measured here."""
        ratio = self.corrections.ratio(plan)
        base = {"model": self.estimator.resident, "adapter": self.estimator.state}
        return {name: base.get(name, 0) + ratio * (size - base.get(name, 0)) for name, size in peak.parts.items()}

    def fastest(self, row: RowShape, budget: int, *, sizes: Sequence[int] | None = None) -> Option | None:
        """The fastest candidate for `row` whose peak is within `budget`; None: there is none."""
        fitting = self._promising(row, self.plans(row, sizes), budget)
        return sparing(fitting, budget, lambda x: x.relative_time, lambda x: x.peak)

    def _promising(self, row: RowShape, plans: Iterable[Plan], budget: int) -> list[Option]:
        """Those that fit, by time, as far as `sparing` can choose one: memory, which takes longer to estimate, is not
        looked at beyond.
        """
        timed = [(self._time(row, plan, self.estimator.read(row, plan))[0], plan) for plan in plans]
        found: list[Option] = []
        slowest = math.inf
        for time, plan in sorted(timed, key=lambda x: x[0]):
            if time > slowest:
                break
            option = self.option(row, plan)
            if option.peak <= budget:
                if not found:  # the best one's time rounds to this one's
                    slowest = DEARER * (time + 0.01)
                found.append(option)
        return found

    def leanest(self, row: RowShape, *, sizes: Sequence[int] | None = None) -> Option:
        """The candidate with the lowest peak."""
        return self.option(row, min(self._lean_plans(row, sizes), key=lambda plan: self._bytes(row, plan)))

    def least(self, row: RowShape, *, sizes: Sequence[int] | None = None) -> int:
        """The lowest peak of all candidates, in bytes."""
        return min(self._bytes(row, plan) for plan in self._lean_plans(row, sizes))

    def fits(self, row: RowShape, budget: int, *, sizes: Sequence[int] | None = None) -> bool:
        """Whether a candidate's peak is within `budget`."""
        return any(self._bytes(row, plan) <= budget for plan in self._lean_plans(row, sizes))

    def full(self, row: RowShape) -> Iterator[Plan]:
        """Ways to run full backward, which never works on dense copies of quantised weights."""
        if not self.settings.dequantize and not self.estimator.streamed:
            recurrent = any(layer.scans for layer in self.estimator.model.layers)  # scans compile their own groups
            yield Plan("full", segment_size=self.layers, compiled=self._compiled(row) and not recurrent)

    def plans(self, row: RowShape, sizes: Sequence[int] | None = None) -> Iterator[Plan]:
        s = self.settings
        if s.backward != "segmented" and sizes is None:
            yield from self.full(row)
        if s.backward == "full":
            return
        chosen = sizes or ((s.segment_size,) if s.segment_size else (1, 2, 4))
        for size, chunk, lookahead, dense in product(chosen, self._chunks(), self._lookaheads(), self._dense()):
            base = Plan(
                "segmented",
                segment_size=min(size, self.layers),
                head_chunk=chunk,
                keep=s.keep or 0,
                lookahead=lookahead,
                dequantize=dense,
                compiled=self._compiled(row),
            )
            yield from self._leaner(row, base)
            yield from self._richer(base)

    def _lean_plans(self, row: RowShape, sizes: Sequence[int] | None) -> Iterator[Plan]:
        """Candidates for the lowest peak: nothing is done for speed."""
        s = self.settings
        if s.backward == "full":
            yield from self.full(row)
            return
        size = min((sizes or (s.segment_size or 1,))[0], self.layers)
        base = Plan(
            "segmented",
            segment_size=size,
            head_chunk=self._chunks()[-1],
            keep=s.keep or 0,
            lookahead=s.lookahead or 0,
            dequantize=bool(s.dequantize),
            compiled=self._compiled(row),
        )
        yield from self._leaner(row, base)

    def _leaner(self, row: RowShape, base: Plan) -> Iterator[Plan]:
        """`base`, and slower ways that need less: MLP in chunks, fewer boundaries, a limit to wait for."""
        longest = max(row.streams)
        chunks = MLP_ROWS if self.estimator.backend.chunks_help else ()
        boundaries = (None, *self._boundaries(base))
        for rows in (None, *(rows for rows in chunks if rows < longest)):
            plans = [replace(base, mlp_rows=rows, boundaries=kept) for kept in boundaries]
            yield from plans
            if self.estimator.backend.held and rows is not None:
                yield from (replace(plan, tight=True) for plan in plans)

    def _boundaries(self, plan: Plan) -> list[int]:
        """Numbers of boundaries to keep, fewer than there are.

        Two hold the fewest in backward: the larger is faster, the smaller leaves less in forward and of other streams.
        """
        _, trained = layer_cuts(self.layers, plan.segment_size, lowest=self.estimator.lowest, keep=plan.keep)
        count = len(trained)
        least, most = leanest_boundaries(count)
        shares = {round(share * count) for share in BOUNDARIES}
        kept = {number for number in shares if number > most} | {least, most}
        return sorted({number for number in kept if 0 < number < count}, reverse=True)

    def _richer(self, base: Plan) -> Iterator[Plan]:
        """Faster ways that need more: some layers kept."""
        if self.settings.keep is None:
            for count in sorted({round(share * self.layers) for share in KEPT} - {0}):
                yield replace(base, keep=count)

    def _chunks(self) -> tuple[int, ...]:
        if self.settings.head_chunk:
            return (self.settings.head_chunk,)
        per_row = 12 * self.estimator.model.vocabulary
        best = max(MIN_CHUNK, min(MAX_CHUNK, HEAD_CHUNK_BYTES // per_row))
        return tuple(sorted({best, max(MIN_CHUNK, best // 4), MIN_CHUNK}, reverse=True))

    def _lookaheads(self) -> tuple[int, ...]:
        if self.settings.lookahead is not None:
            return (self.settings.lookahead,)
        times = self.timer.speed.lookahead
        if len(set(times)) == 1:
            return (0,)
        return (0, 1, 2) if self.estimator.backend.overlaps else (times.index(min(times)),)

    def _dense(self) -> tuple[bool, ...]:
        if not self.estimator.model.packed:
            return (False,)
        return (False, True) if self.settings.dequantize is None else (self.settings.dequantize,)

    def _compiled(self, row: RowShape) -> bool:
        return self.settings.compiled and not row.branches


def sizes(layers: int) -> list[int]:
    """Segment sizes to compare: powers of two, and all layers."""
    return [*(1 << k for k in range(layers.bit_length()) if 1 << k < layers), layers]


def longest(fits: Callable[[int], bool], limit: int, floor: int = 2) -> int:
    """The largest row length up to `limit` that fits (a multiple of 128 above 1,024); 0: not even `floor`."""
    if not fits(floor):
        return 0
    if fits(limit):
        return limit
    low, high = floor, limit
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low // 128 * 128 if low > 1024 else low
