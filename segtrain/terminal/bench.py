"""`segtrain bench`: this machine's timings and what follows from them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from segtrain.terminal.console import line_width, make_console, write
from segtrain.terminal.format import clean, gib, label, listed, named, pick, value, wrapped
from segtrain.terminal.table import table_lines


def print_bench(report: object, *, console: Console | None = None) -> None:
    """Draw `report`: device, results (rows with name, seconds and maybe peak_gib and note), choices, path."""
    console = console or make_console()
    width = line_width(console)
    device = pick(report, "device")
    if device is not None:
        pieces = listed(device) if isinstance(device, Mapping) else [value(device)]
        write(console, *wrapped("device", pieces, width))
    results = pick(report, "results", "timings", "rows", default=())
    if results:
        columns = [("measured", "wrap"), ("time", "right"), ("peak", "right"), ("note", "wrap")]
        write(console, *table_lines(columns, [_cells(row) for row in _as_rows(results)], width))
    choices = pick(report, "choices", "chosen", default={}) or {}
    for key, choice in named(choices).items():
        write(console, *wrapped(f"{key}:", [choice], width))
    path = pick(report, "path", "written")
    if path is not None:
        write(console, f"written to {clean(path)}, where plan-segments and training read it")


def _as_rows(results: Any) -> Sequence[object]:
    if isinstance(results, Mapping):
        return [{"name": label(name), "seconds": seconds} for name, seconds in results.items()]
    return list(results)


def _cells(row: object) -> list[str]:
    seconds, peak = pick(row, "seconds"), pick(row, "peak_gib")
    return [
        clean(pick(row, "name", default="")),
        "" if seconds is None else _time(float(seconds)),
        "" if peak is None else gib(float(peak)),
        clean(pick(row, "note", default="") or ""),
    ]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
