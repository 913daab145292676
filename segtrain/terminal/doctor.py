"""`segtrain doctor`: a line for each finding, and what follows from it."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from segtrain.terminal.console import line_width, make_console, write
from segtrain.terminal.format import clean, paragraph


def print_doctor(report: Mapping[str, Any], *, console: Console | None = None) -> None:
    """`report`: what `Report.as_json` gives."""
    console = console or make_console()
    width = line_width(console)
    write(console, f"mlx {clean(report['mlx'])} on {clean(report['device'])} ({clean(report['backend'])})")
    for finding in report["findings"]:
        mark, style = ("right", "green") if finding["right"] else ("WRONG" if finding["fatal"] else "look", "bold red")
        lines = [Text(line) for line in paragraph(f"{mark:5}  ", f"{finding['name']}: {finding['found']}", width)]
        lines[0].stylize(style, 0, len(mark))
        follows = {"segtrain": finding["does"], "you can": finding["can"]}
        notes = [paragraph(f"{'':7}{who}: ", text, width) for who, text in follows.items() if text]
        write(console, *lines, *(line for note in notes for line in note))
    count = sum(not finding["right"] for finding in report["findings"])
    verdict = "gradients can be trusted here" if report["passed"] else "this machine computes wrong gradients"
    write(console, "", f"{len(report['findings'])} checks, {count} to look at: {verdict}")
