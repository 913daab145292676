"""Streamed weights in a run: what the disk may do to it, and what is said of a slow one."""

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run

from segtrain.errors import RunFailed
from segtrain.event import Event, Notice, TrainStep
from segtrain.models import page_cache
from segtrain.recipe.schema import load_recipe
from segtrain.run import disk
from segtrain.run.streaming import Watch
from segtrain.run.trainer import Trainer
from segtrain.storage import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import streamed_run

Fault = Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reading")


def events(folder: Path, name: str, **flags: bool) -> Iterator[Event]:
    """Of a run of two rows an update, which go through each segment together."""
    options = {"engine__weights": "streamed", "engine__rows_together": 1, "train__grad_accumulation_steps": 2}
    run = str(folder / name)
    path = tiny_run.recipe_file(folder, output__dir=run, output__save_every=1, train__steps=5, **options)
    return Trainer(load_recipe(path), "sft", **flags).events()


def adapter(folder: Path, name: str) -> bytes:
    return (folder / name / "adapters.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    list(events(folder, "whole"))
    return adapter(folder, "whole")


@contextmanager
def put_back(file: Path) -> Iterator[Path]:
    """The file is as it was afterwards, its time too."""
    kept = file.with_suffix(".kept")
    shutil.copy2(file, kept)
    try:
        yield file
    finally:
        kept.replace(file)


@contextmanager
def vanished(file: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with put_back(file):
        file.unlink()
        yield


@contextmanager
def shrunk(file: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with put_back(file):
        os.truncate(file, file.stat().st_size // 2)
        yield


@contextmanager
def changed(file: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with put_back(file):
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
        os.utime(file, ns=(0, 0))
        yield


@contextmanager
def bad_sector(file: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fifth read from now on fails."""
    original, left = os.preadv, [5]

    def preadv(*given: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*given)

    with patch.context() as within:
        within.setattr(os, "preadv", preadv)
        yield


FAULTS: dict[Fault, str] = {
    vanished: "can't be read any more: No such file",
    shrunk: "changed while its weights were in use",
    changed: "changed while its weights were in use",
    bad_sector: "can't be read any more: Input/output error",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_of_the_disk_keeps_the_checkpoint_and_the_run_goes_on(
    fault: Fault, message: str, folder: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fault.__name__
    running = events(folder, name)
    while not (isinstance(event := next(running), TrainStep) and event.step == 3):
        pass
    with (
        fault(folder / "model" / "model.safetensors", monkeypatch),
        pytest.raises(RunFailed, match=rf"{message}.*--resume"),
    ):
        list(running)
    found, notices = checkpoint.newest(folder / name)
    assert found is not None
    assert (found.step, notices) == (3, [])
    list(events(folder, name, resume=True))
    assert adapter(folder, name) == whole


def texts(found: Iterator[Event]) -> list[str]:
    return [event.text for event in found if isinstance(event, Notice) and "of the time goes by" in event.text]


def test_a_slow_disk_is_said_once_with_its_speed(folder: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "NOTABLE", 0.0)
    original = os.preadv

    def slow(*given: Any) -> int:
        time.sleep(0.02)
        return original(*given)

    monkeypatch.setattr(os, "preadv", slow)
    (text,) = texts(events(folder, "slow"))
    assert "GiB/s" in text
    assert "train.grad_accumulation_steps" in text
    assert adapter(folder, "slow") == whole


@pytest.mark.parametrize(("waited", "said"), [(0.4, 0), (0.6, 1), (1.0, 1)])
def test_slow_is_what_takes_most_of_the_time(waited: float, said: int) -> None:
    """Of ten seconds an update, whatever the first one's compilation took; 16 GiB are read in so long."""
    clock, weights = [0.0], SimpleNamespace(waited=0.0, bytes_read=0, reading=0.0)
    watch, found = Watch(weights, lambda: clock[0]), []  # type: ignore[arg-type]
    for seconds in (100.0, 10.0, 10.0, 10.0):
        clock[0] += seconds
        weights.waited += 10 * waited
        weights.reading += 8.0
        weights.bytes_read += 16 << 30
        found += [notice.text for notice in watch.after_step()]
    assert "first update read 16.00 GiB" in found[0]
    assert len(found) == 1 + said
    assert not said or f"{waited:.0%} of the time" in found[1]
    assert not said or "2.00 GiB/s" in found[1]


@pytest.mark.parametrize(
    ("share", "system", "past"), [(0.0, "mac", True), (0.5, "mac", False), (0.0, "linux", False), (0.0, "none", False)]
)
def test_reads_leave_the_page_cache_alone_where_it_is_too_small(
    share: float, system: str, past: bool, folder: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a system with F_NOCACHE (48, on macOS) every file that is opened for weights is read so."""
    asked: list[tuple[int, int]] = []
    module = SimpleNamespace(fcntl=lambda descriptor, command, on: asked.append((command, on)))
    if system == "mac":
        module.F_NOCACHE = 48
    monkeypatch.setattr(page_cache, "fcntl", None if system == "none" else module)
    monkeypatch.setattr(page_cache, "SHARE", share)
    list(events(folder, f"cache-{system}-{share}"))
    assert adapter(folder, f"cache-{system}-{share}") == whole
    assert set(asked) == ({(48, 1)} if past else set())


def test_a_disk_is_timed_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    module = SimpleNamespace(F_NOCACHE=48, fcntl=lambda descriptor, command, on: asked.append(command))
    monkeypatch.setattr(page_cache, "fcntl", module)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert disk.read_speed(tmp_path, 1 << 20) > 0
    assert asked == [48]


def test_a_run_within_a_limit_of_memory_and_one_that_is_stopped_give_the_same_adapter(tmp_path: Path) -> None:
    """`benchmarks/streamed_run.py`, whose kept results are those of a model three times its limit, at a small size."""
    found = streamed_run.measured(tmp_path, "tiny", 400 * streamed_run.MB, rows=(2,))
    (run,) = found["runs"]
    assert run["same"]
    assert max(run["peak_mb"]) < found["limit_mb"]
