"""Dense copies of quantised weights: the same layer, each weight expanded once for a forward pass and its vjp."""

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

from segtrain.models.dense import dense_weight, dequantized, quantized_modules

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
