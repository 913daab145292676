"""Rows that a Python program holds: written once to a file in the cache, so that all else reads them as any file.

The file is named after its content. The same rows give the same file, hence the same fingerprint, so that a run is
resumed, checked and evaluated with them as with a file of the user's own.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from segtrain.cache import cache
from segtrain.errors import UserError

PARTS = ("train", "valid", "test")


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's sections as a file would hold them: paths as text, iterables of rows as files. Raises UserError."""
    found = {name: _texts(value) for name, value in values.items()}
    if isinstance(data := found.get("data"), dict):
        found["data"] = {name: _sources(value, name) if name in PARTS else value for name, value in data.items()}
    return found


def _texts(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return {name: _texts(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _sources(value: Any, part: str) -> Any:
    """What a recipe's file may say stays as it is: a path, a mapping, or a list of these. All else is rows."""
    if value is None or isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return value
    if isinstance(value, list | tuple) and all(map(_is_source, value)):
        return [_texts(one) for one in value]
    return str(written(value, f"data.{part}"))


def _is_source(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) or (isinstance(value, Mapping) and "path" in value)


def written(rows: Iterable[Any], name: str) -> Path:
    """The file in the cache that holds `rows`, which are read once, one at a time.

    Raises UserError for an element that is no mapping of JSON values, for none at all, and for a cache that can't be
    written.
    """
    folder = cache() / "rows"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft, path = tempfile.mkstemp(dir=folder, prefix=".")
    except OSError as error:
        raise UserError(f"{name}: rows can't be written to {folder}: {error.strerror}; set XDG_CACHE_HOME") from None
    try:
        with open(draft, "wb") as file:
            target = folder / f"{_write(rows, file, name)}.jsonl"
        os.replace(path, target)
    except OSError as error:
        raise UserError(f"{name}: rows can't be written to {folder}: {error.strerror}; set XDG_CACHE_HOME") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return target


def _write(rows: Iterable[Any], file: BinaryIO, name: str) -> str:
    """Write a line a row; the hash of them all."""
    digest, number = blake2b(digest_size=16), 0
    columns = hasattr(rows, "column_names")
    for number, row in enumerate(rows, start=1):
        line = _line(row, f"{name}, row {number}", columns)
        digest.update(line)
        file.write(line)
    if not number:
        raise UserError(f"{name}: the iterable gave no row; a generator that was read before gives none again")
    return digest.hexdigest()


def _line(row: Any, where: str, columns: bool) -> bytes:
    if not isinstance(row, Mapping):
        hint = "; of a DataFrame give df.to_dict('records')" if isinstance(row, str) else ""
        raise UserError(f"{where} is a {type(row).__name__}, and must be a mapping such as {{'text': ...}}{hint}")
    fields = without_nulls(dict(row)) if columns else dict(row)
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where} can't be written as JSON: {error}; rows hold text, numbers, booleans, lists and mappings"
        ) from None


def without_nulls(value: Any) -> Any:
    """Columnar formats give every struct all fields; those a row doesn't have are null and would confuse templates."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
