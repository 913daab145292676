"""Products remembered from forward to backward: the same gradients, and their matrix products gone from the graph."""

import re

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

from segtrain.lora.layers import swapped
from segtrain.lora.modules import LoRALinear
from segtrain.models.products import linear_modules, recalling, remembering

NAMES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ROWS = 12


def layer_and_lora(bits: int = 0, **options):
    model = tiny.build("llama", bits=bits)
    lora = tiny.attach(model, **options)
    return model.layers[0], lora.slots(0, 1)


def gradients(layer: nn.Module, slots: list, products: list[mx.array]) -> dict[str, mx.array]:
    """Unevaluated gradients of the layer's output, against a fixed cotangent."""
    h, dy = (mx.random.normal((1, ROWS, 32), key=mx.random.key(i)) for i in range(2))

    def outputs(h: mx.array, *values: mx.array) -> list[mx.array]:
        with swapped(slots, values), recalling(linear_modules([layer]), products):
            return [layer(h, "causal", None)]

    _, grads = mx.vjp(outputs, [h, *(slot.value for slot in slots)], [dy])
    return dict(zip(["h", *(slot.name for slot in slots)], grads, strict=True))


def remembered(layer: nn.Module) -> list[mx.array]:
    with remembering(linear_modules([layer])) as products:
        h = mx.random.normal((1, ROWS, 32), key=mx.random.key(0))
        mx.eval(layer(h, "causal", None))
    mx.eval(products)
    return products


def count(grads: dict[str, mx.array], operation: str, tmp_path) -> int:
    """How often `operation` stands in the graph that evaluating `grads` runs."""
    path = tmp_path / "graph.dot"
    mx.export_to_dot(str(path), *grads.values())
    return len(re.findall(rf'label ="{operation}"', path.read_text()))


def test_a_lora_layer_is_one_product_and_excluded_modules_have_none():
    layer, _ = layer_and_lora(targets="q_proj")
    assert len(linear_modules([layer])) == len(NAMES)
    assert [type(m) for m in linear_modules([layer])].count(LoRALinear) == 1
    assert len(linear_modules([layer], without=[layer.mlp])) == 4


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("options", [{}, {"targets": ("q_proj", "up_proj")}, {"dropout": 0.4}], ids=str)
def test_recalled_products_leave_the_gradients_as_they_are(bits: int, options: dict):
    layer, slots = layer_and_lora(bits, **options)
    products = remembered(layer)
    assert len(products) == len(NAMES) - 1
    assert tiny.relative(gradients(layer, slots, []), gradients(layer, slots, products)) < 2e-6


def test_recalled_products_are_not_computed_again(tmp_path):
    """Six of the layer's seven forward products go; the seventh never was in the graph, since nothing wants it."""
    layer, slots = layer_and_lora(bits=4)
    before, after = (gradients(layer, slots, products) for products in ([], remembered(layer)))
    assert count(before, "QuantizedMatmul", tmp_path) == 6 + 7
    assert count(after, "QuantizedMatmul", tmp_path) == 7


def test_control_another_product_is_seen():
    layer, slots = layer_and_lora()
    products = remembered(layer)
    products[0] = products[0] * 1.5
    assert tiny.relative(gradients(layer, slots, []), gradients(layer, slots, products)) > 0.01


def test_the_classes_are_restored_after_an_error():
    layer, _ = layer_and_lora()
    before = LoRALinear.__call__
    for context in (remembering(linear_modules([layer])), recalling(linear_modules([layer]), [])):
        with pytest.raises(RuntimeError, match="boom"), context:
            raise RuntimeError("boom")
    assert LoRALinear.__call__ is before
