"""SIGINT, SIGTERM and SIGHUP: the first ends a command in order, the second at once.

A terminal that closes may send SIGHUP twice (from the kernel and from the shell), so only the first of those counts,
and none where the command was started to outlive its terminal (`nohup`).

A handler of Python's waits until the main thread is back from mlx, which may take a segment's time. The C code below it
doesn't: it writes the signal's number into a pipe. A thread reads that, as mlx computes without the interpreter's lock.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import NoReturn

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIRST = "finishing this step and saving; the same again leaves at once"
SECOND = "left at once; the last checkpoint is intact: go on with --resume"
SHOW_CURSOR = "\x1b[?25h"


class Stop:
    """A wish that a run ends in order after the step at hand: whoever has it sets `requested`."""

    def __init__(self) -> None:
        self.requested = False
        self._holding = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the block runs a first signal only sets `requested`."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False


class Interrupts(Stop):
    """Ctrl-C for a run inside somebody else's program, which goes on whatever becomes of the run.

    Within `caught`, the first one only sets `requested` where the run is `held`; any other raises KeyboardInterrupt.
    """

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Take Ctrl-C over for the block: in the main thread, and where Python's own handler has it."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if again or not self._holding:
            raise KeyboardInterrupt
        say(f"\nsegtrain: {FIRST}")


class StopRequest(Stop):
    """While entered, catches the three signals (in the main thread; in another one it does nothing).

    Outside `held` the first raises KeyboardInterrupt, as nothing is to be saved; inside it only sets `requested`. The
    second ends the process with code 130, whatever it does: what is saved appears by rename, so it is whole, and the
    run directory's lock ends with its process. `interrupted` says whether a KeyboardInterrupt was raised; libraries
    may turn it into another error, which `__exit__` turns back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.interrupted = False
        self._before: dict[signal.Signals, object] = {}
        self._pipe_before, self._pipe = -1, -1

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._watch, args=(reader,), name="segtrain-signals", daemon=True).start()
        self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]
        if self._before:
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._pipe)  # ends the thread
        self._before = {}
        if self.interrupted and isinstance(error, Exception):
            raise KeyboardInterrupt from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._holding:
            self.interrupted = True
            raise KeyboardInterrupt

    def _watch(self, reader: int) -> None:
        """Answer each signal as it comes, in a thread of its own."""
        seen = 0
        while numbers := os.read(reader, 64):
            for number in [number for number in numbers if number in SIGNALS]:
                if number == signal.SIGHUP and seen:
                    continue
                seen += 1
                if seen > 1:
                    say(f"\nsegtrain: {SECOND if self._holding else 'interrupted'}")
                    leave(INTERRUPTED)
                if self._holding:
                    say(f"\nsegtrain: {FIRST}")
        os.close(reader)


def leave(code: int) -> NoReturn:
    """End the process from any thread, in the middle of whatever it does."""
    if os.isatty(1):
        _write(1, f"{SHOW_CURSOR}\n")  # a progress display may have hidden it
    os._exit(code)


def leave_with(code: int) -> None:
    """From now on a signal ends the process with the code that it ends with anyway: its work is done."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, lambda *_: os._exit(code))


def say(text: str) -> None:
    """A line on stderr, from any thread; not where it would block (a full pipe, a stopped terminal)."""
    _write(2, f"{text}\n")


def _write(descriptor: int, text: str) -> None:
    with suppress(OSError, ValueError):
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, text.encode())


def _forget_pipe() -> None:
    """In a forked process: its signals aren't its parent's."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_pipe)
