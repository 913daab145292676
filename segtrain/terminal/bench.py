"""`segtrain bench`: this machine's timings and what follows from them."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from segtrain.terminal.console import line_width, make_console, write
from segtrain.terminal.format import clean, gib, named, value, wrapped
from segtrain.terminal.table import table_lines


def print_bench(report: Any, *, console: Console | None = None) -> None:
    """Draw `report`: device, results (rows with name, seconds and maybe peak_gib and note), choices, path."""
    console = console or make_console()
    width = line_width(console)
    write(console, *wrapped("device", [value(report.device)], width))
    if report.results:
        columns = [("measured", "wrap"), ("time", "right"), ("peak", "right"), ("note", "wrap")]
        write(console, *table_lines(columns, [_cells(row) for row in report.results], width))
    for key, choice in named(report.choices).items():
        write(console, *wrapped(f"{key}:", [choice], width))
    if report.path:
        write(console, f"written to {clean(report.path)}, where plan-segments and training read it")


def _cells(row: Mapping[str, Any]) -> list[str]:
    peak = row.get("peak_gib")
    return [
        clean(row["name"]),
        _time(row["seconds"]) if "seconds" in row else "",
        "" if peak is None else gib(peak),
        clean(row.get("note", "")),
    ]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
