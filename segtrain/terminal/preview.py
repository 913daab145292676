"""`segtrain plan-segments`: memory and time per segment size, drawn for 80 columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from segtrain.errors import counted
from segtrain.terminal.console import line_width, make_console, unicode_bars, write
from segtrain.terminal.format import clean, count, gib, label, paragraph, wrapped
from segtrain.terminal.plan import settings
from segtrain.terminal.table import Column, stacked, table_lines

_BLOCKS, _ASCII = "█▓▒░#+=:", "#=+:%@o."
_COLOURS = ("blue", "cyan", "green", "magenta", "yellow", "red", "white", "bright_blue")
_OVER_BUDGET = 1.5
_BAR_ROOM = 51  # columns that the other cells of the table take
_OPTIONAL = {"keep": "kept\nlayers", "boundaries": "edges\nkept", "mlp_rows": "MLP\nrows"}
_OPTIONAL_ROOM = 8  # of a column that is there where options differ in it


def print_preview(preview: Any, *, console: Console | None = None) -> None:
    """Draw a preview: model, seq, budget_gib, fits, recommended, options; options may say fits and longest.

    It may have lengths (rows of the data set: name, tokens, fits, peak_gib), notes and measured (one real step). The
    phases of an option are parts of its peak (GiB); all bars share one scale.
    """
    console = console or make_console()
    options = list(preview.options)
    budget = preview.budget_gib
    phases = list(dict.fromkeys(name for option in options for name in _phases(option)))
    marks = _BLOCKS if unicode_bars(console) else _ASCII
    write(console, *_head(preview, line_width(console)), "")
    rows = _rows(preview, options, phases, marks, line_width(console))
    write(console, *table_lines(_columns(options), rows, line_width(console)))
    write(console, "", *_legend(phases, marks, line_width(console)), *_notes(options, line_width(console)))
    write(console, *_verdict(preview, budget, line_width(console)))
    write(console, *_own_rows(preview, line_width(console)), *_measured(preview, line_width(console)))


def _head(preview: Any, width: int) -> list[str]:
    pieces = [clean(preview.model)]
    if (seq := preview.seq) is not None:
        pieces.append(f"{counted(seq, 'token')} a row")
    if (budget := preview.budget_gib) is not None:
        pieces.append(f"budget {gib(budget)}")
    planned = wrapped("planned for", [clean(preview.planned_for)], width) if preview.planned_for else []
    return [*planned, *wrapped("plan", pieces, width)]


def _columns(options: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns = [("", "left"), ("segment\nsize", "right"), ("head\nchunk", "right")]
    columns += [(_OPTIONAL[key], "right") for key in _differing(options)]
    columns += [("peak", "right"), ("time", "right"), ("fits", "left")]
    if any(_longest(option) is not None for option in options):
        columns.append(("longest\nrow", "right"))
    return [*columns, ("memory", "left")]


def _rows(
    preview: Any, options: Sequence[Mapping[str, Any]], phases: list[str], marks: str, width: int
) -> list[list[str | Text]]:
    chosen, budget = preview.recommended, preview.budget_gib
    scale = _scale(options, budget)
    differing = _differing(options)
    room = max(width - _BAR_ROOM - _OPTIONAL_ROOM * len(differing), 8)
    limit = None if budget is None or not scale else min(round(room * budget / scale), room - 1)
    with_longest = any(_longest(option) is not None for option in options)
    rows: list[list[str | Text]] = []
    for option in options:
        best = chosen is not None and _identity(option) == _identity(chosen)
        row = [*_figures(option, best, budget, differing), *([_count(_longest(option))] if with_longest else [])]
        parts = _phases(option)
        lengths = stacked([parts.get(name, 0.0) for name in phases], scale, room)
        rows.append([*(Text(cell, "bold" if best else "") for cell in row), _drawn(lengths, marks, limit, room)])
    return rows


def _scale(options: Sequence[Mapping[str, Any]], budget: float | None) -> float:
    """GiB of a full bar: the largest peak, but never so far above the budget that what fits becomes a sliver."""
    peak = max((option["peak_gib"] for option in options), default=0.0)
    return peak if budget is None else max(min(peak, _OVER_BUDGET * budget), budget)


def _drawn(lengths: Sequence[int], marks: str, limit: int | None, room: int) -> Text:
    """The bar of one option, with a | where the budget ends; a bar that goes on beyond the scale ends in >."""
    text = Text()
    for i, length in enumerate(lengths):
        text.append(marks[i % len(marks)] * length, _COLOURS[i % len(_COLOURS)])
    if len(text) > room:
        text = Text.assemble(text[: room - 1], ">")
    if limit is None:
        return text
    text.append(" " * max(limit + 1 - len(text), 0))
    return Text.assemble(text[:limit], ("|", "bold red"), text[limit + 1 :])


def _figures(option: Mapping[str, Any], best: bool, budget: float | None, differing: Sequence[str]) -> list[str]:
    fits = _fits(option, budget)
    relative, seconds = option.get("relative_time"), option.get("seconds")
    full = option.get("backward") == "full"
    return [
        ">" if best else " ",
        "full" if full else str(option.get("segment_size", "")),
        "" if full else _count(option.get("head_chunk")),
        *(_count(option.get(key) or None) for key in differing),
        gib(option["peak_gib"]),
        f"{seconds:.3g} s" if seconds else "" if relative is None else f"{relative:.2f}x",
        "" if fits is None else "yes" if fits else "no",
    ]


def _legend(phases: list[str], marks: str, width: int) -> list[str]:
    pieces = [f"{marks[i % len(marks)] * 2} {label(name)}" for i, name in enumerate(phases)]
    return wrapped("memory", [*pieces, "| budget"], width) if pieces else []


def _notes(options: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """What the columns mean."""
    texts = ["time: relative to full backward, counted in operations"]
    if any(option.get("seconds") for option in options):
        texts = ["time: seconds a row as measured in earlier runs here (s), or relative to full backward (x)"]
    if any(option.get("estimated_gib") for option in options):
        texts.append("peak: the estimate, corrected by what earlier runs of this model measured here")
    if set(_differing(options)) - {"keep"}:
        texts.append("edges kept, MLP rows: chosen by auto, nothing to type; fewer need less memory and more time")
    return [line for text in texts for line in paragraph("  ", text, width)]


def _verdict(preview: Any, budget: float | None, width: int) -> list[Text | str]:
    chosen = preview.recommended
    if preview.fits is False or chosen is None:
        text = Text("nothing fits" + ("" if budget is None else f" in {gib(budget)}"), "bold red")
        advice = preview.advice
        tries = [line for n, words in enumerate(preview.tries, 1) for line in wrapped(f"{n}.", [clean(words)], width)]
        last = wrapped(f"{len(preview.tries) + 1}.", [clean(advice)], width) if advice else []
        return [text, *(["try, in this order:"] if tries or last else []), *tries, *last]
    pieces = [*settings(chosen), f"predicted peak {gib(chosen['peak_gib'])}"]
    first, *rest = paragraph("> recommended: ", ", ".join(pieces), width)
    return [Text.assemble((">", "bold"), first[1:]), *rest]


def _own_rows(preview: Any, width: int) -> list[str]:
    """The data set's own row lengths, and remarks."""
    lines = []
    for row in preview.lengths:
        pieces = [f"{clean(row['name'])} row, {counted(row['tokens'], 'token')}"]
        peak = row.get("peak_gib")
        pieces.append("doesn't fit" if peak is None else f"peak {gib(peak)}")
        lines += wrapped("data", pieces, width)
    return lines + [line for note in preview.notes for line in wrapped("note:", [clean(note)], width)]


def _measured(preview: Any, width: int) -> list[str]:
    """One real step against its estimate."""
    step = preview.measured
    if not step:
        return []
    peaks = [f"predicted {gib(step['predicted_gib'])}", f"measured {gib(step['peak_gib'])}"]
    lines = wrapped("step", [*peaks, f"error {step['error']:+.1%}"], width)
    for name, phase in step["phases"].items():
        pieces = [clean(name), gib(phase["peak_gib"]), f"{phase['seconds']:.2f} s"]
        lines += wrapped("", pieces, width)
    return lines


def _differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings beyond segment size and head chunk that some option has: what its memory and time come from too."""
    return [key for key in _OPTIONAL if any(option.get(key) for option in options)]


def _identity(option: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(option.get(key) for key in ("backward", "segment_size", "head_chunk", "keep", "peak_gib"))


def _phases(option: Mapping[str, Any]) -> dict[str, float]:
    phases: Mapping[str, Any] = option["phases"]
    return {str(name): amount for name, amount in phases.items()}


def _fits(option: Mapping[str, Any], budget: float | None) -> bool | None:
    told = option.get("fits")
    if told is not None or budget is None:
        return told
    return option["peak_gib"] <= budget


def _longest(option: Mapping[str, Any]) -> int | None:
    return option.get("longest")


def _count(number: Any) -> str:
    return "" if number is None else count(number)
