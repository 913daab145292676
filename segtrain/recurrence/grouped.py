"""A recurrence over all tokens of a row as a scan over groups of tokens, with a gradient of its own.

Autodiff keeps what every group computed until its gradient comes. Here the forward pass keeps the state at each
group's start and nothing else; the backward pass goes from the last group to the first, computes each one again from
its state, and hands the cotangent of that state to the group before. Groups are chained by `mx.depends`, forward and
backward, so that one group's arrays are live at a time: MLX would otherwise begin them all, since most of a group's
work doesn't need the state.

On a GPU a group is a compiled graph, which all groups and layers share. Within a compiled layer the groups would be
laid out one after the other, and on CUDA what MLX fuses differs from group to group: 8,192 tokens took minutes of
kernel compilation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import mlx.core as mx

from segtrain.recurrence.sizes import backend_name

MOST = 128
"""Groups at most: what MLX takes to compile a graph grows faster than the graph (128 groups two seconds, 1,024 two
minutes). Longer rows have larger groups, so that a group stays a small part of the row."""

Chunk: TypeAlias = Callable[..., tuple[mx.array, mx.array]]
"""(some tokens of each sequence, each fixed array, state) -> (outputs of those tokens, state after them). Pure."""


def scan(
    chunk: Chunk, sequences: Sequence[mx.array], state: mx.array, *, group: int, fixed: Sequence[mx.array] = ()
) -> tuple[mx.array, mx.array]:
    """Outputs [B, T, ...] and final state of `chunk`, given `group` tokens at a time (or a multiple
    of them, see `MOST`).

    Equals `chunk(*sequences, *fixed, state)` on all tokens at once. It is differentiable in the sequences, the fixed
    arrays and the state, also through the final state.

    - `chunk` takes any number of tokens: the last group may be shorter. It must not capture arrays that gradients are
      wanted for.
    - `sequences` [B, T, ...]: floating-point, time on axis 1; a mask has to be worked into them.
    - `fixed`: arrays that every token uses, such as a decay rate per channel.
    - `state`: its dtype and shape stay.

    Raises ValueError if the sequences differ in length or have no token.
    """
    groups = _Groups(chunk, _bounds({x.shape[1] for x in sequences}, group), len(sequences))

    @mx.custom_function
    def whole(*primals: mx.array) -> tuple[mx.array, ...]:
        return groups.forward(primals)

    @whole.vjp
    def backward(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        return groups.backward(primals, cotangents[0], cotangents[1], outputs[2:])

    found: Any = whole(*sequences, *fixed, state)
    return found[0], found[1]


@dataclass(frozen=True)
class _Groups:
    """The scan's two passes. `primals` are `count` sequences, the fixed arrays, and the state."""

    chunk: Chunk
    bounds: list[tuple[int, int]]
    count: int

    def forward(self, primals: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Outputs, final state, and the states at the start of every group but the first."""
        sequences, fixed, state = primals[: self.count], primals[self.count : -1], primals[-1]
        run, _ = passes(self.chunk)
        outputs: list[mx.array] = []
        starts = []
        for lo, hi in self.bounds:
            starts.append(state)
            part = in_turn([x[:, lo:hi] for x in sequences], outputs[-1:])
            y, state = run(*part, *fixed, state)
            outputs.append(y)
        return mx.concatenate(outputs, axis=1), state, *starts[1:]

    def backward(
        self, primals: tuple[mx.array, ...], dy: mx.array, dstate: mx.array, starts: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        """Gradients of the primals from the cotangents of the outputs and of the final state."""
        sequences, fixed = primals[: self.count], primals[self.count : -1]
        _, vjp = passes(self.chunk)
        shares: list[list[mx.array]] = []  # gradients of the sequences, last group first
        totals = [mx.zeros(x.shape, mx.float32) for x in fixed]
        for (lo, hi), start in zip(reversed(self.bounds), reversed([primals[-1], *starts]), strict=True):
            now = [*(x[:, lo:hi] for x in sequences), start, dy[:, lo:hi]]
            *part, start, cotangent = in_turn(now, [dstate, *totals, *(shares[-1] if shares else [])])
            found = vjp([*part, *fixed, start], [cotangent, dstate])
            dstate = found[-1]
            shares.append(found[: self.count])
            totals = [total + share for total, share in zip(totals, found[self.count : -1], strict=True)]
        joined = [mx.concatenate(list(share[::-1]), axis=1) for share in zip(*shares, strict=True)]
        return *joined, *(total.astype(x.dtype) for total, x in zip(totals, fixed, strict=True)), dstate


def _bounds(lengths: set[int], group: int) -> list[tuple[int, int]]:
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"a scan over sequences of {sorted(lengths)} tokens: give each the same number, at least 1")
    (length,) = lengths
    group = group_of(length, group)
    return [(lo, min(lo + group, length)) for lo in range(0, length, group)]


def group_of(tokens: int, group: int) -> int:
    """Tokens of a group in a row of so many tokens."""
    return group * max(1, math.ceil(tokens / (group * MOST)))


def in_turn(arrays: list[mx.array], before: list[mx.array]) -> list[mx.array]:
    """`arrays`, available once all of `before` is computed."""
    return mx.depends(arrays, before) if before else arrays


def passes(chunk: Chunk) -> tuple[Chunk, Callable[[list[mx.array], list[mx.array]], list[mx.array]]]:
    """`chunk` and its vjp, (primals, cotangents) -> gradients; each compiled on a GPU."""
    if backend_name() == "cpu":
        return chunk, partial(_vjp, chunk)
    if isinstance(chunk, partial):
        return _compiled(chunk.func, chunk.args)
    return _compiled(chunk, ())


@lru_cache(maxsize=64)
def _compiled(function: Chunk, given: tuple) -> tuple[Chunk, Callable]:
    chunk = partial(function, *given)
    return mx.compile(chunk), mx.compile(partial(_vjp, chunk))


def _vjp(chunk: Chunk, primals: list[mx.array], cotangents: list[mx.array]) -> list[mx.array]:
    return list(mx.vjp(chunk, primals, cotangents)[1])
