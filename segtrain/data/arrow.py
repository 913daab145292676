"""Parquet files and data sets on disk or on the hub, as tables or in order.

`datasets` and `pyarrow` take a while to import, so that happens on use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.data.raw import Raw
from segtrain.data.rows import Origin
from segtrain.data.slices import bounds, parted
from segtrain.errors import UserError, reason
from segtrain.recipe.row_files import without_nulls

SAVED = ("dataset_dict.json", "state.json")


class DatasetTable:
    """A `datasets.Dataset` (memory-mapped) as a table."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Raw:
        return Raw(without_nulls(self.dataset[number]), Origin(self.name, number + 1))

    @property
    def fingerprint(self) -> list[Any]:
        return [len(self), sorted(self.dataset.column_names)]

    @property
    def size(self) -> int:
        return int(self.dataset.data.nbytes)

    def sizes(self) -> np.ndarray:
        batches = self.dataset.with_format("arrow").iter(batch_size=1000)
        sizes = [sum(map(_bytes, batch.columns), np.zeros(len(batch), np.int64)) for batch in batches]
        return np.concatenate([np.zeros(0, np.int64), *sizes])


class DatasetInOrder:
    """A `datasets.IterableDataset`, read in order; the cursor is its own state and the row number."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name
        self._first = dataset.state_dict()
        self._at: Any = None
        self._rows: Iterator[dict[str, Any]] | None = None

    def start(self) -> Any:
        return {"row": 0, "state": None}

    def read(self, cursor: Any, limit: int) -> tuple[list[Raw], Any | None]:
        rows, number = [], cursor["row"]
        for value in self._from(cursor):
            number += 1
            rows.append(Raw(without_nulls(value), Origin(self.name, number)))
            if len(rows) == limit:
                self._at = {"row": number, "state": self.dataset.state_dict()}
                return rows, self._at
        self._rows = None
        return rows, None

    def _from(self, cursor: Any) -> Iterator[dict[str, Any]]:
        if self._rows is None or self._at is not cursor:
            self.dataset.load_state_dict(cursor["state"] or self._first)
            self._rows = iter(self.dataset)
        return self._rows

    @property
    def fingerprint(self) -> list[Any]:
        return [self.name]


class ParquetInOrder:
    """Parquet files read in order, one batch at a time; a cursor is [file, row]."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._at: Any = None
        self._rows: Iterator[dict[str, Any]] = iter(())

    def start(self) -> Any:
        return [0, 0]

    def read(self, cursor: Any, limit: int) -> tuple[list[Raw], Any | None]:
        rows: list[Raw] = []
        number, row = cursor
        while number < len(self.paths):
            if cursor is not self._at or row == 0:
                self._rows = _parquet_rows(self.paths[number], row)
            for value in self._rows:
                row += 1
                rows.append(Raw(without_nulls(value), Origin(str(self.paths[number]), row)))
                if len(rows) == limit:
                    self._at = [number, row]
                    return rows, self._at
            number, row = number + 1, 0
        return rows, None

    @property
    def fingerprint(self) -> list[Any]:
        return [[path.name, path.stat().st_size] for path in self.paths]


def _bytes(array: Any) -> np.ndarray:
    """Bytes of text in each row of an Arrow array, however it is nested; numbers count as nothing."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.compute  # type: ignore[import-untyped]

    kind = array.type
    if isinstance(array, pyarrow.ChunkedArray):
        return np.concatenate([np.zeros(0, np.int64), *map(_bytes, array.chunks)])
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        lengths = pyarrow.compute.binary_length(array).fill_null(0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    if pyarrow.types.is_struct(kind):
        return sum((_bytes(field) for field in array.flatten()), np.zeros(len(array), np.int64))
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(_bytes(array.values))])
        ends = before[array.offsets.to_numpy()]
        return ends[1:] - ends[:-1]
    return np.zeros(len(array), np.int64)


def _parquet_rows(path: Path, start: int) -> Iterator[dict[str, Any]]:
    """The rows of a file from row `start` on; row groups before it aren't read."""
    file = _parquet(path)
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if start >= count:
            start -= count
            continue
        for batch in file.iter_batches(batch_size=256, row_groups=[group]):
            if start >= batch.num_rows:
                start -= batch.num_rows
                continue
            yield from batch.slice(start).to_pylist()
            start = 0


def _parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {reason(error)}") from None


def parquet_table(path: Path) -> DatasetTable:
    """A Parquet file as a memory-mapped table. Raises UserError for a broken file."""
    import datasets

    _parquet(path)
    return DatasetTable(datasets.Dataset.from_parquet(str(path)), str(path))


def is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this directory."""
    return any((path / name).is_file() for name in SAVED)


def saved(path: Path, split: str | None) -> tuple[Any, str]:
    """A data set on disk, and its name. Raises UserError where `split` is needed and missing."""
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a data set that can be loaded: {reason(error)}") from None
    return _split(found, split, str(path))


def hub(name: str, subset: str | None, split: str | None, streaming: bool) -> tuple[Any, str]:
    """A data set of the hub, or a stream of it, and how to call it. Raises UserError."""
    from segtrain.hub import hub as connection

    with connection() as unreachable, _datasets_offline(bool(unreachable)):
        return _split(_loaded(name, subset, streaming, unreachable), split, name)


def _loaded(name: str, subset: str | None, streaming: bool, unreachable: str) -> Any:
    import datasets

    from segtrain.hub import advice

    try:
        return datasets.load_dataset(name, subset, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        if unreachable:
            why = advice(name, unreachable, dataset=True)
            raise UserError(f"{name}: there is no such file or directory, {why}") from None
        config = f" with subset {subset}" if subset else ""
        raise UserError(
            f"{name}: no such file or directory, and no hub data set{config} could be loaded: {reason(error)}"
        ) from None


@contextmanager
def _datasets_offline(offline: bool) -> Iterator[None]:
    """`datasets` has a setting of its own beside the hub library's, read at its import."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _split(found: Any, split: str | None, name: str) -> tuple[Any, str]:
    if not hasattr(found, "keys"):
        return found, name
    wanted = split or ("train" if "train" in found else None)
    base, part = parted(wanted or "")
    if base not in found:
        have = ", ".join(found)
        raise UserError(f"{name} has the splits {have}; name one as data.split" + (f", not {split}" if split else ""))
    chosen = _slice(found[base], part, name, wanted or "") if part else found[base]
    return chosen, f"{name}[{wanted}]"


def _slice(dataset: Any, part: str, name: str, split: str) -> Any:
    """A part of a split. Raises UserError."""
    if not hasattr(dataset, "select"):
        raise UserError(f"{name}: can't take {split!r}; slices are like train[:80%], and need streaming: false")
    return dataset.select(range(*bounds(part, len(dataset), split)))
