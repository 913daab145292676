"""The gated delta rule, chunk by chunk: a state of key-value pairs that each token decays and corrects.

For one head, with state S [Dk, Dv], a token's query q, key k, value v, decay d (one number, or one for each channel of
the key) and strength b:

    S <- d S;    S <- S + k b (v - S'k)';    y = S'q                                            (`reference`)

Within a chunk of C tokens let D(t, s) be the product of the decays after token s up to token t. What the tokens write,
u_t = b_t (v_t - S'k_t), depends on the chunk's first state S and on the tokens before, so that all u together solve a
triangular system:

    (I + A) U = b (V - (D(t, -) k_t)' S),   A(t, s) = b_t (k_t D(t, s) k_s)  for s < t
    Y = (D(t, -) q_t)' S + P U,             P(t, s) = q_t D(t, s) k_s        for s <= t
    S <- D(last, -) S + (D(last, t) k_t)' U

What has to go chunk by chunk is S alone, S <- D(last, -) S + (D(last, t) k_t)' (U0 - W S) with U = U0 - W S: one
product a chunk, once (D(last, t) k_t)' W and (D(last, t) k_t)' U0 are known (`_chain`). Everything else is done for
all chunks of a group at once. Yang et al. 2024, "Parallelizing linear transformers with the delta rule over sequence
length", and the Kimi Linear report describe the scheme.

Products of decays are exponentials of sums of logarithms. Sums run over the very tokens between s and t: as a
difference of two sums from the chunk's start they would cancel where a decay is near 0, and as a quotient of two
exponentials they would overflow.

Shapes: N chunks, B batch, K key heads, R value heads for each key head, C tokens a chunk, Dk, Dv; T tokens. Chunks come
first, so that what belongs to one lies together.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from segtrain.recurrence.grouped import scan
from segtrain.recurrence.sizes import Sizes, backend_name, group_tokens, on_device
from segtrain.recurrence.triangular import triangle, unit_lower_inverse

SIZES = {
    "cpu": Sizes(chunk=16, group_bytes=1 << 18),
    "cuda": Sizes(chunk=128, group_bytes=27 << 20),
    "metal": Sizes(chunk=32, group_bytes=8 << 20),
}
"""CPU's and CUDA's were measured (`benchmarks/recurrences.py`).
A group's work takes some twenty times its inputs' bytes, and with a decay for each channel twice as much."""
CHANNEL_SIZES = {**SIZES, "cuda": Sizes(chunk=128, group_bytes=18 << 20)}


RULE = __name__.rsplit(".", 1)[-1]  # what a plan calls it (`memory.shapes.Scan`)
FUSED_HEADS = {"metal": frozenset({(16, 16), (16, 32), (16, 64), (24, 24), (32, 32)})}
"""By backend, the (key heads, value heads) for which `mx.fast.gated_delta_update` is a kernel that has a gradient, with
keys and values of 128 and a decay a head; read in MLX's binary and not run. It is used where `follow` says so."""
FUSED_DIM = 128

_chosen: dict[str, Any] = {}


def follow(choices: Mapping[str, Any]) -> None:
    """Use MLX's kernel where it is and `segtrain doctor` chose it ("gated_delta": "fused"); {}: chunks everywhere."""
    _chosen.clear()
    _chosen.update(choices)


def has_kernel(q: mx.array, v: mx.array, log_decay: mx.array) -> bool:
    """Whether MLX has a kernel with a gradient for these shapes on the default device."""
    heads = FUSED_HEADS.get(backend_name(), frozenset())
    return log_decay.ndim == 3 and (q.shape[2], v.shape[2]) in heads and q.shape[3] == v.shape[3] == FUSED_DIM


def fused(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_delta` by MLX's own function, which runs a token at a time where it has no kernel."""
    y, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_decay), beta, state)
    return y.astype(q.dtype), state


def reference(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_delta` a token at a time."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (mx.repeat(x, repeats, axis=2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        decay = mx.exp(log_decay[:, t])
        state = state * decay.reshape(*decay.shape[:2], 1, -1)
        write = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, None]).sum(axis=-1))
        state = state + write[..., None] * k[:, t, :, None]
        outputs.append((state * q[:, t, :, None]).sum(axis=-1))
    return mx.stack(outputs, axis=1).astype(q.dtype), state


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    *,
    sizes: Sizes | None = None,
) -> tuple[mx.array, mx.array]:
    """Outputs [B, T, K*R, Dv] in q's dtype, and the state after the last token, [B, K*R, Dv, Dk] in float32.

    - q, k [B, T, K, Dk]; v [B, T, K*R, Dv]; beta [B, T, K*R];
    - log_decay [B, T, K*R] or, for a decay per channel, [B, T, K*R, Dk]: at most 0;
    - state: before the first token; None for zeros;
    - sizes: instead of the table's row of the default device.

    Differentiable in all of them, also through the final state. A token with log_decay 0 and beta 0 changes nothing.
    """
    B, _, heads, Dv = v.shape
    if state is None:
        state = mx.zeros((B, heads, Dv, k.shape[-1]), mx.float32)
    if _chosen.get("gated_delta") == "fused" and not sizes and has_kernel(q, v, log_decay):
        return fused(q, k, v, log_decay, beta, state.astype(mx.float32))
    gates = log_decay.shape[-1] if log_decay.ndim == 4 else 1
    sizes = sizes or on_device(SIZES if gates == 1 else CHANNEL_SIZES)
    group = group_tokens(sizes, B * heads * (k.shape[-1] + Dv + gates))
    chunk = partial(_group, sizes.chunk)
    return scan(chunk, [q, k, v, log_decay, beta], state.astype(mx.float32), group=group)


def _group(
    size: int, q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Some chunks of `size` tokens, the last one perhaps shorter, at once."""
    (B, T, heads, Dv), K, dtype = v.shape, k.shape[2], q.dtype
    q, k, v, logs, beta = (_in_chunks(x, size, K) for x in (q, k, v, log_decay, beta))
    S = state.reshape(B, K, heads // K, Dv, -1).swapaxes(-1, -2)
    since, until = _decays(logs)
    kk, qk = _per_channel(k, q, logs) if logs.shape[-1] > 1 else _per_head(k, q, logs)
    X = unit_lower_inverse(beta * kk) * beta.swapaxes(-1, -2)
    U0, W, kt = X @ v, X @ (since * k), (until * k).swapaxes(-1, -2)
    chained: Any = _chain(kt @ W, kt @ U0, since[..., -1, :, None], S)
    before, S = chained
    y = (since * q) @ before + qk @ (U0 - W @ before)
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, heads, Dv)[:, :T]
    return y.astype(dtype), S.swapaxes(-1, -2).reshape(state.shape)


def _in_chunks(x: mx.array, size: int, K: int) -> mx.array:
    """[B, T, H, D] or [B, T, H] as [N, B, K, H / K, C, D or 1] in float32, filled up with zeros."""
    B, T, heads = x.shape[:3]
    if T % size:
        x = mx.pad(x, [(0, 0), (0, -T % size)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(B, -1, size, K, heads // K, x.shape[3] if x.ndim == 4 else 1)
    return x.transpose(1, 0, 3, 4, 2, 5).astype(mx.float32)


def _decays(logs: mx.array) -> tuple[mx.array, mx.array]:
    """D(t, -) and D(last, t) from logs [..., C, D or 1]."""
    after = mx.cumsum(logs, axis=-2, reverse=True, inclusive=False)
    return mx.exp(mx.cumsum(logs, axis=-2)), mx.exp(after)


def _per_head(k: mx.array, q: mx.array, logs: mx.array) -> tuple[mx.array, mx.array]:
    """k_t D(t, s) k_s for s < t and q_t D(t, s) k_s for s <= t, zeros elsewhere: [..., C, C], one decay a head."""
    strict, lower = (triangle(k.shape[-2], diagonal) for diagonal in (-1, 0))
    sums = mx.cumsum(mx.where(strict, logs, 0), axis=-2)
    decay = mx.where(lower, mx.exp(sums), 0)
    kt = k.swapaxes(-1, -2)
    return mx.where(strict, decay * (k @ kt), 0), decay * (q @ kt)


def _per_channel(k: mx.array, q: mx.array, logs: mx.array) -> tuple[mx.array, mx.array]:
    """The same with a decay for each channel, which has to come between the factors of each product.

    D(t, s) = D(t, m) D(m, s) for a token m between them, and both factors are at most 1. So blocks of one token are
    joined to blocks of two, four, ..., with m at the joint: every pair meets at one joint.
    """
    k, q = (mx.broadcast_to(x, logs.shape) for x in (k, q))
    rows = mx.stack([k, q])
    own = mx.stack([mx.zeros(k.shape[:-1]), (q * k).sum(axis=-1)])[..., None, None]  # [2, ..., C, 1, 1]
    size = 1
    while size < k.shape[-2]:
        late, early = (_halves(x, size)[i] for x, i in ((rows, 1), (k, 0)))
        since = mx.exp(mx.cumsum(_halves(logs, size)[1], axis=-2))
        until = mx.exp(mx.cumsum(_halves(logs, size)[0], axis=-2, reverse=True, inclusive=False))
        across = (late * since) @ (early * until).swapaxes(-1, -2)
        own = _joined(own[..., 0::2, :, :], across, own[..., 1::2, :, :])
        size *= 2
    return own[0, ..., 0, :, :], own[1, ..., 0, :, :]


def _halves(x: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """[..., C, D] as the first and the second half of each block of 2 * size tokens, [..., C / (2 size), size, D]."""
    x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _joined(first: mx.array, across: mx.array, second: mx.array) -> mx.array:
    """[[first, 0], [across, second]]."""
    above = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([above, mx.concatenate([across, second], axis=-1)], axis=-2)


@mx.custom_function
def _chain(P: mx.array, Z: mx.array, decay: mx.array, S: mx.array) -> tuple[mx.array, mx.array]:
    """The states before each chunk [N, ..., Dk, Dv] and after the last, by S_{n+1} = decay_n S_n - P_n S_n + Z_n.

    P [N, ..., Dk, Dk], Z [N, ..., Dk, Dv], decay [N, ..., Dk or 1, 1], S [..., Dk, Dv]. The decay isn't put into P: a
    product may round its factors to TF32, and of what a state keeps for many chunks nothing is to be lost.
    """
    states = [S]
    for p, z, d in zip(P, Z, decay, strict=True):
        states.append(mx.addmm(d * states[-1] + z, p, states[-1], alpha=-1.0))
    return mx.stack(states[:-1]), states[-1]


@_chain.vjp
def _chain_vjp(
    primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    P, _, decay, _ = primals
    own, dS = cotangents
    before, _ = outputs
    after = []  # cotangents of the state after each chunk, last chunk first
    for p, d, more in reversed(list(zip(P, decay, own, strict=True))):
        after.append(dS)
        dS = mx.addmm(d * dS + more, p.swapaxes(-1, -2), dS, alpha=-1.0)
    dZ = mx.stack(after[::-1])
    d_decay: Any = (before * dZ).sum(axis=-1, keepdims=True)
    if decay.shape[-2] == 1:
        d_decay = d_decay.sum(axis=-2, keepdims=True)
    return -(dZ @ before.swapaxes(-1, -2)), dZ, d_decay, dS
