"""Directories that are complete or absent, also when a process is killed or two want the same one."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tiny_run import ENVIRONMENT, ROOT

from segtrain.errors import RunFailed, UserError
from segtrain.storage.fresh import fresh, made_once


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_there_at_the_end_only(tmp_path: Path) -> None:
    with fresh(tmp_path / "deep/out", "--out") as inside:
        (inside / "a").write_text("1")
        (inside / "sub").mkdir()
        (inside / "sub/b").write_text("2")
        assert not (tmp_path / "deep/out").exists()
    assert names(tmp_path / "deep") == ["out"]
    assert names(tmp_path / "deep/out") == ["a", "sub"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fill() -> None:
        with fresh(tmp_path / "out", "--out") as inside:
            (inside / "a").write_text("1")
            raise error

    with pytest.raises(type(error)):
        fill()
    assert names(tmp_path) == []


def test_what_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name, kind in (("file", "file"), ("folder", "directory")):
        with (
            pytest.raises(UserError, match=f"--out .*{name}: there is a {kind} .* give another --out"),
            fresh(tmp_path / name, "--out"),
        ):
            raise AssertionError
    with (
        pytest.raises(UserError, match="file is a file; give another --out"),
        fresh(tmp_path / "file/out", "--out"),
    ):
        raise AssertionError
    with pytest.raises(UserError, match="there is a file"), fresh(tmp_path / "late", "--out"):
        (tmp_path / "late").write_text("mine")
    assert (tmp_path / "late").read_text() == "mine"


def test_a_kill_leaves_the_place_free(tmp_path: Path) -> None:
    script = f"""
    import sys, time
    from pathlib import Path
    from segtrain.storage.fresh import fresh
    with fresh(Path({str(tmp_path)!r}) / "out", "--out") as inside:
        (inside / "a").write_text("half")
        (inside / "sub").mkdir()
        print("filling", flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, env=ENVIRONMENT, cwd=ROOT
    )
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(UserError, match="being written by another process"), fresh(tmp_path / "out", "--out"):
        raise AssertionError
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert names(tmp_path) == [".out.unfinished"]
    with fresh(tmp_path / "out", "--out") as inside:
        assert names(inside) == []
        (inside / "b").write_text("whole")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["b"]


def test_two_want_the_same_one(tmp_path: Path) -> None:
    made, begun = [], threading.Event()

    def want() -> None:
        with made_once(tmp_path / "out") as inside:
            made.append(inside is not None)
            if inside:
                begun.set()
                (inside / "a").write_text("1")

    with made_once(tmp_path / "out") as inside:
        assert inside is not None
        others = [threading.Thread(target=want) for _ in range(3)]
        for other in others:
            other.start()
        assert not begun.wait(0.2)
        (inside / "a").write_text("0")
    for other in others:
        other.join()
    assert made == [False] * 3
    assert names(tmp_path) == ["out"]
    with made_once(tmp_path / "out") as inside:
        assert inside is None


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("segtrain.storage.fresh.sync", full)
    with (
        pytest.raises(RunFailed, match=r"could not be written: No space left.* nothing of it is left"),
        fresh(tmp_path / "out", "--out") as inside,
    ):
        (inside / "a").write_text("1")
    assert names(tmp_path) == []


def test_the_next_one_takes_over_from_one_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), made_once(tmp_path / "out"):
        raise ValueError("no")
    with made_once(tmp_path / "out") as inside:
        assert inside is not None
