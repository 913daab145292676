"""`segtrain check`: what is in the data set, and rows with their supervised tokens marked."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from segtrain.terminal.console import fits, line_width, make_console, unicode_bars, write
from segtrain.terminal.format import clean, count, label, listed, paragraph, wrapped
from segtrain.terminal.table import bar

BAR = 40
SAMPLE_TOKENS = 400  # shown; a longer row is cut in its middle
_NEWLINE = "\\n"
PAIRS = {
    "identical": "pairs with twice the same answer; they teach no preference",
    "fallbacks": "pairs whose prompts differ between the answers, so that each answer runs with its own prompt",
    "prompt_share": "the prompt's part of the longest pair",
    "shared_share": "the part of all tokens that needn't be computed, since both answers use one prompt",
}


def print_check(report: Any, *, console: Console | None = None) -> None:
    """Draw a data check: counts, lengths, what was dropped or truncated and why, duplicates, suggestions, a sample.

    `report`: a `CheckReport`, with bins (first, last, rows) as histogram and a `Reason` for whatever was dropped.
    """
    console = console or make_console()
    width = line_width(console)
    write(console, *wrapped("data", listed(report.counts), width))
    for name, meaning in PAIRS.items():
        if name in report.counts:
            write(console, *paragraph("  ", f"{label(name)}: {meaning}", width))
    if report.form:
        write(console, f"form  {clean(report.form)}")
    if report.histogram:
        write(console, "", Text("tokens a row", "bold"), *histogram_lines(report.histogram, unicode_bars(console)))
    if report.percentiles:
        write(console, *wrapped("percentiles", listed(report.percentiles), width))
    for name in ("dropped", "truncated", "duplicates", "split_prompts"):
        write(console, *_reasons(name, getattr(report, name), width))
    for text in report.suggestions:
        write(console, *textwrap.wrap(f"note  {clean(text)}", width, subsequent_indent=" " * 6, break_on_hyphens=False))
    marks = WIDE_MARKS if unicode_marks(console) else PLAIN_MARKS
    for sample in report.samples or report.shown:
        write(console, "", *sample_lines(sample, width, marks))


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


def sample_lines(sample: Any, width: int, marks: "Marks") -> list[Text]:
    """The tokens of a sample; supervised ones stand between marks that no text can contain, in colour where there is.

    A sample has pieces (text of each token), supervised (one flag each), origin, and a weight unless that is 1.
    """
    pieces, flags = sample.pieces, sample.supervised
    answer = f", the {sample.answer} answer" if sample.answer else ""
    head = Text(f"sample {clean(sample.origin)}{answer}", "bold")
    weighed = "" if sample.weight == 1 else f", of weight {sample.weight:g}"
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


WIDE_MARKS = Marks("⟦", "⟧", "·", {"⟦": r"\u27e6", "⟧": r"\u27e7", "·": r"\u00b7"})
PLAIN_MARKS = Marks(r"\<", r"\>", r"\.", {"\\": r"\\"})


def unicode_marks(console: Console) -> bool:
    """Whether the marks can be written in the console's encoding."""
    return unicode_bars(console) and fits("⟦⟧·", console.encoding)


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


def _reasons(name: str, reasons: Mapping[str, Any], width: int) -> list[Text | str]:
    """One line a reason: how many rows and where the first ones are."""
    lines: list[Text | str] = [Text(label(name), "bold yellow")] if reasons else []
    for reason, rows in reasons.items():
        lines += wrapped("  " + label(reason), _examples(rows), width)
    return lines


def _examples(rows: Any) -> list[str]:
    """A `Reason` (count, examples) as pieces of text."""
    shown = [clean(example) for example in rows.examples[:3]]
    more = ["..."] if rows.count > len(shown) and shown else []
    return [count(rows.count), *shown, *more]
