"""What `data.train` and its like name: files, globs, directories, data sets on disk or on the hub."""

import difflib
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from segtrain.data import arrow
from segtrain.data.feeds import Chained, InOrder, Table
from segtrain.data.jsonl import JsonLines, LinesInOrder
from segtrain.data.slices import parted, sliced
from segtrain.errors import UserError
from segtrain.recipe.schema import DataRecipe, Source

Part: TypeAlias = Literal["train", "valid", "test"]

JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".ndjson.gz")
PARQUET = (".parquet",)
PART_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}


@dataclass(frozen=True)
class Located:
    """A source that was found: files of one kind, or a data set of `datasets`."""

    source: Source
    kind: Literal["jsonl", "parquet", "disk", "hub"]
    paths: tuple[Path, ...] = ()
    split: str | None = None

    @property
    def name(self) -> str:
        return self.source.path

    def table(self) -> Chained:
        """The rows by number. Raises UserError."""
        tables = self._tables()
        if self.kind in ("jsonl", "parquet") and self._part:
            tables = sliced(tables, self._part, self.split or "")
        return Chained(tables)

    @property
    def _part(self) -> str:
        """The slice of a split of files."""
        return parted(self.split)[1] if self.split else ""

    def _tables(self) -> list[Table]:
        match self.kind:
            case "jsonl":
                return [JsonLines(path) for path in self.paths]
            case "parquet":
                return [arrow.parquet_table(path) for path in self.paths]
            case "disk":
                return [arrow.DatasetTable(*arrow.saved(self.paths[0], self.split))]
        return [arrow.DatasetTable(*arrow.hub(self.name, self.source.subset, self.split, streaming=False))]

    def in_order(self) -> InOrder:
        """The rows one after another, in constant memory. Raises UserError."""
        if self.kind in ("jsonl", "parquet") and self._part:
            raise UserError(f"{self.name}: can't take {self.split!r} in order; a slice needs streaming: false")
        match self.kind:
            case "jsonl":
                return LinesInOrder(list(self.paths))
            case "parquet":
                return arrow.ParquetInOrder(list(self.paths))
            case "disk":
                dataset, name = arrow.saved(self.paths[0], self.split)
                return arrow.DatasetInOrder(dataset.to_iterable_dataset(), name)
        return arrow.DatasetInOrder(*arrow.hub(self.name, self.source.subset, self.split, streaming=True))


def locate(recipe: DataRecipe, part: Part) -> list[Located]:
    """The sources of one part; those of `valid` and `test` may come from the directory that `train` names.

    Raises UserError for what doesn't exist.
    """
    given = recipe.sources(part)
    if given:
        return [_locate(_as_split(source, recipe, part), part) for source in given]
    return [found for source in recipe.sources("train") if (found := _sibling(source, part)) is not None]


def _as_split(source: Source, recipe: DataRecipe, part: Part) -> Source:
    """`valid: validation` names a split of the data set that `train` names, if there is no such file."""
    train = recipe.sources("train")
    path = Path(source.path).expanduser()
    if part == "train" or path.exists() or len(train) != 1 or _looks_like_file(source.path) or "/" in source.path:
        return source
    home = Path(train[0].path).expanduser()
    if home.exists() and not arrow.is_saved(home) and not _has_split(home, train[0], source.path):
        return source
    return source.model_copy(update={"path": train[0].path, "split": source.path, "subset": train[0].subset})


def _has_split(home: Path, train: Source, split: str) -> bool:
    """Whether a directory of files has some of that split."""
    path = home / (train.subset or "")
    return path.is_dir() and bool(_part_files(path, _file_names(parted(split)[0])))


def _sibling(source: Source, part: Part) -> Located | None:
    """The `part` of a directory whose train part is used; None where it has none."""
    home = Path(source.path).expanduser() / (source.subset or "")
    if not home.is_dir() or arrow.is_saved(home):
        return None
    files = _part_files(home, PART_NAMES[part])
    source = source.model_copy(update={"split": None})
    return _of_files(source, files) if files else None


def _locate(source: Source, part: Part) -> Located:
    path = Path(source.path).expanduser()
    if glob.has_magic(source.path) and not path.exists():
        return _of_files(_without_splits(source, part), _globbed(source))
    if path.is_dir():
        return _directory(source, path, part)
    if os.path.lexists(path):
        return _of_files(_without_splits(source, part), [path])
    if _looks_like_file(source.path):
        raise UserError(f"data.{part}: {source.path}: no such file{_similar(path)}")
    return Located(source, "hub", split=source.split)


def _without_splits(source: Source, part: Part) -> Source:
    """A file, whose rows are one split. Raises UserError for a subset or another split, which it can't have."""
    if source.subset:
        raise UserError(f"data.{part}: {source.path} is a file, so it has no subset {source.subset!r}; leave it out")
    if source.split and parted(source.split)[0] not in ("train", part):
        raise UserError(
            f"data.{part}: {source.path} is a file, whose rows are the split train; it has no split {source.split!r}"
        )
    return source


def _directory(source: Source, path: Path, part: Part) -> Located:
    path = _subset(source, path, part)
    if arrow.is_saved(path):
        return Located(source, "disk", (path,), source.split)
    split = parted(source.split)[0] if source.split else part
    files = _part_files(path, _file_names(split))
    if files:
        return _of_files(source, files)
    if split != "train" and source.split:
        have = ", ".join(_names(path)) or "nothing"
        raise UserError(f"data.{part}: {path} has no files of a split {split} (it has: {have})")
    if any(_part_files(path, names) for names in PART_NAMES.values()):
        raise UserError(f"data.{part}: {path} has no {part}.jsonl, only {', '.join(_names(path))}")
    files = _data_files(path)
    if not files:
        have = ", ".join(_names(path)) or "nothing"
        raise UserError(f"data.{part}: {path} holds no .jsonl, .jsonl.gz or .parquet file (it has: {have})")
    return _of_files(source, files)


def _subset(source: Source, path: Path, part: Part) -> Path:
    """The directory of a subset, which is one within the source's. Raises UserError where there is none."""
    if not source.subset:
        return path
    if not (path / source.subset).is_dir():
        have = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir())) or "none"
        raise UserError(f"data.{part}: {path} has no directory for the subset {source.subset!r} (directories: {have})")
    return path / source.subset


def _file_names(split: str) -> tuple[str, ...]:
    """What the files of a split may be called."""
    return next((names for names in PART_NAMES.values() if split in names), (split,))


def _of_files(source: Source, files: list[Path]) -> Located:
    kinds = {_kind(path) for path in files}
    if len(kinds) > 1:
        raise UserError(f"{source.path}: JSONL and Parquet files can't be one source; list them as two")
    for path in files:
        _check_readable(path)
    return Located(source, kinds.pop(), tuple(files), source.split)


def _check_readable(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            if not file.seekable():
                raise UserError(f"{path}: a pipe can be read once only; write its rows to a file, and give that")
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None


def _kind(path: Path) -> Literal["jsonl", "parquet"]:
    return "parquet" if path.name.endswith(PARQUET) else "jsonl"


def _globbed(source: Source) -> list[Path]:
    """The files of a glob in order, each once: links that lead in circles make `**` find a file many times."""
    found: dict[str, Path] = {}
    for name in sorted(glob.iglob(os.path.expanduser(source.path), recursive=True), key=lambda name: (len(name), name)):
        if os.path.isfile(name):
            found.setdefault(os.path.realpath(name), Path(name))
    if not found:
        raise UserError(f"data: nothing matches {source.path}")
    return sorted(found.values())


def _part_files(path: Path, names: tuple[str, ...]) -> list[Path]:
    """`train.jsonl`, `train.jsonl.gz`, `train.parquet`, or numbered ones such as `train-00000-of-00002.parquet`."""
    for name in names:
        files = [file for file in _data_files(path) if file.name.split(".")[0] == name]
        files = files or [file for file in _data_files(path) if file.name.startswith((f"{name}-", f"{name}_"))]
        if files:
            return files
    return []


def _data_files(path: Path) -> list[Path]:
    return sorted(file for file in _listed(path) if file.name.endswith(JSON_LINES + PARQUET))


def _listed(path: Path) -> Iterator[Path]:
    try:
        yield from (entry for entry in path.iterdir() if not entry.name.startswith(".") and not entry.is_dir())
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None


def _names(path: Path) -> list[str]:
    return sorted(file.name for file in _listed(path))[:8]


def _looks_like_file(name: str) -> bool:
    return (
        name.endswith(JSON_LINES + PARQUET + (".csv", ".txt"))
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    )


def _similar(path: Path) -> str:
    if not path.parent.is_dir():
        return f" ({path.parent} doesn't exist either)"
    close = difflib.get_close_matches(path.name, _names(path.parent), 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
