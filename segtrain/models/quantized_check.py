"""A start-up check of MLX's quantised product at the few row counts where it has been wrong.

Autodiff of a quantised linear layer multiplies by the weights untransposed, and a released MLX did that wrongly at 2
and 3 rows on one backend: gradients of short rows and of a loss head's last chunk were wrong without a word. It is
compared here with the dense product, on small random weights in each quantisation that the model has.
"""

from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from segtrain.errors import RunFailed

ROWS = range(1, 6)
OUTPUTS, INPUTS = 64, 512
TOLERANCE = 1e-4  # relative norm, float32


def check_quantized_products(model: nn.Module) -> None:
    """Raises RunFailed where this machine's quantised products differ from dense ones; nothing for a dense model."""
    for group_size, bits, mode in sorted(quantisations(model)):
        wrong = [rows for rows in ROWS if _error(rows, group_size, bits, mode) > TOLERANCE]
        if wrong:
            raise RunFailed(
                f"mlx {version('mlx')} multiplies {bits}-bit weights wrongly at {', '.join(map(str, wrong))} rows on "
                "this machine, so gradients would be wrong: install a newer mlx, or use a model that isn't quantised"
            )


def quantisations(model: nn.Module) -> set[tuple[int, int, str]]:
    """The (group size, bits, mode) of the model's quantised modules."""
    return {(m.group_size, m.bits, m.mode) for m in model.modules() if "scales" in m and hasattr(m, "mode")}


def _error(rows: int, group_size: int, bits: int, mode: str) -> float:
    weight, cotangent = mx.random.split(mx.random.key(rows))
    packed = mx.quantize(mx.random.normal((OUTPUTS, INPUTS), key=weight), group_size, bits, mode=mode)
    options: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    dense = mx.dequantize(*packed, **options).astype(mx.float32)
    dz = mx.random.normal((rows, OUTPUTS), key=cotangent)
    wanted = dz @ dense
    found = mx.quantized_matmul(dz, *packed, transpose=False, **options)
    return cast(float, (mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)).item())
