"""Tables that fit 80 columns and read the same without colour."""

from collections.abc import Sequence
from itertools import pairwise

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segtrain.terminal.console import is_live, line_width, plain, unicode_bars

Column = tuple[str, str]  # heading, and "left", "right" or "wrap" (left, and may take several lines)


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print rows under headings; only "wrap" columns give way when the table is too wide."""
    edges = box.SIMPLE_HEAD if unicode_bars(console) else box.ASCII2
    table = Table(box=edges, pad_edge=False, show_edge=False, header_style="bold", width=None)
    for heading, kind in columns:
        wraps = kind == "wrap"
        table.add_column(
            heading,
            justify="right" if kind == "right" else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    target = console if is_live(console) else plain(console)
    target.print(table, width=line_width(console))


def bar(share: float, width: int, unicode: bool = True) -> str:
    """A bar of `share` (0 to 1) of `width` characters; what is not zero shows at least a sliver."""
    if share <= 0:
        return ""
    eighths = max(1, round(min(share, 1.0) * width * 8))
    if not unicode:
        return "#" * max(1, round(eighths / 8))
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def stacked(parts: Sequence[float], total: float, width: int, marks: str) -> str:
    """Parts side by side, `total` being `width` characters; each part has its own mark, so no colour is needed.

    Edges are rounded, not lengths: the whole is as long as its sum says.
    """
    edges, reached = [0], 0.0
    for part in parts:
        reached += part
        edges.append(round(width * reached / total) if total > 0 else 0)
    return "".join(marks[i % len(marks)] * (hi - lo) for i, (lo, hi) in enumerate(pairwise(edges)))
