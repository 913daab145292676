"""Dense copies of quantised weights: the same layer, each weight expanded once for a forward pass and its vjp."""

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

from segtrain.engine import objectives
from segtrain.engine.backward import SegmentedBackward
from segtrain.lora.frozen import dense_weight
from segtrain.models import dense
from segtrain.models.dense import dequantized, dequantized_in_slices, quantized_modules
from segtrain.models.stack import Execution, LayerStack

LINEAR = 7


def layer_of(bits: int) -> nn.Module:
    model = tiny.build("llama", bits=bits)
    tiny.attach(model)
    return model.layers[0]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_dense_weight_multiplies_as_the_quantised_layer(bits: int):
    (module, *_) = quantized_modules([layer_of(bits)])
    x = mx.random.normal((5, 32), key=mx.random.key(0))
    assert mx.allclose(x @ dense_weight(module, mx.float32).T, module(x), atol=1e-5)
    assert dense_weight(module, mx.bfloat16).dtype == mx.bfloat16


@pytest.mark.parametrize("uses", [1, 2])
def test_each_weight_is_expanded_once_for_a_vjp(uses: int, monkeypatch):
    """However often a layer is used while the block runs: once for each block."""
    layer, calls = layer_of(4), []
    x, dy = (mx.random.normal((1, 6, 32), key=mx.random.key(i)) for i in range(2))
    expected = mx.vjp(lambda x: [layer(x, "causal", None)], [x], [dy])
    original = mx.dequantize
    monkeypatch.setattr(mx, "dequantize", lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
    with dequantized([layer]):
        for _ in range(uses):
            actual = mx.vjp(lambda x: [layer(x, "causal", None)], [x], [dy])
    for a, b in zip(expected, actual, strict=True):
        assert mx.allclose(a[0], b[0], rtol=1e-4, atol=1e-5)
    assert len(calls) == LINEAR


def test_the_packed_layer_is_back_after_the_block():
    layer = layer_of(4)
    before = nn.QuantizedLinear.__call__
    with dequantized([layer]):
        assert nn.QuantizedLinear.__call__ is not before
    assert nn.QuantizedLinear.__call__ is before


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [97, 40, 1])
def test_the_head_in_slices_of_the_vocabulary(tied: bool, rows: int, monkeypatch):
    """Every slice is expanded once a pass, and the logits and their vjp are those of the packed head."""
    model = tiny.build("llama", bits=4, tie_word_embeddings=tied)
    head = model.model.embed_tokens if tied else model.lm_head
    outputs, width = tiny.VOCAB, 32
    monkeypatch.setattr(dense, "SLICE_BYTES", rows * width * 4)
    h, dz = mx.random.normal((1, 6, width)), mx.random.normal((1, 6, outputs))
    project = head.as_linear if tied else head
    expected = mx.vjp(lambda x: [project(x)], [h], [dz])
    sizes: list[int] = []
    original = mx.dequantize

    def counted(weight: mx.array, *args, **kwargs) -> mx.array:
        sizes.append(weight.shape[0])
        return original(weight, *args, **kwargs)

    monkeypatch.setattr(mx, "dequantize", counted)
    with dequantized_in_slices([] if tied else [head]):
        project = head.as_linear if tied else head
        actual = mx.vjp(lambda x: [project(x)], [h], [dz])
    for a, b in zip(expected, actual, strict=True):
        assert mx.allclose(a[0], b[0], rtol=1e-4, atol=1e-5)
    assert max(sizes) <= rows
    assert sum(sizes) == outputs * (2 if rows < outputs else 1)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_stack_on_dense_weights_slices_its_head(family: str, compiled: bool, monkeypatch):
    monkeypatch.setattr(dense, "SLICE_BYTES", 20 * 32 * 4)
    model = tiny.build(family, bits=4)
    stack, lora = LayerStack(model), tiny.attach(model)
    expected = SegmentedBackward(stack, lora, objectives.sft).step(tiny.row())
    calls: list[int] = []
    original = dense._in_slices
    monkeypatch.setattr(dense, "_in_slices", lambda module, x: calls.append(1) or original(module, x))
    stack = stack.executing(Execution(dequantize=True))
    actual = SegmentedBackward(stack, lora, objectives.sft, head_chunk=8, compiled=compiled).step(tiny.row())
    assert calls
    assert actual.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=2e-6)
    assert tiny.relative(expected.grads, actual.grads) < 1e-5


def test_slices_in_bf16_are_as_near_to_the_truth_as_one_product(monkeypatch):
    """err_sliced <= 1.1 err_whole + 1e-3, norm-relative, of a vjp through a head of 24 slices."""
    head = nn.QuantizedLinear(256, 24 * 64, bias=False, group_size=64, bits=4)
    head.set_dtype(mx.bfloat16)
    x, dz = mx.random.normal((64, 256)).astype(mx.bfloat16), mx.random.normal((64, 24 * 64)).astype(mx.bfloat16)

    def results(dtype: mx.Dtype, limit: int) -> list[mx.array]:
        monkeypatch.setattr(dense, "SLICE_BYTES", limit)
        with dequantized_in_slices([head]):
            outputs, grads = mx.vjp(lambda x: [head(x)], [x.astype(dtype)], [dz.astype(dtype)])
        return [a.astype(mx.float32) for a in (*outputs, *grads)]

    truth, whole, sliced = results(mx.float32, 1 << 30), results(mx.bfloat16, 1 << 30), results(mx.bfloat16, 64 * 512)
    for exact, one, many in zip(truth, whole, sliced, strict=True):
        errors = [(mx.linalg.norm(a - exact) / mx.linalg.norm(exact)).item() for a in (many, one)]
        assert errors[0] <= 1.1 * errors[1] + 1e-3
        assert errors[0] > 1e-4
