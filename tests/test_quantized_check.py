"""The check of quantised products: MLX's old fault put back is found, rounding like TF32's is not."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from segtrain.models.quantized_check import Quantisation, quantisations, wrong_rows

AFFINE = Quantisation(64, 4, "affine")


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[mx.array, mx.array, mx.array], mx.array]) -> None:
    """MLX's quantised product with its result changed by (product, x, weights)."""
    right = mx.quantized_matmul

    def product(x: mx.array, weight: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return change(right(x, weight, *args, **kwargs), x, weight)

    monkeypatch.setattr(mx, "quantized_matmul", product)


@pytest.mark.parametrize(
    "kind",
    [
        (64, 4, "affine"),
        (32, 4, "affine"),
        pytest.param((64, 8, "affine"), marks=pytest.mark.slow),
        (64, 3, "affine"),
        (32, 4, "mxfp4"),
        (16, 4, "nvfp4"),
        pytest.param((32, 8, "mxfp8"), marks=pytest.mark.slow),
    ],
)
def test_this_machine_is_right(kind: tuple[int, int, str]) -> None:
    assert wrong_rows(Quantisation(*kind)) == []


@pytest.mark.parametrize(("group_size", "bits", "mode"), [(64, 4, "affine"), (32, 4, "mxfp4"), (16, 4, "nvfp4")])
def test_the_models_quantisations_are_those_checked(group_size: int, bits: int, mode: str) -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Embedding(10, 128))
    nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
    assert quantisations(model) == {(group_size, bits, mode)}


def test_a_dense_model_has_none() -> None:
    assert quantisations(nn.Linear(8, 8)) == set()


def test_the_old_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda product, x, _: product * 0.5 if x.shape[0] in (2, 3) else product)
    assert wrong_rows(AFFINE) == [2, 3]


@pytest.mark.parametrize("row", [0, -1])
def test_one_wrong_row_of_many_is_found(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(product: mx.array, x: mx.array, weight: mx.array) -> mx.array:
        return product.at[row].add(product[row]) if x.shape[0] == 5 else product

    changed(monkeypatch, one)
    assert wrong_rows(AFFINE) == [5]


def test_a_fault_of_kernels_that_split_the_inner_dimension_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLX's was: right below 1,024."""
    changed(monkeypatch, lambda product, x, _: product * 0.5 if x.shape[-1] >= 1024 and len(x) == 3 else product)
    assert wrong_rows(AFFINE) == [3]


def test_results_that_are_no_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda product, *_: product * mx.nan)
    assert wrong_rows(AFFINE) == [1, 2, 3, 4, 5]


def test_products_that_round_as_tf32_does_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mantissa has 10 bits: measured on one GPU as relative errors of 3e-4 to 8e-4."""

    def tf32(x: mx.array) -> mx.array:
        return ((x.view(mx.uint32) + 0x1000) & 0xFFFFE000).view(mx.float32) if x.dtype == mx.float32 else x

    def rounded(product: mx.array, x: mx.array, weight: mx.array) -> mx.array:
        noise = mx.random.normal(product.shape, key=mx.random.key(0)).astype(product.dtype)
        return tf32(product) + noise * 1e-3 * mx.abs(product).mean()

    changed(monkeypatch, rounded)
    assert wrong_rows(AFFINE) == []
