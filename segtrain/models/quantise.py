"""Quantisation of a dense model's layers by mlx-lm, under the names that recipes and commands give it."""

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import quantize_model

from segtrain.models.dense_weights import is_packed, quantisation
from segtrain.models.exceptions import replaced

KINDS: dict[int | str, dict[str, Any]] = {
    4: {"bits": 4, "mode": "affine"},
    8: {"bits": 8, "mode": "affine"},
    "mxfp4": {"bits": None, "mode": "mxfp4"},
    "nvfp4": {"bits": None, "mode": "nvfp4"},
}
PIECE = 1 << 16  # numbers
KEYS = ("quantization", "quantization_config")


def quantised(model: nn.Module, config: Mapping[str, Any], kind: int | str) -> dict[str, Any]:
    """Quantise the layers that mlx-lm's conversion would, in groups of its default size; the new `config.json`."""
    with replaced(mx, "quantize", _in_pieces), contextlib.redirect_stdout(io.StringIO()):  # it prints bits per weight
        _, found = quantize_model(model, dict(config), None, **KINDS[kind])
    return dict(found)


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the same model, dense."""
    plain = {key: value for key, value in config.items() if key not in KEYS}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in text.items() if key not in KEYS}
    return plain


def packings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """How each quantised layer is packed, by its path, as its dense form's `to_quantized` takes it."""
    return {path: quantisation(module) | _scaled(module) for path, module in model.named_modules() if is_packed(module)}


def _scaled(module: nn.Module) -> dict[str, bool]:
    return {"global_scale": True} if module.get("global_scale") is not None else {}


def repack(model: nn.Module, packed: Mapping[str, dict[str, Any]]) -> None:
    """Quantise the layers that are dense now and that `packed` names, as it says."""
    with replaced(mx, "quantize", _in_pieces):
        nn.quantize(model, class_predicate=lambda path, m: hasattr(m, "to_quantized") and packed.get(path, False))


def _in_pieces(original: Callable[..., Any]) -> Callable[..., Any]:
    """`mx.quantize` some rows at a time where it compares each number with every value of a format: 4-bit floats, CPU.

    Rows are quantised independently of each other, so the result is the same.
    """

    def quantize(w: mx.array, group_size: Any = None, bits: Any = None, mode: str = "affine", **options: Any) -> Any:
        if mode == "affine" or options or mx.default_device() != mx.Device(mx.cpu):
            return original(w, group_size, bits, mode=mode, **options)
        rows = max(1, PIECE // w.shape[-1])
        flat = w.reshape(-1, w.shape[-1])
        parts = [original(flat[at : at + rows], group_size, bits, mode=mode) for at in range(0, flat.shape[0], rows)]
        return tuple(mx.concatenate(list(arrays)).reshape(*w.shape[:-1], -1) for arrays in zip(*parts, strict=True))

    return quantize
