"""Data-parallel ranks over `mx.distributed`: each takes its own rows, and all apply the same update.

Started by `mlx.launch` (ring, MPI or NCCL); on its own a process is a group of one and nothing is exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` ranks."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Only rank 0 writes files and shows progress."""
        return self.rank == 0

    def sum(
        self, arrays: dict[str, mx.array], numbers: Sequence[float] = ()
    ) -> tuple[dict[str, mx.array], list[float]]:
        """Elementwise sums over all ranks, in one exchange. Every rank must bring the same names and shapes.

        Arrays are summed in float32; `numbers` lose what float32 can't hold.
        """
        if self.size == 1:
            return arrays, list(numbers)
        parts = [array.astype(mx.float32).reshape(-1) for array in arrays.values()]
        flat = mx.distributed.all_sum(mx.concatenate([*parts, mx.array(numbers, dtype=mx.float32)]))
        mx.eval(flat)
        summed, at = {}, 0
        for name, array in arrays.items():
            summed[name] = flat[at : at + array.size].reshape(array.shape)
            at += array.size
        mx.eval(summed)
        return summed, [float(x) for x in flat[at:].tolist()]


def join() -> Ranks:
    """Join the group that `mlx.launch` set up, if any."""
    group = mx.distributed.init()
    return Ranks(group.rank(), group.size())
