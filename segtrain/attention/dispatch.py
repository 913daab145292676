"""Exact causal attention over a stream's visibility, without a `[T, T]` array: one call, three ways to compute it.

- `fused`: MLX's own kernel with the mask "causal", where the backend has a backward for it that is bounded in memory;
- `band`: a sliding window folded into the batch dimension (`attention/band.py`), where the fused kernel takes arrays
  as masks;
- `blocks`: a block loop with its own backward (`attention/blocks.py`), everywhere.

`kernels` says what each backend can do, `choose` follows from it.

Shapes: q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from segtrain.attention.band import band, padded_rows
from segtrain.attention.blocks import Blocks
from segtrain.attention.kernels import KERNELS, Kind, form
from segtrain.attention.reference import reference, visibility
from segtrain.attention.turns import Turns, cut, in_order

__all__ = ["BACKENDS", "Backend", "Call", "Kind", "align", "attend", "backend", "choose", "follow", "reference"]
__all__ += ["steered", "unmasked", "visibility"]

# Taken before anyone replaces it (`models/stream_ops.py` does, for the length of a step).
_sdpa = mx.fast.scaled_dot_product_attention


@dataclass(frozen=True)
class Backend:
    """A row of the table: what the fused kernel has a memory-bounded backward for, and sizes that suit the backend.

    - `head_dims`, `dtypes`: for which, with the mask "causal" (none: never fused);
    - `query_multiple`: the query length must be a multiple of it (`attend` pads);
    - `array_mask`, `unequal_dims`: also with an array as mask, with D != Dv;
    - `widens_values`: where Dv < D, values are padded with zeros to D, as the fused kernel needs them equal;
    - `fused_rows`: longer rows are split into calls of so many queries;
    - `differentiated`: outside gradients too, the call is made as if it were to be differentiated (`_kernel`);
    - `fused_elements`: and the heads into calls of at most so many heads x keys x head dim;
    - `tile_bytes`, `power`: see `Blocks`.

    CUDA's row was run on an H200, the CPU's sizes were measured (`benchmarks/attention.py`). Sinks are never fused:
    CUDA's kernel takes them, but gives no gradient for them.

    Metal's row was not run. It follows what mlx 0.32.4's binaries do, which `tests/test_metal.py` holds as a table: a
    gradient through 8 query rows or fewer raises an exception, hence whole tiles of 32 rows. Its calls are small since
    the display's watchdog ends a process whose kernels take seconds.
    """

    name: str
    head_dims: frozenset[int] = frozenset()
    dtypes: tuple[mx.Dtype, ...] = ()
    query_multiple: int = 1
    array_mask: bool = False
    unequal_dims: bool = False
    widens_values: bool = False
    fused_rows: int = 8192
    differentiated: bool = False
    fused_elements: int = 1 << 62
    tile_bytes: int = 4 << 20
    power: bool = False


_HALF = (mx.float16, mx.bfloat16)


def _row(name: str, **sizes: Any) -> Backend:
    """The shared table's entry with what only computing needs."""
    shared = {**KERNELS[name], "dtypes": tuple(getattr(mx, dtype) for dtype in KERNELS[name]["dtypes"])}
    return Backend(name, **shared, **sizes)


BACKENDS = {
    # 2^29 (32 heads, 131,072 keys, dim 128): cuDNN's backward asks for all memory there is
    "cuda": _row("cuda", fused_elements=1 << 28),
    # 2,048 rows of 32 heads and dim 128 against 32,768 keys: a backward of 2.7 TFLOP
    "metal": _row("metal", fused_rows=2048, fused_elements=1 << 27, differentiated=True),
    "cpu": _row("cpu", power=True),
}


@dataclass(frozen=True)
class Call:
    """What `choose` needs to know about one attention call without branches."""

    heads: int
    rows: int
    keys: int
    dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def windowed(self) -> bool:
        return self.window is not None and self.window < self.keys


_steered: dict[str, Backend] = {}


def backend() -> Backend:
    """The table's row for the default device, as `follow` has changed it."""
    cpu = mx.default_device() == mx.Device(mx.cpu)
    name = "cpu" if cpu else "metal" if mx.metal.is_available() else "cuda"
    return _steered.get(name, BACKENDS[name])


def follow(choices: Mapping[str, Any]) -> None:
    """Compute attention on the default device as `segtrain bench` measured is best there; {}: as the table says."""
    name = backend().name
    _steered[name] = steered(BACKENDS[name], choices)


def steered(rows: Backend, choices: Mapping[str, Any]) -> Backend:
    """`rows` changed by a measurement of the fused kernel's backward, against blocks and the memory of all scores.

    Where it lost, nothing is fused. Where it won, it is taken for the head dim and dtype that were measured, which the
    table may not have.
    """
    match choices.get("attention"):
        case "blocks":
            return replace(rows, head_dims=frozenset())
        case "fused" if isinstance(dim := choices.get("attention_dim"), int):
            dtypes = [x for x in (*_HALF, mx.float32) if str(x).endswith(f".{choices.get('attention_dtype')}")]
            if not rows.head_dims:  # else what is known of other dtypes would be claimed for this dim, and vice versa
                return replace(rows, head_dims=frozenset({dim}), dtypes=tuple(dtypes))
    return rows


def align(rows: Backend | None = None) -> int:
    """Streams whose length is a multiple of this need no padding inside attention."""
    return (rows or backend()).query_multiple


def choose(rows: Backend, call: Call) -> Kind:
    """The fastest kind whose memory is bounded on this backend. Pure."""
    return form(rows, call, dtype=call.dtype in rows.dtypes, windowed=call.windowed)


@dataclass(frozen=True)
class _Rule:
    """The scores' rule, and the backend to compute on."""

    scale: float
    window: int | None
    softcap: float | None
    rows: Backend
    sinks: mx.array | None


def attend(
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
    rows: Backend | None = None,
) -> mx.array:
    """Causal attention, aligned at the lower right: output [B, Hq, Tq, Dv] in q's dtype.

    Equals `reference`, gradients too. A row sees keys at most `window - 1` positions before it. `softcap` c replaces
    scores by c tanh(score / c). `sinks` [Hq] adds one score without a value to each head's softmax.

    With `branches` (lengths that, with `prefix`, add up to Tq = Tk) the rows are a common prefix followed by
    independent continuations: a branch sees the prefix and its own earlier rows, and its positions, which windows
    count, start at `prefix`. `rows` overrides the table's row of the default device.

    Raises ValueError for lengths that do not fit each other.
    """
    _check(q, k, v, window, prefix, branches)
    rule = _Rule(scale, window, softcap, rows or backend(), sinks)
    if not branches:
        return _causal(q, k, v, rule)
    return mx.concatenate(_branches(q, k, v, rule, prefix, branches), axis=2)


def unmasked(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, sinks: mx.array | None = None, rows: Backend | None = None
) -> mx.array:
    """Attention in which every row sees every key, as a few models have it: MLX's own, at a length that it takes."""
    count = q.shape[2]
    q = padded_rows(q, -count % (rows or backend()).query_multiple)
    return _sdpa(q, k, v, scale=scale, mask=None, sinks=sinks)[:, :, :count]


def _branches(
    q: mx.array, k: mx.array, v: mx.array, rule: _Rule, prefix: int, branches: tuple[int, ...]
) -> list[mx.array]:
    """Outputs of [prefix; first branch], then of each further branch against [the prefix it can reach; itself]."""
    reach = 0 if rule.window is None else max(0, prefix - rule.window + 1)
    start = prefix + branches[0]
    parts = [_causal(q[:, :, :start], k[:, :, :start], v[:, :, :start], rule)] if start else []
    for length in filter(None, branches[1:]):
        stop = start + length
        block = q[:, :, start:stop]
        keys, values = (mx.concatenate([x[:, :, reach:prefix], x[:, :, start:stop]], axis=2) for x in (k, v))
        if parts:
            parts[-1], block = in_order(parts[-1], block)
        parts.append(_causal(block, keys, values, rule))
        start = stop
    return parts


def _check(q: mx.array, k: mx.array, v: mx.array, window: int | None, prefix: int, branches: tuple[int, ...]) -> None:
    rows, keys = q.shape[2], k.shape[2]
    if not 0 < rows <= keys or v.shape[2] != keys:
        raise ValueError(
            f"attention of {rows} rows over {keys} keys and {v.shape[2]} values: the rows are the last keys"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key-value heads")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} sees nothing; it counts the row itself, so it is at least 1")
    if branches and not prefix + sum(branches) == rows == keys:
        raise ValueError(
            f"a prefix of {prefix} and branches of {branches} do not add up to {rows} rows and {keys} keys"
        )


def _causal(q: mx.array, k: mx.array, v: mx.array, rule: _Rule) -> mx.array:
    """Attention of one run of rows that are the last of the keys."""
    call = Call(
        heads=q.shape[1],
        rows=q.shape[2],
        keys=k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=q.dtype,
        window=rule.window,
        softcap=rule.softcap,
        sinks=rule.sinks is not None,
    )
    window = rule.window if call.windowed else None
    match choose(rule.rows, call):
        case "fused":
            extra = 0 if rule.rows.unequal_dims else call.dim - call.value_dim
            return _fused(q, k, widened(v, extra), rule)[..., : call.value_dim]
        case "band":
            assert window is not None
            return band(q, k, v, scale=rule.scale, window=window, multiple=rule.rows.query_multiple)
        case "blocks":
            return Blocks(rule.scale, window, rule.softcap, rule.rows.tile_bytes, rule.rows.power)(q, k, v, rule.sinks)


def widened(v: mx.array, extra: int) -> mx.array:
    """Values with `extra` zeros after each: so many more columns of zeros in the output."""
    return mx.pad(v, [(0, 0), (0, 0), (0, 0), (0, extra)]) if extra else v


def _fused(q: mx.array, k: mx.array, v: mx.array, rule: _Rule) -> mx.array:
    """Fused causal calls that are as large as the backend allows, one after the other, forward and backward."""
    count, before = q.shape[2], k.shape[2] - q.shape[2]
    q, k, v = (padded_rows(x, -count % rule.rows.query_multiple) for x in (q, k, v))

    def call(block: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return _kernel(block, keys, values, rule.scale, rule.rows.differentiated)

    groups = list(_head_groups(q.shape[1], k.shape[1], k.shape[2] * max(q.shape[3], v.shape[3]), rule.rows))
    starts = list(range(0, q.shape[2], rule.rows.fused_rows))
    if len(starts) == 1 and k.shape[1] % len(groups) == 0:
        return _joined(_by_heads(q, k, v, groups, call), axis=1)[:, :, :count]
    turns = Turns(k, v)
    for start, block in zip(starts, cut(q, starts[1:], axis=2), strict=True):
        stop = before + start + block.shape[2]
        for (_, kv_heads), part in zip(groups, cut(block, _edges(groups, 0), axis=1), strict=True):
            turns.results.append(call(*turns.next(part, kv_heads, stop)))
    done = turns.results
    rows = [_joined(done[i : i + len(groups)], axis=1) for i in range(0, len(done), len(groups))]
    return _joined(rows, axis=2)[:, :, :count]


def _kernel(q: mx.array, k: mx.array, v: mx.array, scale: float, differentiated: bool) -> mx.array:
    """MLX's causal attention. `differentiated`: with the kernel that has a backward, whoever calls.

    On Metal MLX takes that one for all head dims while it traces a gradient. Otherwise it prefers composed operations,
    which hold all scores, for head dims 192 and 256: in a segment's forward pass and in evaluation. What is traced here
    besides is never computed.
    """

    def attention(*inputs: mx.array) -> list[mx.array]:
        return [_sdpa(*inputs, scale=scale, mask="causal")]

    if not differentiated:
        return attention(q, k, v)[0]
    (out,), _ = mx.vjp(attention, [q, k, v], [mx.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)])
    return out


def _by_heads(
    q: mx.array, k: mx.array, v: mx.array, groups: list[tuple[slice, slice]], call: Callable[..., mx.array]
) -> list[mx.array]:
    """Calls of groups of heads that share no keys, one after the other."""
    done: list[mx.array] = []
    parts = [cut(x, _edges(groups, side), axis=1) for x, side in ((q, 0), (k, 1), (v, 1))]
    for block, keys, values in zip(*parts, strict=True):
        if done:
            done[-1], block = in_order(done[-1], block)
        done.append(call(block, keys, values))
    return done


def _edges(groups: list[tuple[slice, slice]], side: int) -> list[int]:
    return [group[side].start for group in groups[1:]]


def _head_groups(heads: int, kv_heads: int, head_elements: int, rows: Backend) -> Iterator[tuple[slice, slice]]:
    """Equal groups of query heads, with the key-value heads that each needs, as few as `fused_elements` allows."""
    counts = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    count = next((n for n in counts if heads // n * head_elements <= rows.fused_elements), heads)
    size, kv_size = heads // count, max(1, kv_heads // count)
    for group in range(count):
        first = group * kv_heads // count
        yield slice(group * size, (group + 1) * size), slice(first, first + kv_size)


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
