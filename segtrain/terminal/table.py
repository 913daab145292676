"""Tables that fit the console and read the same without colour."""

import textwrap
from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.text import Text

Column = tuple[str, str]  # heading (may have two lines), and one of the kinds below
LEFT, RIGHT, WRAP = "left", "right", "wrap"  # WRAP: left, and may take several lines

GAP = "  "
_NARROWEST = 12


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int) -> list[Text]:
    """Rows under headings, in lines of at most `width` where that can be.

    Too much text first breaks the wrapping columns into several lines, then shortens left-aligned cells in front,
    where a module's name has least to say.
    """
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = _widths(columns, texts, width)
    lines = _row([Text(heading, "bold") for heading, _ in columns], columns, widths, bottom=True)
    lines.append(Text(GAP.join("-" * size for size in widths), "dim"))
    for row in texts:
        lines += _row(row, columns, widths)
    return lines


def bar(share: float, width: int, unicode: bool = True) -> str:
    """A bar of `share` (0 to 1) of `width` characters; what is not zero shows at least a sliver."""
    if share <= 0:
        return ""
    eighths = max(1, round(min(share, 1.0) * width * 8))
    if not unicode:
        return "#" * max(1, round(eighths / 8))
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def stacked(parts: Sequence[float], total: float, width: int) -> list[int]:
    """How many characters each part takes when `total` takes `width`.

    Edges are rounded, not lengths: the whole is as long as its sum says.
    """
    edges, reached = [0], 0.0
    for part in parts:
        reached += part
        edges.append(round(width * reached / total) if total > 0 else 0)
    return [hi - lo for lo, hi in pairwise(edges)]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    """As wide as the cells; while that is too wide, the widest column of the first kind that can give way gives."""
    widths = [
        max([*(cell_len(line) for line in heading.split("\n")), *(row[i].cell_len for row in rows)])
        for i, (heading, _) in enumerate(columns)
    ]
    for kind in (WRAP, LEFT):
        while (excess := sum(widths) + len(GAP) * (len(widths) - 1) - width) > 0:
            wide = [i for i, (_, own) in enumerate(columns) if own == kind and widths[i] > _NARROWEST]
            if not wide:
                break
            widest = max(wide, key=lambda i: widths[i])
            widths[widest] = max(_NARROWEST, widths[widest] - excess)
    return widths


def _row(cells: Sequence[Text], columns: Sequence[Column], widths: Sequence[int], bottom: bool = False) -> list[Text]:
    """One row as one or more lines; `bottom` sets short cells low, as headings stand."""
    blocks = [_fitted(cell, kind, size) for cell, (_, kind), size in zip(cells, columns, widths, strict=True)]
    height = max(len(block) for block in blocks)
    padding = [[Text()] * (height - len(block)) for block in blocks]
    blocks = [pad + block if bottom else block + pad for block, pad in zip(blocks, padding, strict=True)]
    lines = []
    for parts in zip(*blocks, strict=True):
        aligned = [_aligned(part, kind, size) for part, (_, kind), size in zip(parts, columns, widths, strict=True)]
        line = Text(GAP).join(aligned)
        line.rstrip()
        lines.append(line)
    return lines


def _fitted(cell: Text, kind: str, size: int) -> list[Text]:
    if "\n" in cell.plain:
        return list(cell.split("\n"))
    if cell.cell_len <= size or kind == RIGHT:
        return [cell]
    if kind == WRAP:
        return [Text(line, cell.style) for line in textwrap.wrap(cell.plain, size)]
    return [Text("..." + cell.plain[-(size - 3) :], cell.style)]


def _aligned(part: Text, kind: str, size: int) -> Text:
    pad = " " * max(size - part.cell_len, 0)
    return Text.assemble(pad, part) if kind == RIGHT else Text.assemble(part, pad)
