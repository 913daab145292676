"""LoRA: formulas written out, and names compared with what mlx-lm itself attaches."""

import math
from contextlib import suppress

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from segtrain.lora import modules
from segtrain.lora.layers import attach, swapped
from segtrain.lora.modules import Dropout, DropoutKeys, LoRALinear, LoRASwitchLinear, Slot

KEYS = DropoutKeys(seed=3)


def plain(module: str = "m", p: float = 0.0, keys: DropoutKeys = KEYS) -> Dropout:
    return Dropout(p, module, keys)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_base_plus_scaled_product(bias: bool):
    base = nn.Linear(6, 5, bias=bias)
    module = LoRALinear(base, 2, 0.5, plain())
    module.lora_a, module.lora_b = mx.random.normal((6, 2)), mx.random.normal((2, 5))
    x = mx.random.normal((3, 6))
    assert mx.allclose(module(x), base(x) + 0.5 * (x @ module.lora_a @ module.lora_b), atol=1e-5)


def test_experts_use_their_own_factors():
    base = SwitchLinear(6, 5, 3, bias=False)
    module = LoRASwitchLinear(base, 2, 0.5, plain())
    module.lora_a, module.lora_b = mx.random.normal((3, 2, 6)), mx.random.normal((3, 5, 2))
    x, experts = mx.random.normal((4, 1, 1, 6)), mx.array([[0, 2], [1, 1], [2, 0], [0, 1]])
    y = module(x, experts)
    for t in range(4):
        for j, e in enumerate(experts[t].tolist()):
            weight = base.weight[e] + 0.5 * module.lora_b[e] @ module.lora_a[e]
            assert mx.allclose(y[t, j, 0], weight @ x[t, 0, 0], atol=1e-5)


def test_half_precision_activations_keep_their_dtype_and_masters_stay_float32():
    base = nn.Linear(8, 8)
    base.set_dtype(mx.bfloat16)
    module = LoRALinear(base, 2, 1.0, plain())
    assert module(mx.ones((2, 8), mx.bfloat16)).dtype == mx.bfloat16
    assert module.lora_a.dtype == module.lora_b.dtype == mx.float32


def output_and_gradients(module: LoRALinear | LoRASwitchLinear, *inputs: mx.array) -> list[mx.array]:
    def run(a: mx.array, b: mx.array) -> mx.array:
        with swapped([Slot("a", module, "lora_a"), Slot("b", module, "lora_b")], [a, b]):
            return module(*inputs)

    factors = [module.lora_a, module.lora_b]
    out = run(*factors)
    return [out, *mx.vjp(run, factors, [mx.cos(out)])[1]]


@pytest.mark.parametrize("rank", [1, 3, 8, 12])
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_a_padded_rank_gives_the_same(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch):
    base = nn.Linear(16, 24) if kind == "linear" else SwitchLinear(16, 24, 3, bias=False)
    module = (LoRALinear if kind == "linear" else LoRASwitchLinear)(base, rank, 0.5)
    module.lora_a, module.lora_b = (mx.random.normal(x.shape) for x in (module.lora_a, module.lora_b))
    x = mx.random.normal((4, 1, 1, 16))
    inputs = (x,) if kind == "linear" else (x, mx.array([[0, 2], [1, 1], [2, 0], [0, 1]]))
    plain = output_and_gradients(module, *inputs)
    monkeypatch.setattr(modules, "pads", lambda dtype: True)
    assert [f.shape[axis] % 8 for f, axis in zip(module.factors(mx.float32), module.RANK_AXES, strict=True)] == [0, 0]
    for padded, expected in zip(output_and_gradients(module, *inputs), plain, strict=True):
        assert padded.shape == expected.shape
        assert mx.allclose(padded, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_pads_and_a_cpus_float32_does_not():
    assert modules.pads(mx.bfloat16)
    assert modules.pads(mx.float32) == (mx.default_device() != mx.Device(mx.cpu))


@pytest.mark.parametrize("bits", [0, 4])
def test_attach_starts_as_the_base_model_with_uniform_a_and_zero_b(bits: int):
    ids = mx.array([tiny.tokens(9)])
    before = tiny.build("llama", bits=bits)(ids)
    model = tiny.build("llama", bits=bits)
    lora = attach(model, rank=4, scale=2.0)
    assert mx.array_equal(model(ids), before)
    for slot in lora.slots():
        if slot.key == "lora_b":
            assert not slot.value.any()
        else:
            bound = 1 / math.sqrt(slot.value.shape[0])
            assert slot.value.max().item() <= bound
            assert slot.value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


def test_initial_a_follows_the_seed():
    first, same, other = (attach(tiny.build("llama"), rank=4, scale=1.0, seed=s).values() for s in (0, 0, 1))
    name = next(iter(first))
    assert mx.array_equal(first[name], same[name])
    assert not mx.array_equal(first[name], other[name])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "gemma4_text"])
def test_names_shapes_and_trainables_are_mlx_lms(family: str):
    ours, theirs = tiny.build(family), tiny.build(family)
    lora = attach(ours, rank=4, scale=2.0)
    theirs.freeze()
    linear_to_lora_layers(theirs, len(theirs.layers), {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": lora.keys})
    expected = {name: array.shape for name, array in tree_flatten(theirs.trainable_parameters())}
    assert {name: array.shape for name, array in lora.values().items()} == expected
    assert {name: array.shape for name, array in tree_flatten(ours.trainable_parameters())} == expected


@pytest.mark.parametrize(
    ("targets", "keys"),
    [
        ("q_proj", ["self_attn.q_proj"]),
        (["q_proj", "down_proj"], ["mlp.down_proj", "self_attn.q_proj"]),
        ("self_attn.v_proj", ["self_attn.v_proj"]),
        ("*_proj", None),
        ("all-linear", None),
        (["*.mlp.*"], ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]),  # as the recipe's table says
        (["*.self_attn.q_proj"], ["self_attn.q_proj"]),
        (["mlp.*"], ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]),
        (["[qk]_proj"], ["self_attn.k_proj", "self_attn.q_proj"]),
    ],
)
def test_targets_by_name_path_and_glob(targets, keys: list[str] | None):
    everything = [f"mlp.{n}_proj" for n in ("down", "gate", "up")] + [f"self_attn.{n}_proj" for n in "koqv"]
    assert attach(tiny.build("llama"), rank=2, scale=1.0, targets=targets).keys == (keys or everything)


def test_a_target_that_matches_nothing_is_named_with_the_choices():
    with pytest.raises(ValueError, match=r"'query' matches no linear layer.*down_proj.*q_proj"):
        attach(tiny.build("llama"), rank=2, scale=1.0, targets=["q_proj", "query"])


def test_layer_ranges():
    lora = attach(tiny.build("llama"), rank=2, scale=1.0, layers=(2, 4))
    assert [bool(slots) for slots in lora.layers] == [False, False, True, True, False]
    assert lora.lowest == 2
    assert {slot.name.split(".")[2] for slot in lora.slots()} == {"2", "3"}
    assert lora.slots(0, 2) == []


@pytest.mark.parametrize("layers", [(0, 6), (-1, 3), (3, 3), (4, 2)])
def test_layer_ranges_outside_the_model_are_refused(layers: tuple[int, int]):
    with pytest.raises(ValueError, match="outside the model's 5 layers"):
        attach(tiny.build("llama"), rank=2, scale=1.0, layers=layers)


def test_set_and_values_round_trip():
    lora = attach(tiny.build("llama"), rank=2, scale=1.0)
    values = {name: mx.ones(array.shape) for name, array in lora.values().items()}
    lora.set(values)
    assert all(mx.array_equal(lora.values()[name], value) for name, value in values.items())


def test_swapped_puts_the_arrays_back_after_an_exception():
    lora = attach(tiny.build("llama"), rank=2, scale=1.0)
    before = [slot.value for slot in lora.slots()]
    with suppress(RuntimeError), swapped(lora.slots(), [mx.zeros(v.shape) for v in before]):
        assert not lora.slots()[0].value.any()
        raise RuntimeError
    assert all(slot.value is value for slot, value in zip(lora.slots(), before, strict=True))


def mask(module: str = "m", **state: int) -> mx.array:
    return plain(module, 0.5, DropoutKeys(**{"seed": 1, "row": 2, "stream": 0, **state}))(mx.ones((64, 64)))


def test_dropout_is_the_same_for_the_same_key_and_differs_otherwise():
    assert mx.array_equal(mask(), mask())
    for other in (mask("n"), mask(seed=2), mask(row=3), mask(stream=1)):
        assert not mx.array_equal(mask(), other)


def test_dropout_keeps_the_expected_share_and_scales_it():
    y = plain("m", 0.25)(mx.ones((200, 200)))
    assert set(y.reshape(-1).tolist()) == {0.0, mx.array(1 / 0.75).item()}
    assert (y == 0).mean().item() == pytest.approx(0.25, abs=0.01)


def test_dropout_does_not_draw_from_the_global_random_state():
    mx.random.seed(0)
    expected = mx.random.uniform(shape=(3,))
    mx.random.seed(0)
    mask()
    assert mx.array_equal(mx.random.uniform(shape=(3,)), expected)


def test_dropout_is_off_while_disabled_and_back_after_an_exception():
    keys = DropoutKeys()
    dropout = plain("m", 0.5, keys)
    with suppress(RuntimeError), keys.disabled():
        assert dropout(mx.ones((8, 8))).all()
        raise RuntimeError
    assert keys.active
    assert not dropout(mx.ones((8, 8))).all()
