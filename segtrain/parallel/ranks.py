"""Data-parallel ranks over `mx.distributed`: each takes its own rows, and all apply the same update.

Started by `mlx.launch` (ring, MPI, NCCL, JACCL); on its own a process is a group of one and nothing is exchanged.
`mlx.launch --backend nccl` shows each rank one GPU (CUDA_VISIBLE_DEVICES), so that is the one it uses.
"""

import functools
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from segtrain.errors import RunFailed, UserError
from segtrain.parallel import lifeline
from segtrain.parallel.lifeline import Lifeline

PIECES = 3  # float32s that hold a float64
BLOCK = 1 << 26  # bytes sent at a time by `broadcast`
LOST = "the exchange with the other ranks failed ({error}): one of them has ended; go on with --resume"


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` ranks, `local` of them on this host.

    All ranks must call the same methods in the same order.
    """

    rank: int = 0
    size: int = 1
    lifeline: Lifeline | None = field(default=None, compare=False)
    notices: tuple[str, ...] = ()
    local: int = 1

    @property
    def writes(self) -> bool:
        """Only rank 0 writes files and shows progress."""
        return self.rank == 0

    def sum(
        self, arrays: Mapping[str, mx.array], numbers: Sequence[float] = ()
    ) -> tuple[dict[str, mx.array], list[float]]:
        """Elementwise sums over all ranks, in one exchange. Every rank brings the same names and shapes, in any order.

        Arrays are summed in float32. Numbers travel exactly, each rank's in a place of its own, and are summed by rank.
        Raises RunFailed when a rank is gone.
        """
        if self.size == 1:
            return dict(arrays), [float(x) for x in numbers]
        places = np.zeros((self.size, len(numbers), PIECES), np.float32)
        places[self.rank] = [_pieces(float(x)) for x in numbers] or np.zeros((0, PIECES))
        names = sorted(arrays)  # ranks whose rows had different plans made their gradients in different orders
        parts = [arrays[name].astype(mx.float32).reshape(-1) for name in names]
        flat = self._all_sum(mx.concatenate([*parts, mx.array(places.reshape(-1))]))
        summed, at = {}, 0
        for name in names:
            size = arrays[name].size
            summed[name] = mx.contiguous(flat[at : at + size]).reshape(arrays[name].shape)
            at += size
        mx.eval(summed)
        found = np.array(flat[at:]).astype(np.float64).reshape(places.shape).sum(axis=2)
        return summed, [sum(float(x) for x in column) for column in found.T]

    def barrier(self) -> None:
        """Wait until every rank is here. Raises RunFailed."""
        self.sum({}, [0.0])

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank (the others give None). Raises RunFailed."""
        if self.size == 1:
            return data or b""
        _, (length,) = self.sum({}, [len(data) if data is not None and self.writes else 0])
        words, parts = -(-int(length) // 4), []
        padded = (data or b"").ljust(words * 4, b"\0")
        for at in range(0, words * 4, BLOCK):
            count = min(BLOCK, words * 4 - at) // 4
            own = np.frombuffer(padded[at : at + count * 4], np.uint32) if self.writes else np.zeros(count, np.uint32)
            parts.append(np.array(self._all_sum(mx.array(own))).tobytes())
        return b"".join(parts)[: int(length)]

    def gather(self, text: str) -> list[str]:
        """Every rank's text, by rank. Raises RunFailed."""
        if self.size == 1:
            return [text]
        data = text.encode()
        _, lengths = self.sum({}, [len(data) * (rank == self.rank) for rank in range(self.size)])
        slots = np.zeros((self.size, max(1, *map(int, lengths))), np.float32)
        slots[self.rank, : len(data)] = np.frombuffer(data, np.uint8)
        found = np.array(self._all_sum(mx.array(slots))).astype(np.uint8)
        return [bytes(row[: int(length)]).decode() for row, length in zip(found, lengths, strict=True)]

    def require_same(self, what: str, value: str) -> None:
        """Raises UserError, on every rank, unless `value` is the same on all of them."""
        values = self.gather(value)
        odd = [str(rank) for rank, other in enumerate(values) if other != values[0]]
        if odd:
            raise UserError(f"{what} of rank {', '.join(odd)} isn't that of rank 0; every rank needs the same")

    def leave(self) -> None:
        """Wait for the others, then end the connection in order."""
        if self.size > 1:
            self.barrier()
        if self.lifeline is not None:
            self.lifeline.leave()

    def _all_sum(self, array: mx.array) -> mx.array:
        try:
            summed = mx.distributed.all_sum(array)
            mx.eval(summed)
        except RuntimeError as error:
            raise RunFailed(LOST.format(error=error)) from error
        return summed


@functools.cache
def join() -> Ranks:
    """Join the group that `mlx.launch` set up, if any. Raises UserError where one was set up and can't be joined."""
    backend = _backend()
    try:
        group = mx.distributed.init(strict=backend is not None, backend=backend or "any")
    except RuntimeError as error:
        raise UserError(f"the {backend} group of mlx.launch can't be joined: {error}") from error
    if group.size() == 1:
        return Ranks()
    alone = Ranks(group.rank(), group.size())
    hosts = alone.gather(socket.gethostname())
    local = hosts.count(hosts[alone.rank])
    peers, problem = _peers(alone)
    _, (unconnected,) = alone.sum({}, [bool(problem)])  # all of them, or none
    if not unconnected:
        return Ranks(alone.rank, alone.size, Lifeline(peers), local=local)
    for peer in peers.values():
        peer.close()
    reason = f" ({problem})" if problem else ""
    notice = f"the ranks have no connection that shows a lost one{reason}: if one dies, the others may wait for ever"
    return Ranks(alone.rank, alone.size, None, (notice,), local)


def _pieces(x: float) -> list[float]:
    """Float32s whose exact sum is `x`."""
    pieces = []
    for _ in range(PIECES):
        pieces.append(float(np.float32(x)))
        x -= pieces[-1]
    return pieces


def _backend() -> str | None:
    """The backend that the launcher's variables speak of."""
    if "NCCL_HOST_IP" in os.environ and "MLX_WORLD_SIZE" in os.environ:
        return "nccl"
    if "MLX_JACCL_COORDINATOR" in os.environ:
        return "jaccl"
    return "ring" if os.environ.get("MLX_HOSTFILE") else None


def _peers(ranks: Ranks) -> tuple[dict[int, socket.socket], str]:
    """Connections to the other ranks that this one watches, or why there are none."""
    found: Sequence[float] = [0] * (5 + lifeline.TOKEN)
    problem, server = "", None
    if ranks.writes:
        try:
            server, found = lifeline.listen(_address())
        except OSError as failure:
            problem = str(failure)
    _, numbers = ranks.sum({}, found if ranks.writes else [0] * len(found))
    shared = [round(n) for n in numbers]
    try:
        if server is not None:
            return lifeline.accept(server, shared[5:], ranks.size), ""
        if not ranks.writes:
            return lifeline.connect(shared, ranks.rank), ""
    except OSError as failure:
        problem = str(failure)
    return {}, problem


def _address() -> str:
    """An address of this host, rank 0's, that the other ranks reach: the one that the launcher uses."""
    if host := os.environ.get("NCCL_HOST_IP"):
        return socket.gethostbyname(host)
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return socket.gethostbyname(coordinator.rpartition(":")[0])
    with suppress(KeyError, OSError, ValueError, IndexError, TypeError):
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        return socket.gethostbyname(hosts[0][0].rpartition(":")[0])
    return socket.gethostbyname(socket.gethostname())
