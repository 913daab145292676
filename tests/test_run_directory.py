"""The run directory: who may write to it, what is written, and what a resumed run finds."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from segtrain.errors import RunFailed, UserError
from segtrain.recipe.schema import Recipe, load_recipe
from segtrain.storage import checkpoint, run_directory
from segtrain.storage.run_directory import RunDirectory, best


def recipe() -> Recipe:
    return Recipe.from_mapping({"model": "some/model", "data": {"train": "train.jsonl"}})


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def checkpoint_at(run: Path, step: int) -> Path:
    return checkpoint.save(
        run, step, adapters={"a": mx.zeros((2,))}, adapter_config={}, optimizer={"step": mx.array(step)}, state={}
    )


def finished_run(path: Path) -> Path:
    with RunDirectory(path) as run:
        run.write_recipe(recipe())
        run.append_metrics({"event": "train", "step": 1})
        checkpoint_at(path, 1)
    return path


def tree(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


# --- creation ---------------------------------------------------------------------------------------------------------


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "runs/a") as run:
        run.append_metrics({"step": 1})
    assert tree(tmp_path) == ["runs", "runs/a", "runs/a/metrics.jsonl"]


def test_a_run_that_never_wrote_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such model"), RunDirectory(tmp_path / "a"):
        raise RuntimeError("no such model")
    assert tree(tmp_path) == []


def test_a_directory_of_the_users_is_not_removed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        pass
    assert tmp_path.is_dir()


def test_an_existing_run_is_refused_with_both_fixes(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "a")
    before = tree(path)
    with pytest.raises(UserError, match=r"--resume.*--overwrite"), RunDirectory(path):
        pass
    assert tree(path) == before


@pytest.mark.parametrize("name", run_directory.MARKS)
def test_any_file_of_a_run_counts(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="already holds a run"), RunDirectory(tmp_path):
        pass


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_no_run_made_is_never_replaced(name: str, flags: dict[str, bool], tmp_path: Path) -> None:
    (tmp_path / name).write_text("r: 64")
    with pytest.raises(UserError, match="an adapter that no run"), RunDirectory(tmp_path, **flags):
        pass
    assert tree(tmp_path) == [name]


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_recipe_alone_is_no_run_and_stays(flags: dict[str, bool], tmp_path: Path) -> None:
    own = tmp_path / "recipe.yaml"
    own.write_text("model: a  # why this one\n")
    for _ in range(2):
        with RunDirectory(tmp_path, **flags, reads=[own]) as run:
            run.write_recipe(recipe())
        assert own.read_text() == "model: a  # why this one\n"
        assert run_directory.recipe_file(tmp_path).read_text().startswith("# resolved by")
        assert run_directory.recipe_file(tmp_path) != own


def test_the_recipe_of_a_run_that_is_read_again_stays(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "a") / "recipe.yaml"
    before = path.read_text()
    with RunDirectory(path.parent, overwrite=True, reads=[path]) as run:
        run.append_metrics({"step": 1})
        run.write_recipe(recipe())
    assert path.read_text() == before
    assert tree(path.parent) == ["metrics.jsonl", "recipe.yaml"]  # it says the same


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_data_with_the_name_of_a_log_is_not_written(flags: dict[str, bool], tmp_path: Path) -> None:
    data = tmp_path / "samples.jsonl"
    data.write_text("{}\n")
    with pytest.raises(UserError, match=r"samples\.jsonl, which this run reads"):
        RunDirectory(tmp_path, **flags, reads=[data]).__enter__()
    assert data.read_text() == "{}\n"


@pytest.mark.parametrize("read", ["checkpoints/train.jsonl", "checkpoints/*.jsonl", "link/train.jsonl"])
def test_what_is_read_from_a_runs_directories_is_not_removed(read: str, tmp_path: Path) -> None:
    """Data, a template or a model that the user has put there."""
    path = finished_run(tmp_path / "a")
    (path / "link").symlink_to("checkpoints")
    before = tree(path)
    with pytest.raises(UserError, match=r"this run reads .*, which --overwrite would remove"):
        RunDirectory(path, overwrite=True, reads=[path / read]).__enter__()
    assert tree(path) == before
    with RunDirectory(path, resume=True, reads=[path / read]):
        pass


def test_what_no_run_made_among_checkpoints_is_not_removed(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "a")
    (path / "checkpoints" / ".DS_Store").touch()
    mine = path / "checkpoints" / "mine"
    mine.mkdir()
    with pytest.raises(UserError, match=r"checkpoints/mine is none of a run's checkpoints"):
        RunDirectory(path, overwrite=True).__enter__()
    mine.rename(path / "mine")
    with RunDirectory(path, overwrite=True) as run:
        run.append_metrics({"step": 1})
    assert tree(path) == ["metrics.jsonl", "mine"]


def test_a_dangling_best_counts_too(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to("checkpoints/gone")
    with pytest.raises(UserError, match="already holds a run"), RunDirectory(tmp_path):
        pass


def test_other_files_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with RunDirectory(tmp_path) as run:
        run.append_metrics({})


def test_overwrite_removes_the_run_at_the_first_write_and_nothing_else(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "a")
    (path / "notes.txt").write_text("mine")
    before = tree(path)
    with pytest.raises(RuntimeError), RunDirectory(path, overwrite=True):
        raise RuntimeError("a run that fails before it writes")
    assert tree(path) == before
    with RunDirectory(path, overwrite=True) as run:
        run.append_metrics({"step": 7})
        run.append_metrics({"step": 8})
    assert tree(path) == ["metrics.jsonl", "notes.txt"]
    assert lines(path / "metrics.jsonl") == [{"step": 7}, {"step": 8}]


KILLED = """
import os, sys
from segtrain.recipe.schema import Recipe
from segtrain.storage.run_directory import RunDirectory
calls = []
def replace(path, stop):
    with RunDirectory(path, overwrite=True) as run:
        sys.addaudithook(lambda *event: counted(stop, *event))
        run.write_recipe(Recipe.from_mapping({"model": "new/model", "data": {"train": "train.jsonl"}}))
        run.append_metrics({"step": "new"})
        return len(calls)
def counted(stop, event, _):
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate") or event == "open" and _[2] & 3:
        calls.append(event)
        if len(calls) == stop:
            os._exit(9)
for line in sys.stdin:  # a fork each, with what is imported here
    stop, path = line.rstrip("\\n").split(" ", 1)
    child = os.fork() or os._exit(100 + replace(path, int(stop)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_kill_at_any_moment_of_a_replacement_leaves_the_old_run_or_the_new(tmp_path: Path) -> None:
    """Killed before each change of the file system in turn."""
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py")]
    old = tree(finished_run(tmp_path / "old"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def replaced(path: Path, stop: int) -> int:
            process.stdin.write(f"{stop} {path}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return int(process.stdout.readline())  # type: ignore[union-attr]

        count = replaced(tmp_path / "old", 0) - 100
        assert count >= 8
        seen = set()
        for moment in range(1, count + 1):
            path = finished_run(tmp_path / f"run-{moment}")
            assert replaced(path, moment) == 9
            with RunDirectory(path, resume=True):
                pass
            found = tree(path)
            new = "new/model" in (path / "recipe.yaml").read_text()
            assert not new or found in (["recipe.yaml"], ["metrics.jsonl", "recipe.yaml"]), moment
            assert new or found == old, moment
            seen.add(new)
    assert seen == {False, True}


def test_a_disk_that_refuses_the_new_run_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = finished_run(tmp_path / "a")
    before = tree(path)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_directory, "replace_text", full)
    with pytest.raises(RunFailed, match="No space left"), RunDirectory(path, overwrite=True) as run:
        run.write_recipe(recipe())
    assert tree(path) == before


def test_resume_keeps_everything_and_cleans_leftovers(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "a")
    before = tree(path)
    (path / "checkpoints/.writing-step-0000009").mkdir()
    with RunDirectory(path, resume=True) as run:
        run.append_metrics({"step": 2})
    assert tree(path) == before
    assert len(lines(path / "metrics.jsonl")) == 2


def test_overwrite_with_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exclude"):
        RunDirectory(tmp_path, overwrite=True, resume=True)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "link"])
def test_a_name_that_cannot_be_is_the_users_error(name: str, tmp_path: Path) -> None:
    os.symlink("link", tmp_path / "link")  # to itself
    with pytest.raises(UserError, match=r"give another"), RunDirectory(tmp_path / name):
        pass


def test_a_linked_directory_is_used_and_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "link")
    with RunDirectory(tmp_path / "link") as run:
        run.append_metrics({"event": "train"})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "metrics.jsonl").exists()
    with RunDirectory(tmp_path / "link", overwrite=True) as run:
        run.append_metrics({"event": "eval"})
    assert (tmp_path / "link").is_symlink()
    assert "train" not in (tmp_path / "real" / "metrics.jsonl").read_text()


def test_overwrite_does_not_follow_links_out_of_the_run(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-0000001").write_text("not ours")
    (tmp_path / "run").mkdir()
    os.symlink(outside, tmp_path / "run" / "checkpoints")
    with RunDirectory(tmp_path / "run", overwrite=True) as run:
        run.append_metrics({"event": "train"})
    assert (outside / "step-0000001").read_text() == "not ours"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(UserError, match="is a file"), RunDirectory(tmp_path / "a"):
        pass
    with pytest.raises(UserError, match="can't be written"), RunDirectory(tmp_path / "a/b"):
        pass


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory that refuses writing, to root as well: a file system mounted read-only."""
    mount = tmp_path / "disk"
    mount.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(mount)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.geteuid() == 0:
            pytest.skip(f"nothing can be mounted here and root ignores permissions: {error}")
        mount.chmod(0o500)
        yield mount
        mount.chmod(0o700)
        return
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_read_only_place_is_the_users_error_and_nothing_is_written(read_only: Path) -> None:
    with pytest.raises(UserError, match=r"output\.dir .* can't be written.*another output\.dir"):
        RunDirectory(read_only / "runs/a").__enter__()
    with pytest.raises(UserError, match="can't be written"):
        RunDirectory(read_only).__enter__()
    assert tree(read_only) == []


# --- the lock ---------------------------------------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from segtrain.storage.run_directory import RunDirectory
with RunDirectory(sys.argv[1], resume=True) as run:
    if sys.argv[2:] == ["fork"] and os.fork() == 0:
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path, *options: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), *options], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    process = holder(tmp_path / "a")
    try:
        with pytest.raises(UserError, match=rf"in use by process {process.pid} on "):
            RunDirectory(tmp_path / "a", resume=True).__enter__()
    finally:
        process.kill()
        process.wait()


def test_a_killed_process_leaves_a_stale_lock_that_is_taken_over(tmp_path: Path) -> None:
    process = holder(tmp_path / "a")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "a/.lock").exists()
    with RunDirectory(tmp_path / "a", resume=True) as run:
        assert len(run.notices) == 1
        assert f"process {process.pid}" in run.notices[0]
    assert not (tmp_path / "a").exists() or not (tmp_path / "a/.lock").exists()


def test_children_of_a_killed_process_do_not_hold_the_lock(tmp_path: Path) -> None:
    """A data loader's forked workers may outlive it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "a"), "fork"], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.kill()
        process.wait()
        with RunDirectory(tmp_path / "a", resume=True) as run:
            assert len(run.notices) == 1
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_closed_run_leaves_no_lock_and_no_notice(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "a")
    assert ".lock" not in tree(path)
    with RunDirectory(path, resume=True) as run:
        assert run.notices == []


# --- lines ------------------------------------------------------------------------------------------------------------


def test_lines_are_on_disk_at_once_and_are_valid_json(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics({"loss": math.nan, "nested": {"a": [math.inf, 1.5]}, "text": "ü\n"})
        run.append_memory({"phase": "head"})
        run.append_sample({"text": "hi"})

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} isn't JSON")

        text = (tmp_path / "metrics.jsonl").read_text()
        assert text.count("\n") == 1
        parsed = json.loads(text, parse_constant=refuse)
        assert parsed == {"loss": None, "nested": {"a": [None, 1.5]}, "text": "ü\n"}
        assert lines(tmp_path / "memory.jsonl") == [{"phase": "head"}]
        assert lines(tmp_path / "samples.jsonl") == [{"text": "hi"}]


@pytest.mark.parametrize("written", [0, 5])
def test_a_full_disk_is_a_failed_run(written: int, tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            if written:
                return written
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    with RunDirectory(tmp_path) as run:
        run.append_metrics({"step": 1})
        run._logs["metrics.jsonl"].close()
        run._logs["metrics.jsonl"] = Full()  # type: ignore[assignment]
        with pytest.raises(RunFailed, match=r"metrics\.jsonl.*No space left"):
            run.append_metrics({"step": 2})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def train(run: RunDirectory, steps: range) -> None:
        for step in steps:
            run.append_metrics({"step": step, "text": "é" * step})
            run.append_memory({"step": step})

    with RunDirectory(tmp_path / "whole") as run:
        train(run, range(1, 9))
    with RunDirectory(tmp_path / "parts") as run:
        train(run, range(1, 5))
        position = run.position()
        train(run, range(5, 8))
        run.append_sample({"step": 7})  # a log that didn't exist at the checkpoint
    with open(tmp_path / "parts/metrics.jsonl", "ab") as file:
        file.write(b'{"step": 8, "te')  # killed while writing
    with RunDirectory(tmp_path / "parts", resume=True) as run:
        run.rewind(json.loads(json.dumps(position)))
        assert run.notices == []
        train(run, range(5, 9))
    for name in ("metrics.jsonl", "memory.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "parts/samples.jsonl").read_bytes() == b""


def test_without_a_checkpoint_the_logs_start_empty(tmp_path: Path) -> None:
    finished_run(tmp_path / "a")
    with RunDirectory(tmp_path / "a", resume=True) as run:
        run.rewind({})
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize(("content", "kept"), [(b'{"step": 1}\n', 12), (b'{"step": 1}\n{"st', 12), (b"x" * 99, 0)])
def test_a_log_that_was_changed_keeps_its_whole_lines_and_says_so(content: bytes, kept: int, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with RunDirectory(tmp_path, resume=True) as run:
        run.rewind({"metrics.jsonl": 40, "memory.jsonl": 3})
        assert len(run.notices) == 2  # changed, and gone
    assert (tmp_path / "metrics.jsonl").stat().st_size == kept


# --- recipe and best --------------------------------------------------------------------------------------------------


def test_the_recipe_is_written_as_resolved_with_versions(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.write_recipe(recipe())
    assert load_recipe(tmp_path / "recipe.yaml").fingerprint() == recipe().fingerprint()
    assert " mlx " in (tmp_path / "recipe.yaml").read_text().splitlines()[0]


def test_no_environment_value_is_in_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    path = finished_run(tmp_path / "a")
    process = holder(path)
    try:
        files = [p for p in path.rglob("*") if p.is_file()]
        assert path / ".lock" in files
        assert not any(b"a-secret-value" in p.read_bytes() for p in files)
    finally:
        process.kill()
        process.wait()


def test_best_is_a_relative_link_that_moves_with_the_run(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "a") as run:
        assert run.best is None
        for step in (1, 2):
            run.set_best(checkpoint_at(run.path, step))
            assert run.best == run.path / f"checkpoints/step-000000{step}"
    (tmp_path / "a").rename(tmp_path / "b")
    assert os.readlink(tmp_path / "b/best") == "checkpoints/step-0000002"
    assert best(tmp_path / "b") == tmp_path / "b/checkpoints/step-0000002"
    checkpoint.prune(tmp_path / "b", 1, best=2)
    assert (tmp_path / "b/best/adapters.safetensors").exists()


def test_best_is_marked_again_in_a_copy_that_followed_links(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "a") as run:
        run.set_best(checkpoint_at(run.path, 1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with RunDirectory(tmp_path / "b", resume=True) as run:
        for step in (1, 2):
            run.set_best(checkpoint_at(run.path, step))
    assert os.readlink(tmp_path / "b/best") == "checkpoints/step-0000002"
    assert (tmp_path / "b/best-1/adapters.safetensors").exists()


def test_best_is_a_text_file_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    with RunDirectory(tmp_path) as run:
        for step in (1, 2):
            run.set_best(checkpoint_at(tmp_path, step))
        assert run.best == tmp_path / "checkpoints/step-0000002"
    assert (tmp_path / "best").read_text() == "checkpoints/step-0000002\n"


def test_a_best_that_is_gone_or_outside_the_run_is_none(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "best").symlink_to("checkpoints/step-0000001")
    assert best(run) is None
    (run / "best").unlink()
    (tmp_path / "elsewhere").mkdir()
    (run / "best").write_text("../elsewhere\n")
    assert best(run) is None
