"""How many tokens a recurrence takes at a time, by backend."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Sizes:
    """A row of a recurrence's table of backends.

    - `chunk`: tokens that one matrix product covers, a power of 2;
    - `group_bytes`: chunks are worked on together up to so many bytes of their inputs in float32.
    """

    chunk: int
    group_bytes: int


def on_device(table: Mapping[str, Sizes]) -> Sizes:
    """The row of the default device."""
    return table[backend_name()]


def backend_name() -> str:
    """cpu, cuda or metal."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def group_tokens(sizes: Sizes, elements: int) -> int:
    """Tokens of a group, a multiple of the chunk, for inputs of so many elements a token."""
    return max(1, sizes.group_bytes // (4 * elements * sizes.chunk)) * sizes.chunk
