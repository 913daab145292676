"""Where text goes: a console on stdout, whether it may be animated, and lines free of markup and control codes."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from rich.console import Console
from rich.text import Text

WIDEST = 100


def make_console() -> Console:
    """A console on stdout. Only a real terminal counts as one, whatever FORCE_COLOR says."""
    terminal = sys.stdout.isatty()
    return Console(force_terminal=terminal, highlight=False, markup=False, emoji=False)


def is_live(console: Console, environment: Mapping[str, str] | None = None) -> bool:
    """Whether colours and a moving line are welcome: a terminal, and none of NO_COLOR, CI, TERM=dumb."""
    env = os.environ if environment is None else environment
    refused = env.get("NO_COLOR") or env.get("CI", "").lower() not in ("", "0", "false") or env.get("TERM") == "dumb"
    return console.is_terminal and not console.is_dumb_terminal and not refused


def line_width(console: Console) -> int:
    """Columns for running text: the console's, but neither absurdly narrow nor too wide to read."""
    return max(40, min(console.width, WIDEST))


def write(console: Console, *lines: str | Text, styled: bool | None = None) -> None:
    """Print lines as they are: no wrapping, no markup; styles only where `styled` (default: `is_live`).

    All in one go, so that a live area below is repainted once. What the output's encoding lacks is written as an
    escape instead of raising.
    """
    target = console if (is_live(console) if styled is None else styled) else plain(console)
    if not lines:
        return
    text = Text("\n").join(line if isinstance(line, Text) else Text(line) for line in lines)
    if not fits(text.plain, console.encoding):
        text = Text(text.plain.encode(console.encoding, "backslashreplace").decode(console.encoding))
    target.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def plain(console: Console) -> Console:
    """The same output without a single control character: no colours, no bold."""
    return Console(
        file=console.file, width=console.width, color_system=None, force_terminal=False, highlight=False, markup=False
    )


def unicode_bars(console: Console) -> bool:
    """Whether block characters can be written at all."""
    return fits("█▌░━", console.encoding)


def fits(text: str, encoding: str) -> bool:
    """Whether a text can be written in an encoding."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def silence() -> None:
    """Standard output is closed: nothing complains of it again, at exit either."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError, ValueError):
        sys.stderr.write("segtrain: the output was closed; the run goes on, and its metrics.jsonl has all figures\n")
