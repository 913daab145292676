"""One large computation as several small ones that take turns, in the forward pass and in the backward pass.

MLX evaluates a graph breadth first: calls that don't need each other's results are all begun before any is finished,
and what autodiff makes of them is summed at the very end. Here each call waits for the one before it, in the backward
pass for the one after it, and for that one's share of the gradients to be added up: one call's results are live at a
time.
"""

from typing import Any

import mlx.core as mx


def in_order(done: mx.array, following: mx.array) -> tuple[mx.array, mx.array]:
    """Both arrays, `following` only once `done` is computed; in the backward pass the other way round."""
    ordered: Any = _ordered(done, following)
    return ordered


@mx.custom_function
def _ordered(done: mx.array, following: mx.array) -> tuple[mx.array, mx.array]:
    return done, mx.depends([following], [done])[0]


@_ordered.vjp
def _ordered_vjp(
    inputs: tuple[mx.array, mx.array], cotangents: tuple[mx.array, mx.array], outputs: tuple[mx.array, mx.array]
) -> tuple[mx.array, mx.array]:
    done, following = cotangents
    return mx.depends([done], [following])[0], following


def cut(x: mx.array, edges: list[int], axis: int) -> list[mx.array]:
    """`x` in parts that end before `edges` and at its end; their cotangents are joined.

    `mx.split` into many parts is a slice for each, whose cotangents are padded to the size of `x` and added up.
    """
    if not edges:
        return [x]
    bounds = list(zip([0, *edges], [*edges, x.shape[axis]], strict=True))

    @mx.custom_function
    def parts(x: mx.array) -> tuple[mx.array, ...]:
        return tuple(x[(slice(None),) * axis + (slice(lo, hi),)] for lo, hi in bounds)

    @parts.vjp
    def backward(x: mx.array, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]) -> mx.array:
        return mx.concatenate(list(cotangents), axis=axis)

    found: Any = parts(x)
    return list(found)


class Turns:
    """Hands out keys [B, Hkv, Tk, D] and values [B, Hkv, Tk, Dv] to one attention call after the other.

    Their gradients are summed in float32, call by call; autodiff would pad each call's to the whole length, and add
    them up when all are there.
    """

    def __init__(self, k: mx.array, v: mx.array):
        self._k, self._v = k, v
        self.results: list[mx.array] = []  # of the calls so far; whoever makes a call appends its own

    def next(self, q: mx.array, heads: slice, stop: int) -> tuple[mx.array, mx.array, mx.array]:
        """What the next call works on: its queries, and the first `stop` keys and values of key-value `heads`."""
        part, dtype = (slice(None), heads, slice(0, stop)), self._k.dtype
        before = self.results[-1:]

        @mx.custom_function
        def turn(q: mx.array, k: mx.array, v: mx.array, *done: mx.array) -> tuple[mx.array, ...]:
            now = mx.depends([q], list(done))[0] if done else q
            return now, k[part], v[part], k, v, *done

        @turn.vjp
        def backward(
            inputs: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
        ) -> tuple[mx.array, ...]:
            dq, dk, dv, *sums = cotangents
            totals = [_added(total, share, part) for total, share in zip(sums[:2], (dk, dv), strict=True)]
            if not before:
                return dq, *(total.astype(dtype) for total in totals)
            return dq, *totals, *mx.depends(sums[2:], [dq, *totals])

        given: Any = turn(q, self._k, self._v, *before)
        now, keys, values, self._k, self._v, *passed = given
        self.results[-1:] = passed
        return now, keys, values


def _added(total: mx.array, share: mx.array, part: tuple[slice, ...]) -> mx.array:
    """`total` in float32 with `share` added to its `part`."""
    total = total.astype(mx.float32)
    total[part] = total[part] + share
    return total
