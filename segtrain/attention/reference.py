"""Attention as its definition says it, with every score and the whole mask in memory: the oracle of the tests."""

import mlx.core as mx


def visibility(
    rows: int, keys: int, *, window: int | None = None, prefix: int = 0, branches: tuple[int, ...] = ()
) -> mx.array:
    """Who sees whom, [rows, keys] bool, as `attend`'s docstring says. Rows are the last of the keys."""
    position = mx.arange(keys)
    branch = mx.zeros((keys,), mx.int32)
    if branches:
        position = mx.concatenate([mx.arange(prefix), *(mx.arange(prefix, prefix + n) for n in branches)])
        numbers = [mx.full((n,), 1 + i, mx.int32) for i, n in enumerate(branches)]
        branch = mx.concatenate([mx.zeros((prefix,), mx.int32), *numbers])
    index = mx.arange(keys)
    visible = index[:, None] >= index[None]
    visible &= (branch[None] == 0) | (branch[None] == branch[:, None])
    if window is not None:
        visible &= position[:, None] - position[None] < window
    return visible[keys - rows :]


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    prefix: int = 0,
    branches: tuple[int, ...] = (),
) -> mx.array:
    """What `attend` equals: float32 softmax over all visible keys, and the sink where there is one. Same shapes."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (mx.repeat(x.astype(mx.float32), repeats, axis=1) for x in (k, v))
    scores = scale * (q.astype(mx.float32) @ k.swapaxes(-1, -2))
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    mask = visibility(q.shape[2], k.shape[2], window=window, prefix=prefix, branches=branches)
    scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        extra = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, extra], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : k.shape[2]]
    return (weights @ v).astype(q.dtype)
