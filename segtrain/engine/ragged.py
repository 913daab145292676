"""A ragged batch: the tokens of several training rows one after another in one stream, without filler between them.

Whatever works token by token takes the stream as it is. Attention takes it folded: each sequence that a model should
see, a row or a prompt with one of its responses, is a row of a padded batch. A prompt that two responses share is
computed once and stands in two sequences, where the second one only reads its keys and values.

Everything that differs from one group of rows to the next is in arrays, so that one compiled graph serves all groups
of these sizes: `T` tokens of the stream, `S` sequences of up to `L` tokens, `N` sequences at most that hold a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Ragged:
    """Where the tokens of a stream stand. Filler, in the stream or in the batch, is in no slot and seen by nobody."""

    positions: mx.array  # [T] of each token in its sequences
    tokens: mx.array  # [S, L] the token in each slot, 0 in an empty one
    own: mx.array  # [S, L] whether the slot is where its token's output is taken from
    slots: mx.array  # [N, T] the slots s * L + l that hold each token, that of its output first
    held: mx.array  # [N, T] whether it is in so many

    @property
    def arrays(self) -> list[mx.array]:
        return [self.positions, self.tokens, self.own, self.slots, self.held]


def up(count: int) -> int:
    """`count` rounded up to one of few sizes, by at most an eighth where it is large."""
    above = 1 << max(0, count - 1).bit_length()
    unit = max(8, above // 16, min(256, above // 8))
    return -(-count // unit) * unit


def batch_length(longest: int, multiple: int) -> int:
    """The length `L` of sequences up to `longest` tokens: a `multiple` times a power of two, or three of these."""
    units = -(-longest // multiple)
    above = 1 << (units - 1).bit_length()
    return multiple * (3 * above // 4 if units <= 3 * above // 4 and above > 2 else above)


def ragged(sequences: Sequence[Sequence[int]], tokens: int, length: int) -> Ragged:
    """Of a stream of `tokens` tokens, whose sequences are the numbers of their tokens in order, at most `length` each.

    A token's output is taken from the first sequence that holds it.
    """
    count = 1 << (len(sequences) - 1).bit_length()
    grid, own = [[0] * length for _ in range(count)], [[False] * length for _ in range(count)]
    positions = [0] * tokens
    places: list[list[int]] = [[] for _ in range(tokens)]
    for s, sequence in enumerate(sequences):
        for at, token in enumerate(sequence):
            grid[s][at], own[s][at] = token, not places[token]
            positions[token] = at
            places[token].append(s * length + at)
    most = max(map(len, places))
    slots = [[one[n] if n < len(one) else 0 for one in places] for n in range(most)]
    held = [[n < len(one) for one in places] for n in range(most)]
    return Ragged(_ids(positions), _ids(grid), mx.array(own), _ids(slots), mx.array(held))


def _ids(values: list) -> mx.array:
    return mx.array(values, dtype=mx.int32)
