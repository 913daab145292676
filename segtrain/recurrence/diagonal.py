"""The diagonal linear recurrence h_t = a_t * h_{t-1} + b_t, every channel by itself, and all its states.

Its gradient is the same recurrence backwards in time: with g_t the cotangent of h_t,

    G_t = g_t + a_{t+1} * G_{t+1},    db_t = G_t,    da_t = G_t * h_{t-1},    dh_0 = a_1 * G_1

so nothing is divided by a decay and nothing can overflow, however near to 0 a decay is.

T steps would wait for each other. Here K blocks of m tokens go at once: m steps give each block's product of decays
and its end from a zero state, K steps join the blocks' starts, and m steps more give all states: 2 m + K instead of
m K, with twice the arithmetic.

Shapes: B batch, T tokens, then any axes for the channels.
"""

import math
from functools import partial
from typing import Any

import mlx.core as mx


def reference(a: mx.array, b: mx.array, state: mx.array) -> mx.array:
    """A token at a time: what `states` equals."""
    found = []
    for t in range(b.shape[1]):
        state = a[:, t] * state + b[:, t]
        found.append(state)
    return mx.stack(found, axis=1)


@mx.custom_function
def _states(a: mx.array, b: mx.array, state: mx.array) -> mx.array:
    return _in_blocks(a, b, state)


@_states.vjp
def _states_vjp(
    primals: tuple[mx.array, mx.array, mx.array], cotangent: mx.array, found: mx.array
) -> tuple[mx.array, ...]:
    a, _, state = primals
    later = mx.concatenate([a[:, 1:], mx.ones_like(a[:, :1])], axis=1)
    total = _in_blocks(later[:, ::-1], cotangent[:, ::-1], mx.zeros_like(state))[:, ::-1]
    before = mx.concatenate([state[:, None], found[:, :-1]], axis=1)
    return total * before, total, a[:, 0] * total[:, 0]


def states(a: mx.array, b: mx.array, state: mx.array) -> mx.array:
    """h [B, T, ...] after each token, from decays `a` and inputs `b` [B, T, ...] and the state [B, ...] before them.

    Differentiable in all three. All of h is held, so call it on some tokens at a time (`grouped.scan`).
    """
    found: Any = _states(a, b, state)
    return found


def linear_recurrence(x: mx.array, a: mx.array, state: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """h [B, T, D] in the dtype of `x`, and the last one [B, D] in float32: h_t = a_t * h_{t-1} + x_t.

    For states that are outputs themselves, as in Griffin's RG-LRU (De et al. 2024): a row's need no more memory than
    its inputs. `state` before the first token, None: zeros. Arithmetic in float32. Differentiable in everything.
    """
    if state is None:
        state = mx.zeros((x.shape[0], *x.shape[2:]), mx.float32)
    h = states(a.astype(mx.float32), x.astype(mx.float32), state.astype(mx.float32))
    return h.astype(x.dtype), mx.contiguous(h[:, -1])  # a slice would hold all of h


def _in_blocks(a: mx.array, b: mx.array, state: mx.array) -> mx.array:
    length = b.shape[1]
    steps = math.isqrt(length - 1) + 1
    blocks = -(-length // steps)
    a, b = _split(a, blocks, steps, fill=1), _split(b, blocks, steps, fill=0)
    product, end = a[:, :, 0], b[:, :, 0]
    for i in range(1, steps):
        product, end = a[:, :, i] * product, _next(a[:, :, i], end, b[:, :, i])
    starts = []
    for k in range(blocks):
        starts.append(state)
        state = _next(product[:, k], state, end[:, k])
    h = mx.stack(starts, axis=1)
    found = []
    for i in range(steps):
        h = _next(a[:, :, i], h, b[:, :, i])
        found.append(h)
    return mx.stack(found, axis=2).flatten(1, 2)[:, :length]


@partial(mx.compile, shapeless=True)
def _next(a: mx.array, h: mx.array, b: mx.array) -> mx.array:
    """One step in one pass over memory; equal shapes, elementwise."""
    return a * h + b


def _split(x: mx.array, blocks: int, steps: int, fill: int) -> mx.array:
    """[B, T, ...] as [B, blocks, steps, ...], filled up at the end."""
    missing = blocks * steps - x.shape[1]
    if missing:
        filling = mx.full((x.shape[0], missing, *x.shape[2:]), fill, x.dtype)
        x = mx.concatenate([x, filling], axis=1)
    return x.reshape(x.shape[0], blocks, steps, *x.shape[2:])
