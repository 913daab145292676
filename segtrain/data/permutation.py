"""A seeded shuffle that needs no memory: position -> row number, computed one at a time.

A Feistel network is a bijection on [0, 2^(2h)); walking its cycles until a value falls below n makes it one on [0,
n). Any position can be asked for by itself, so a resumed run needs the seed, the epoch and a position, and no
generator's state.
"""

from hashlib import blake2b

ROUNDS = 6


class Permutation:
    """A bijection of `range(n)`, the same for the same (n, key) on every machine and version."""

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)
        self.mask = (1 << self.half) - 1
        digest = blake2b(repr((n, *key)).encode(), digest_size=8 * ROUNDS).digest()
        self.keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.n:
            raise IndexError(position)
        value = self._mix(position)
        while value >= self.n:
            value = self._mix(value)
        return value

    def _mix(self, value: int) -> int:
        left, right = value >> self.half, value & self.mask
        for key in self.keys:
            left, right = right, left ^ (_hash(right ^ key) & self.mask)
        return (left << self.half) | right


def _hash(x: int) -> int:
    """64-bit finaliser of the splitmix generator (Steele et al. 2014)."""
    x &= 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
