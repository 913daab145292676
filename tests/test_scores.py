"""Log-probs of spans without gradient: with the adapter, with another one, without; and the memory that it takes."""

import gc

import mlx.core as mx
import pytest
import tiny

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward
from segtrain.engine.layouts import CHOSEN, PROMPT, REJECTED, RESPONSE, Layout, pair, shared_prefix, single
from segtrain.engine.objectives import LossValue, Objective, Scores
from segtrain.models.stack import LayerStack

ENGINES = [SegmentedBackward, FullBackward]
IDS = tiny.tokens(17)
PAIR = IDS[:6], IDS[6:11], IDS[11:17]


def naive(model, layout: Layout) -> dict[str, float]:
    """The spans' sums from mlx-lm's own forward pass of each stream."""
    sums = {}
    for name, span in layout.spans.items():
        z = model(layout.streams[span.stream].tokens)[0, span.rows].astype(mx.float32)
        logp = mx.take_along_axis(z, span.targets[:, None], axis=-1).squeeze(-1) - mx.logsumexp(z, axis=-1)
        sums[name] = logp.sum().item()
    return sums


def numbers(scores: Scores) -> dict[str, float]:
    return {name: logp.item() for name, logp in scores.sums.items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compiled", [False, True])
def test_scores_are_mlx_lms_log_probs(engine: type, compiled: bool) -> None:
    model = tiny.build("llama")
    lora, layout = tiny.attach(model), pair(*PAIR)
    backward = engine(LayerStack(model), lora, objectives.orpo(), compiled=compiled)
    scores = backward.score(layout)
    assert numbers(scores) == pytest.approx(naive(model, layout), rel=1e-5)
    assert scores.counts == {CHOSEN: 5, REJECTED: 6, PROMPT: 5}
    assert numbers(backward.score(shared_prefix(*PAIR))) == pytest.approx(numbers(scores), rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
def test_a_disabled_adapter_leaves_the_base_model(engine: type, compiled: bool, family: str) -> None:
    """Before and after a step, whose graphs must not serve old values."""
    layout = tiny.row()
    base = naive(tiny.build(family), layout)
    model = tiny.build(family)
    lora = tiny.attach(model)
    backward = engine(LayerStack(model), lora, objectives.sft, compiled=compiled)
    with_adapter = numbers(backward.score(layout))
    expected = backward.step(layout)
    before = lora.values()
    with lora.disabled():
        assert numbers(backward.score(layout)) == pytest.approx(base, rel=1e-6)
        assert backward.evaluate(layout).total.item() == pytest.approx(-base[RESPONSE], rel=1e-6)
        without = backward.step(layout)
    assert without.loss.total.item() == pytest.approx(-base[RESPONSE], rel=1e-6)
    assert with_adapter != pytest.approx(base, rel=1e-3)
    assert numbers(backward.score(layout)) == with_adapter
    assert all(lora.values()[name] is value for name, value in before.items())
    assert tiny.relative(expected.grads, backward.step(layout).grads) == 0.0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compiled", [False, True])
def test_another_adapters_values_serve_for_a_block(engine: type, compiled: bool) -> None:
    model = tiny.build("llama")
    lora, layout = tiny.attach(model), tiny.row()
    backward = engine(LayerStack(model), lora, objectives.sft, compiled=compiled)
    own, others = backward.step(layout), {name: 2 * value for name, value in lora.values().items()}
    with lora.with_values(others):
        other = backward.step(layout)
    with pytest.raises(RuntimeError, match="boom"), lora.with_values(others):
        raise RuntimeError("boom")
    assert tiny.relative(own.grads, backward.step(layout).grads) == 0.0
    assert tiny.relative(own.grads, other.grads) > 0.1
    lora.set(others)
    assert tiny.relative(other.grads, backward.step(layout).grads) == 0.0


def preference(scores: Scores) -> LossValue:
    """DPO's loss: -log sigmoid of the responses' log-ratio to the reference, chosen less rejected."""
    ratio = {name: scores.sums[name] - scores.reference[name] for name in (CHOSEN, REJECTED)}
    margin = 0.5 * (ratio[CHOSEN] - ratio[REJECTED])
    return LossValue(mx.logaddexp(mx.array(0.0), -margin), 1.0, {"margin": margin})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", [pair(*PAIR), shared_prefix(*PAIR)], ids=["pair", "shared"])
def test_an_objective_may_compare_with_the_model_without_adapter(compiled: bool, layout: Layout) -> None:
    model = tiny.build("llama")
    base = naive(model, pair(*PAIR))
    lora = tiny.attach(model)
    now = naive(model, pair(*PAIR))
    margin = 0.5 * (now[CHOSEN] - base[CHOSEN] - now[REJECTED] + base[REJECTED])
    objective = Objective("dpo", preference, ("margin",), pairs=True, needs_reference=True)
    segmented, full = (engine(LayerStack(model), lora, objective, compiled=compiled) for engine in ENGINES)
    steps = [segmented.step(layout), full.step(layout)]
    for value in (*(step.loss for step in steps), segmented.evaluate(layout), full.evaluate(layout)):
        assert value.metrics["margin"].item() == pytest.approx(margin, rel=1e-4)
        assert value.total.item() == pytest.approx(mx.logaddexp(mx.array(0.0), mx.array(-margin)).item(), rel=1e-5)
    assert tiny.relative(steps[1].grads, steps[0].grads) < 1e-5


def evaluation_bytes(layers: int) -> int:
    """The peak of one evaluation of 1,024 tokens, above what was in use before."""
    model = tiny.build("llama", num_hidden_layers=layers)
    backward = SegmentedBackward(LayerStack(model), tiny.attach(model), objectives.sft, head_chunk=16)
    layout = single(tiny.tokens(1025), [False] * 1000 + [True] * 25)
    for _ in range(2):  # the first one makes what stays
        gc.collect()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        backward.evaluate(layout).total.item()
    return mx.get_peak_memory() - before


def test_evaluation_holds_no_more_edges_of_a_deeper_model() -> None:
    edge = 1024 * 32 * 4  # bytes of the hidden states
    assert evaluation_bytes(12) - evaluation_bytes(4) < 4 * edge
