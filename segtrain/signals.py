"""SIGINT and SIGTERM during a run: the first asks it to finish its step and save, the second ends it at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, catches the two signals. Outside `held` a signal raises KeyboardInterrupt, since there is nothing to save."""

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
