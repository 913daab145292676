"""The program's start: an interrupt counts from the first line on, before anything that takes a while is imported."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    _open_streams()
    from segtrain.cli import main as command_line

    try:
        command_line()
    except KeyboardInterrupt:
        _leave()


def _open_streams() -> None:
    """Streams that the caller has closed (`>&-`) lead nowhere, lest a file of the run takes their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process)


def _leave(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    """Nothing has begun, and an exception might get lost: Python swallows those that come in an import's callbacks."""
    os.write(2, b"segtrain: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
