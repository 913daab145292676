"""Quantised layers as dense ones, and an adapter's arrays in the layers' own weights: nothing is read or computed yet.

On a lazily loaded model all of this only describes arrays. Whoever writes the model (`saving`) reads and computes them
one by one.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from segtrain.errors import UserError
from segtrain.lora.layers import EXPERTS, LINEAR
from segtrain.lora.merge import merged

DENSE: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


def merge(model: nn.Module, params: Mapping[str, mx.array], scale: float) -> None:
    """Put the adapter `params` (by mlx-lm's names) into the weights of its modules, which become dense.

    Weights keep their dtype; those of quantised modules take `dtype_of(model)`. Raises UserError, naming it, for an
    array that has no place in the model, or another shape.
    """
    modules, dtype = dict(model.named_modules()), dtype_of(model)
    found: dict[str, nn.Module] = {}
    for path, arrays in _by_module(params).items():
        module = modules.get(path)
        if not isinstance(module, (*LINEAR, *EXPERTS, *EMBEDDINGS)):
            raise UserError(f"the adapter's {path} is no layer of this model that can take it; give its own base model")
        kind = dtype if is_packed(module) else module.weight.dtype
        try:
            weight = merged(_weight(path, module), arrays, scale, embedding=isinstance(module, EMBEDDINGS))
        except (KeyError, ValueError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise UserError(f"the adapter's {path} doesn't suit this model: {why}; give its own base model") from error
        found[path] = _with_weight(module, weight.astype(kind))
    model.update_modules(tree_unflatten(list(found.items())))


def dequantise(model: nn.Module) -> None:
    """Make every quantised layer dense, in `dtype_of(model)`. Raises UserError for a kind that has no dense form."""
    dtype = dtype_of(model)
    packed = [(path, module) for path, module in model.named_modules() if is_packed(module)]
    dense = [(path, _with_weight(module, _weight(path, module).astype(dtype))) for path, module in packed]
    model.update_modules(tree_unflatten(dense))


def dtype_of(model: nn.Module) -> mx.Dtype:
    """What the model computes in: the dtype of most of its numbers that aren't packed (norms, biases, scales)."""
    sizes: dict[mx.Dtype, int] = {}
    for array in dict(tree_flatten(model.parameters())).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def quantisation(module: nn.Module) -> dict[str, Any]:
    """How a quantised layer is packed, as `nn.quantize` takes it."""
    return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}


def is_packed(module: nn.Module) -> bool:
    """Whether a layer's weight is quantised."""
    return "scales" in module


def _by_module(params: Mapping[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in sorted(params.items()):
        path, _, key = name.rpartition(".")
        found.setdefault(path, {})[key] = array
    return found


def _weight(path: str, module: nn.Module) -> mx.array:
    """A layer's weight: as it is, or dequantised in float32."""
    if not is_packed(module):
        return module.weight
    if type(module) not in DENSE:
        raise UserError(f"{path} is a {type(module).__name__}, which can't be made dense; give the original model")
    scales, biases = module.scales, module.get("biases")
    if biases is not None:
        return _dequantised(module, module.weight, scales.astype(mx.float32), biases.astype(mx.float32))
    factors = module.get("global_scale")
    if factors is None:
        return _dequantised(module, module.weight, scales)
    experts = range(module.weight.shape[0])
    return mx.stack([_dequantised(module, module.weight[e], scales[e], factor=factors[e]) for e in experts])


def _dequantised(
    module: nn.Module,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    factor: mx.array | None = None,
) -> mx.array:
    """In float32."""
    return mx.dequantize(weight, scales, biases, **quantisation(module), global_scale=factor, dtype=mx.float32)


def _with_weight(module: nn.Module, weight: mx.array) -> nn.Module:
    """The layer with a dense `weight`: itself, or the dense layer that a quantised one stands for."""
    made = module
    if is_packed(module):
        made = (kind := DENSE[type(module)]).__new__(kind)
        nn.Module.__init__(made)
        if "bias" in module:
            made.bias = module.bias
    made.weight = weight
    return made
