"""One line that counts up while something long reads its rows; nothing at all where stderr isn't a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

Count: TypeAlias = Callable[[int, int | None], None]

INTERVAL = 0.2  # seconds between two drawings
CLEAR = "\r\x1b[K"


@contextmanager
def counter(noun: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Count]:
    """A function of (done, total or None) that redraws `noun 1,200 of 5,000`; the line goes when the context ends."""
    out = stream or sys.stderr
    if not out.isatty():
        yield lambda done, total: None
        return
    drawn = -INTERVAL

    def show(done: int, total: int | None) -> None:
        nonlocal drawn
        if clock() - drawn >= INTERVAL:
            drawn = clock()
            out.write(f"{CLEAR}{noun} {done:,}{'' if total is None else f' of {total:,}'}")
            out.flush()

    try:
        yield show
    finally:
        out.write(CLEAR)
        out.flush()
