"""`segtrain check`: what is in the data set, and rows with their supervised tokens marked."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from segtrain.terminal.console import fits, line_width, make_console, unicode_bars, write
from segtrain.terminal.format import clean, count, label, listed, pick, wrapped
from segtrain.terminal.table import bar

BAR = 40
SAMPLE_TOKENS = 400  # shown; a longer row is cut in its middle
_NEWLINE = "\\n"


def print_check(report: object, *, console: Console | None = None) -> None:
    """Draw a data check: counts, lengths, what was dropped or truncated and why, duplicates, suggestions, a sample.

    `report` has histogram, bins of (first, last, rows), or lengths (tokens of each row), from which bins are made.
    """
    console = console or make_console()
    width = line_width(console)
    write(console, *wrapped("data", listed(pick(report, "counts", default={}) or {}), width))
    if form := pick(report, "form", default=""):
        write(console, f"form  {clean(form)}")
    histogram = pick(report, "histogram") or doubling_bins(pick(report, "lengths", default=()))
    if histogram:
        write(console, "", Text("tokens a row", "bold"), *histogram_lines(histogram, unicode_bars(console)))
    percentiles = pick(report, "percentiles")
    if percentiles:
        write(console, *wrapped("percentiles", listed(percentiles), width))
    for name in ("dropped", "truncated", "duplicates", "split_prompts"):
        write(console, *_reasons(name, pick(report, name), width))
    for text in pick(report, "suggestions", default=()):
        write(console, *textwrap.wrap(f"note  {clean(text)}", width, subsequent_indent=" " * 6, break_on_hyphens=False))
    marks = WIDE_MARKS if unicode_marks(console) else PLAIN_MARKS
    for sample in pick(report, "samples", default=()) or filter(None, [pick(report, "sample")]):
        write(console, "", *sample_lines(sample, width, marks))


def doubling_bins(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, last, rows) for 1, 2 to 3, 4 to 7 and so on, from the shortest row's bin to the longest's."""
    rows = Counter(length.bit_length() for length in lengths)
    return [(1 << (bits - 1) if bits else 0, (1 << bits) - 1, rows[bits]) for bits in _all_between(rows)]


def _all_between(rows: Mapping[int, int]) -> range:
    return range(min(rows), max(rows) + 1) if rows else range(0)


def histogram_lines(bins: Iterable[Any], unicode: bool = True) -> list[str]:
    """`lo to hi  count  bar` for each bin (lo, hi, rows), the upper end included."""
    triples = [(int(lo), int(hi), int(rows)) for lo, hi, rows in bins]
    most = max((rows for _, _, rows in triples), default=0) or 1
    left = max(len(count(lo)) for lo, _, _ in triples)
    right = max(len(count(hi)) for _, hi, _ in triples)
    wide = max(len(count(rows)) for _, _, rows in triples)
    return [
        f"  {count(lo):>{left}} to {count(hi):>{right}}  {count(rows):>{wide}}  {bar(rows / most, BAR, unicode)}"
        for lo, hi, rows in triples
    ]


def sample_lines(sample: object, width: int, marks: "Marks") -> list[Text]:
    """The tokens of a sample; supervised ones stand between marks that no text can contain, in colour where there is.

    A sample has pieces (text of each token), supervised (one flag each), origin, and a weight unless that is 1.
    """
    pieces, flags = list(pick(sample, "pieces", "tokens")), list(pick(sample, "supervised"))
    head = Text(f"sample {clean(pick(sample, 'origin', default=''))}", "bold")
    weight = pick(sample, "weight", default=1.0)
    weighed = "" if weight == 1 else f", of weight {weight:g}"
    note = (
        f"  {sum(flags):,} of {len(flags):,} tokens are supervised{weighed}, between {marks.start} and {marks.end}; "
        f"tokens are divided by {marks.between}"
    )
    return [head, Text(note), Text(""), *_flowed(_shortened(list(zip(pieces, flags, strict=True))), width, marks)]


@dataclass(frozen=True)
class Marks:
    """What stands around supervised tokens and between tokens, and how a text that has it is written."""

    start: str
    end: str
    between: str
    escapes: dict[str, str]

    def shown(self, piece: str) -> str:
        for text, escape in self.escapes.items():
            piece = piece.replace(text, escape)
        return clean(piece)


WIDE_MARKS = Marks("⟦", "⟧", "│", {"⟦": r"\u27e6", "⟧": r"\u27e7", "│": r"\u2502"})
PLAIN_MARKS = Marks(r"\<", r"\>", r"\|", {"\\": r"\\"})


def unicode_marks(console: Console) -> bool:
    """Whether the marks can be written in the console's encoding."""
    return unicode_bars(console) and fits("⟦⟧│", console.encoding)


def _shortened(tokens: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    if len(tokens) <= SAMPLE_TOKENS:
        return tokens
    half = SAMPLE_TOKENS // 2
    return [*tokens[:half], (f" ... {len(tokens) - 2 * half} tokens ... ", False), *tokens[-half:]]


def _flowed(tokens: Sequence[tuple[str, bool]], width: int, marks: Marks) -> list[Text]:
    """Tokens after one another, broken at `width` and after a token that holds a line break."""
    lines, before = [Text()], False
    for number, (piece, supervised) in enumerate(tokens):
        last = number + 1 == len(tokens) or tokens[number + 1][1] != supervised
        start = marks.start if supervised and not before else ""
        shown = start + marks.shown(piece) + (marks.end if supervised and last else "" if last else marks.between)
        if lines[-1].cell_len and lines[-1].cell_len + len(shown) > width:
            lines.append(Text())
        lines[-1].append(shown, "green underline" if supervised else "dim")
        if _NEWLINE in shown:
            lines.append(Text())
        before = supervised
    return lines if lines[-1].cell_len else lines[:-1]


def _reasons(name: str, reasons: Any, width: int) -> list[Text | str]:
    """One line a reason: how many rows and where the first ones are."""
    if not reasons:
        return []
    if isinstance(reasons, int):
        return [f"{label(name)}  {count(reasons)}"]
    if not isinstance(reasons, Mapping):
        reasons = {"rows": reasons}
    lines: list[Text | str] = [Text(label(name), "bold yellow")]
    for reason, rows in reasons.items():
        lines += wrapped("  " + label(str(reason)), _examples(rows), width)
    return lines


def _examples(rows: Any) -> list[str]:
    """A count, a list of origins, or an object with rows and examples, as pieces of text."""
    if isinstance(rows, int):
        return [count(rows)]
    examples = list(rows) if isinstance(rows, (list, tuple)) else list(pick(rows, "examples", "origins", default=()))
    total = pick(rows, "count", "rows", default=len(examples)) if not isinstance(rows, (list, tuple)) else len(examples)
    shown = [clean(example) for example in examples[:3]]
    more = ["..."] if total > len(shown) and shown else []
    return [count(total), *shown, *more]
