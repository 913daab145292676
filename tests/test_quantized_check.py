"""The start-up check of quantised products; the control is MLX's old fault, put back."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from segtrain.errors import RunFailed
from segtrain.models.quantized_check import check_quantized_products, quantisations


@pytest.mark.parametrize(("group_size", "bits"), [(64, 4), (32, 4), (64, 8), (64, 3)])
def test_this_machine_is_right(group_size: int, bits: int) -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Embedding(10, 128))
    nn.quantize(model, group_size=group_size, bits=bits)
    assert quantisations(model) == {(group_size, bits, "affine")}
    check_quantized_products(model)


def test_a_dense_model_needs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mx, "quantized_matmul")
    check_quantized_products(nn.Linear(8, 8))


def test_the_old_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mx.quantized_matmul

    def wrong(x: mx.array, *args: object, **kwargs: object) -> mx.array:
        product = right(x, *args, **kwargs)
        return product * 0.5 if x.shape[0] in (2, 3) else product

    model = nn.Linear(128, 64)
    quantised = nn.QuantizedLinear.from_linear(model, 64, 4)
    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    with pytest.raises(RunFailed, match="4-bit weights wrongly at 2, 3 rows"):
        check_quantized_products(quantised)
