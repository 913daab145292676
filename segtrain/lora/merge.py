"""An adapter's effect on a weight matrix, for a model that holds both in one.

    linear      W + scale * (A B)^T      A [in, r], B [r, out], W [out, in]
    experts     W + scale * B A          A [E, r, in], B [E, out, r], W [E, out, in]
    embedding   W + scale * A B          A [tokens, r], B [r, width], W [tokens, width]

DoRA then gives each row of the sum the length m. All of it in float32: the sum is rounded once, by who stores it.
"""

from collections.abc import Mapping

import mlx.core as mx

from segtrain.lora.dora import TINY
from segtrain.lora.modules import FACTORS

Arrays = Mapping[str, mx.array]


def merged(weight: mx.array, adapter: Arrays, scale: float, *, embedding: bool = False) -> mx.array:
    """`weight` with what the adapter's arrays (by their last name: `lora_a`, `lora_b`, `m`) do to it, in float32.

    Raises ValueError where their shapes don't suit the weight.
    """
    delta = _delta(adapter, scale, embedding)
    if delta.shape != weight.shape:
        raise ValueError(f"it makes a matrix of shape {list(delta.shape)}, the model's is {list(weight.shape)}")
    found = weight.astype(mx.float32) + delta
    if "m" not in adapter:
        return found
    lengths = mx.maximum(mx.linalg.norm(found, axis=-1, keepdims=True), TINY)
    return adapter["m"].astype(mx.float32)[..., None] / lengths * found


def _delta(adapter: Arrays, scale: float, embedding: bool) -> mx.array:
    """What LoRA adds to the weight."""
    a, b = (adapter[key].astype(mx.float32) for key in FACTORS)
    if a.ndim == 3:
        return scale * (b @ a)
    return scale * (a @ b) if embedding else scale * (a @ b).T
