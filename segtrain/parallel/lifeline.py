"""A connection between ranks whose only purpose is to break: it tells the others that a rank is gone.

An exchange waits for every rank, and some backends (NCCL) wait for ever for one that died. So rank 0 holds a TCP
connection to each other rank. The kernel closes a dead process's connections at once; a host that vanished is noticed
by its silence. Who leaves in order says so first. On a loss a message goes to stderr and, if the process hasn't ended
by itself a little later (its exchange may fail too, and says more), it ends with code 1.
"""

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from segtrain.signals import leave, say

BEAT = 2.0  # seconds between signs of life
SILENCE = 25.0  # seconds without one after which a rank counts as lost
GRACE = 3.0  # seconds for the process to end by itself
CONNECT = 20.0
ALIVE, LEFT = b".", b"q"
TOKEN = 16  # bytes
FAILED = 1

OnLoss = Callable[[str], None]


def end_process(text: str) -> None:
    """Say why, wait a moment for the process to end by itself, then end it. What is saved is whole at any moment."""
    say(f"segtrain: {text}; go on with --resume")
    time.sleep(GRACE)
    leave(FAILED)


class Lifeline:
    """Watches connections to other ranks in a thread, until `leave` or the first loss."""

    def __init__(self, peers: dict[int, socket.socket], on_loss: OnLoss = end_process):
        self.peers, self.on_loss = peers, on_loss
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="segtrain-lifeline", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Tell the others that this rank ends in order."""
        self._leaving.set()
        for peer in self.peers.values():
            with suppress(OSError):
                peer.sendall(LEFT)
        self._thread.join(BEAT * 2)

    def _watch(self) -> None:
        open_ = dict(self.peers)
        woken = due = time.monotonic()
        while open_ and not self._leaving.is_set():
            readable, _, _ = select.select(list(open_.values()), [], [], max(0.0, due - time.monotonic()))
            now = time.monotonic()
            beats = now >= due  # a sign of life is not answered at once, or two ranks would do nothing else
            due = now + BEAT / 2 if beats else due
            if now - woken > SILENCE / 2:  # this process itself was stopped for a while: the silence was its own
                self._heard = dict.fromkeys(self.peers, now)
            woken = now
            for rank, peer in list(open_.items()):
                reason = self._reason(rank, peer, peer in readable, beats, now)
                if reason == "left":
                    del open_[rank]
                elif reason:
                    if not self._leaving.is_set():
                        self.on_loss(f"rank {rank} {reason}, so this rank ends too")
                    return

    def _reason(self, rank: int, peer: socket.socket, readable: bool, beats: bool, now: float) -> str:
        """ "left" for an orderly end, what happened for a loss, else nothing."""
        try:
            if readable:
                data = peer.recv(4096)
                self._heard[rank] = now
                if LEFT in data:
                    return "left"
                if not data:
                    return "is gone"
            if beats:
                peer.send(ALIVE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            return "is gone"
        return f"has been silent for {SILENCE:.0f} s" if now - self._heard[rank] > SILENCE else ""


def listen(address: str) -> tuple[socket.socket, list[int]]:
    """Rank 0's socket, and what the others need to find it: its address (4 numbers), its port, a secret's bytes."""
    server = socket.create_server((address, 0))
    host, port = server.getsockname()[:2]
    return server, [*socket.inet_aton(host), port, *secrets.token_bytes(TOKEN)]


def accept(server: socket.socket, token: list[int], size: int) -> dict[int, socket.socket]:
    """Wait for ranks 1..size-1 to connect; who doesn't know the secret is turned away. Raises OSError after 20 s."""
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + CONNECT
    with server:
        while len(peers) < size - 1:
            server.settimeout(max(0.1, until - time.monotonic()))
            peer, _ = server.accept()
            peer.settimeout(5.0)
            with suppress(OSError):
                greeting = peer.recv(TOKEN + 4, socket.MSG_WAITALL)
                rank = int.from_bytes(greeting[TOKEN:], "little")
                if secrets.compare_digest(greeting[:TOKEN], bytes(token)) and 0 < rank < size:
                    peers[rank] = peer
                    continue
            peer.close()
    return peers


def connect(found: list[int], rank: int) -> dict[int, socket.socket]:
    """Connect to the rank 0 that `listen` described. Raises OSError."""
    host, port, token = socket.inet_ntoa(bytes(found[:4])), found[4], bytes(found[5:])
    peer = socket.create_connection((host, port), timeout=CONNECT)
    peer.sendall(token + rank.to_bytes(4, "little"))
    return {0: peer}
