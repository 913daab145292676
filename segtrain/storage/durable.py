"""Files that are complete or absent: written beside their place, flushed to the disk, and renamed."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

BLOCK = 1 << 20
Writer = Callable[[BinaryIO], object]


@dataclass(frozen=True)
class Record:
    """What a file should hold: its size in bytes and the SHA-256 of its content."""

    bytes: int
    sha256: str


class _Hashing:
    """A binary file that hashes what is written to it (in order; nothing here seeks)."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.digest = hashlib.sha256()
        self.closed = False

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        assert (offset, whence) in [(self.tell(), 0), (0, 1), (0, 2)], "a hashed file is written in order"
        return self.tell()

    def read(self, size: int = -1) -> bytes:
        raise OSError("a file being written can't be read")

    readinto = read


def write_new(path: Path, write: Writer) -> Record:
    """Create `path`, let `write` fill it, and flush it to the disk. Raises OSError, leaving whatever was written."""
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        write(cast(BinaryIO, hashing))
        file.flush()
        sync(file.fileno())
        return Record(file.tell(), hashing.digest.hexdigest())


def replace_together(contents: Iterable[tuple[Path, Writer]]) -> None:
    """Write files of one directory: each is the old or the new one at any moment.

    All of them are on the disk before the first is replaced. Raises OSError, with the temporary files
    removed and (unless it was a rename that failed) nothing replaced.
    """
    pairs = [(unfinished(path), path, write) for path, write in contents]
    try:
        for temporary, _, write in pairs:
            write_new(temporary, write)
        for temporary, path, _ in pairs:
            os.replace(temporary, path)
        sync_directory(pairs[0][1].parent)
    finally:
        for temporary, _, _ in pairs:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def unfinished(path: Path) -> Path:
    """Where a file's content is until it takes its place; a kill may leave it there."""
    return path.with_name(f".{path.name}.tmp")


def replace_text(path: Path, text: str) -> None:
    """`replace_together` for one text file."""
    replace_together([(path, lambda file: file.write(text.encode()))])


def sync(descriptor: int) -> None:
    """Flush to the medium itself: macOS's fsync stops at the drive's cache, so its own call is used there."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with contextlib.suppress(OSError):  # network file systems don't know it
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory (a rename, a new file) survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def record_of(path: Path) -> Record:
    """Read a file and hash it. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return Record(size, digest.hexdigest())
