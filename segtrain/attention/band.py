"""Sliding-window attention as a band: linear in the number of rows, where the fused kernel takes array masks.

Rows are cut into blocks of c >= window rows, which become a batch dimension. Row i of a block sees, of the 2c keys of
the previous block and its own, those j with i + c - window < j <= i + c: one mask [c, 2c] serves all blocks. The first
rows, which have no whole block of keys before them, are one small call of their own.
"""

import mlx.core as mx

_sdpa = mx.fast.scaled_dot_product_attention


def band(q: mx.array, k: mx.array, v: mx.array, *, scale: float, window: int, multiple: int = 1) -> mx.array:
    """Equals `attention_reference.reference` with `window`; query lengths of all calls are multiples of `multiple`."""
    rows, before = q.shape[2], k.shape[2] - q.shape[2]
    size = -(-window // multiple) * multiple
    head = min(rows, max(0, size - before))
    parts = []
    if head:
        parts.append(
            _first(q[:, :, :head], k[:, :, : before + head], v[:, :, : before + head], scale, window, multiple)
        )
    if head < rows:
        reach = before + head - size
        parts.append(_folded(q[:, :, head:], k[:, :, reach:], v[:, :, reach:], scale, window, size))
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def window_mask(rows: int, keys: int, window: int) -> mx.array:
    """[rows, keys] bool, aligned at the lower right: keys not later than the row, and less than `window` before it."""
    distance = mx.arange(keys - rows, keys)[:, None] - mx.arange(keys)[None]
    return (distance >= 0) & (distance < window)


def padded_rows(x: mx.array, extra: int) -> mx.array:
    """`extra` rows of zeros after the last one: later than every real row, so that none sees them."""
    return mx.pad(x, [(0, 0), (0, 0), (0, extra), (0, 0)]) if extra else x


def _first(q: mx.array, k: mx.array, v: mx.array, scale: float, window: int, multiple: int) -> mx.array:
    rows = q.shape[2]
    q, k, v = (padded_rows(x, -rows % multiple) for x in (q, k, v))
    mask = "causal" if window >= k.shape[2] else window_mask(q.shape[2], k.shape[2], window)
    return _sdpa(q, k, v, scale=scale, mask=mask)[:, :, :rows]


def _folded(q: mx.array, k: mx.array, v: mx.array, scale: float, window: int, size: int) -> mx.array:
    """`k` and `v` begin `size` keys before the first row."""
    B, _, rows, _ = q.shape
    q, k, v = (padded_rows(x, -rows % size) for x in (q, k, v))
    blocks = _blocks(q, size)
    out = _sdpa(_batch(blocks), _pairs(k, size), _pairs(v, size), scale=scale, mask=window_mask(size, 2 * size, window))
    out = out.reshape(B, -1, *out.shape[1:]).swapaxes(1, 2)
    return out.reshape(B, out.shape[1], -1, out.shape[-1])[:, :, :rows]


def _blocks(x: mx.array, size: int) -> mx.array:
    """[B, H, n * size, D] -> [B, H, n, size, D]."""
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def _batch(blocks: mx.array) -> mx.array:
    """[B, H, n, c, D] -> [B * n, H, c, D]."""
    return blocks.swapaxes(1, 2).reshape(-1, blocks.shape[1], *blocks.shape[3:])


def _pairs(x: mx.array, size: int) -> mx.array:
    """Each block of keys behind the one before it: [B, H, (n + 1) * c, D] -> [B * n, H, 2c, D]."""
    blocks = _blocks(x, size)
    return _batch(mx.concatenate([blocks[:, :, :-1], blocks[:, :, 1:]], axis=3))
