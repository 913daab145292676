"""An MLP in chunks of tokens: the same output and gradients as in one piece, with fewer of its rows live."""

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
import tiny_configs

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward
from segtrain.models.stack import Execution, LayerStack
from segtrain.models.tokenwise import FORWARD, NAMES, chunked, tokenwise_modules

ROWS = 23


def mlp(**options) -> nn.Module:
    model = tiny.build("llama")
    tiny.attach(model, **options)
    return model.layers[0].mlp


def vjp(module: nn.Module, x: mx.array, rows: int | None) -> list[mx.array]:
    """The output and its derivative with respect to x, against a fixed cotangent."""
    dy = mx.random.normal(x.shape, key=mx.random.key(1))
    modules = [] if rows is None else [module]
    with chunked(modules, rows or 1):
        outputs, grads = mx.vjp(lambda x: [module(x)], [x], [dy])
    mx.eval(outputs, grads)
    return [*outputs, *grads]


@pytest.mark.parametrize("rows", [1, 5, 6, ROWS, ROWS + 1])  # FORWARD * 5 < ROWS <= FORWARD * 6
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_chunks_are_exact_in_both_passes(rows: int, dropout: float):
    module, x = mlp(dropout=dropout), mx.random.normal((1, ROWS, 32), key=mx.random.key(0))
    expected, actual = vjp(module, x, None), vjp(module, x, rows)
    for a, b in zip(expected, actual, strict=True):
        assert mx.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_no_pass_sees_more_rows_than_its_chunk(monkeypatch):
    module, seen = mlp(), []
    original = type(module.gate_proj).__call__

    def watching(self, x):
        seen.append(x.shape[-2])
        return original(self, x)

    monkeypatch.setattr(type(module.gate_proj), "__call__", watching)
    vjp(module, mx.zeros((1, ROWS, 32)), 4)
    assert sorted(set(seen)) == [3, 4, ROWS - FORWARD * 4, FORWARD * 4]  # backward: 4 and the rest, forward: 16 and 7


ROUTED = ("Klear", "afmoe", "dbrx", "dots1", "gpt_oss", "llama4", "mixtral", "qwen3_next")  # names differ


@pytest.mark.parametrize("name", ROUTED)
def test_routed_experts_are_left_alone(name: str):
    last = tiny_configs.build(name).layers[-1]
    parts = [m for name in NAMES if isinstance(m := last.get(name), nn.Module)]
    assert tokenwise_modules(last) == [m for m in parts if type(m).__name__.endswith("MLP")]
    if name in ("afmoe", "gpt_oss"):
        assert parts, "the control: it has a module of that name"


@pytest.mark.parametrize("name", ["gpt_oss", "dots1"])
def test_experts_draw_the_same_masks_in_both_passes(name: str):
    """With fewer rows at a time than the stream has, gradients are still those of one forward pass."""
    model = tiny_configs.build(name)
    lora = tiny.attach(model, dropout=0.3)
    stack, row = LayerStack(model), tiny.row(ROWS)
    expected = FullBackward(stack, lora, objectives.sft).step(row).grads
    stack = stack.executing(Execution(mlp_rows=4))
    assert tiny.relative(expected, SegmentedBackward(stack, lora, objectives.sft).step(row).grads) < 1e-5
