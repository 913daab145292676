"""SIGINT and SIGTERM during a run: the first asks it to finish its step and save, the second ends it at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ANNOUNCEMENT = b"\nsegtrain: finishing this step and saving; the same again leaves at once\n"


class StopRequest:
    """While entered, catches the two signals. Outside `held` a signal raises KeyboardInterrupt: nothing is to be saved.

    A handler of Python's runs between two calls into mlx, so a signal waits for the segment that is being computed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._holding = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the block runs a first signal only sets `requested`; a second one ends the process with code 130."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        if self.requested:
            os._exit(INTERRUPTED)
        self.requested = True
        with suppress(OSError):
            os.write(2, ANNOUNCEMENT)  # print isn't safe in a handler
