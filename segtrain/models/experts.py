"""What MLX can't compute of stacked experts on this device."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from segtrain.errors import UserError


def check_experts(model: nn.Module, name: str) -> None:
    """Raise UserError for dense experts in 16 bits on the CPU, where MLX's product of chosen matrices takes float32.

    Quantised experts have a product of their own, and LoRA on them is computed in float32 there.
    """
    if mx.default_device().type != mx.cpu:
        return
    for path, module in model.named_modules():
        if isinstance(module, SwitchLinear) and module.weight.dtype != mx.float32:
            dtype = str(module.weight.dtype).removeprefix("mlx.core.")
            raise UserError(
                f"model: on a CPU mlx multiplies experts in float32 only, and {path} of {name} is {dtype}; convert the "
                f"model first: mlx_lm.convert --hf-path {name} --mlx-path NEW --dtype float32 (or -q for 4 bits)"
            )
