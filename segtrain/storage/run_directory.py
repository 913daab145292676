"""The run directory: created or taken up again, locked for one process, and appended to.

A line of a log (`LOGS`) is one write. `position()` goes into each checkpoint, and
`rewind` cuts the files back to it, so that a resumed run leaves the files that an uninterrupted one would have left.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from segtrain.errors import UserError
from segtrain.recipe.schema import RESOLVED_BY, Recipe
from segtrain.storage import checkpoint, replacement
from segtrain.storage.durable import replace_text, sync, unfinished

REFERENCE = "reference.jsonl"
LOGS = ("metrics.jsonl", "memory.jsonl", "samples.jsonl", REFERENCE)
RECIPE, RESOLVED, BEST, LOCK = "recipe.yaml", "recipe.resolved.yaml", "best", ".lock"
ROW = "data_row.json"
MARKS = (*LOGS, BEST, "report.html", "checkpoints")  # any of these makes a directory a run
DIRECTORIES = ("checkpoints", "tensorboard")
OWN = (RECIPE, RESOLVED, ROW, *MARKS, checkpoint.ADAPTERS, checkpoint.CONFIG, "tensorboard")
ADAPTER_FILES = (checkpoint.ADAPTERS, checkpoint.CONFIG, "adapter_model.safetensors", "adapter_model.bin")
PACKAGES = ("segtrain-mlx", "mlx", "mlx-lm", "transformers")
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


class RunDirectory:
    """A context manager for the one process that writes to `path`.

    Entering creates and locks the directory. With `overwrite`, what an earlier run left (and no other file) makes room
    at the first write, so that a run which fails while it is set up loses nothing; a kill leaves the old run or the new
    one (replacement.py). `reads` are files that the new run reads: none of them is ever written. Raises UserError where
    a run is there and neither `overwrite` nor `resume` is given, where an adapter is there that no run here made, where
    another process holds the lock, and where nothing can be written. `notices` says what the user should know.
    """

    def __init__(
        self, path: Path | str, overwrite: bool = False, resume: bool = False, reads: Iterable[Path | str] = ()
    ):
        if overwrite and resume:
            raise UserError("--overwrite and --resume exclude each other; keep one")
        if "\0" in str(path):
            raise UserError(f"output.dir {str(path)!r} can't be a directory's name; give another one")
        self.path = Path(path)
        self.resume = resume
        self.notices: list[str] = []
        self._reads = [Path(one) for one in reads]
        self._overwrite = overwrite
        self._to_clear = overwrite
        self._created = False
        self._logs: dict[str, BinaryIO] = {}
        self._lock: BinaryIO | None = None

    def __enter__(self) -> "RunDirectory":
        try:
            if not (self.path / replacement.ASIDE).exists():  # else it is judged once it is put back
                self._refuse_existing()
            self._created = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            if replacement.recover(self.path):
                self.notices.append(f"the run in {self.path} is back: a process that was to replace it had ended early")
            self._refuse_existing()
            checkpoint.clean(self.path)
            for name in OWN:
                unfinished(self.path / name).unlink(missing_ok=True)
        except OSError as error:
            self._close()
            raise UserError(
                f"output.dir {self.path} can't be written: {error.strerror or error}; give another output.dir"
            ) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _refuse_existing(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output.dir {self.path} is a file; give a directory")
        is_run = any(os.path.lexists(self.path / name) for name in MARKS)
        foreign = [name for name in ADAPTER_FILES if os.path.lexists(self.path / name)]
        if foreign and not is_run:
            raise UserError(
                f"output.dir {self.path} holds an adapter that no run of segtrain made here ({foreign[0]}), which this "
                "run would replace; give another output.dir, and lora.init_from to train that adapter further"
            )
        self._refuse_to_write_what_is_read()
        if is_run and not (self._overwrite or self.resume):
            raise UserError(
                f"{self.path} already holds a run; go on with it by --resume, replace it by --overwrite, "
                "or give another output.dir"
            )

    def _refuse_to_write_what_is_read(self) -> None:
        for name in OWN:
            if name != RECIPE and self._is_read(self.path / name):
                raise UserError(f"output.dir {self.path} holds {name}, which this run reads; give another output.dir")
        if self._overwrite:
            self._refuse_to_remove()

    def _refuse_to_remove(self) -> None:
        """A run's directories go as a whole: not where something is in them that is to be read, or is the user's."""
        for folder in DIRECTORIES:
            if inner := [one for one in self._reads if _is_within(one, self.path / folder)]:
                raise UserError(
                    f"this run reads {inner[0]}, which --overwrite would remove with the run in {self.path}; move it, "
                    "or give another output.dir"
                )
        if foreign := checkpoint.foreign(self.path):
            raise UserError(
                f"{foreign[0]} is none of a run's checkpoints, and --overwrite would remove it with them; move it, or "
                "give another output.dir"
            )

    def _is_read(self, path: Path) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return any(one.exists() and os.path.samefile(one, path) for one in self._reads)
        return False

    def _locked(self) -> BinaryIO:
        """Take the lock. A POSIX lock ends with its process, however that ends, and children don't inherit it."""
        path = self.path / LOCK
        while True:
            file = open(path, "a+b")  # noqa: SIM115 (held until the run ends)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    break
                file.close()  # its last holder removed it between our two calls
            except OSError as error:
                holder = _holder(file)
                file.close()
                if error.errno in _HELD_BY_ANOTHER:
                    raise UserError(f"{self.path} is in use by {holder}; wait for it to end, or end it") from None
                raise
        if file.seek(0, os.SEEK_END):
            self.notices.append(f"{_holder(file)} ended without closing {self.path}; its lock is taken over")
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        file.flush()
        return file

    def _close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs = {}
        if self._lock is not None:
            with contextlib.suppress(OSError):
                replacement.recover(self.path)  # where a full disk kept the new run from beginning
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink()
            self._lock.close()
            self._lock = None
        if self._created:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # succeeds on an empty one only: a run that never wrote leaves nothing

    @property
    def _recipe_name(self) -> str:
        """Where the resolved recipe goes: beside a recipe.yaml that is the user's own."""
        path = self.path / RECIPE
        return RESOLVED if path.is_file() and (self._is_read(path) or not _is_resolved(path)) else RECIPE

    def _set_aside(self) -> bool:
        """With `overwrite`, once, move the earlier run's files away; whether that is to be committed."""
        if not self._to_clear:
            return False
        self._to_clear = False
        kept = RECIPE if self._recipe_name == RESOLVED else None
        replacement.set_aside(self.path, [name for name in OWN if name != kept])
        return True

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", line)

    def append_memory(self, line: Mapping[str, Any]) -> None:
        self._append("memory.jsonl", line)

    def append_sample(self, line: Mapping[str, Any]) -> None:
        self._append("samples.jsonl", line)

    def append_reference(self, line: Mapping[str, Any]) -> None:
        self._append(REFERENCE, line)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        """One JSON line in one write; NaN and infinities become null. Raises RunFailed."""
        data = json.dumps(_finite(line), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        path = self.path / name
        try:
            if self._set_aside():
                replacement.commit(self.path)
            if name not in self._logs:
                self._logs[name] = open(path, "ab", buffering=0)  # noqa: SIM115 (open until the run ends)
            if self._logs[name].write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError as error:
            raise checkpoint.failed(f"{name} could not be written", error) from error

    def position(self) -> dict[str, int]:
        """The length of each log in bytes, flushed to the disk: for a checkpoint's state. Raises RunFailed."""
        try:
            for log in self._logs.values():
                sync(log.fileno())
            return {name: (self.path / name).stat().st_size for name in LOGS if (self.path / name).exists()}
        except OSError as error:
            raise checkpoint.failed("the metrics could not be flushed", error) from error

    def rewind(self, position: Mapping[str, int]) -> None:
        """Cut each log back to `position` (an absent name: to nothing). Raises RunFailed."""
        for name in LOGS:
            path, length = self.path / name, position.get(name, 0)
            try:
                if path.exists():
                    self._cut(path, length)
                elif length:
                    self.notices.append(f"{path} is gone; it begins anew with the next step")
            except OSError as error:
                raise checkpoint.failed(f"{name} could not be cut back", error) from error

    def _cut(self, path: Path, length: int) -> None:
        """Keep `length` bytes, or what is left of whole lines where something else changed the file."""
        with open(path, "r+b") as file:
            content = file.read(length)
            if len(content) < length or (length and not content.endswith(b"\n")):
                self.notices.append(f"{path} was changed since the checkpoint; its whole lines are kept")
                length = content.rfind(b"\n") + 1
            file.truncate(length)

    def write_row(self, row: Mapping[str, Any]) -> None:
        """`data_row.json`: one row of the data as `segtrain check` shows it. Raises RunFailed."""
        try:
            replace_text(self.path / ROW, json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise checkpoint.failed(f"{ROW} could not be written", error) from error

    def write_recipe(self, recipe: Recipe, packages: Iterable[str] = PACKAGES) -> None:
        """`recipe.yaml`: the recipe as resolved, with the versions of `packages`. Raises RunFailed.

        Where a `recipe.yaml` of the user's own is there, it stays, and this one is `recipe.resolved.yaml`.
        """
        text = recipe.to_yaml(tuple(packages))
        try:
            aside = self._set_aside()
            name = self._recipe_name
            if not (self.path / RECIPE).is_file() or (self.path / RECIPE).read_bytes() != text.encode():
                replace_text(self.path / name, text)
            if name == RECIPE:
                (self.path / RESOLVED).unlink(missing_ok=True)
            if aside:
                replacement.commit(self.path)
        except OSError as error:
            raise checkpoint.failed(f"{RECIPE} could not be written", error) from error

    def set_best(self, path: Path) -> None:
        """Point `best` at a checkpoint of this run: a relative link, or a file with the path where links fail.

        A directory of that name, as a copy of the run has it that followed links, is kept as `best-1` or the like.
        """
        target, mark = os.path.relpath(path, self.path), self.path / BEST
        link = unfinished(mark)
        try:
            if mark.is_dir() and not mark.is_symlink():
                mark.rename(next(name for n in count(1) if not (name := self.path / f"{BEST}-{n}").exists()))
            link.unlink(missing_ok=True)
            try:
                os.symlink(target, link)
            except (OSError, NotImplementedError):
                replace_text(mark, target + "\n")
            else:
                os.replace(link, mark)
        except OSError as error:
            raise checkpoint.failed("the mark of the best checkpoint could not be written", error) from error

    @property
    def best(self) -> Path | None:
        """The checkpoint that `set_best` marked, if it is still there."""
        return best(self.path)


def best(run: Path) -> Path | None:
    """The checkpoint that a run's `best` points at, if it is still there."""
    mark = run / BEST
    if mark.is_symlink():
        target = run / os.readlink(mark)
    elif mark.is_file():
        target = run / mark.read_text().strip()
    else:
        return None
    inside = target.resolve().parent == (run / "checkpoints").resolve()  # a mark may come from elsewhere
    return target if inside and target.is_dir() else None


def recipe_file(run: Path) -> Path:
    """Where a run's resolved recipe is."""
    return run / RESOLVED if (run / RESOLVED).is_file() else run / RECIPE


def _is_within(path: Path, folder: Path) -> bool:
    """Links followed on both sides. `path` may be a pattern."""
    return Path(os.path.realpath(path.expanduser())).is_relative_to(os.path.realpath(folder))


def _is_resolved(path: Path) -> bool:
    """Whether a recipe was written by a run."""
    with open(path, "rb") as file:
        return file.read(len(RESOLVED_BY)) == RESOLVED_BY.encode()


def _holder(file: BinaryIO) -> str:
    file.seek(0)
    try:
        content = json.loads(file.read())
        return f"process {int(content['pid'])} on {content['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
