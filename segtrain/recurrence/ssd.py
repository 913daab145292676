"""Mamba-2's recurrence (SSD): linear attention whose state decays by one number a head and token, in chunks.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        y_t = S_t C_t

With g_t = dt_t A, L_ij = exp(g_{j+1} + ... + g_i) for j <= i and 0 elsewhere, and c_i = g_1 + ... + g_i, a chunk is

    y = (L * (C B^T)) (dt x) + exp(c) * (C S_0^T)        S = exp(c_last) S_0 + (L_last * dt x)^T B

No exponent is positive. The sums in L are added up column by column from 0, not taken as differences c_i - c_j: after
a few strong decays such a difference would lose the digits of the weak ones.

Lightning attention is the same with dt = 1, so that A is a constant decay of each head; C are its queries, B its keys
and x its values. Dao and Gu, Transformers are SSMs (2024).

Shapes: B batch, T tokens, M chunks of L tokens, G groups of R heads that share B and C, H = G R heads, P features of a
head, N features of its state.
"""

import mlx.core as mx

from segtrain.recurrence import chunks, grouped

CHUNK, CHUNKS = 64, 4


def reference(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """A token at a time: what `ssd` equals."""
    repeats = x.shape[2] // B.shape[2]
    B, C = (mx.repeat(of_group, repeats, axis=2) for of_group in (B, C))
    outputs = []
    for t in range(x.shape[1]):
        new = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = mx.exp(dt[:, t] * A)[..., None, None] * state + new
        outputs.append((state @ C[:, t, :, :, None]).squeeze(-1))
    return mx.stack(outputs, axis=1), state


def ssd(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """y [B, T, H, P] in the dtype of `x`, and the state after the last token [B, H, P, N] in float32.

    x [B, T, H, P]; dt [B, T, H]; B, C [B, T, G, N]; A [H], at most 0; `state` before the first token, None: zeros.
    Arithmetic in float32. Differentiable in everything.
    """
    if state is None:
        state = mx.zeros((x.shape[0], *x.shape[2:], B.shape[-1]), mx.float32)
    size = CHUNK * CHUNKS
    y, state = grouped.scan(_group, [x, dt, B, C], state.astype(mx.float32), group=size, fixed=[A])
    return y.astype(x.dtype), state


def _group(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    length, groups = x.shape[1], B.shape[2]
    chunk = min(length, CHUNK)
    x, dt = (mx.unflatten(chunks.split(of_head, chunk), 2, (groups, -1)) for of_head in (x, dt))  # B M G R L P
    B, C = (chunks.split(of_group, chunk)[:, :, :, None] for of_group in (B, C))  # B M G 1 L N
    g, x = dt * A.astype(mx.float32).reshape(groups, -1, 1), dt[..., None] * x
    decays = _decays(g)
    since_start = mx.exp(mx.cumsum(g, axis=-1))[..., None]
    added = (decays[..., -1, :, None] * x).swapaxes(-1, -2) @ B
    starts, state = _starts(added, since_start[..., -1:, :], mx.unflatten(state, 1, (groups, -1)))
    y = (decays * (C @ B.swapaxes(-1, -2))) @ x + since_start * (C @ starts.swapaxes(-1, -2))
    return chunks.join(y.flatten(2, 3), length), state.flatten(1, 2)


def _starts(added: mx.array, decay: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """States before each chunk [B, M, G, R, P, N] and after the last, from what each chunk adds and keeps."""
    starts = []
    for m in range(added.shape[1]):
        starts.append(state)
        state = decay[:, m] * state + added[:, m]
    return mx.stack(starts, axis=1), state


def _decays(g: mx.array) -> mx.array:
    """L [..., L, L] of g [..., L]."""
    size = g.shape[-1]
    lower = mx.tril(mx.ones((size, size), mx.bool_))
    sums = mx.cumsum(mx.tril(mx.broadcast_to(g[..., :, None], (*g.shape, size)), -1), axis=-2)
    return mx.where(lower, mx.exp(sums), 0)
