"""`segtrain verify-grads`: segmented against full backward, per module."""

from typing import Any

from rich.console import Console
from rich.text import Text

from segtrain.errors import counted
from segtrain.terminal.console import line_width, make_console, write
from segtrain.terminal.format import clean, count, listed, wrapped
from segtrain.terminal.table import table_lines

ROWS = 30  # the worst ones; the rest is summed up in a line


def print_verify(report: Any, *, console: Console | None = None, rows: int = ROWS) -> None:
    """`report`: a `VerifyReport`, with rows (module, relative error), tolerance, passed and what it was measured on.

    A module whose error isn't a number counts as the worst.
    """
    console = console or make_console()
    tolerance, passed = report.tolerance, report.passed
    errors = [(row.module, row.relative_error) for row in report.rows]
    errors.sort(key=lambda item: _badness(item[1]), reverse=True)
    columns = [("module", "left"), ("relative error", "right"), ("", "left")]
    write(console, *table_lines(columns, _rows(errors[:rows], tolerance), line_width(console)))
    if len(errors) > rows:
        write(console, f"... and {counted(len(errors) - rows, 'module')} with smaller errors")
    failed = sum(not error <= tolerance for _, error in errors)
    verdict = "PASS" if passed else "FAIL"
    worst = f"worst {errors[0][1]:.2e}, tolerance {tolerance:.0e}" if errors else "no module was compared"
    text = Text(f"{verdict}: {counted(len(errors), 'module')}, {failed} above tolerance; {worst}")
    text.stylize("bold green" if passed else "bold red", 0, len(verdict))
    measured = {key: getattr(report, key) for key in ("loss_error", "tokens", "segment_size", "row")}
    write(console, "", text, *wrapped("on", listed(measured), line_width(console)), *_long(report))


def _long(report: Any) -> list[str]:
    """What was compared at the length of the longest row."""
    if report.longest <= report.tokens:
        return []
    fewer = report.long_tokens < report.longest
    of = f" of {count(report.longest)} tokens, as many as there is memory for" if fewer else " tokens"
    if not report.long_tokens:
        return [f"long row: not compared, there is no memory for more than these {count(report.tokens)} tokens"]
    return [
        f"long row: {count(report.long_tokens)}{of}",
        f"  worst {report.long_error:.2e} against {report.long_reference}",
    ]


def _rows(errors: list[tuple[str, float]], tolerance: float) -> list[list[str | Text]]:
    return [
        [clean(name), f"{error:.2e}", "ok" if error <= tolerance else Text("TOO LARGE", "bold red")]
        for name, error in errors
    ]


def _badness(error: float) -> float:
    return error if error == error else float("inf")
