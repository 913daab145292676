"""An earlier run makes room for a new one by renames: a kill at any moment leaves the one or the other.

`set_aside` moves the old run's files into a hidden directory, `commit` (one rename) makes that final and removes them.
In between only the new run's recipe is written. `recover`, under the run's lock, puts back what was not committed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from segtrain.storage.durable import sync_directory

ASIDE, REMOVED = ".replaced-run", ".removed-run"


def set_aside(directory: Path, names: Iterable[str]) -> None:
    """Move what `directory` holds under these names out of sight. Raises OSError."""
    aside = directory / ASIDE
    aside.mkdir()
    for name in names:
        if os.path.lexists(directory / name):
            os.rename(directory / name, aside / name)


def commit(directory: Path) -> None:
    """The old run is gone from here on. Raises OSError."""
    os.rename(directory / ASIDE, directory / REMOVED)
    sync_directory(directory)
    shutil.rmtree(directory / REMOVED, ignore_errors=True)


def recover(directory: Path) -> bool:
    """Undo a replacement that wasn't committed (whether there was one); finish one that was. Raises OSError."""
    shutil.rmtree(directory / REMOVED, ignore_errors=True)
    aside = directory / ASIDE
    if not aside.is_dir():
        return False
    found = [path.name for path in aside.iterdir()]
    for name in found:
        os.replace(aside / name, directory / name)  # over the new run's recipe, which was written already
    with contextlib.suppress(OSError):
        aside.rmdir()
    return bool(found)
