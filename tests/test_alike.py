"""Which layers count as alike, and what putting arrays into one leaves behind."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

from segtrain.models.alike import as_function, fingerprint, holding, places
from segtrain.models.stack import LayerStack


def layers(family: str = "llama", **options) -> list[nn.Module]:
    model = tiny.build(family, **options)
    tiny.attach(model)
    return model.layers


def test_layers_that_differ_in_arrays_and_number_alone_are_alike():
    assert len({fingerprint(layer) for layer in layers()}) == 1
    assert len({fingerprint(layer) for layer in layers("mistral")}) == 2  # with a window and without
    assert fingerprint(layers(bits=4)[0]) != fingerprint(layers()[0])


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "another scale": lambda layer: setattr(layer.mlp.gate_proj, "scale", 3.0),
    "another epsilon": lambda layer: setattr(layer.input_layernorm, "eps", 1e-3),
    "another dtype": lambda layer: layer.input_layernorm.set_dtype(mx.bfloat16),
    "another shape": lambda layer: setattr(layer.mlp.gate_proj, "lora_a", mx.zeros((32, 4))),
    "one more array": lambda layer: setattr(layer.input_layernorm, "bias", mx.zeros((32,))),
    "an unknown object": lambda layer: setattr(layer.mlp, "extra", object()),
    "another class": lambda layer: setattr(layer, "input_layernorm", nn.LayerNorm(32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_makes_a_layer_unlike(change: str):
    first, second, *_ = layers()
    CHANGES[change](second)
    assert fingerprint(first) != fingerprint(second)


def test_held_arrays_are_put_back_after_an_error():
    layer = layers()[0]
    where = places([layer])
    before = [module[key] for module, key in where]
    zeros = [mx.zeros_like(array) for array in before]

    def failing() -> None:
        with holding(where, zeros):
            assert all(module[key] is zero for (module, key), zero in zip(where, zeros, strict=True))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        failing()
    assert all(module[key] is old for (module, key), old in zip(where, before, strict=True))


def test_a_module_as_function_keeps_the_arrays_of_its_making():
    module = layers()[0].mlp.gate_proj
    x = mx.random.normal((1, 3, 32), key=mx.random.key(0))
    expected = module(x)
    function, trainable = as_function(module, type(module).__call__)
    module.linear.weight = module.linear.weight * 2
    module.lora_b = mx.zeros_like(module.lora_b)
    assert mx.array_equal(function(x, *trainable), expected)
    assert not mx.array_equal(module(x), expected)


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("mistral", 2), ("gemma4_text", 5)])
def test_ranges_of_like_layers_share_one_function(family: str, kinds: int):
    """gemma4 has six layers: a plain one, two donors, two readers of one of them, one of the other."""
    model = tiny.build(family)
    tiny.attach(model)
    stack = LayerStack(model)
    tape = stack.begin(tiny.row().streams[0])
    keys = {stack.pure(tape, i, i + 1, shared=True).key for i in range(len(stack))}
    assert len(keys) == kinds
    assert stack.pure(tape, 0, 1, shared=False).key is None
    again = stack.begin(tiny.row(seed=1).streams[0])
    assert {stack.pure(again, i, i + 1, shared=True).key for i in range(len(stack))} == keys


def test_a_shared_function_computes_the_range_whose_arrays_it_gets():
    model = tiny.build("llama")
    tiny.attach(model)
    stack = LayerStack(model)
    tape = stack.begin(tiny.row().streams[0])
    h = {"h": mx.random.normal(tape.embedded.shape, key=mx.random.key(2))}
    first, second = (stack.pure(tape, i, i + 1, shared=True) for i in (0, 1))
    assert first.key == second.key
    for mine, theirs in zip(stack.layers[0].modules(), stack.layers[1].modules(), strict=True):
        mine.update({key: theirs[key] for key in ("lora_a", "lora_b") if key in theirs})
    assert mx.allclose(first.run(h, second.arrays)["h"], stack.run(tape, h, 1, 2)["h"], rtol=1e-6, atol=1e-6)
    assert not mx.allclose(first.run(h, first.arrays)["h"], stack.run(tape, h, 1, 2)["h"], rtol=1e-3)
