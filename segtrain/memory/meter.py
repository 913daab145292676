"""The meter: memory and time by phase, read from MLX's allocator and the process. GiB are 2^30 bytes."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil

from segtrain.event import Memory
from segtrain.lora.modules import trains

GIB = 2**30
_process = psutil.Process()


def frozen_bytes(model: nn.Module) -> int:
    """Of all arrays that a model holds but the adapter's parameters; each counts once, however many places hold it."""
    found = {}
    for _, module in model.named_modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and not trains(module, key):
                found[id(value)] = value.nbytes
    return sum(found.values())


def recommended_bytes() -> int:
    """What the device recommends as working set; 0 where it says nothing (no Metal)."""
    info = mx.device_info()
    return int(info.get("max_recommended_working_set_size") or 0)


def set_limits(memory: int, cache: int) -> None:
    """Above `memory` bytes an allocation waits for running work; freed buffers beyond `cache` bytes are given back."""
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@contextmanager
def allocator_as_it_was() -> Iterator[int]:
    """Whatever a block sets of mlx's allocator and draws of its random numbers, it leaves as they were.

    Yields the bytes in use beforehand: whoever runs the block may have arrays of their own.
    """
    memory, cache = mx.get_memory_limit(), mx.set_cache_limit(0)
    mx.set_cache_limit(cache)
    (key,) = mx.random.state  # type: ignore[misc]
    high, low = key.tolist()  # type: ignore[has-type]
    try:
        yield mx.get_active_memory()
    finally:
        set_limits(memory, cache)
        mx.random.seed(high << 32 | low)


def give_back() -> None:
    """Free what is left of a model that nobody holds: circles of Python's objects, and mlx's cache."""
    gc.collect()
    mx.clear_cache()


class Meter:
    """A context around each phase; `record` gets one JSON object a phase, `peak` is the highest since `start_step`.

    `held`: bytes that the process held before, which aren't counted.
    """

    def __init__(self, record: Callable[[dict[str, Any]], None] | None = None, held: int = 0):
        self.record, self.held = record, held
        self.step = self.tokens = self.padding = 0
        self._peak = 0

    def start_step(self, step: int) -> None:
        self.step, self._peak = step, 0
        mx.reset_peak_memory()

    def start_pass(self, tokens: int, padding: int) -> None:
        """The next phases compute so many tokens of rows, and filler beside them."""
        self.tokens, self.padding = tokens, padding

    @contextmanager
    def __call__(self, phase: str, stream: int) -> Iterator[None]:
        self._note_peak()
        mx.reset_peak_memory()
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        line = {
            "step": self.step,
            "phase": phase,
            "stream": stream,
            "tokens": self.tokens,
            "padding": self.padding,
            "seconds": round(seconds, 6),
            "peak_gib": self._own(mx.get_peak_memory()) / GIB,
            "active_gib": self._own(mx.get_active_memory()) / GIB,
            "cache_gib": mx.get_cache_memory() / GIB,
        }
        self._note_peak()
        if self.record:
            self.record(line)

    def memory(self) -> Memory:
        """The step's peak, and what is in use now. The allocator's peak does not count its cache; RSS counts all."""
        self._note_peak()
        return Memory(
            peak_gib=self._peak / GIB,
            active_gib=self._own(mx.get_active_memory()) / GIB,
            cache_gib=mx.get_cache_memory() / GIB,
            rss_gib=_process.memory_info().rss / GIB,
        )

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self._own(mx.get_peak_memory()))

    def _own(self, amount: int) -> int:
        return max(0, amount - self.held)
