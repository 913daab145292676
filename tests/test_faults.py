"""Kills, full disks, damaged files: nothing saved is lost, and a resumed run ends as if nothing had happened."""

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from processes import ended, start, wait_for

from segtrain.errors import RunFailed
from segtrain.event import Event, Notice
from segtrain.recipe.schema import Recipe, load_recipe
from segtrain.run.trainer import Trainer
from segtrain.storage import checkpoint

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def recipe_file(folder: Path, run: Path, loss: str = "sft", **changes: Any) -> Path:
    run.parent.mkdir(exist_ok=True)
    options = changes | {
        "output__dir": str(run),
        "output__eval_every": 3,
        "output__save_every": 1,
        "train__steps": STEPS,
    }
    path = tiny_run.recipe_file(
        folder, loss, data__valid=str(folder / f"{loss}-valid.jsonl"), lora__dropout=0.1, **options
    )
    return path.rename(folder / f"{run.parent.name}-{loss}.yaml")


def trained(path: Path, loss: str = "sft", **flags: bool) -> tuple[object, list[str]]:
    """The result of a run in this process, and what it noticed."""
    recipe = load_recipe(path)
    events = list(Trainer(recipe, loss, **flags).events())  # type: ignore[arg-type]
    notices = [event.text for event in events if isinstance(event, Notice)]
    return tiny_run.result(Path(recipe.output.dir)), notices


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, object]:
    return {loss: trained(recipe_file(folder, folder / "whole" / loss, loss), loss)[0] for loss in ("sft", "orpo")}


def killed_until_done(
    folder: Path, name: str, loss: str, most: int, draw: random.Random, **changes: Any
) -> tuple[object, int]:
    """A run whose process is killed after a random part of it, up to `most` times or until one gets to the end."""
    path = recipe_file(folder, folder / name / "run", loss, **changes)
    kills = 0
    while kills < most:
        process = start([loss, str(path), "--resume"], folder / f"{name}.log")
        wait_for_a_random_moment(folder / name / "run", process, draw)
        process.kill()
        if ended(process) == 0:
            break
        kills += 1
    return trained(path, loss, resume=True)[0], kills


def wait_for_a_random_moment(run: Path, process: BaseProcess, draw: random.Random) -> None:
    """Until the run has written a random number of memory lines more, and a random moment longer."""
    lines, log = draw.randint(0, 40), run / "memory.jsonl"
    before = now = log.read_bytes().count(b"\n") if log.exists() else 0
    while process.is_alive() and now < before + lines:
        time.sleep(0.002)
        now = log.read_bytes().count(b"\n") if log.exists() else 0
        before = min(before, now)  # a resumed run cuts the file back first
    time.sleep(draw.uniform(0, 0.3))


@pytest.mark.parametrize(
    ("loss", "kills", "weights"),
    [
        ("sft", 2, "auto"),
        ("orpo", 2, "auto"),
        ("sft", 1, "streamed"),
        pytest.param("sft", 20, "auto", marks=pytest.mark.slow),
        pytest.param("orpo", 15, "auto", marks=pytest.mark.slow),
        pytest.param("sft", 30, "streamed", marks=pytest.mark.slow),
        pytest.param("orpo", 15, "streamed", marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments(folder: Path, whole: dict[str, object], loss: str, kills: int, weights: str) -> None:
    draw, done, runs = random.Random(kills), 0, 0
    while done < kills:
        name = f"kills-{loss}-{weights}-{kills}-{runs}"
        result, killed = killed_until_done(folder, name, loss, kills - done, draw, engine__weights=weights)
        assert result[0] == whole[loss][0] if weights == "streamed" else result == whole[loss]  # type: ignore[index]
        done, runs = done + killed, runs + 1
        assert runs <= 2 * kills, "the runs end before they can be killed"


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_while_the_rows_of_an_update_share_each_reading(folder: Path, kills: int) -> None:
    """Against a run whose weights are in memory and that takes one row after the other."""
    rows = {"engine__rows_together": 1, "train__grad_accumulation_steps": 3}
    wanted = trained(recipe_file(folder, folder / f"shared-whole-{kills}" / "run", **rows))[0]
    draw, done, runs = random.Random(kills), 0, 0
    while done < kills:
        options = rows | {"engine__weights": "streamed"}
        result, killed = killed_until_done(folder, f"shared-{kills}-{runs}", "sft", kills - done, draw, **options)
        assert result[0] == wanted[0]  # type: ignore[index]
        done, runs = done + killed, runs + 1
        assert runs <= 2 * kills, "the runs end before they can be killed"


def damaged(run: Path, step: int, name: str) -> None:
    path = checkpoint.directory(run, step) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def left_at(run: Path, step: int) -> None:
    """The run stopped after this step's checkpoint."""
    events = Trainer(load_recipe(recipe_file(run.parents[1], run))).events()
    while not checkpoint.directory(run, step).exists():
        next(events)
    events.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def stopped(folder: Path) -> Path:
    run = folder / "stopped" / "run"
    left_at(run, 5)
    return run


@pytest.mark.parametrize("name", ["adapters.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    folder: Path, whole: dict[str, object], stopped: Path, name: str
) -> None:
    run = folder / f"damaged {name}" / "run"
    path = recipe_file(folder, run)
    shutil.copytree(stopped, run, symlinks=True)
    damaged(run, 5, name)
    result, notices = trained(path, resume=True)
    assert any("skipped" in text and "step-0000005" in text for text in notices)
    assert result == whole["sft"]


def test_all_checkpoints_damaged(folder: Path, whole: dict[str, object]) -> None:
    """The run isn't begun anew in its place: its adapter may be the last good thing of it. The advice works."""
    run = folder / "all damaged" / "run"
    path = recipe_file(folder, run)
    left_at(run, 2)
    for step in checkpoint.steps(run):
        damaged(run, step, "state.json")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(RunFailed, match=r"no checkpoint in .* can be read"):
        trained(path, resume=True)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert trained(path, overwrite=True)[0] == whole["sft"]


def test_killed_before_the_last_pruning(
    folder: Path, whole: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is finished then, and going on with it still removes what the pruning would have removed."""
    path = recipe_file(folder, folder / "not pruned" / "run")

    def killed(*args: Any, **options: Any) -> list[str]:
        return prune(*args, **options) if options["last"] < STEPS else []

    prune = checkpoint.prune
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "prune", killed)
        assert len(trained(path)[0][2]) > len(whole["sft"][2])  # type: ignore[index]
    assert trained(path, resume=True)[0] == whole["sft"]


def test_a_good_checkpoint_outlives_a_damaged_newer_one(folder: Path) -> None:
    """With `keep_checkpoints: 1`, a run goes on from the one before; it stays until a newer good one is there."""
    path = recipe_file(folder, folder / "keeps one" / "run")
    run = folder / "keeps one" / "run"
    recipe = load_recipe(path, ["output.save_every=3", "output.eval_every=0", "output.keep_checkpoints=2"])
    list(Trainer(recipe).events())
    assert checkpoint.steps(run) == [6, 8]
    damaged(run, 8, "adapters.safetensors")
    recipe = load_recipe(path, ["output.save_every=7", "output.eval_every=0", "output.keep_checkpoints=1"])
    events = Trainer(recipe, resume=True).events()
    for found in ([6, 8], [7, 8], [8]):
        while checkpoint.steps(run) != found:
            next(events)
        newest, _ = checkpoint.newest(run)
        assert newest is not None
        events = events if found != [6, 8] else restarted(events, recipe)
    assert newest.step == 8


def restarted(events: Iterator[Event], recipe: Recipe) -> Iterator[Event]:
    events.close()  # type: ignore[attr-defined]
    return Trainer(recipe, resume=True).events()


@pytest.mark.parametrize("part", ["progress", "data", "run"])
@pytest.mark.usefixtures("whole")
def test_a_state_of_another_kind_is_one_message(folder: Path, part: str) -> None:
    """A checkpoint whose hash is right but whose state isn't this version's."""
    run = folder / f"odd {part}" / "run"
    path = recipe_file(folder, run)
    shutil.copytree(folder / "whole" / "sft", run, symlinks=True)
    state = checkpoint.directory(run, STEPS) / "state.json"
    manifest = json.loads(state.read_text())
    del manifest["sha256"], manifest["state"][part]
    state.write_text(json.dumps({**manifest, "sha256": checkpoint._hash(manifest)}))
    with pytest.raises(RunFailed, match="wasn't written by this version"):
        trained(path, resume=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a small tmpfs")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(folder: Path, whole: dict[str, object], small_disk: Path) -> None:
    path = recipe_file(folder, small_disk / "run")
    filler, log = small_disk / "filler", folder / "full.log"
    filler.write_bytes(b"x" * 440 * 1024)
    assert ended(start(["sft", str(path)], log)) == 1
    check_refused(log)
    found, notices = checkpoint.newest(small_disk / "run")
    assert found is not None
    assert not notices
    filler.unlink()
    adapter, lines, _ = trained(path, resume=True)[0]  # type: ignore[misc]
    assert (adapter, lines) == whole["sft"][:2]  # type: ignore[index]


def test_a_target_that_becomes_read_only(folder: Path, whole: dict[str, object]) -> None:
    """As a network share or a failing disk does in the middle of a run."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount")
    path, log = recipe_file(folder, folder / "read-only" / "run"), folder / "read-only.log"
    target = folder / "read-only" / "run" / "checkpoints"
    process = start(["sft", str(path)], log, slow="segtrain.run.updates:Updates._apply")
    wait_for(lambda: checkpoint.directory(target.parent, 2).exists(), "two checkpoints")
    if subprocess.run(["mount", "--bind", str(target), str(target)], capture_output=True).returncode:
        process.kill()
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(target)], check=True)
        assert ended(process) == 1
    finally:
        subprocess.run(["umount", str(target)], check=True)
    check_refused(log)
    assert "Read-only file system" in log.read_text()
    found, notices = checkpoint.newest(target.parent)
    assert found is not None
    assert found.step >= 2
    assert not notices
    assert trained(path, resume=True)[0] == whole["sft"]


def test_files_that_may_not_grow(folder: Path, whole: dict[str, object]) -> None:
    """As a full disk, for users who can't mount one: the metrics hit a limit in mid-run."""
    path, log = recipe_file(folder, folder / "limited" / "run"), folder / "limited.log"
    assert ended(start(["sft", str(path)], log, file_limit=9000)) == 1
    check_refused(log)
    assert trained(path, resume=True)[0] == whole["sft"]


def check_refused(log: Path) -> None:
    text = log.read_text()
    assert "could not be" in text
    assert "--resume" in text
    assert "Traceback" not in text
