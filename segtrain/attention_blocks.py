"""Attention in blocks of query rows: exact, and never more than a few tiles of scores at a time, forward and backward.

For a block of rows with scores S (masked with -inf), logsumexp l and P = exp(S - l):

    forward    o  = P v                      only o and l are kept
    backward   D  = rowsum(do * o)           (equals rowsum(dP * P))
               dS = P * (do v^T - D)         P is recomputed from S and l
               dq = scale * dS k,    dk += scale * dS^T q,    dv += P^T do

A soft-cap c replaces S by c tanh(S / c), whose derivative is 1 - (S_capped / c)^2. A sink s of a head is one more score in
its softmax, without a value: it enters l only, and ds = -sum_rows exp(s - l) D.

Each block waits for the one before it (`mx.depends`): otherwise evaluation, which runs ahead breadth first, would hold many
blocks' tiles at once. Shapes: B batch, G key-value heads, R query heads of each, C rows of a block, K keys that it sees.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

MIN_ROWS = 16


@dataclass(frozen=True)
class Blocks:
    """What a block-wise attention computes and how: `tile_bytes` bounds one float32 tile of scores [B, G, R, C, K].

    `power` computes exp(x) as e ** x, which on MLX's CPU backend takes a third of the time of `mx.exp`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    tile_bytes: int = 4 << 20
    power: bool = False

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> mx.array:
        """Equals `attention_reference.reference` without branches; differentiable once, in all four arrays."""
        arrays = (q, k, v) if sinks is None else (q, k, v, sinks)

        @mx.custom_function
        def attention(*inputs: mx.array) -> tuple[mx.array, mx.array]:
            return self.forward(*inputs)

        @attention.vjp
        def attention_vjp(
            inputs: tuple[mx.array, ...], cotangents: tuple[mx.array, mx.array], outputs: tuple[mx.array, mx.array]
        ) -> tuple[mx.array, ...]:
            return self.backward(inputs, cotangents[0], outputs)

        return attention(*arrays)[0]

    def forward(
        self, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Output [B, Hq, Tq, Dv] in q's dtype and logsumexp [B, G, R, Tq, 1] in float32."""
        keys, values, queries = _plain(k), _plain(v), _grouped(q, k.shape[1])
        outs: list[mx.array] = []
        sums: list[mx.array] = []
        for start, stop, first, last in self.spans(q, k):
            block = queries[..., start:stop, :]
            if outs:
                (block,) = mx.depends([block], [outs[-1], sums[-1]])
            scores, _ = self._scores(_rows(block), keys, (start, stop, first, last), q, k)
            top = scores.max(axis=-1, keepdims=True)
            if sinks is not None:
                top = mx.maximum(top, _per_head(sinks, top))
            weights = self._exp(scores - top)
            total = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total = total + self._exp(_per_head(sinks, top) - top)
            out = _ungrouped(_flat(weights) @ values[:, :, first:last], block) / total
            outs.append(out.astype(q.dtype))
            sums.append(top + mx.log(total))
        out = mx.concatenate(outs, axis=-2).reshape(*q.shape[:3], v.shape[-1])
        return out, mx.concatenate(sums, axis=-2)

    def backward(
        self, inputs: tuple[mx.array, ...], do: mx.array, outputs: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, ...]:
        """Cotangents of q, k, v (and sinks, where there are some), in the dtypes of those."""
        q, k, v, *sinks = inputs
        groups, (out, sums) = k.shape[1], outputs
        keys, values = _plain(k), _plain(v)
        queries, outs, douts = (_grouped(x, groups) for x in (q, out, do))
        dk, dv = mx.zeros(k.shape, mx.float32), mx.zeros(v.shape, mx.float32)
        dqs: list[mx.array] = []
        deltas: list[mx.array] = []
        for start, stop, first, last in self.spans(q, k):
            block, dout = queries[..., start:stop, :], douts[..., start:stop, :]
            if dqs:
                block, dout = mx.depends([block, dout], [dqs[-1], dk, dv])
            rows, drows = _rows(block), _rows(dout)
            scores, capped = self._scores(rows, keys, (start, stop, first, last), q, k)
            weights = self._exp(scores - sums[..., start:stop, :])
            delta = (_float(dout) * _float(outs[..., start:stop, :])).sum(axis=-1, keepdims=True)
            slope = drows @ values[:, :, first:last].swapaxes(-1, -2)
            dscores = weights * (slope.reshape(weights.shape) - delta)
            if capped is not None:
                dscores = dscores * (1 - mx.square(capped / self.softcap))
            dscores = _flat(dscores)
            dqs.append((_ungrouped(dscores @ keys[:, :, first:last], block) * self.scale).astype(q.dtype))
            dk = _added(dk, first, last, dscores.swapaxes(-1, -2) @ (rows * self.scale))
            dv = _added(dv, first, last, _flat(weights).swapaxes(-1, -2) @ drows)
            deltas.append(delta)
        dq = mx.concatenate(dqs, axis=-2).reshape(q.shape)
        cotangents = dq, dk.astype(k.dtype), dv.astype(v.dtype)
        if not sinks:
            return cotangents
        share = self._exp(_per_head(sinks[0], sums) - sums) * mx.concatenate(deltas, axis=-2)
        return *cotangents, -share.sum(axis=(0, 3, 4)).reshape(-1).astype(sinks[0].dtype)

    def spans(self, q: mx.array, k: mx.array) -> Iterator[tuple[int, int, int, int]]:
        """Blocks as (first row, last row + 1, first key, last key + 1), each with at most `tile_bytes` of scores."""
        rows, before = q.shape[2], k.shape[2] - q.shape[2]
        area = self.tile_bytes / (4 * q.shape[0] * q.shape[1])
        start = 0
        while start < rows:
            seen = before + start if self.window is None else min(before + start, self.window - 1)
            # C rows see seen + C keys: the positive root of C * (seen + C) = area.
            count = int((math.sqrt(seen * seen + 4 * area) - seen) / 2) // MIN_ROWS * MIN_ROWS
            stop = min(rows, start + max(count, MIN_ROWS))
            yield start, stop, before + start - seen, before + stop
            start = stop

    def _scores(
        self, rows: mx.array, keys: mx.array, span: tuple[int, int, int, int], q: mx.array, k: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Masked scores [B, G, R, C, K], and the capped ones before the mask where there is a soft-cap."""
        start, stop, first, last = span
        scores = (rows * self.scale) @ keys[:, :, first:last].swapaxes(-1, -2)
        scores = scores.reshape(q.shape[0], k.shape[1], -1, stop - start, last - first)
        capped = None
        if self.softcap is not None:
            scores = capped = self.softcap * mx.tanh(scores / self.softcap)
        before = k.shape[2] - q.shape[2]
        return scores + self._bias(mx.arange(before + start, before + stop), mx.arange(first, last)), capped

    def _bias(self, rows: mx.array, keys: mx.array) -> mx.array:
        distance = rows[:, None] - keys[None]
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        return mx.where(visible, 0.0, -mx.inf)

    def _exp(self, x: mx.array) -> mx.array:
        # float32's e is off by 3e-8 relative: as if the scores were, by less than their own rounding.
        return mx.power(mx.array(math.e, mx.float32), x) if self.power else mx.exp(x)


def _float(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _plain(x: mx.array) -> mx.array:
    """Float32 and row-contiguous, once, so that no block's matmul copies its keys."""
    return mx.contiguous(_float(x))


def _grouped(x: mx.array, groups: int) -> mx.array:
    """[B, Hq, T, D] -> [B, G, R, T, D]."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _rows(block: mx.array) -> mx.array:
    """[B, G, R, C, D] -> float32 [B, G, R * C, D]: a group's query heads are more rows against the same keys."""
    return _flat(_float(block))


def _flat(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _ungrouped(rows: mx.array, block: mx.array) -> mx.array:
    return rows.reshape(*block.shape[:-1], rows.shape[-1])


def _per_head(sinks: mx.array, like: mx.array) -> mx.array:
    """[Hq] -> float32 [G, R, 1, 1], to meet [B, G, R, C, 1]."""
    return _float(sinks).reshape(like.shape[1], like.shape[2], 1, 1)


def _added(total: mx.array, first: int, last: int, part: mx.array) -> mx.array:
    if (first, last) == (0, total.shape[2]):
        return total + part
    return total.at[:, :, first:last].add(part)
