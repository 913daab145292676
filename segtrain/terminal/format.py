"""Text for terminals: numbers people can read, foreign strings made harmless, lines that fit. Standard library only."""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

# C0 and C1 controls, line and paragraph separators, and the marks that reorder a line from within.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def clean(value: object) -> str:
    """`value` as one line without control characters: what a data set or a model wrote can't move the cursor."""
    return _UNSAFE.sub(_escape, str(value))


def clipped(value: object, width: int) -> str:
    """`clean(value)` cut to `width` characters, with `...` where something is missing."""
    text = clean(value)
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def count(number: float) -> str:
    """An integer with thousands separated; other numbers to four digits."""
    if isinstance(number, bool):
        return "yes" if number else "no"
    if isinstance(number, int) or (math.isfinite(number) and number == int(number)):
        return f"{int(number):,}"
    return f"{number:.4g}"


def compact(number: float) -> str:
    """A large count in at most five characters and a unit: 8.19B, 20.5M, 512."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return count(number)


def duration(seconds: float) -> str:
    """3.2 s, 2:05 (minutes) or 1:02:33 (hours); days above that."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def gib(amount: float) -> str:
    """Memory, from megabytes to hundreds of gigabytes, in GiB with three digits."""
    if amount < 0.01:
        return f"{amount:.4f} GiB"
    return f"{amount:.2f} GiB" if amount < 10 else f"{amount:.1f} GiB"


def value(item: Any) -> str:
    """Any JSON value as one short, harmless piece of text."""
    if item is None:
        return "none"
    if isinstance(item, (bool, int, float)):
        return count(item)
    if isinstance(item, Mapping):
        return ", ".join(f"{clean(key)} {value(entry)}" for key, entry in item.items()) or "none"
    if isinstance(item, (list, tuple)):
        return ", ".join(value(entry) for entry in item) or "none"
    return clean(item)


def label(key: str) -> str:
    """`supervised_tokens` as `supervised tokens`."""
    return clean(key).replace("_", " ")


def named(items: Mapping[str, Any]) -> dict[str, str]:
    """A flat mapping as readable names and values; a key that ends in `_gib` shows its unit, one in `_bytes` as GiB."""
    shown = {}
    for key, item in items.items():
        stem, _, unit = key.rpartition("_")
        if unit in ("gib", "bytes") and stem and isinstance(item, (int, float)):
            shown[label(stem)] = gib(item if unit == "gib" else item / 2**30)
        else:
            shown[label(key)] = value(item)
    return shown


def listed(items: Mapping[str, Any]) -> list[str]:
    """A flat mapping as `name value` pieces."""
    return [f"{name} {shown}" for name, shown in named(items).items()]


def wrapped(head: str, pieces: Iterable[str], width: int) -> list[str]:
    """`head` and the pieces, two spaces between them, in lines of at most `width`.

    Further lines are indented under the first. A piece longer than a line (a path) is kept whole, to be copied.
    """
    indent = " " * (len(head) + 2)
    lines, current = [], head
    for piece in pieces:
        if current not in (head, indent) and len(current) + 2 + len(piece) > width:
            lines.append(current)
            current = indent + piece
        else:
            current = current + "  " + piece if current != indent else indent + piece
    return [*lines, current]


def paragraph(head: str, text: str, width: int) -> list[str]:
    """`head` and running text, wrapped at spaces, further lines indented by two."""
    return textwrap.wrap(
        f"{head}{clean(text)}", width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _escape(found: re.Match[str]) -> str:
    char = found.group()
    return _ESCAPES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")
