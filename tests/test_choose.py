"""The choice against an exhaustive search, its properties, and the time model against counts by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes_of import shapes_of

from segtrain.memory import backends, rows
from segtrain.memory.backends import BACKENDS, CUDA_BUFFERS, with_buffers
from segtrain.memory.choose import DEARER, SMALLER, Chooser, Settings, longest, sizes, sparing
from segtrain.memory.corrections import Corrections
from segtrain.memory.estimate import Estimator
from segtrain.memory.plan import Plan
from segtrain.memory.timing import OVERHEAD, Speed, Timer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def chooser(backend: Any = "cpu", speed: Speed | None = None, **fixed: Any) -> Chooser:
    model = shapes_of({**CONFIG, **fixed.pop("config", {})}, backend)
    estimator = Estimator(model, BACKENDS[backend])
    return Chooser(estimator, Timer(model, BACKENDS[backend], speed=speed), Settings(**fixed))


EQUAL = 0.0101  # times that differ by a hundredth of full backward's are equal: less memory wins


@given(st.integers(64, 8000), st.floats(0.3, 3.0))
@settings(deadline=None, max_examples=25)
def test_the_fastest_that_fits_is_the_fastest_that_fits(length: int, share: float) -> None:
    """`fastest` against a plain loop over every candidate."""
    mine, row = chooser("cuda"), rows.sft(length)
    budget = round(share * mine.leanest(row).peak)
    fitting = [x for x in (mine.option(row, plan) for plan in mine.plans(row)) if x.peak <= budget]
    found = mine.fastest(row, budget)
    chosen = sparing(fitting, budget, lambda x: x.relative_time, lambda x: x.peak)
    assert (found is None) == (chosen is None)
    if found and chosen:
        assert (round(found.relative_time, 2), found.peak) == (round(chosen.relative_time, 2), chosen.peak)
        assert found.peak <= budget
        fastest = min(x.relative_time for x in fitting)
        assert found.relative_time <= DEARER * (fastest + EQUAL)
        same = [x.peak for x in fitting if round(x.relative_time, 2) == round(found.relative_time, 2)]
        assert found.peak == min(same)
        if found.relative_time > fastest + EQUAL:
            assert found.peak <= SMALLER * max(x.peak for x in fitting if x.relative_time <= fastest + EQUAL)


def test_memory_is_estimated_only_where_a_plan_can_still_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """New lengths come all through a run: their search takes a few estimates, not one for each candidate."""
    mine, row = chooser("cuda"), rows.sft(1300)
    estimated = []
    peak = mine.estimator.peak
    monkeypatch.setattr(mine.estimator, "peak", lambda *given: estimated.append(given) or peak(*given))
    assert mine.fastest(row, 1 << 40)
    assert len(estimated) < len(list(mine.plans(row))) / 10


@given(st.integers(64, 4000), st.integers(20, 34))
@settings(deadline=None, max_examples=25)
def test_a_larger_budget_is_never_slower(length: int, power: int) -> None:
    mine, row = chooser("cuda"), rows.sft(length)
    small, large = mine.fastest(row, 1 << power), mine.fastest(row, 1 << (power + 1))
    if small:
        assert large is not None
        assert large.relative_time <= DEARER * (small.relative_time + EQUAL)


@pytest.mark.parametrize("share", [0.9, 1.0, 1.1])
def test_a_row_fits_where_the_leanest_candidate_does(share: float) -> None:
    mine, row = chooser(), rows.sft(2048)
    least = min(mine.option(row, plan).peak for plan in mine.plans(row, (1,)))
    assert mine.least(row) == mine.leanest(row).peak == least
    assert mine.fits(row, round(share * least)) == (share >= 1)


@pytest.mark.parametrize("keep", [0, 3])
def test_layers_of_one_kind_are_estimated_once(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's estimate for 40 layers takes no longer than for 4."""
    asked: list[range] = []
    original = Estimator._live
    monkeypatch.setattr(Estimator, "_live", lambda self, s, *a, **k: asked.append(s) or original(self, s, *a, **k))
    counts = []
    for layers in (4, 40):
        asked.clear()
        estimator = chooser(config={"num_hidden_layers": layers}).estimator
        estimator.peak(rows.sft(300), Plan("segmented", keep=keep))
        counts.append(len(asked))
    assert counts == [1 + bool(keep)] * 2


def test_a_slow_disk_counts_in_the_time_of_streamed_weights() -> None:
    row, plan = rows.sft(200), Plan("segmented")
    model = shapes_of(CONFIG)
    estimator, timer = Estimator(model, BACKENDS["cpu"], streamed=True), Timer(model, BACKENDS["cpu"])
    rates = Corrections(rates={"segmented": 1e-9})

    def timed(disk: float | None) -> Any:
        return Chooser(estimator, timer, corrections=rates, disk=disk).option(row, plan)

    unknown, fast = timed(None), timed(1e15)
    assert unknown.seconds == fast.seconds == pytest.approx(1e-9 * timer.cost(row, plan))
    slow = timed(fast.read / (10 * fast.seconds))  # ten times as long as the layers compute
    assert slow.seconds == pytest.approx(10 * fast.seconds)
    assert slow.relative_time == pytest.approx(10 * fast.relative_time)


def test_full_backward_where_it_fits_and_segments_where_it_does_not() -> None:
    mine, row = chooser(), rows.sft(2048)
    full = mine.option(row, next(mine.full(row)))
    assert mine.fastest(row, 4 * full.peak).plan.backward == "full"  # type: ignore[union-attr]
    assert mine.fastest(row, full.peak - 1).plan.backward == "segmented"  # type: ignore[union-attr]
    assert mine.fastest(row, mine.leanest(row).peak) is not None
    assert mine.fastest(row, 1 << 20) is None


def test_what_the_recipe_fixes_is_kept() -> None:
    mine, row = chooser(segment_size=3, head_chunk=77, keep=2, lookahead=1, backward="segmented"), rows.sft(500)
    found = [(x.segment_size, x.head_chunk, x.keep, x.lookahead) for x in mine.plans(row)]
    assert set(found) == {(3, 77, 2, 1)}
    assert {x.segment_size for x in mine.relaxed().plans(row)} != {3}
    assert {x.backward for x in chooser(backward="full").plans(row)} == {"full"}


def test_compiled_graphs_only_without_branches() -> None:
    mine = chooser(compiled=True)
    assert all(plan.compiled for plan in mine.plans(rows.sft(100)))
    assert not any(plan.compiled for plan in mine.plans(rows.shared(50, 20, 20)))


def test_dense_copies_are_taken_where_packed_products_are_slow() -> None:
    packed = {"quantization": {"bits": 4, "group_size": 64}}
    for slow, dense in ((3.0, True), (1.0, False)):
        mine = chooser(config=packed, speed=Speed(packed=slow), backward="segmented")
        assert mine.fastest(rows.sft(1000), 1 << 40).plan.dequantize is dense  # type: ignore[union-attr]


def test_time_is_counted_in_forwards_and_backwards() -> None:
    """Without attention, head and edges: full is 2 units, segmented 3 less the last product of each segment's last
    layer, which nothing needs again; half the boundaries add half a forward pass."""
    config = {**CONFIG, "vocab_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    timer = Timer(shapes_of(config), BACKENDS["cpu"], speed=Speed())
    row = rows.RowShape((10 * OVERHEAD,), ((1,),))

    def relative(**options: Any) -> float:
        return timer.relative(row, Plan("segmented", **{"segment_size": 8, **options}))

    layer = timer.model.layers[0]
    down = layer.linears[-1].active / layer.active
    assert layer.linears[-1].name == "down_proj"
    assert relative() == pytest.approx((3 - down / 8) / 2, rel=0.01)
    assert relative(segment_size=1, boundaries=4) == pytest.approx((3.5 - down) / 2, rel=0.02)
    assert relative(keep=4) == pytest.approx((2.5 - down / 16) / 2, rel=0.01)  # products alone count here
    assert relative(keep=8) == pytest.approx(1, rel=0.01)


@given(st.integers(0, 5000), st.integers(2, 5000))
def test_longest_finds_the_edge(edge: int, limit: int) -> None:
    """Against the edge itself: exact up to 1,024 tokens, else rounded down by less than 1 %."""
    found = longest(lambda length: length <= edge, limit)
    if edge < 2:
        assert found == 0
    elif limit <= edge:
        assert found == limit
    else:
        assert found <= edge
        assert edge - found <= max(1 if edge <= 256 else edge / 100 + 4, 128 + edge / 128 if found >= 1024 else 0)


def test_sizes_are_powers_of_two_and_all() -> None:
    assert sizes(1) == [1]
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(36) == [1, 2, 4, 8, 16, 32, 36]


@pytest.mark.parametrize("length", [128, 512, 1024])
def test_full_backward_is_chosen_on_cuda_where_it_fits(length: int) -> None:
    """An H200 took 0.055 s for full backward of 512 tokens, 0.18 s for kept segments of 1,024 (benchmarks/results)."""
    mine, row = Chooser(*_eight_billion(), Settings(compiled=True)), rows.sft(length + 1)
    rich = mine.fastest(row, 120 << 30)
    assert rich
    assert rich.plan.backward == "full"
    lean = mine.fastest(row, rich.peak - 1)
    assert lean
    assert lean.plan.backward == "segmented"


def test_half_the_memory_is_worth_a_few_per_cent_of_time() -> None:
    """An H200 took 0.71 s and 79 GiB for full backward of 8,192 tokens, 0.76 s and 34 GiB with kept layers."""
    mine, row = Chooser(*_eight_billion(), Settings(compiled=True)), rows.sft(8193)
    full, found = mine.option(row, next(mine.full(row))), mine.fastest(row, 120 << 30)
    assert found
    assert found.plan.keep
    assert full.relative_time < found.relative_time <= DEARER * full.relative_time
    assert found.peak < 0.6 * full.peak


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ([(1.0, 90), (1.11, 45)], (1.11, 45)),
        ([(1.0, 90), (1.11, 46)], (1.0, 90)),  # too little is saved
        ([(1.0, 90), (1.13, 10)], (1.0, 90)),  # too dear
        ([(1.0, 90), (1.001, 80)], (1.001, 80)),  # equal times
        ([(1.0, 90), (1.07, 45), (1.02, 44)], (1.02, 44)),
        ([], None),
    ],
)
def test_the_rule_of_sparing(options: list[tuple[float, int]], chosen: tuple[float, int] | None) -> None:
    assert sparing(options, 100, lambda x: x[0], lambda x: x[1]) == chosen


def test_a_plan_that_leaves_three_quarters_of_the_budget_is_not_spared() -> None:
    options = [(1.0, 90), (1.07, 60)]
    assert sparing(options, 400, lambda x: x[0], lambda x: x[1]) == (1.0, 90)


def _eight_billion() -> tuple[Estimator, Timer]:
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16"}  # fmt: skip
    model = shapes_of({**CONFIG, **config}, "cuda")
    return Estimator(model, BACKENDS["cuda"]), Timer(model, BACKENDS["cuda"])


@pytest.mark.parametrize(
    ("name", "longest", "wanted"),
    [
        ("cuda", backends.SHORT_ROWS + 1, backends.CUDA_BUFFERS),
        ("cuda", backends.SHORT_ROWS, {}),
        ("cpu", 8192, {}),
        ("metal", 8192, {}),
    ],
)
def test_small_command_buffers_are_for_long_rows_on_cuda(
    monkeypatch: pytest.MonkeyPatch, name: str, longest: int, wanted: dict[str, str]
) -> None:
    monkeypatch.setattr(backends, "_here", lambda: backends.BACKENDS[name])
    environment: dict[str, str] = {}
    backends.set_buffers(environment, longest)
    assert environment == wanted


def test_command_buffers_that_the_user_chose_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_here", lambda: backends.BACKENDS["cuda"])
    chosen = {"MLX_MAX_OPS_PER_BUFFER": "50"}
    backends.set_buffers(chosen, 8192)
    assert chosen["MLX_MAX_OPS_PER_BUFFER"] == "50"


def test_full_backward_never_counts_on_dense_copies() -> None:
    """It multiplies by packed weights whatever the plan says, so a plan for it must not say otherwise."""
    mine, row = chooser("cuda", config={"quantization": {"bits": 4, "group_size": 64}}), rows.sft(512)
    assert {plan.dequantize for plan in mine.plans(row)} == {True, False}
    assert not any(plan.dequantize for plan in mine.full(row))


def test_kept_layers_on_cuda_cost_what_was_measured() -> None:
    """Llama 8B's shape at 8,192 tokens on an H200: full backward, 28, 24 and no layers kept, by `as_a_user.py`."""
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32}
    model = shapes_of(
        {**CONFIG, **shape, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16"}, "cuda"
    )
    timer, row = Timer(model, BACKENDS["cuda"]), rows.sft(8193)
    full = timer.cost(row, Plan("full", compiled=True))
    for keep, seconds in ((28, 0.776), (24, 0.791), (0, 0.89)):
        cost = timer.cost(row, Plan("segmented", keep=keep, head_chunk=348, lookahead=2, compiled=True))
        assert 0.71 * cost / full == pytest.approx(seconds, rel=0.03)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("config", [{}, {"head_dim": 256}, {"model_type": "gemma2", "head_dim": 64}])
def test_a_tight_plan_is_smaller_and_slower(config: dict[str, Any], compiled: bool) -> None:
    """With fused attention, and with attention in blocks: its tiles are the larger part of a layer."""
    backend = with_buffers(BACKENDS["cuda"], CUDA_BUFFERS)
    estimator = Estimator(chooser("cuda", config=config).estimator.model, backend)
    mine, row = Chooser(estimator, Timer(estimator.model, backend), Settings(compiled=compiled)), rows.sft(8193)
    plain = Plan("segmented", mlp_rows=512, compiled=compiled)
    tight = replace(plain, tight=True)
    assert mine.option(row, tight).peak < mine.option(row, plain).peak
    assert mine.option(row, tight).relative_time > mine.option(row, plain).relative_time
    assert tight in {replace(plan, head_chunk=256, lookahead=0) for plan in mine.plans(row)}
    assert not any(plan.tight for plan in chooser("cpu").plans(row))
