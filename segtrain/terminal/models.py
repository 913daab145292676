"""`segtrain models`: what each model type supports."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from segtrain.terminal.console import line_width, make_console, write
from segtrain.terminal.format import clean
from segtrain.terminal.table import table_lines

_COLUMNS = (
    ("SFT", "sft"),
    ("pairs", "pairs"),
    ("shared\nprefix", "shared_prefix"),
    ("quantised", "quantised"),
    ("MoE\nLoRA", "moe_lora"),
)


def print_models(rows: Iterable[Any], *, console: Console | None = None) -> None:
    """Rows have model_type, sft, pairs, shared_prefix, quantised, moe_lora and notes."""
    console = console or make_console()
    rows = list(rows)
    headings = [("model_type", "left"), *((heading, "left") for heading, _ in _COLUMNS), ("notes", "wrap")]
    write(console, *table_lines(headings, [_cells(row) for row in rows], line_width(console)))
    write(console, "", f"{len(rows)} model types; -: does not apply")


def _cells(row: Any) -> list[str]:
    fields: Mapping[str, Any] = {key: getattr(row, key) for _, key in _COLUMNS}
    marks = [_mark(entry) for entry in fields.values()]
    return [clean(row.model_type), *marks, clean(row.notes)]


def _mark(entry: object) -> str:
    if entry is None:
        return "-"
    return {True: "yes", False: "no"}[entry] if isinstance(entry, bool) else clean(entry)
