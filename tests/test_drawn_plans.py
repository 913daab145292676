"""Plans of drawn tiny models against what a step takes: nightly. `SEGTRAIN_DRAWS` says how many (500)."""

import os
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
import tiny_configs

from segtrain.engine import layouts, objectives
from segtrain.engine.layouts import Layout
from segtrain.lora import layers as lora_module
from segtrain.memory import anatomy, rows
from segtrain.memory.anatomy import Subject
from segtrain.memory.backends import BACKENDS
from segtrain.memory.estimate import Estimator
from segtrain.memory.meter import Meter
from segtrain.memory.plan import Plan
from segtrain.models.load import Loaded
from segtrain.models.stack import LayerStack
from segtrain.recipe.schema import Recipe
from segtrain.run.planning import Planner
from segtrain.run.session import Session, make_backward

pytestmark = pytest.mark.slow
DRAWS = int(os.environ.get("SEGTRAIN_DRAWS", "500"))
MIB = 1 << 20
ROWS, TIMES = 200, (1.0, 1.5, 3.0)
HELD = ("llama", "gemma3_text", "gemma4_text", "qwen3_moe", "qwen3_5", "deepseek_v3", "lfm2", "gpt_oss")


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    mx.clear_cache()


def drawn(draw: random.Random, layers: int) -> Plan:
    if draw.random() < 0.2:
        return Plan("full")
    return Plan(
        "segmented",
        segment_size=draw.choice([1, 2, layers]),
        head_chunk=draw.choice([16, 64, 256]),
        boundaries=draw.choice([None, None, 1, 2]),
        mlp_rows=draw.choice([None, 64]),
    )


def row_of(draw: random.Random, shares: bool) -> Layout:
    def ids(count: int) -> list[int]:
        return [draw.randrange(tiny_configs.VOCAB) for _ in range(count)]

    length = draw.randint(32, 300)
    if (kind := draw.choice(["single", "pair", "shared"])) == "single":
        return layouts.single(ids(length), [True] * length)
    build = layouts.shared_prefix if kind == "shared" and shares else layouts.pair
    return build(ids(length // 2), ids(length // 4), ids(length // 4))


def peak_of(step: Any) -> int:
    """The highest bytes in use while `step` runs, above those before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_drawn_step_takes_no_more_than_planned(seed: int) -> None:
    """Never more than 15 % and 4 MiB below what is measured above model and adapter."""
    draw = random.Random(seed)
    name = draw.choice(sorted(tiny_configs.CONFIGS))
    model = tiny_configs.build(name, seed=seed)
    lora = lora_module.attach(model, rank=draw.choice([4, 8]), scale=2.0)
    stack = LayerStack(model)
    shapes = anatomy.read(Subject(model, stack, lora), "cpu", tiny_configs.CONFIGS[name])
    plan, layout = drawn(draw, len(stack)), row_of(draw, stack.shares_prefix)
    objective = objectives.for_rows(pairs=len(layout.spans) > 1)
    backward = make_backward(plan, stack, lora, objective, Meter())
    backward.step(layout)
    measured = peak_of(lambda: mx.eval(backward.step(layout).grads.array))
    estimator = Estimator(shapes, BACKENDS["cpu"], optimizer="adafactor")
    predicted = estimator.peak(rows.of_layout(layout), plan).bytes - estimator.fixed
    assert predicted > min(0.85 * measured, measured - 4 * MIB), (name, plan, layout.streams, predicted, measured)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", HELD)
def test_a_budget_is_never_exceeded(name: str, times: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Over rows of drawn lengths, with a budget of so many times what the longest needs above the model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draw = random.Random(0)
    model = tiny_configs.build(name)
    lora = lora_module.attach(model, rank=4, scale=2.0)
    values = {"model": "m", "data": {"train": "t.jsonl", "max_seq_length": 400}, "lora": {"rank": 4}}
    loaded = Loaded(model, None, tiny_configs.CONFIGS[name], None)  # type: ignore[arg-type]
    objective = objectives.for_rows(pairs=False)
    session = Session(Recipe.from_mapping(values), loaded, lora, LayerStack(model), objective, False)
    planner = Planner(session, Meter(), BACKENDS["cpu"])
    fixed, need = planner.chooser.estimator.fixed, planner.chooser.leanest(rows.sft(400)).peak
    planner.budget = round(fixed + times * (need - fixed)) + MIB
    for _ in range(ROWS):
        length = draw.randint(8, 400)
        layout = layouts.single([draw.randrange(tiny_configs.VOCAB) for _ in range(length)], [True] * length)
        backward = planner.backward(layout)
        assert fixed + peak_of(lambda b=backward, x=layout: mx.eval(b.step(x).grads.array)) <= planner.budget + MIB
