"""`segtrain verify-grads`: segmented against full backward, per module."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from segtrain.terminal.console import line_width, make_console, write
from segtrain.terminal.format import clean, listed, pick, wrapped
from segtrain.terminal.table import table_lines

ROWS = 30  # the worst ones; the rest is summed up in a line


def print_verify(report: object, *, console: Console | None = None, rows: int = ROWS) -> None:
    """`report` has modules (name to relative error, or rows with name and error), tolerance and passed.

    A module whose error isn't a number counts as the worst.
    """
    console = console or make_console()
    tolerance = float(pick(report, "tolerance"))
    errors = sorted(
        _errors(pick(report, "modules", "errors", "rows")), key=lambda item: _badness(item[1]), reverse=True
    )
    passed = bool(pick(report, "passed", "ok"))
    columns = [("module", "left"), ("relative error", "right"), ("", "left")]
    write(console, *table_lines(columns, _rows(errors[:rows], tolerance), line_width(console)))
    if len(errors) > rows:
        write(console, f"... and {len(errors) - rows} modules with smaller errors")
    failed = sum(not error <= tolerance for _, error in errors)
    verdict = "PASS" if passed else "FAIL"
    worst = f"worst {errors[0][1]:.2e}, tolerance {tolerance:.0e}" if errors else "no module was compared"
    text = Text(f"{verdict}: {len(errors)} modules, {failed} above tolerance; {worst}")
    text.stylize("bold green" if passed else "bold red", 0, len(verdict))
    extra = {key: pick(report, key) for key in ("loss_error", "tokens", "segment_size", "row") if _has(report, key)}
    write(console, "", text, *(wrapped("on", listed(extra), line_width(console)) if extra else []))


def _rows(errors: list[tuple[str, float]], tolerance: float) -> list[list[str | Text]]:
    return [
        [clean(name), f"{error:.2e}", "ok" if error <= tolerance else Text("TOO LARGE", "bold red")]
        for name, error in errors
    ]


def _errors(modules: Any) -> list[tuple[str, float]]:
    if isinstance(modules, Mapping):
        return [(str(name), float(error)) for name, error in modules.items()]
    return [(str(pick(m, "name", "module")), float(pick(m, "relative_error", "error"))) for m in modules or ()]


def _badness(error: float) -> float:
    return error if error == error else float("inf")


def _has(report: object, key: str) -> bool:
    return pick(report, key) is not None
