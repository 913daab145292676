"""The reference for long rows equals plain autodiff of mlx-lm's whole model, in far less memory."""

import gc

import mlx.core as mx
import pytest
import tiny
import tiny_configs

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward
from segtrain.engine.layouts import Layout, pair
from segtrain.models import plain
from segtrain.models.plain import PlainForward
from segtrain.models.stack import LayerStack
from segtrain.run import layerwise
from segtrain.run.layerwise import Layerwise

ORPO = objectives.orpo()
PAIR = pair(tiny.tokens(9), tiny.tokens(12, 1), tiny.tokens(7, 2))

# Windows and shared keys; shared keys through caches; a soft-cap, latent attention, recurrences and sinks of the files.
FAMILIES = ("llama", "gemma4_text", "gemma3n", "gemma2", "deepseek_v3", "qwen3_5", "mamba", "gpt_oss")


@pytest.mark.parametrize("name", FAMILIES)
def test_it_equals_autodiff_of_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "QUERIES", 8)
    monkeypatch.setattr(layerwise, "HEAD_ROWS", 5)
    model = tiny_configs.build(name)
    lora, stack = tiny.attach(model), LayerStack(model)
    cases: list[tuple[objectives.Objective, Layout]] = [(objectives.sft, tiny.row(30)), (ORPO, PAIR)]
    for objective, layout in cases:
        expected = FullBackward(PlainForward(stack), lora, objective).step(layout)
        found = Layerwise(stack, lora, objective).step(layout)
        assert found.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=1e-6)
        assert tiny.relative(expected.grads, found.grads) < 1e-5


def test_layers_below_the_lowest_trainable_one_have_no_gradient() -> None:
    model = tiny.build("llama")
    lora, stack = tiny.attach(model, layers=(3, 5)), LayerStack(model)
    expected = FullBackward(PlainForward(stack), lora, objectives.sft).step(tiny.row())
    found = Layerwise(stack, lora, objectives.sft).step(tiny.row())
    assert tiny.relative(expected.grads, found.grads) < 1e-5


def test_its_memory_is_a_layer_s() -> None:
    """768 tokens, 8 heads: the scores of one layer are 18 MiB, of which autodiff holds two and more for each layer."""
    model = tiny.build("llama", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8)
    lora, stack = tiny.attach(model), LayerStack(model)
    peaks = []
    for reference in (FullBackward(PlainForward(stack), lora, objectives.sft), Layerwise(stack, lora, objectives.sft)):
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        reference.step(tiny.row(769))
        peaks.append(mx.get_peak_memory() - before)
    scores = 18 * 2**20
    assert peaks[0] > 2 * 2 * scores
    assert peaks[1] < 1.5 * scores
