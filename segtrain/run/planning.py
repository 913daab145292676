"""The plan of each row, chosen by estimate and held against what is measured.

The planner chooses a plan for the data set's longest row when the run begins, and refuses a run whose rows can't fit.
Shorter rows get the plan that is fastest at their length. The allocator's limits follow from the budget: over the limit
it waits for running work instead of growing, and its cache never takes what a long row needs.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

from segtrain.engine import groups
from segtrain.engine.backward import Backward, SegmentedBackward
from segtrain.engine.layouts import Layout
from segtrain.engine.ragged import batch_length, up
from segtrain.errors import RunFailed, counted
from segtrain.event import Event, Memory, Notice, PlanChosen
from segtrain.memory import anatomy, choices, rows
from segtrain.memory.anatomy import Subject
from segtrain.memory.backends import Backend
from segtrain.memory.choose import Chooser, Option, longest
from segtrain.memory.corrections import Corrections, keep, kept, kind
from segtrain.memory.meter import GIB, Meter, frozen_bytes, set_limits
from segtrain.memory.plan import Plan
from segtrain.memory.rows import RowShape
from segtrain.models.tokenwise import FORWARD
from segtrain.run import streaming
from segtrain.run.budget import budget_of, own_backend
from segtrain.run.session import Session

BUCKETS = 8  # lengths are rounded up to an eighth of a power of two, so that plans (and traces) are few
WAITING_BYTES, WAITING_SHARE = 320 << 20, 0.15  # at most: what is allocated on top of a limit, in a tight plan
CACHE_BYTES = 64 << 20  # freed memory that is kept for use again although the plan needs less than that
QUIET_BYTES = 100 << 20  # below it nobody asks where memory goes
# Rows together: a pass costs as much as so many tokens more than it has (little on a CPU), and
# above so many no device gets faster.
PASS_TOKENS = {"cpu": 0, "cuda": 512, "metal": 256}
FULL_TOKENS = {"cpu": 1024, "cuda": 8192, "metal": 4096}
CREEP_STEPS, CREEP_SHARE, CREEP_BYTES = 20, 0.01, 16 << 20


class Reads(Protocol):
    """What `after_step` needs of a meter."""

    def memory(self) -> Memory: ...


@dataclass
class Watch:
    """Predicted against measured: after the first step, and at each longest row so far."""

    predicted: int = 0
    tokens: int = 0
    longest: int = 0
    highest: Option | None = None

    def note(self, peak: int, tokens: int, option: Option | None = None) -> None:
        """Count one row of the step at hand: its predicted peak in bytes, its length, and the plan it runs by."""
        if peak > self.predicted:
            self.highest = option
        self.predicted, self.tokens = max(self.predicted, peak), max(self.tokens, tokens)

    def report(self, measured_gib: float) -> Notice | None:
        predicted, tokens = self.predicted / GIB, self.tokens
        self.predicted = self.tokens = 0
        if tokens <= self.longest or not predicted:
            return None
        self.longest = tokens
        if max(predicted, measured_gib) < QUIET_BYTES / GIB:
            return None
        error = measured_gib / predicted - 1
        figures = f"predicted {_gib(predicted)}, measured {_gib(measured_gib)} ({error:+.0%})"
        return Notice(f"memory at {counted(tokens, 'token')}: {figures}", "warning" if error > 0.15 else "info")


class Creep:
    """Active memory after each step; a rise that never falls back over `CREEP_STEPS` steps is a leak."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=CREEP_STEPS)

    def check(self, active_gib: float) -> Notice | None:
        """A warning once a whole window only rose; the next one needs a new window."""
        self._seen.append(active_gib)
        if len(self._seen) < CREEP_STEPS:
            return None
        seen, quarter = list(self._seen), CREEP_STEPS // 4
        rise = min(seen[-quarter:]) - max(seen[:quarter])
        if rise <= max(CREEP_SHARE * seen[0], CREEP_BYTES / GIB):
            return None
        self._seen.clear()
        return Notice(
            f"memory creeps: {seen[0]:.3f} GiB in use {CREEP_STEPS} steps ago, {seen[-1]:.3f} GiB now "
            f"({1024 * (seen[-1] - seen[0]) / (CREEP_STEPS - 1):.1f} MiB a step); the run would outgrow its budget",
            "warning",
        )


LONG_KERNEL = 8192  # tokens: products over more are cut on Metal


class Planner:
    """Chooses plans and hands out the backward passes that run them."""

    def __init__(self, session: Session, meter: Meter, backend: Backend | None = None, sharing: int = 1):
        """`sharing`: ranks of this host, which share its memory unless each has a GPU of its own."""
        self.session, self.meter = session, meter
        self.backend = backend or own_backend()
        engine = session.recipe.engine
        self.budget = budget_of(session.recipe, self.backend, sharing)
        self.reads = streaming.Watch(session.loaded.weights)
        self.chooser = _chooser(session, self.backend)
        self.watch, self.creep = Watch(), Creep()
        self.notices: list[Notice] = []
        if sharing > 1 and not engine.budget_bytes and self.backend.name != "cuda":
            text = f"{sharing} ranks share this machine's memory: each plans for {_gib(self.budget / GIB)}"
            self.notices.append(Notice(text))
        self._held = 0
        self._options: dict[RowShape, Option] = {}
        self._fits: dict[RowShape, bool] = {}
        self._backwards: dict[Plan, Backward] = {}
        self.prompt_share = choices.PROMPT_SHARE
        self.corrections = Corrections()
        self._clock = _Clock()

    def go_by(self, corrections: Corrections, *, resumed: bool) -> None:
        """Plan by these, and add to them; where nothing is resumed, by what earlier runs measured too."""
        if not resumed:
            found = kept(self.chooser.estimator.model, self.backend.name)
            corrections.ratios, corrections.rates = found.ratios, found.rates
        self.corrections, self.watch.longest = corrections, corrections.longest
        self._replan()

    def _replan(self) -> None:
        self.chooser = self.chooser.corrected(self.corrections)
        self._options.clear()
        self._fits.clear()

    def announce(self, counts: Mapping[str, Any]) -> Iterator[Event]:
        """The plan of the longest row that the data have. Raises RunFailed where none fits."""
        limit = self.session.recipe.data.max_seq_length
        length = min(limit, max(int(counts.get("longest") or limit), int(counts.get("valid_longest") or 0)))
        if counts.get("prompt_share"):
            self.prompt_share = min(0.99, counts["prompt_share"])
        together = self._together(length)
        group = self._group(together, length)
        joined, option = self._joined(group, -(-self.session.recipe.train.grad_accumulation_steps // together))
        option = option or self._option(group)
        self._hold(option.plan)
        about = {"row_tokens": length, "rows_together": together * joined}
        yield PlanChosen({**option.plan.as_json(), "budget_gib": round(self.budget / GIB, 4), **about})
        if self.session.why_alone and self.session.recipe.engine.rows_together != 1:
            yield Notice(f"rows run one at a time: {self.session.why_alone}")
        yield from self._drain()

    def cut(self, lengths: Sequence[int]) -> list[int]:
        """How many rows run together, one group after the other, of rows with these lengths in ascending order."""
        asked = self.session.recipe.engine.rows_together
        if asked == 1:
            return [1] * len(lengths)
        cut = partial(groups.cut, filler=groups.RAGGED_FILLER, any_size=True) if self.session.ragged else groups.cut
        if asked == "auto":
            most = FULL_TOKENS[self.backend.name]
            sizes = cut(lengths, PASS_TOKENS[self.backend.name], len(lengths), self._tokens_together(lengths[-1], most))
        else:
            fewest, most = len(lengths) * lengths[-1], asked * lengths[-1]  # any filler is better than one more group
            sizes = cut(lengths, fewest, asked, self._tokens_together(lengths[-1], most))
        return list(self._within(lengths, sizes))

    def _within(self, lengths: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
        """`sizes` of groups, with those halved that no plan within the budget can run."""
        edges = accumulate(sizes, initial=0)
        for lo, hi in pairwise(edges):
            size = hi - lo
            while lo < hi:
                size = min(size, hi - lo)
                while size > 1 and not self._room_for(size, lengths[lo + size - 1]):
                    size = -(-size // 2)
                yield size
                lo += size

    def _room_for(self, count: int, length: int) -> bool:
        """Whether so many rows of up to `length` tokens can run together."""
        row = _bucketed(self._group(count, length))
        if row not in self._fits:
            self._fits[row] = self.chooser.fits(row, self.budget)
        return self._fits[row]

    def _group(self, count: int, length: int) -> RowShape:
        """The shape of so many rows of `length` tokens together."""
        row = self._row(max(2, length))
        if count == 1:
            return row
        if not self.session.ragged:
            return rows.together(row, count)
        sequences = count * (len(row.branches) or len(row.streams))
        longest_one = max(row.streams) - sum(row.branches[1:])
        apart = 1 << (sequences - 1).bit_length(), batch_length(longest_one, self.session.align)
        return rows.in_one_stream(row, count, up(count * row.tokens), apart)

    def _together(self, length: int) -> int:
        """How many rows as long as the longest one run together."""
        rows = self.session.recipe.train.grad_accumulation_steps
        return 1 if self.session.why_alone else max(self.cut([length] * rows))

    def _tokens_together(self, length: int, most: int) -> int:
        """Tokens of a group of rows of up to `length` tokens that fits the budget, `most` at most."""
        return length * longest(lambda count: self._room_for(count, length), max(1, most // length), floor=1)

    def backward(self, layout: Layout) -> Backward:
        """How to run this row. Raises RunFailed where no plan for it fits the budget."""
        return self._running(self.plan_for(layout), rows.of_layout(layout), [layout])

    def joined(self, layouts: Sequence[Layout]) -> SegmentedBackward | None:
        """How to run these so that all go through a segment before the next one; None where that doesn't fit."""
        row, option = self._through_segments([rows.of_layout(layout) for layout in layouts])
        running: Any = option and self._running(option.plan, row, layouts)
        return running  # never full backward: it doesn't stream

    def _through_segments(self, passes: Sequence[RowShape]) -> tuple[RowShape, Option | None]:
        """The shape of passes that all go through a segment before the next one, and by which plan, if any fits."""
        row = rows.joined(passes)
        found = self.chooser.fastest(row, self.budget)
        return row, in_short_kernels(found, row, self.backend) if found else None

    def _joined(self, group: RowShape, passes: int) -> tuple[int, Option | None]:
        """Where weights are streamed: how many of an update's passes, all like this one, go through a segment before
        the next one is read, and by which plan."""
        while self.session.loaded.weights is not None and passes > 1:
            _, option = self._through_segments([group] * passes)
            if option:
                return passes, option
            passes = -(-passes // 2)
        return 1, None

    def _running(self, plan: Plan, row: RowShape, layouts: Sequence[Layout]) -> Backward:
        self._hold(plan)
        option = self.chooser.option(row, replace(plan, peak_bytes=None))
        self.watch.note(option.peak, max(row.streams), option)
        self.meter.start_pass(sum(x.tokens for x in layouts), sum(x.padding for x in layouts))
        self._clock.row(plan, self.chooser.timer.cost(row, plan))
        if plan not in self._backwards:
            self._backwards[plan] = self.session.backward(plan, self.meter)
        return self._backwards[plan]

    def plan_for(self, layout: Layout) -> Plan:
        """The plan of this row. Raises RunFailed where none fits the budget."""
        row = rows.of_layout(layout)
        return self._option(_bucketed(row), exact=row).plan

    def fitting(self, limit: int) -> int:
        """Tokens of the longest row up to `limit` for which there is a plan (of pairs like the longest known one)."""
        chooser = self.chooser.relaxed()
        return longest(lambda length: chooser.fits(self._row(length), self.budget), limit)

    def _hold(self, plan: Plan) -> None:
        """Over a plan's predicted peak allocations wait for running work: evaluation runs ahead no further.

        The limit counts the allocator's cache too, so the cache needs none of its own below it. The longest row's
        limit stays for shorter ones, whose plans may be larger.
        """
        fixed, peak = self.chooser.estimator.fixed, min(self.budget, plan.peak_bytes or self.budget)
        if peak > self._held:
            self._held = peak
            above = max(0, peak - fixed)
            waiting = min(WAITING_BYTES, WAITING_SHARE * above) if plan.tight else 0
            set_limits(round(self.meter.held + fixed + above - waiting), max(above, CACHE_BYTES))

    def skip(self) -> None:
        """Forget the rows since the last step: they were evaluated only."""
        self.watch = Watch(longest=self.watch.longest)
        self._clock.costs = {}

    def after_step(self, step: int, meter: Reads) -> Iterator[Event]:
        memory, highest = meter.memory(), self.watch.highest
        self.watch.highest = None
        known = dict(self.corrections.rates)
        if memory.peak_gib >= QUIET_BYTES / GIB:
            self.corrections.rates |= self._clock.rates(known)
        reported = self.watch.report(memory.peak_gib)
        self.corrections.longest = self.watch.longest
        changed = bool(reported and highest) and self._learn(highest, memory.peak_gib)  # type: ignore[arg-type]
        if changed or self.corrections.rates != known:
            keep(self.chooser.estimator.model, self.backend.name, self.corrections)
        for notice in (reported, self.creep.check(memory.active_gib)):
            if notice is not None:
                yield notice
        yield from self.reads.after_step()
        yield from self._drain()

    def _learn(self, option: Option, measured_gib: float) -> bool:
        """Correct the estimate by a step's peak; longer rows get their plans by it. Whether that changes anything."""
        fixed, plan = self.chooser.estimator.fixed, option.plan
        changed = self.corrections.learn(plan, option.estimated - fixed, measured_gib * GIB - fixed)
        if changed:
            self._replan()
            ratio = self.corrections.ratio(plan)
            self.notices.append(Notice(f"plans count {ratio:.2f} of what is estimated above the model from now on"))
        return changed

    def _drain(self) -> Iterator[Event]:
        yield from self.notices
        self.notices.clear()

    def _option(self, row: RowShape, *, exact: RowShape | None = None) -> Option:
        """The option for rows up to `row`; where that doesn't fit, for the `exact` one. Raises RunFailed."""
        if row not in self._options:
            found = self.chooser.fastest(row, self.budget) or self._smaller(row)
            if found is None and exact is not None and exact != row:
                return self._option(exact)
            found = found or self._despite_corrections(row)
            if found is None:
                raise RunFailed(self._refusal(row))
            self._options[row] = in_short_kernels(found, row, self.backend)
        return self._options[row]

    def _smaller(self, row: RowShape) -> Option | None:
        """A plan for one row that fits although the recipe's segment size doesn't."""
        found = self.chooser.relaxed().fastest(row, self.budget)
        if found:
            self.notices.append(
                Notice(
                    f"rows of {max(row.streams):,} tokens don't fit as the recipe's engine says; they run with "
                    f"segment_size {found.plan.segment_size}, head_chunk {found.plan.head_chunk} and keep_layers "
                    f"{found.plan.keep}"
                )
            )
        return found

    def _despite_corrections(self, row: RowShape) -> Option | None:
        """The leanest plan for a row that fitted by the estimate alone: a run that was accepted goes on."""
        chooser = self.chooser.relaxed()
        if not self.corrections.longest or not chooser.corrected(Corrections()).fastest(row, self.budget):
            return None
        found = chooser.leanest(row)
        text = f"rows of {max(row.streams):,} tokens may need {_gib(found.peak / GIB)}, by what shorter ones took"
        self.notices.append(Notice(f"{text}: more than the budget of {_gib(self.budget / GIB)}", "warning"))
        return found

    def _refusal(self, row: RowShape) -> str:
        need = self.chooser.relaxed().least(row)
        far = self.fitting(max(row.streams))
        fix = f"set data.max_seq_length to {far}, or " if far else ""
        first = "".join(f"{text}; or " for text in choices.remedies(self.chooser))
        return (
            f"a row of {max(row.streams):,} tokens needs {_gib(need / GIB)} and the budget is "
            f"{_gib(self.budget / GIB)}; in this order: {first}{fix}raise engine.memory_budget to "
            f"{math.ceil(need / 1e6)}MB"
        )

    def _row(self, length: int) -> RowShape:
        row = choices.row_of(
            length,
            preference=self.session.objective.pairs,
            shared=self.session.shares_prefix,
            prompt_share=self.prompt_share,
            score_prompt=self.session.objective.scores_prompt,
        )
        return choices.aligned(row, self.backend)


class _Clock:
    """Seconds for each operation of a step, of early steps whose rows all ran by one kind of plan."""

    CHANGE = 0.1
    STEPS = range(2, 5)  # the first one compiles kernels; later ones needn't be measured

    def __init__(self) -> None:
        self.begun, self.steps = 0.0, 0
        self.costs: dict[str, float] = {}

    def row(self, plan: Plan, cost: float) -> None:
        if not self.costs:
            self.begun = time.perf_counter()
        self.costs[kind(plan)] = self.costs.get(kind(plan), 0.0) + cost

    def rates(self, known: Mapping[str, float]) -> dict[str, float]:
        """At the end of a step: a rate that is new or has changed."""
        costs, seconds = self.costs, time.perf_counter() - self.begun
        self.costs, self.steps = {}, self.steps + 1
        if len(costs) != 1 or self.steps not in self.STEPS:
            return {}
        ((name, cost),) = costs.items()
        rate, before = seconds / cost, known.get(name, 0.0)
        return {name: rate} if abs(rate - before) > self.CHANGE * rate else {}


def in_short_kernels(option: Option, row: RowShape, backend: Backend) -> Option:
    """`option` with the MLP in chunks where one of its products over all tokens would keep a Mac's display waiting.

    The system's watchdog ends a process whose kernels take seconds. 8,192 tokens of an 8B model's MLP are 1 TFLOP, and
    the slowest Macs do 2 to 3 a second. Chunks take less memory than planned, not more.
    """
    plan = option.plan
    if backend.name != "metal" or plan.backward == "full" or max(row.streams) <= LONG_KERNEL:
        return option
    rows = LONG_KERNEL // FORWARD  # the forward pass takes chunks so many times as long
    return replace(option, plan=replace(plan, mlp_rows=min(rows, plan.mlp_rows or rows)))


def _chooser(session: Session, backend: Backend) -> Chooser:
    """The estimate for the model that is loaded: its weights are in memory, so their size is known."""
    subject = Subject(session.loaded.model, session.stack, session.lora)
    resident, streamed = frozen_bytes(session.loaded.model), session.loaded.weights is not None
    model = anatomy.read(subject, backend.name, session.loaded.config)
    return choices.chooser(model, backend, session.recipe, resident=resident, streamed=streamed)


def _bucketed(row: RowShape) -> RowShape:
    """The row with all its numbers rounded up, to at most an eighth more; ragged streams are few as they are."""
    batched = [not extent.folded and extent.sequences > 1 for extent in row.extents]
    sequences = tuple(
        (count, _up(length)) if own else (count, length)
        for own, (count, length) in zip(batched, row.sequences, strict=False)
    )
    streams = tuple(
        x.sequences * _up(x.length) if own else x.tokens if x.folded else _up(x.tokens)
        for own, x in zip(batched, row.extents, strict=True)
    )
    scored = tuple(tuple(map(_up, spans)) for spans in row.scored)
    return RowShape(streams, scored, tuple(map(_up, row.branches)), sequences)


def _up(count: int) -> int:
    unit = max(1, (1 << max(0, count - 1).bit_length()) // (2 * BUCKETS))
    return -(-count // unit) * unit


def _gib(amount: float) -> str:
    if amount * 1024 < 1:
        return f"{1024 * 1024 * amount:.0f} KiB"
    return f"{amount:.2f} GiB" if amount >= 1 else f"{1024 * amount:.0f} MiB"
