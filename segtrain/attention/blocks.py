"""Attention in blocks of query rows: exact, and never more than a few tiles of scores at a time, forward and backward.

For a block of rows with scores S (masked with -inf), logsumexp l and P = exp(S - l):

    forward    o  = P v                      only o and l are kept
    backward   D  = rowsum(do * o)           (equals rowsum(dP * P))
               dS = P * (do v^T - D)         P is recomputed from S and l
               dq = scale * dS k,    dk += scale * dS^T q,    dv += P^T do

A soft-cap c replaces S by c tanh(S / c), whose derivative is 1 - (S_capped / c)^2. A sink s of a head is one more score
in its softmax, without a value: it enters l only, and ds = -sum_rows exp(s - l) D.

Each block waits for the one before it (`mx.depends`): otherwise evaluation, which runs ahead breadth first, would hold
many blocks' tiles at once. Where a block over all heads would have few rows, heads are taken in parts: the same tile
with better matrix shapes, and smaller sums to carry along.

Shapes: B batch, G key-value heads of a part, R query heads of each, T rows, C rows of a block, K keys that it sees.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

MIN_ROWS = 16  # of a block, however many keys it sees
GOOD_ROWS = 128  # a part takes fewer heads rather than blocks shorter than this


class Tile(NamedTuple):
    """Rows `start..stop-1` and the keys `first..last-1` that any of them sees; row i is key `before + i`."""

    start: int
    stop: int
    first: int
    last: int
    before: int


class Part(NamedTuple):
    """Some key-value heads of a call, in float32 but for `q` [B, G, R, T, D]; sinks [G, R, 1, 1]."""

    q: mx.array
    k: mx.array
    v: mx.array
    sinks: mx.array | None


@dataclass(frozen=True)
class Blocks:
    """What a block-wise attention computes and how: `tile_bytes` bounds one float32 tile of scores [B, G, R, C, K].

    `power` computes exp(x) as e ** x, which on MLX's CPU backend takes 0.4 of the time of `mx.exp`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    tile_bytes: int = 4 << 20
    power: bool = False

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> mx.array:
        """Equals `attention_reference.reference` without branches; differentiable once, in all four arrays."""

        @mx.custom_function
        def attention(*inputs: mx.array) -> tuple[mx.array, mx.array]:
            return self.forward(*inputs)

        @attention.vjp
        def attention_vjp(
            inputs: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
        ) -> tuple[mx.array, ...]:
            return self.backward(inputs, cotangents[0], *outputs)

        arrays = (q, k, v) if sinks is None else (q, k, v, sinks)
        return attention(*arrays)[0]  # type: ignore[index]  # mlx types a custom function as returning object

    def forward(
        self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Output [B, Hq, Tq, Dv] in q's dtype and logsumexp [B, Hq, Tq, 1] in float32."""
        outs: list[mx.array] = []
        sums: list[mx.array] = []
        for part in self.parts(q, k, v, sinks):
            blocks: list[tuple[mx.array, mx.array]] = []
            for tile in self.tiles(part):
                wait = list(blocks[-1]) if blocks else outs[-1:]
                blocks.append(self._forward_block(part, tile, wait))
            outs.append(mx.concatenate([out for out, _ in blocks], axis=3).astype(q.dtype))
            sums.append(mx.concatenate([total for _, total in blocks], axis=3))
        return _heads(outs), _heads(sums)

    def backward(
        self, inputs: tuple[mx.array, ...], do: mx.array, out: mx.array, sums: mx.array
    ) -> tuple[mx.array, ...]:
        """Cotangents of q, k, v (and sinks, where there are some), in the dtypes of those."""
        q, k, v, *sinks = inputs
        delta = (_float(do) * _float(out)).sum(axis=-1, keepdims=True)
        rows = [_grouped(x, k.shape[1]) for x in (do, sums, delta)]
        at = 0
        dqs: list[mx.array] = []
        dks: list[mx.array] = []
        dvs: list[mx.array] = []
        for part in self.parts(q, k, v, *sinks):
            heads = slice(at, at + part.k.shape[1])
            own_do, own_sums, own_delta = (x[:, heads] for x in rows)
            dq, dk, dv = self._backward_part(part, own_do, own_sums, own_delta, wait=dqs[-1:])
            dqs.append(dq.astype(q.dtype))
            dks.append(dk.astype(k.dtype))
            dvs.append(dv.astype(v.dtype))
            at = heads.stop
        cotangents = _heads(dqs), mx.concatenate(dks, axis=1), mx.concatenate(dvs, axis=1)
        if not sinks:
            return cotangents
        share = self._exp(_float(sinks[0])[:, None, None] - sums) * delta
        return *cotangents, -share.sum(axis=(0, 2, 3)).astype(sinks[0].dtype)

    def parts(self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> Iterator[Part]:
        """As many key-value heads at a time as leave blocks of `GOOD_ROWS` rows."""
        groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
        rows = min(q.shape[2], GOOD_ROWS)
        seen = k.shape[2] if self.window is None else min(k.shape[2], rows + self.window)
        size = max(1, min(groups, self.tile_bytes // (4 * q.shape[0] * repeats * rows * seen)))
        queries = _grouped(q, groups)
        for at in range(0, groups, size):
            heads = slice(at, at + size)
            sink = None if sinks is None else _float(sinks).reshape(groups, repeats, 1, 1)[heads]
            yield Part(queries[:, heads], _plain(k[:, heads]), _plain(v[:, heads]), sink)

    def tiles(self, part: Part) -> Iterator[Tile]:
        """Blocks of rows, each with at most `tile_bytes` of scores."""
        batch, groups, repeats, rows, _ = part.q.shape
        before = part.k.shape[2] - rows
        area = self.tile_bytes / (4 * batch * groups * repeats)
        start = 0
        while start < rows:
            seen = before + start if self.window is None else min(before + start, self.window - 1)
            # C rows see seen + C keys: the positive root of C * (seen + C) = area.
            count = int((math.sqrt(seen * seen + 4 * area) - seen) / 2) // MIN_ROWS * MIN_ROWS
            stop = min(rows, start + max(count, MIN_ROWS))
            yield Tile(start, stop, before + start - seen, before + stop, before)
            start = stop

    def _forward_block(self, part: Part, tile: Tile, wait: list[mx.array]) -> tuple[mx.array, mx.array]:
        """Output [B, G, R, C, Dv] and logsumexp [B, G, R, C, 1] of a block, computed after `wait`."""
        (q,) = _after([part.q[..., tile.start : tile.stop, :]], wait)
        scores, _ = self._scores(_rows(q), part.k, tile, q.shape[2])
        top = scores.max(axis=-1, keepdims=True)
        if part.sinks is not None:
            top = mx.maximum(top, part.sinks)
        weights = self._exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if part.sinks is not None:
            total = total + self._exp(part.sinks - top)
        out = (_flat(weights) @ part.v[:, :, tile.first : tile.last]).reshape(*q.shape[:-1], -1)
        return out / total, top + mx.log(total)

    def _backward_part(
        self, part: Part, do: mx.array, sums: mx.array, delta: mx.array, wait: list[mx.array]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Cotangents of a part's q [B, G, R, T, D], k and v in float32."""
        dk, dv = mx.zeros(part.k.shape, mx.float32), mx.zeros(part.v.shape, mx.float32)
        dqs: list[mx.array] = []
        for tile in self.tiles(part):
            block = [x[..., tile.start : tile.stop, :] for x in (part.q, do, sums, delta)]
            dq, dk_block, dv_block = self._backward_block(part, tile, *_after(block, wait))
            dqs.append(dq)
            dk, dv = _added(dk, tile, dk_block), _added(dv, tile, dv_block)
            wait = [dq, dk, dv]
        return mx.concatenate(dqs, axis=3), dk, dv

    def _backward_block(
        self, part: Part, tile: Tile, q: mx.array, do: mx.array, sums: mx.array, delta: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """What a block adds to the cotangents: dq [B, G, R, C, D], dk [B, G, K, D], dv [B, G, K, Dv]."""
        rows, drows = _rows(q), _rows(do)
        keys, values = part.k[:, :, tile.first : tile.last], part.v[:, :, tile.first : tile.last]
        scores, capped = self._scores(rows, part.k, tile, q.shape[2])
        weights = self._exp(scores - sums)
        slope = (drows @ values.swapaxes(-1, -2)).reshape(weights.shape)
        dscores = weights * (slope - delta)
        if capped is not None and self.softcap is not None:
            dscores = dscores * (1 - mx.square(capped / self.softcap))
        dscores = _flat(dscores)
        dq = ((dscores @ keys) * self.scale).reshape(q.shape)
        return dq, dscores.swapaxes(-1, -2) @ (rows * self.scale), _flat(weights).swapaxes(-1, -2) @ drows

    def _scores(self, rows: mx.array, k: mx.array, tile: Tile, repeats: int) -> tuple[mx.array, mx.array | None]:
        """Masked scores [B, G, R, C, K], and the capped ones before the mask where there is a soft-cap."""
        scores = (rows * self.scale) @ k[:, :, tile.first : tile.last].swapaxes(-1, -2)
        scores = scores.reshape(*scores.shape[:2], repeats, -1, scores.shape[-1])
        capped = None
        if self.softcap is not None:
            scores = capped = self.softcap * mx.tanh(scores / self.softcap)
        return scores + self._bias(tile), capped

    def _bias(self, tile: Tile) -> mx.array:
        rows = mx.arange(tile.before + tile.start, tile.before + tile.stop)
        distance = rows[:, None] - mx.arange(tile.first, tile.last)[None]
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        return mx.where(visible, 0.0, -mx.inf)

    def _exp(self, x: mx.array) -> mx.array:
        # float32's e is off by 3e-8 relative: as if the scores were, by less than their own rounding.
        return mx.power(mx.array(math.e, mx.float32), x) if self.power else mx.exp(x)


def _after(arrays: list[mx.array], wait: list[mx.array]) -> list[mx.array]:
    return mx.depends(arrays, wait) if wait else arrays


def _float(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _plain(x: mx.array) -> mx.array:
    """Float32 and row-contiguous, once, so that no block's matmul copies its keys."""
    return mx.contiguous(_float(x))


def _grouped(x: mx.array, groups: int) -> mx.array:
    """[B, Hq, T, D] -> [B, G, R, T, D]."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _heads(parts: list[mx.array]) -> mx.array:
    """Parts [B, G, R, T, D] -> [B, Hq, T, D]."""
    return mx.concatenate(parts, axis=1).flatten(1, 2)


def _rows(block: mx.array) -> mx.array:
    """[B, G, R, C, D] -> float32 [B, G, R * C, D]: a group's query heads are more rows against the same keys."""
    return _flat(_float(block))


def _flat(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _added(total: mx.array, tile: Tile, part: mx.array) -> mx.array:
    if part.shape[2] == total.shape[2]:
        return total + part
    return total.at[:, :, tile.first : tile.last].add(part)
