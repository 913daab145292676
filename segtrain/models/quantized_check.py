"""A check of MLX's quantised product at the few row counts where it has been wrong.

Autodiff of a quantised linear layer multiplies by the weights untransposed, and a released MLX did that wrongly at 2
and 3 rows on one backend: gradients of short rows and of a loss head's last chunk were wrong without a word. It is
compared here with the dense product, on random weights in each quantisation that the model has, both ways round, in
the model's dtype (another would take ten seconds of kernel compilation on CUDA). The inner dimension is large enough
for the kernels that split it (1,024 and above).

What is looked for is a wrong result, not rounding: the fault was of the order of the result itself, while TF32 (how
CUDA and recent Apple GPUs multiply float32) rounds by 1e-3, and MLX's CPU backend, which sums in bfloat16, by 5e-2.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

ROWS = range(1, 6)
INNER, OUTER = 2048, 256
TOLERANCES = {mx.float32: 1e-2, mx.bfloat16: 0.2}  # of any row's norm


class Quantisation(NamedTuple):
    """How weights are packed."""

    group_size: int
    bits: int
    mode: str


def quantisations(model: nn.Module) -> set[Quantisation]:
    """Those of the model's quantised modules."""
    modules = [m for m in model.modules() if "scales" in m and hasattr(m, "mode")]
    return {Quantisation(m.group_size, m.bits, m.mode) for m in modules}


def wrong_rows(kind: Quantisation, dtypes: Iterable[mx.Dtype] = TOLERANCES) -> list[int]:
    """The row counts at which a product in one of `dtypes` with weights packed so is wrong on this machine."""
    ways = [(dtype, transpose) for dtype in dtypes for transpose in (False, True)]
    return sorted({rows for way in ways for rows in _wrong(kind, *way)})


def _wrong(kind: Quantisation, dtype: mx.Dtype, transpose: bool) -> Iterator[int]:
    """The row counts at which a row of x W (or x W^T) has an error that is large for its norm."""
    key, other = mx.random.split(mx.random.key(0))
    shape = (OUTER, INNER) if transpose else (INNER, OUTER)
    options: dict[str, Any] = kind._asdict()
    packed = mx.quantize(mx.random.normal(shape, key=key).astype(dtype), **options)
    dense = mx.dequantize(*packed, **options).astype(mx.float32)
    for rows in ROWS:
        x = mx.random.normal((rows, INNER), key=other).astype(dtype)
        wanted = x.astype(mx.float32) @ (dense.T if transpose else dense)
        found = mx.quantized_matmul(x, *packed, transpose=transpose, **options).astype(mx.float32)
        relative = mx.linalg.norm(found - wanted, axis=-1) / mx.linalg.norm(wanted, axis=-1)
        if not cast(float, relative.max().item()) <= TOLERANCES[dtype]:  # also where it is no number
            yield rows
