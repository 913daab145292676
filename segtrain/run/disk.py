"""How fast the disk is read, by a file of its own that the page cache doesn't hold."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from segtrain.models.page_cache import read_past

SIZE, PIECE = 256 << 20, 8 << 20
THREADS = 4  # as many as read streamed weights


def read_speed(directory: Path, size: int = SIZE) -> float:
    """Bytes a second of large reads from the disk that holds `directory`, which is made. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="disk-") as file:
        for _ in range(0, size, PIECE):
            file.write(os.urandom(PIECE))
        file.flush()
        os.fsync(file.fileno())
        _forget(file.fileno())
        begun = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            read = sum(pool.map(lambda at: len(os.pread(file.fileno(), PIECE, at)), range(0, size, PIECE)))
        return read / (time.perf_counter() - begun)


def _forget(descriptor: int) -> None:
    """Let the system drop what it holds of a file, so that reads go to the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    read_past(descriptor)
