"""Where the lines of a large file are: 4 bytes a line, found at about the speed at which the file can be read.

Lengths of lines are kept as 32-bit integers, and every 64th offset in full.
"""

import os
from collections.abc import Iterator
from typing import IO

import numpy as np

from segtrain.data.raw import BOM

CHUNK = 16 << 20
STRIDE = 64
LONGEST = 1 << 32
_NEWLINE = 10


class LineIndex:
    """The rows of an open, unbuffered file: its lines but for blank ones.

    A row's bytes run from the end of the row before it, so they may begin with the newlines of blank lines.
    """

    def __init__(self, file: IO[bytes]) -> None:
        lengths = _lengths(file)
        self._blank = np.zeros(0, np.int64)  # for each blank line, how many rows stand before it
        self._set(lengths)
        blank = np.array([line for line in self._short() if self._is_blank(file, line)], np.int64)
        if len(blank):
            self._blank = blank - np.arange(len(blank))
            self._set(_merged(lengths, blank))

    def _set(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        whole = lengths[: len(lengths) // STRIDE * STRIDE].reshape(-1, STRIDE)
        self._anchors = np.concatenate([np.zeros(1, np.int64), np.cumsum(whole.sum(axis=1, dtype=np.int64))])

    def __len__(self) -> int:
        return len(self._lengths)

    def span(self, row: int) -> tuple[int, int]:
        """Offset and length of a row's bytes."""
        anchor = row // STRIDE
        before = self._lengths[anchor * STRIDE : row].sum(dtype=np.int64)
        return int(self._anchors[anchor] + before), int(self._lengths[row])

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each row."""
        return self._lengths

    def line(self, row: int) -> int:
        """The row's line number in the file, from 1."""
        return row + int(np.searchsorted(self._blank, row, side="right")) + 1

    def _short(self, block: int = 1 << 20) -> Iterator[int]:
        """Lines too short to hold a row, in blocks so that no other array of the index's size exists."""
        for lo in range(0, len(self._lengths), block):
            yield from (lo + np.flatnonzero(self._lengths[lo : lo + block] <= 2 + len(BOM))).tolist()

    def _is_blank(self, file: IO[bytes], line: int) -> bool:
        start, length = self.span(line)
        return os.pread(file.fileno(), length, start).strip() in (b"", BOM)


def _lengths(file: IO[bytes]) -> np.ndarray:
    """The length of each line with its newline. Raises OverflowError for one of 4 GiB or more."""
    found, position, end = [np.zeros(0, np.uint32)], 0, 0
    buffer = bytearray(CHUNK)
    view = np.frombuffer(buffer, np.uint8)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        ends = np.flatnonzero(view[:count] == _NEWLINE) + (position + 1)
        position += count
        if len(ends):
            found.append(_checked(np.diff(ends, prepend=end)))
            end = int(ends[-1])
    if position > end:
        found.append(_checked(np.array([position - end])))
    return np.concatenate(found)


def _checked(lengths: np.ndarray) -> np.ndarray:
    if int(lengths.max()) >= LONGEST:
        raise OverflowError("it has a line of 4 GiB or more")
    return lengths.astype(np.uint32)


def _merged(lengths: np.ndarray, blank: np.ndarray) -> np.ndarray:
    """The lengths of the lines but for the blank ones, whose bytes go to the line after them (if there is one)."""
    kept = np.delete(np.arange(len(lengths)), blank)
    if not len(kept):
        return np.zeros(0, np.uint32)
    starts = np.concatenate([np.zeros(1, np.int64), kept[:-1] + 1])
    merged: np.ndarray = np.add.reduceat(lengths[: kept[-1] + 1].astype(np.int64), starts)
    return merged.astype(np.uint32)
