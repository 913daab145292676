"""The planner on a real tiny model: plans announced, held, refused; creep by a fake meter."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny

from segtrain.engine import groups, objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward
from segtrain.engine.layouts import Layout
from segtrain.errors import RunFailed
from segtrain.event import Memory, Notice, PlanChosen
from segtrain.lora import layers as lora_module
from segtrain.memory import rows
from segtrain.memory.backends import BACKENDS
from segtrain.memory.corrections import Corrections
from segtrain.memory.meter import Meter
from segtrain.memory.plan import Plan
from segtrain.memory.shapes import Line
from segtrain.models.load import Loaded
from segtrain.models.stack import LayerStack
from segtrain.recipe.schema import Recipe
from segtrain.run import planning
from segtrain.run.planning import CREEP_STEPS, Creep, Planner, Watch
from segtrain.run.session import Session
from segtrain.run.state import RunState

CONFIG = {
    **tiny.FAMILIES["llama"][1],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    """The allocator's limits are the process's: put them back."""
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


def session(**engine: Any) -> Session:
    model = tiny.build_module("llama", CONFIG)
    recipe = Recipe.from_mapping(
        {"model": "m", "data": {"train": "t.jsonl", "max_seq_length": 2048}, "engine": engine, "lora": {"rank": 4}}
    )
    lora = lora_module.attach(model, rank=4, scale=2.0)
    loaded = Loaded(model, None, CONFIG, None)  # type: ignore[arg-type]
    return Session(recipe, loaded, lora, LayerStack(model), objectives.sft, False)


def planner(**engine: Any) -> Planner:
    return Planner(session(**engine), Meter(), BACKENDS["cpu"])


def chosen(mine: Planner, counts: dict[str, Any]) -> dict[str, Any]:
    (event,) = [event for event in mine.announce(counts) if isinstance(event, PlanChosen)]
    return dict(event.plan)


def test_the_plan_is_for_the_longest_row_of_the_data() -> None:
    mine = planner(memory_budget="40MB")
    assert chosen(mine, {"longest": 1900})["backward"] == "segmented"
    assert chosen(mine, {"longest": 40})["backward"] == "full"
    assert chosen(mine, {})["row_tokens"] == 2048
    assert chosen(mine, {"longest": 9999})["row_tokens"] == 2048


def test_a_pairs_plan_counts_its_own_prompt() -> None:
    """The prompt is in the one stream once, both responses are: the shorter the prompt, the longer the stream."""
    peaks = []
    for share in (0.9, 0.1):
        mine = planner(backward="full")
        mine.session.objective, mine.session.shares_prefix = objectives.orpo(), True
        peaks.append(chosen(mine, {"longest": 1900, "prompt_share": share})["peak_gib"])
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("objective", "spans"), [(objectives.orpo(), 3), (objectives.dpo(), 2)])
def test_a_pairs_plan_scores_its_prompt_where_the_objective_does(
    shared: bool, objective: objectives.Objective, spans: int
) -> None:
    mine = planner()
    mine.session.objective, mine.session.shares_prefix = objective, shared
    assert sum(map(len, mine._row(1900).scored)) == spans


@pytest.mark.parametrize("above", [100 << 20, 10 << 30])
def test_a_tight_plans_limit_leaves_room_for_what_is_allocated_on_top(
    monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    """The allocator's limit is checked before an allocation, so a peak is a limit and what came on top of it."""
    limits: list[int] = []
    monkeypatch.setattr(planning, "set_limits", lambda memory, cache: limits.append(memory))
    for tight in (False, True):
        mine = planner(memory_budget="20GB")
        peak = mine.chooser.estimator.fixed + above
        mine._hold(Plan("segmented", tight=tight, peak_bytes=peak))
        assert limits[-1] <= peak
    plain, low = limits
    assert plain - above == mine.chooser.estimator.fixed
    assert plain - low == min(planning.WAITING_BYTES, round(planning.WAITING_SHARE * above))


def test_each_row_gets_the_plan_of_its_length() -> None:
    mine = planner(memory_budget="40MB")
    assert isinstance(mine.backward(tiny.row(30)), FullBackward)
    long = mine.backward(tiny.row(1900))
    assert isinstance(long, SegmentedBackward)
    assert long is mine.backward(tiny.row(1890))  # lengths share plans
    assert isinstance(mine.backward(tiny.row(30)), FullBackward)


def test_what_runs_is_what_was_chosen() -> None:
    mine = planner(backward="segmented", segment_size=2, head_chunk=33, keep_layers=1, lookahead=1)
    backward = mine.backward(tiny.row(50))
    assert isinstance(backward, SegmentedBackward)
    assert (backward.head_chunk, backward.lookahead) == (33, 1)
    assert [(s.lo, s.hi) for group in backward.groups for s in group] == [(0, 2), (2, 4), (4, 5)]
    assert [(s.lo, s.hi) for s in backward.kept] == [(4, 5)]


def test_dropout_is_never_compiled() -> None:
    mine = session()
    plain = Planner(mine, Meter(), BACKENDS["cuda"])
    assert plain.backward(tiny.row(128)).compiled  # type: ignore[attr-defined]
    values = mine.recipe.dump() | {"lora": {"rank": 4, "dropout": 0.1}}
    mine.recipe = Recipe.from_mapping(values)
    assert not Planner(mine, Meter(), BACKENDS["cuda"]).backward(tiny.row(128)).compiled  # type: ignore[attr-defined]


def test_a_row_that_does_not_fit_as_the_recipe_says_runs_in_smaller_segments_and_is_announced() -> None:
    mine = planner(backward="segmented", segment_size=5, memory_budget="25MB")
    backward = mine.backward(tiny.row(1500))
    assert isinstance(backward, SegmentedBackward)
    assert max(s.hi - s.lo for group in backward.groups for s in group) < 5
    notices = list(mine.after_step(1, Readings([1.0])))
    assert any("don't fit as the recipe's engine says" in n.text for n in notices if isinstance(n, Notice))
    assert not any("don't fit" in n.text for n in mine.after_step(2, Readings([1.0])) if isinstance(n, Notice))


def test_nothing_fits_is_refused_with_lengths_and_budgets_that_would_do() -> None:
    mine = planner(memory_budget="9MB")
    with pytest.raises(RunFailed, match=r"a row of 1,9\d\d tokens needs .* and the budget is 9 MiB") as refused:
        chosen(mine, {"longest": 1950})
    match = re.search(r"max_seq_length to (\d+), or raise engine.memory_budget to (\d+)MB", str(refused.value))
    assert match is not None
    assert chosen(planner(memory_budget="9MB"), {"longest": int(match[1])})
    assert chosen(planner(memory_budget=f"{match[2]}MB"), {"longest": 1950})
    with pytest.raises(RunFailed):
        mine.backward(tiny.row(1950))


@pytest.mark.parametrize("above", [20 << 20, 3 << 30])
def test_the_cache_is_bounded_by_the_plan_whatever_the_budget(monkeypatch: pytest.MonkeyPatch, above: int) -> None:
    limits: list[int] = []
    monkeypatch.setattr(planning, "set_limits", lambda memory, cache: limits.append(cache))
    mine = planner(memory_budget="100GB")
    mine._hold(Plan("segmented", peak_bytes=mine.chooser.estimator.fixed + above))
    assert limits == [max(above, planning.CACHE_BYTES)]


def test_nothing_is_said_of_lengths_that_no_row_has() -> None:
    """`max_seq_length` may be far above the longest row."""
    mine = planner(backward="segmented", segment_size=5, memory_budget="25MB")
    events = list(mine.announce({"longest": 18}))
    assert not [event for event in events if isinstance(event, Notice)]


def test_validation_rows_count_for_the_plan() -> None:
    assert chosen(planner(), {"longest": 40, "valid_longest": 900})["row_tokens"] == 900


def test_what_fits_is_what_a_refusal_names() -> None:
    mine = planner(memory_budget="9MB")
    with pytest.raises(RunFailed) as refused:
        chosen(mine, {"longest": 1950})
    assert f"max_seq_length to {mine.fitting(1950)}," in str(refused.value)
    assert planner(memory_budget="1GB").fitting(300) == 300


def test_limits_follow_from_the_plan() -> None:
    """The longest row's predicted peak, on any backend but the CPU less the allocation that waits; never the budget."""
    mine = planner(memory_budget="300MB")
    plan = chosen(mine, {"longest": 1000})
    limit = mx.set_memory_limit(1 << 40)
    assert limit == pytest.approx(plan["peak_gib"] * 2**30, rel=0.01)
    assert limit < 300 * 10**6
    assert limit - mine.chooser.estimator.fixed < planning.CACHE_BYTES
    assert mx.set_cache_limit(1 << 40) == planning.CACHE_BYTES  # as the plan needs less
    mine.backward(tiny.row(100))
    assert mx.set_memory_limit(1 << 40) == 1 << 40  # a shorter row leaves the limit
    mine.backward(tiny.row(1500))
    assert limit < mx.set_memory_limit(1 << 40) <= 300 * 10**6


def test_a_model_of_no_size_is_not_reported() -> None:
    watch = Watch()
    watch.note(planning.QUIET_BYTES // 2, 10)
    assert watch.report(0.09) is None
    watch.note(planning.QUIET_BYTES // 2, 11)
    assert watch.report(0.5) is not None  # what was predicted small and isn't


@pytest.mark.usefixtures("loud")
def test_a_step_is_reported_once_and_again_at_a_longer_row() -> None:
    mine = planner()

    def after(row: Layout) -> list[str]:
        mine.meter.start_step(1)
        mine.backward(row).step(row)
        told = [event.text for event in mine.after_step(1, mine.meter) if isinstance(event, Notice)]
        return [text for text in told if text.startswith("memory at")]

    first, same, longer = after(tiny.row(300)), after(tiny.row(300)), after(tiny.row(600))
    assert len(first) == len(longer) == 1
    assert same == []
    assert re.fullmatch(r"memory at 299 tokens: predicted \d+ MiB, measured \d+ MiB \([+-]\d+%\)", first[0])


def test_far_above_the_prediction_is_a_warning() -> None:
    watch = Watch()
    watch.note(1 << 30, 10)
    assert watch.report(1.5).level == "warning"  # type: ignore[union-attr]
    watch.note(1 << 30, 11)
    assert watch.report(1.1).level == "info"  # type: ignore[union-attr]


class Readings:
    """A fake meter: one reading of active memory after another."""

    def __init__(self, active: list[float]):
        self.active = iter(active)

    def memory(self) -> Memory:
        return Memory(2.0, next(self.active), 0.0, 3.0)


def creeping(active: list[float]) -> list[Notice]:
    creep, meter = Creep(), Readings(active)
    return [notice for _ in active if (notice := creep.check(meter.memory().active_gib))]


def test_creeping_memory_is_a_warning_with_the_numbers() -> None:
    (notice,) = creeping([1 + 0.01 * i for i in range(CREEP_STEPS)])
    assert notice.level == "warning"
    assert "1.000 GiB in use 20 steps ago, 1.190 GiB now (10.2 MiB a step)" in notice.text
    assert len(creeping([1 + 0.01 * i for i in range(2 * CREEP_STEPS)])) == 2


@pytest.mark.parametrize(
    "active",
    [
        [1.0] * 60,
        [1.0, 3.0] * 30,  # rows of two lengths
        [1 + 0.0001 * i for i in range(60)],  # less than it takes
        [1.0] * 3 + [2.0] * 3 + [1.0] * 54,
        [1 + 0.01 * i for i in range(CREEP_STEPS - 1)],
    ],
)
def test_memory_that_does_not_creep_is_no_warning(active: list[float]) -> None:
    assert creeping(active) == []


def learnt(mine: Planner, row: Layout, measured_gib: float) -> list[str]:
    """What is told after a step on `row` that took so much."""
    mine.backward(row)
    return [event.text for event in mine.after_step(1, Peaks(measured_gib)) if isinstance(event, Notice)]


class Peaks:
    """A fake meter: the same peak at each step."""

    def __init__(self, gib: float):
        self.gib = gib

    def memory(self) -> Memory:
        return Memory(self.gib, 0.0, 0.0, 0.0)


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planning, "QUIET_BYTES", 0)


def above(mine: Planner, row: Layout) -> float:
    """What is estimated for `row` above model and adapter, GiB."""
    return (mine.chooser.estimator.peak(rows.of_layout(row), mine.plan_for(row)).bytes - fixed(mine)) / 2**30


def fixed(mine: Planner) -> int:
    return mine.chooser.estimator.fixed


def bytes_for(row: Layout, room: float = 1.0) -> str:
    """A budget in which the leanest plan of `row` just fits, or so many times what it takes above the model."""
    mine = planner(backward="segmented")
    need = mine.chooser.leanest(planning._bucketed(rows.of_layout(row))).peak - fixed(mine)
    return f"{(fixed(mine) + room * need) // 1000 + 20:.0f}KB"


@pytest.mark.usefixtures("loud")
def test_a_step_that_took_more_makes_a_longer_row_s_plan_leaner() -> None:
    short, long = tiny.row(400), tiny.row(1200)
    mine, twin = (planner(memory_budget=bytes_for(long, 1.6), backward="segmented") for _ in range(2))
    before = twin.plan_for(long)
    told = learnt(mine, short, fixed(mine) / 2**30 + 1.499 * above(mine, short))
    assert any("plans count 1.50" in text for text in told)
    after = mine.plan_for(long)
    shape = rows.of_layout(long)
    assert mine.chooser.estimator.peak(shape, after).bytes < mine.chooser.estimator.peak(shape, before).bytes
    assert after.peak_bytes
    assert after.peak_bytes <= mine.budget


@pytest.mark.usefixtures("loud")
def test_a_step_that_took_far_less_takes_the_faster_plan() -> None:
    short, long = tiny.row(400), tiny.row(1200)
    mine = planner(memory_budget=bytes_for(long), backward="segmented")
    before = mine.chooser.timer.cost(rows.of_layout(long), mine.plan_for(long))
    learnt(mine, short, fixed(mine) / 2**30 + 0.5 * above(mine, short))
    assert mine.chooser.timer.cost(rows.of_layout(long), mine.plan_for(long)) < before


@pytest.mark.usefixtures("loud")
def test_a_row_no_longer_than_the_last_one_teaches_nothing() -> None:
    mine = planner(backward="segmented")
    low, high = fixed(mine) / 2**30, above(mine, tiny.row(400))
    learnt(mine, tiny.row(400), low + 0.999 * high)
    assert not learnt(mine, tiny.row(400), low + 2 * high)
    assert mine.corrections.ratios == {"segmented": 1.0}


@pytest.mark.usefixtures("loud")
def test_the_next_run_knows_and_a_resumed_one_goes_by_its_checkpoint() -> None:
    first = planner(backward="segmented")
    learnt(first, tiny.row(400), fixed(first) / 2**30 + 1.299 * above(first, tiny.row(400)))
    second = planner(backward="segmented")
    second.go_by(Corrections(), resumed=False)
    assert second.corrections.ratios == {"segmented": 1.3}
    assert above(second, tiny.row(800)) == pytest.approx(above(first, tiny.row(800)))
    resumed = planner(backward="segmented")
    state = RunState(memory=Corrections({"segmented": 0.9}, 300))
    resumed.go_by(RunState.from_json(json.loads(json.dumps(state.as_json()))).memory, resumed=True)
    assert resumed.corrections == Corrections({"segmented": 0.9}, 300)
    assert resumed.watch.longest == 300


@pytest.mark.usefixtures("loud")
def test_an_accepted_run_goes_on_where_the_corrected_estimate_no_longer_fits() -> None:
    mine = planner(memory_budget=bytes_for(tiny.row(1200)), backward="segmented")
    longest = mine.fitting(1900)
    learnt(mine, tiny.row(50), fixed(mine) / 2**30 + 3 * above(mine, tiny.row(50)))
    assert mine.fitting(1900) < longest
    mine.backward(tiny.row(longest - 200))
    assert any("may need" in notice.text for notice in mine.notices)


@pytest.mark.usefixtures("loud")
def test_rows_that_were_only_evaluated_teach_nothing() -> None:
    mine = planner(backward="segmented")
    mine.backward(tiny.row(900))
    mine.skip()
    told = list(mine.after_step(2, Peaks(1.0)))
    assert not told
    assert mine.corrections == Corrections()


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_together_are_counted_as_they_run(ragged: bool) -> None:
    """The planner's shape of a group against that of the group's layout."""
    mine = planner()
    mine.session = replace(mine.session, ragged=ragged)
    joined = (groups.ragged if ragged else groups.together)([tiny.row(50) for _ in range(3)])
    shape, planned = rows.of_layout(joined), mine._group(3, 50)
    assert (shape.streams, shape.sequences) == (planned.streams, planned.sequences)
    assert sum(shape.scored[0]) <= sum(planned.scored[0])


def test_of_rows_together_each_sees_its_own_tokens_only() -> None:
    """Attention's time grows with the square of a row's length, not of the group's."""
    mine = planner()
    timer, plan = mine.chooser.timer, Plan("full")
    alone, apart = rows.sft(1025), rows.together(rows.sft(129), 8)
    extents = alone.extents[0], apart.extents[0]
    assert alone.tokens == apart.tokens
    layer = mine.chooser.estimator.model.layers[0]
    assert timer._attention(layer, extents[0]) == 8 * timer._attention(layer, extents[1])
    assert timer.cost(apart, plan) < timer.cost(alone, plan)
    line = Line(0.0, 0.0, 1.0)
    assert line.at(1024, 128) == 1024 * 128


def test_groups_shrink_to_what_the_budget_holds() -> None:
    wide = planner(rows_together=8, backward="full")
    need = [wide.chooser.least(planning._bucketed(wide._group(count, 200))) for count in (1, 2, 4, 8)]
    assert need == sorted(set(need))
    for budget, expected in ((need[3], [8]), (need[2], [4, 4]), (need[1], [2] * 4), (need[0], [1] * 8)):
        mine = planner(rows_together=8, backward="full")
        mine.budget = budget
        assert mine.cut([200] * 8) == expected
