"""Draws docs/segmented_backward.svg: what is in memory at each moment of a step, plain and segmented.

    python docs/draw_segmented_backward.py

Needs only the standard library; the picture follows the reader's light or dark setting.
"""

from collections.abc import Iterator
from pathlib import Path

SEGMENTS = 4
WIDTH, HEIGHT = 840, 470
CELL, GAP, ROW = 52, 16, 34  # pixels: a segment's box, the space for the boundary beside it, one moment's line
TOP, BOX = 92, 22
PANELS = {"plain": 150, "segmented": 500}  # x of the first boundary

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 15px }
  .faint { fill: #59636e; font-size: 12px }
  .empty { fill: none; stroke: #afb8c1; stroke-dasharray: 3 3 }
  .live { fill: #d1722c }
  .edge { fill: #2f6fb3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .faint { fill: #9198a1 } .empty { stroke: #59636e }
    .live { fill: #e08a48 } .edge { fill: #6cb0f5 }
  }
"""


def moments() -> Iterator[tuple[str, int | None, bool]]:
    """(caption, segment at work or None for the head, whether it is the backward pass), in order."""
    for number in range(SEGMENTS):
        yield f"forward {number + 1}", number, False
    yield "loss head", None, True
    for number in reversed(range(SEGMENTS)):
        yield f"backward {number + 1}", number, True


def live(kind: str, segment: int | None, backward: bool) -> tuple[set[int], int]:
    """The segments whose activations are in memory, and how many boundaries are kept, from the first on."""
    done = SEGMENTS if segment is None else segment + 1
    if kind == "plain":
        return set(range(done)), 0
    return (set() if segment is None else {segment}), done if backward and segment is not None else done + 1


def column(kind: str, number: float) -> float:
    return PANELS[kind] + number * (CELL + GAP)


def panel(kind: str, title: str, remark: str) -> Iterator[str]:
    x = PANELS[kind]
    yield f'<text class="title" x="{x}" y="34">{title}</text>'
    yield f'<text class="faint" x="{x}" y="54">{remark}</text>'
    for number in range(SEGMENTS):
        middle = column(kind, number) + GAP + CELL / 2
        yield f'<text class="faint" x="{middle:g}" y="{TOP - 12}" text-anchor="middle">seg. {number + 1}</text>'
    for line, (_, segment, backward) in enumerate(moments()):
        y = TOP + line * ROW
        segments, boundaries = live(kind, segment, backward)
        for number in range(SEGMENTS):
            style = "live" if number in segments else "empty"
            left = column(kind, number) + GAP
            yield f'<rect class="{style}" x="{left:g}" y="{y}" width="{CELL}" height="{BOX}" rx="4"/>'
        for number in range(boundaries):
            left = column(kind, number) + 5
            yield f'<rect class="edge" x="{left:g}" y="{y}" width="6" height="{BOX}" rx="2"/>'


def legend(y: int) -> Iterator[str]:
    entries = [
        ("live", 20, "the activations of a segment"),
        ("edge", 6, "a boundary: the hidden states between two segments"),
    ]
    x = PANELS["plain"]
    for style, width, text in entries:
        yield f'<rect class="{style}" x="{x}" y="{y - 11}" width="{width}" height="14" rx="2"/>'
        yield f'<text class="faint" x="{x + width + 8}" y="{y}">{text}</text>'
        x += 320


def picture() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Memory during one training step: plain backward and segmented backward</title>",
        f"<style>{STYLE}</style>",
    ]
    for line, (caption, _, _) in enumerate(moments()):
        lines.append(f'<text x="24" y="{TOP + line * ROW + 16}">{caption}</text>')
    lines += panel("plain", "Plain backward", "every activation waits for its gradient")
    lines += panel("segmented", "Segmented backward", "one segment at a time; backward runs it again first")
    lines += legend(TOP + (2 * SEGMENTS + 1) * ROW + 30)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("segmented_backward.svg").write_text(picture(), encoding="utf-8")
