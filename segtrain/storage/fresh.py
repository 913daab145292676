"""A directory that is complete or absent: filled under a hidden name beside its place, flushed, and renamed.

A kill leaves at most the hidden one, which the next writer of that place empties. Its lock is on the hidden directory
itself and ends with the process, however that ends.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from segtrain.errors import RunFailed, UserError
from segtrain.storage.durable import sync, sync_directory


@contextmanager
def fresh(place: Path, option: str) -> Iterator[Path]:
    """A block that fills the directory it is given, which becomes `place` where the block ends well.

    Raises UserError, naming `option`, where `place` exists or another process fills it, RunFailed where the disk
    refuses.
    """
    refuse_existing(place, option)
    with _hidden(place, wait=False) as hidden:
        if hidden is None:
            raise _taken(place, option)
        yield hidden
        refuse_existing(place, option)
        _settle(hidden, place)


@contextmanager
def beside(place: Path, option: str) -> Iterator[Path]:
    """An empty hidden directory beside `place`, for what `place` is made of; removed at the end. Raises as `fresh`."""
    refuse_existing(place, option)
    with _hidden(place, wait=False) as hidden:
        if hidden is None:
            raise _taken(place, option)
        yield hidden
        shutil.rmtree(hidden, ignore_errors=True)


def put(made: Path, place: Path, option: str) -> None:
    """Move a file that was made `beside` its place there, flushed. Raises UserError where one is there, OSError."""
    _flush(made)
    refuse_existing(place, option)
    os.rename(made, place)
    sync_directory(place.parent)


@contextmanager
def made_once(place: Path) -> Iterator[Path | None]:
    """The same for a place that several processes may want: None where it is there, also when another made it first."""
    if place.is_dir():
        yield None
        return
    with _hidden(place, wait=True) as hidden:
        if hidden is None or place.is_dir():
            yield None
            return
        yield hidden
        _settle(hidden, place)


def refuse_existing(place: Path, option: str) -> None:
    """Raise UserError, naming `option`, where something is at `place`."""
    if os.path.lexists(place):
        kind = "directory" if place.is_dir() else "file"
        raise UserError(f"{option} {place}: there is a {kind} of that name; give another {option}, or remove it")
    if above := [path for path in place.parents if path.exists() and not path.is_dir()]:
        raise UserError(f"{option} {place}: {above[0]} is a file; give another {option}")


@contextmanager
def _hidden(place: Path, wait: bool) -> Iterator[Path | None]:
    """The empty directory to fill, locked; None where another process has it and `wait` is false."""
    hidden = place.with_name(f".{place.name}.unfinished")
    lock = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(hidden, wait)
        if lock is None:
            yield None
            return
        _empty(hidden)
        yield hidden
    except BaseException as error:
        if lock is not None:
            shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, OSError):
            raise _failed(place, error) from error
        raise
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                hidden.rmdir()  # where it was not needed
            os.close(lock)


def _settle(hidden: Path, place: Path) -> None:
    """Flush everything and rename. Raises OSError."""
    _flush(hidden)
    os.rename(hidden, place)
    sync_directory(place.parent)


def _locked(hidden: Path, wait: bool) -> int | None:
    """A descriptor that holds the lock of the hidden directory; None where another process does. Raises OSError."""
    while True:
        hidden.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its last holder renamed or removed it between our calls
            lock = os.open(hidden, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if os.path.samestat(os.fstat(lock), os.stat(hidden)):
                    return lock
            except BlockingIOError:
                os.close(lock)
                return None
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _flush(path: Path) -> None:
    """Make a file, or all that is in a directory, survive a power loss."""
    if path.is_dir():
        for inner in path.iterdir():
            _flush(inner)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _taken(place: Path, option: str) -> UserError:
    return UserError(f"{option} {place} is being written by another process; give another {option}, or wait")


def _failed(place: Path, error: OSError) -> RunFailed:
    where = f" ({error.filename})" if error.filename else ""
    return RunFailed(
        f"{place} could not be written: {error.strerror or error}{where}; nothing of it is left: free some space or "
        "make the directory writable, then start again"
    )
