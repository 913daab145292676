"""`segtrain eval`: figures of the adapter beside those of the base model."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from segtrain.errors import counted
from segtrain.terminal.console import line_width, make_console, write
from segtrain.terminal.format import clean, paragraph, wrapped
from segtrain.terminal.table import table_lines


def print_evaluation(report: Mapping[str, Any], *, console: Console | None = None) -> None:
    """`report`: what `Evaluation.as_json` gives."""
    console = console or make_console()
    width = line_width(console)
    models = report["models"]
    columns = [(clean(report["command"]), "left"), *((name, "right") for name in models)]
    rows = [[name, *(f"{figures[name]:,.4f}" for figures in models.values())] for name in models["adapter"]]
    for text in report["notices"]:
        write(console, *paragraph("note: ", text, width))
    write(console, *table_lines(columns, rows, width))
    rows_of = f"{counted(report['rows'], 'row')} of {clean(report['data'])}"
    pieces = [rows_of, f"{counted(report['tokens'], 'token')} scored"]
    write(console, "", *wrapped("over", pieces, width), *wrapped("adapter", [clean(report["adapter"])], width))
