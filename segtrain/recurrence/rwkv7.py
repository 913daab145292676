"""RWKV-7's recurrence: a delta rule with a decay for each key feature, by chunks of matrix products.

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T        y_t = S_t r_t

With c_t = log w_1 + ... + log w_t from the chunk's start and u_t = S_{t-1} a_t, every state of the chunk is

    S_t = S_0 e^{c_t} + sum over s <= t of (u_s b_s^T + v_s k_s^T) e^{c_t - c_s}

so that with A_t = a_t e^{c_{t-1}}, R_t = r_t e^{c_t}, B_s = b_s e^{-c_s}, K_s = k_s e^{-c_s} as rows of matrices

    U = (I - tril(A B^T, -1))^{-1} (A S_0^T + tril(A K^T, -1) V)
    Y = R S_0^T + tril(R B^T) U + tril(R K^T) V

e^{-c} has to stay within float32, so a chunk's decays may not multiply to less than e^{-80}. RWKV-7's decay is
exp(-0.606531 sigmoid(.)) > 0.545 by construction: a chunk of 32 tokens comes to at least e^{-20}.

Shapes: B batch, T tokens, N chunks of C tokens, H heads, K and V features of a key and of a value.
Peng et al., RWKV-7 "Goose" with expressive dynamic state evolution (2025).
"""

import mlx.core as mx

from segtrain.recurrence import chunks, grouped
from segtrain.recurrence.triangular import unit_lower_inverse

CHUNK, CHUNKS = 32, 8


def reference(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """A token at a time: what `rwkv7` equals."""
    outputs = []
    for t in range(r.shape[1]):
        removed = (state @ a[:, t, :, :, None]) @ b[:, t, :, None]
        state = state * w[:, t, :, None] + removed + v[:, t, :, :, None] @ k[:, t, :, None]
        outputs.append((state @ r[:, t, :, :, None]).squeeze(-1))
    return mx.stack(outputs, axis=1), state


def rwkv7(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """y [B, T, H, V] in the dtype of `r`, and the state after the last token [B, H, V, K] in float32.

    r, k, a, b [B, T, H, K]; v [B, T, H, V]; decays w [B, T, H, K] in [0.1, 1]; `state` before the first token, None:
    zeros. Arithmetic in float32. Differentiable in everything.
    """
    if state is None:
        state = mx.zeros((*v.shape[:1], *v.shape[2:], k.shape[-1]), mx.float32)
    y, state = grouped.scan(_group, [r, w, k, v, a, b], state.astype(mx.float32), group=CHUNK * CHUNKS)
    return y.astype(r.dtype), state


def _group(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    length = r.shape[1]
    chunk = min(length, CHUNK)
    r, k, v, a, b = (chunks.split(x, chunk) for x in (r, k, v, a, b))  # B N H C K, B N H C V
    logs = mx.log(chunks.split(w, chunk, fill=1))
    c = mx.cumsum(logs, axis=-2)
    r, a, decay = r * mx.exp(c), a * mx.exp(c - logs), mx.exp(c[..., -1:, :])
    b, k = b * mx.exp(-c), k * mx.exp(-c)
    inverse = unit_lower_inverse(-mx.tril(a @ b.swapaxes(-1, -2), -1))
    from_state, from_v = inverse @ a, inverse @ (mx.tril(a @ k.swapaxes(-1, -2), -1) @ v)
    starts, u, state = _through_chunks(from_state, from_v, v, b * decay, k * decay, decay, state)
    y = r @ starts.swapaxes(-1, -2)
    y = y + mx.tril(r @ b.swapaxes(-1, -2)) @ u + mx.tril(r @ k.swapaxes(-1, -2)) @ v
    return chunks.join(y, length), state


def _through_chunks(
    from_state: mx.array, from_v: mx.array, v: mx.array, b: mx.array, k: mx.array, decay: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """States before each chunk [B, N, H, V, K], U = from_v + from_state S_0^T of each, and the state after the last.

    b and k are decayed to their chunk's end.
    """
    added = v.swapaxes(-1, -2) @ k
    starts, us = [], []
    for n in range(v.shape[1]):
        starts.append(state)
        us.append(from_v[:, n] + from_state[:, n] @ state.swapaxes(-1, -2))
        state = decay[:, n] * state + us[-1].swapaxes(-1, -2) @ b[:, n] + added[:, n]
    return mx.stack(starts, axis=1), mx.stack(us, axis=1), state
