"""Mamba's selective scan: a decay for each channel and each of its states, which depends on the token.

    S_t = exp(dt_t A) * S_{t-1} + (dt_t x_t) B_t^T        y_t = S_t C_t

The decays differ in every channel and state, so a chunk is no product of matrices: that would need
exp(A (c_i - c_j)) taken apart into a factor that overflows. The states of a group of tokens are computed by
`diagonal.states` instead, which is exact at every decay, and recomputed in the gradient.

Memory: a group's states [B, GROUP, D, N] some eight times over, and the state [B, D, N] at each group's start.
"A selective scan" is that of Gu and Dao, Mamba: linear-time sequence modeling with selective state spaces (2023).

Shapes: B batch, T tokens, D channels, N states of a channel.
"""

import mlx.core as mx

from segtrain.recurrence import diagonal, grouped

GROUP = 64


def reference(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """A token at a time: what `selective_scan` equals."""
    outputs = []
    for t in range(x.shape[1]):
        decay = mx.exp(dt[:, t, :, None] * A)
        state = decay * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        outputs.append((state * C[:, t, None]).sum(axis=-1))
    return mx.stack(outputs, axis=1), state


def selective_scan(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """y [B, T, D] in the dtype of `x`, and the state after the last token [B, D, N] in float32.

    x, dt [B, T, D]; B, C [B, T, N]; A [D, N], at most 0; `state` [B, D, N] before the first token, None: zeros.
    Arithmetic in float32. Differentiable in everything.
    """
    if state is None:
        state = mx.zeros((x.shape[0], *A.shape), mx.float32)
    y, state = grouped.scan(_chunk, [x, dt, B, C], state.astype(mx.float32), group=GROUP, fixed=[A])
    return y.astype(x.dtype), state


def _chunk(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    x, dt, B, C, A = (array.astype(mx.float32) for array in (x, dt, B, C, A))
    decays = mx.exp(dt[..., None] * A)
    found = diagonal.states(decays, (dt * x)[..., None] * B[:, :, None], state)
    last = mx.contiguous(found[:, -1])  # a slice would hold all states for as long as it lives
    return (found @ C[..., None]).squeeze(-1), last
