"""FlatLayout: expected values are the arrays that went in, and autodiff of the plain formulas."""

import mlx.core as mx
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward
from segtrain.lora.flat import ALIGN, FlatArrays, FlatLayout
from segtrain.lora.modules import LoRALinear
from segtrain.models.stack import LayerStack

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


def arrays_of(shapes) -> dict[str, mx.array]:
    random = np.random.default_rng(0)
    return {f"p{i}": mx.array(random.normal(size=s).astype(np.float32)) for i, s in enumerate(shapes)}


@given(SHAPES)
def test_what_is_flattened_comes_out_again(shapes):
    arrays = arrays_of(shapes)
    flat = FlatLayout.of(arrays).flatten(arrays)
    assert list(flat) == list(arrays)
    assert all(np.array_equal(np.array(flat[name]), np.array(array)) for name, array in arrays.items())


@given(SHAPES)
def test_each_array_begins_aligned_and_the_rest_is_zero(shapes):
    arrays = arrays_of(shapes)
    flat = FlatLayout.of(arrays).flatten(arrays)
    assert flat.array.size % ALIGN == 0
    assert all(lo % ALIGN == 0 for lo, _ in flat.layout.spans.values())
    joined = mx.concatenate([array.reshape(-1) for array in arrays.values()])
    whole, parts = (float(mx.abs(x).sum()) for x in (flat.array, joined))
    assert whole == pytest.approx(parts)


def test_flat_arrays_are_not_flattened_again():
    arrays = arrays_of([(3, 4), (5,)])
    flat = FlatLayout.of(arrays).flatten(arrays)
    assert FlatLayout.of(arrays).flatten(flat) is flat
    other = FlatLayout.of(dict(reversed(arrays.items())))
    again = other.flatten(flat)
    assert isinstance(again, FlatArrays)
    assert list(again) == ["p1", "p0"]
    assert mx.array_equal(again["p0"], arrays["p0"])


def test_an_adapter_notices_parameters_that_were_put_in_one_by_one():
    lora = tiny.attach(tiny.build("llama"))
    before = lora.flat()
    assert lora.flat() is before
    slot = lora.slots()[0]
    slot.module[slot.key] = slot.value + 1
    assert mx.array_equal(lora.flat()[slot.name], before[slot.name] + 1)


def test_casts_are_those_that_a_module_would_make():
    lora = tiny.attach(tiny.build("llama"))
    casts = lora.flat_layout.views(lora.cast(lora.flat().array, mx.bfloat16))
    for slot, cast in zip(lora.flat_slots, casts, strict=True):
        factor = lora.scale if slot.key == "lora_b" else 1.0
        assert cast.dtype == mx.bfloat16
        assert mx.array_equal(cast, (factor * slot.value).astype(mx.bfloat16))


class Widening(LoRALinear):
    """A layer that computes in float32 in a half-precision model."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x.astype(mx.float32)).astype(x.dtype)


class Both(Widening):
    """One that computes in both."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) + LoRALinear.__call__(self, x)


@pytest.mark.parametrize("kind", [Widening, Both])
@pytest.mark.parametrize("widened", [0, 1, 3])
def test_full_backward_where_some_modules_work_in_another_dtype(kind: type, widened: int):
    """Expected: plain autodiff with respect to each parameter, without flat arrays or casts made beforehand."""
    model = tiny.build("llama")
    model.set_dtype(mx.bfloat16)
    lora = tiny.attach(model)
    linears = [slot.module for slot in lora.slots() if slot.key == "lora_a"]
    for module in linears[2 : 2 + widened]:
        module.__class__ = kind
    row, backward = tiny.row(), FullBackward(LayerStack(model), lora, objectives.sft)
    slots = lora.slots()

    def total(values: list[mx.array]) -> mx.array:
        for slot, value in zip(slots, values, strict=True):
            slot.module[slot.key] = value
        return backward._total(row, *backward._inputs(row, {}))[0]

    values = [slot.value for slot in slots]
    expected = mx.grad(total)(values)
    lora.set({slot.name: value for slot, value in zip(slots, values, strict=True)})
    grads = backward.step(row).grads
    assert all(grads[slot.name].dtype == mx.float32 for slot in slots)
    assert all(mx.array_equal(grads[slot.name], grad) for slot, grad in zip(slots, expected, strict=True))
