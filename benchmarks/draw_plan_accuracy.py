"""Predicted against measured peaks as an SVG, without a plotting library."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH, HEIGHT, EDGE = 640, 460, 60
COLOURS = ("#3366cc", "#dc3912", "#ff9900", "#109618", "#990099", "#0099c6")
BAND = 0.1

Point = tuple[str, float, float]
"""(family, measured MiB, predicted MiB)"""


def draw(points: Sequence[Point], path: Path) -> None:
    """One dot a case on logarithmic axes; the line is equality, the band 10 % to either side."""
    values = [value for _, *pair in points for value in pair]
    scale = _Scale(min(values) / 1.15, max(values) * 1.15)
    families = list(dict.fromkeys(family for family, _, _ in points))
    marks = "\n".join([*_frame(scale), *_dots(points, families, scale), *_legend(families)])
    style = "text{font:13px sans-serif;fill:#333}.b{fill:#3366cc22}.l{stroke:#999;fill:none}"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Predicted against measured peak memory">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{marks}\n</svg>\n',
        encoding="utf-8",
    )


class _Scale:
    """MiB to pixels, the same range on both axes."""

    def __init__(self, low: float, high: float):
        self.low, self.high = low, high

    def x(self, value: float) -> float:
        return round(EDGE + self._share(value) * (WIDTH - 2 * EDGE), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - EDGE - self._share(value) * (HEIGHT - 2 * EDGE), 1)

    def _share(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(1.0, max(0.0, share))


def _frame(scale: _Scale) -> Iterator[str]:
    low, high = scale.low, scale.high
    corners = [(low, low * (1 + BAND)), (high, high * (1 + BAND)), (high, high * (1 - BAND)), (low, low * (1 - BAND))]
    yield f'<polygon class="b" points="{" ".join(f"{scale.x(a)},{scale.y(b)}" for a, b in corners)}"/>'
    yield f'<path class="l" d="M{scale.x(low)} {scale.y(low)}L{scale.x(high)} {scale.y(high)}"/>'
    right, bottom = WIDTH - EDGE, HEIGHT - EDGE
    yield f'<path class="l" d="M{EDGE} {EDGE}V{bottom}H{right}"/>'
    for tick in (25, 50, 100, 200, 400, 800, 1600, 3200):
        if low < tick < high:
            yield f'<text x="{scale.x(tick)}" y="{bottom + 20}" text-anchor="middle">{tick}</text>'
            yield f'<text x="{EDGE - 8}" y="{scale.y(tick) + 4}" text-anchor="end">{tick}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 15}" text-anchor="middle">measured peak, MiB</text>'
    yield f'<text x="{EDGE - 40}" y="{EDGE - 20}">predicted peak, MiB (band: ±10 %)</text>'


def _dots(points: Sequence[Point], families: Sequence[str], scale: _Scale) -> Iterator[str]:
    for family, measured, predicted in points:
        colour = COLOURS[families.index(family) % len(COLOURS)]
        yield f'<circle cx="{scale.x(measured)}" cy="{scale.y(predicted)}" r="4" fill="{colour}" fill-opacity=".7"/>'


def _legend(families: Sequence[str]) -> Iterator[str]:
    for i, family in enumerate(families):
        y = EDGE + 20 * i
        yield f'<circle cx="{EDGE + 16}" cy="{y}" r="5" fill="{COLOURS[i % len(COLOURS)]}"/>'
        yield f'<text x="{EDGE + 28}" y="{y + 4}">{family}</text>'
