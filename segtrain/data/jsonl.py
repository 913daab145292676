"""JSON-lines files: by row number through an index of byte offsets, or one after another from a cursor.

A file is never held in memory. Its index is built anew by each run, which takes about as long as reading the file;
blank lines are left out of it. A compressed file is unpacked once into an unnamed temporary file before it can be
indexed; reading it in order (`streaming: true`) needs no disk.
"""

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np

from segtrain.data.line_index import CHUNK, LineIndex
from segtrain.data.raw import BOM, Raw
from segtrain.data.rows import Origin
from segtrain.errors import UserError


class JsonLines:
    """A JSONL file, plain or .gz, as a table: `len` and rows by number, in any order."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._file = _unpacked(path) if is_gzip(path) else _opened(path)
        try:
            with _readable(path):
                self._index = LineIndex(self._file)
        except OverflowError as error:
            raise UserError(f"{path}: can't be read: {error}") from None
        self.size = os.fstat(self._file.fileno()).st_size

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> Raw:
        """Row `number`, counted from 0 without blank lines."""
        start, length = self._index.span(number)
        data = os.pread(self._file.fileno(), length, start)
        return Raw(_bare(data), Origin(self.name, self._index.line(number)))

    def sizes(self) -> np.ndarray:
        return self._index.lengths

    @property
    def fingerprint(self) -> list[Any]:
        return [len(self), self.size, _digest(self.path)]


class LinesInOrder:
    """JSONL files read in order; a cursor [file, offset, line] names the next line to read."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._open: tuple[int, IO[bytes]] | None = None

    def start(self) -> Any:
        return [0, 0, 0]

    def read(self, cursor: Any, limit: int) -> tuple[list[Raw], Any | None]:
        """Up to `limit` rows from `cursor` on, and the cursor after them (None: that was all)."""
        rows: list[Raw] = []
        number, offset, line = cursor
        while number < len(self.paths):
            path = self.paths[number]
            with _readable(path):
                file = self._at(number, offset)
                for data in iter(file.readline, b""):
                    line += 1
                    offset += len(data)
                    if _bare(data):
                        rows.append(Raw(_bare(data), Origin(str(path), line)))
                    if len(rows) == limit:
                        return rows, [number, offset, line]
            number, offset, line = number + 1, 0, 0
        return rows, None

    def _at(self, number: int, offset: int) -> IO[bytes]:
        """File `number` at `offset`; the open one is used on, since seeking in a .gz starts over."""
        if self._open is None or self._open[0] != number:
            self.close()
            self._open = number, _stream(self.paths[number])
        file = self._open[1]
        if file.tell() != offset:
            file.seek(offset)
        return file

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    @property
    def fingerprint(self) -> list[Any]:
        return [[path.name, path.stat().st_size, _digest(path)] for path in self.paths]


def _bare(line: bytes) -> bytes:
    """A line without its end, and without what may stand before its object: blank lines, a byte-order mark."""
    return line.rstrip(b" \t\r\n").lstrip(b" \t\r\n" + BOM)


def _digest(path: Path, ends: int = 1 << 16) -> str:
    """Tells apart files of one size by their first and last 64 KiB; reading all of a large file would take too long."""
    with _readable(path), open(path, "rb") as file:
        head = file.read(ends)
        file.seek(max(0, path.stat().st_size - ends))
        return blake2b(head + file.read(ends), digest_size=8).hexdigest()


def is_gzip(path: Path) -> bool:
    return path.suffix == ".gz"


def _opened(path: Path) -> IO[bytes]:
    with _readable(path):
        return open(path, "rb", buffering=0)


def _stream(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if is_gzip(path) else open(path, "rb")  # type: ignore[return-value]


def _unpacked(path: Path) -> IO[bytes]:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as the table)
    with _readable(path), gzip.open(path, "rb") as packed:
        shutil.copyfileobj(packed, file, CHUNK)
    file.seek(0)
    return file


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: the gzip data is broken or cut off ({error}); copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}") from None
