"""Recurrent layers of the model files, computed by `segtrain.recurrence`: the doors.

mlx-lm runs a recurrence a token at a time where a gradient is wanted. Inside `stream_ops` the functions in `DOORS` do
the same in chunks of tokens, and through a stream's branches (`branches`). So a prompt can be shared wherever
everything that looks back goes through a door: `RESTARTS` names those model files.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from segtrain.engine.layouts import Stream
from segtrain.models import scans
from segtrain.models.branches import by_branches
from segtrain.recurrence.gated_delta import gated_delta

Maker: TypeAlias = Callable[[Stream, Any, Any], Any]
"""(stream, its attention, the original) -> what stands in for it, as in `exceptions`."""


def delta_rule(stream: Stream, attend: Any, original: Any) -> Any:
    """`gated_delta_update` with the decay kept as a logarithm, which stays exact where the decay itself is 0."""

    def update(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *,
        use_kernel: bool = True,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
    ) -> tuple[mx.array, mx.array]:
        beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
        rate = mx.exp(A_log.astype(mx.float32))
        if lower_bound is None:
            log_decay = -rate * nn.softplus(a + dt_bias)
        else:
            log_decay = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
        if mask is not None:
            beta = mx.where(mask[..., None], beta, 0)
            log_decay = mx.where(mask.reshape(*mask.shape, *[1] * (log_decay.ndim - 2)), log_decay, 0)
        return by_branches(stream, _delta_rule, [q, k, v, log_decay, beta], state)

    return update


def _delta_rule(sequences: Sequence[mx.array], state: mx.array | None) -> tuple[mx.array, mx.array]:
    q, k, v, log_decay, beta = sequences
    return gated_delta(q, k, v, log_decay, beta, state)


_DELTA_RULE = ("qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid", "bailing_moe_v3")

DOORS: list[tuple[str, str, Maker]] = [
    *((file, "gated_delta_update", delta_rule) for file in _DELTA_RULE),
    *scans.DOORS,
]
"""(model file, what is replaced, by what)."""

RESTARTS = {*(file for file, *_ in DOORS), "lfm2", "lfm2_moe", "gear", "longcat_flash"}
"""Files with other caches than one of keys and values a layer, in which all that looks back goes through doors."""


def restarts(layers: Sequence[nn.Module]) -> bool:
    """Whether a prompt can be shared through these recurrent layers."""
    return all(type(layer).__module__.rpartition(".")[2] in RESTARTS for layer in layers)
