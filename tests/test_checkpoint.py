"""Checkpoints under faults: each system call fails in turn, and what was saved before must be whole afterwards."""

import builtins
import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from segtrain.errors import RunFailed
from segtrain.storage import checkpoint, durable
from segtrain.storage.checkpoint import (
    Unreadable,
    clean,
    directory,
    load,
    newest,
    newest_path,
    prune,
    save,
    write_adapters,
)

CALLS = [(os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (builtins, "open"), (mx, "save_safetensors")]


ALL = ("adapters.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json")


@pytest.fixture(autouse=True)
def plain_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has a call of its own; here it is fsync everywhere, which the tests watch."""
    monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)


def content(step: int) -> dict[str, Any]:
    adapters = {"model.layers.0.q.lora_a": mx.full((3, 2), float(step)), "model.layers.0.q.lora_b": mx.zeros((2, 3))}
    return {
        "adapters": adapters,
        "adapter_config": {"fine_tune_type": "lora"},
        "optimizer": {"step": mx.array(step, mx.uint64), "model.layers.0.q.lora_a.m": mx.full((3, 2), 0.1 * step)},
        "state": {"cursor": [step, "row"], "recipe_fingerprint": "r", "model_fingerprint": "m"},
    }


def stored(run: Path, step: int) -> Path:
    return save(run, step, **content(step))


def is_whole(run: Path, step: int) -> bool:
    try:
        read = load(directory(run, step))
    except Unreadable:
        return False
    expected = content(step)
    return (
        read.step == step
        and read.state == expected["state"]
        and all(np.array_equal(np.array(read.adapters[k]), np.array(v)) for k, v in expected["adapters"].items())
        and all(np.array_equal(np.array(read.optimizer[k]), np.array(v)) for k, v in expected["optimizer"].items())
    )


def hidden(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


class Fault:
    """Makes the k-th of all watched calls fail, as a full disk would; with k = None only counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, inside: Path, k: int | None = None):
        self.calls, self.k = 0, k
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name), name, str(inside)))

    def _wrapped(self, real: Callable[..., Any], name: str, inside: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not (str(args[0]).startswith(inside) and "w" in str(args[1:])):
                return real(*args, **kwargs)
            self.calls += 1
            if self.calls - 1 == self.k:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call


def faults(run: Path, action: Callable[[], object]) -> Iterator[int]:
    """Run `action` once with each watched call failing, and yield after each for the caller to look at the disk."""
    with pytest.MonkeyPatch.context() as patch:
        counter = Fault(patch, run)
        action()
    assert counter.calls >= 4
    messages: list[str] = []
    for k in range(counter.calls):
        with pytest.MonkeyPatch.context() as patch:
            Fault(patch, run, k)
            try:
                action()
            except RunFailed as error:
                messages.append(str(error))
        yield k
    assert len(messages) >= counter.calls - 1  # making a directory that is there may fail
    assert all("No space left" in message for message in messages)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = stored(tmp_path, 100)
    assert path == tmp_path / "checkpoints/step-0000100"
    names = {"adapters.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"}
    assert {p.name for p in path.iterdir()} == names
    assert is_whole(tmp_path, 100)
    assert load(path).optimizer["step"].dtype == mx.uint64
    assert hidden(tmp_path) == []


def test_a_full_disk_at_any_call_loses_nothing(tmp_path: Path) -> None:
    stored(tmp_path, 1)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "before")

    def action() -> None:
        shutil.rmtree(directory(tmp_path, 2), ignore_errors=True)
        stored(tmp_path, 2)

    for _ in faults(tmp_path, action):
        assert is_whole(tmp_path, 1)
        assert is_whole(tmp_path, 2) or not directory(tmp_path, 2).exists()
        assert hidden(tmp_path) == []
        found, notices = newest(tmp_path)
        assert found is not None
        assert notices == []
        stored(tmp_path, 2)  # and the next attempt works
        assert is_whole(tmp_path, 2)


def test_a_full_disk_while_a_checkpoint_is_replaced_keeps_one_of_the_two(tmp_path: Path) -> None:
    stored(tmp_path, 1)
    stored(tmp_path, 2)
    for _ in faults(tmp_path, lambda: stored(tmp_path, 2)):
        assert is_whole(tmp_path, 1)
        assert is_whole(tmp_path, 2)
        clean(tmp_path)
        assert is_whole(tmp_path, 2)
        assert hidden(tmp_path) == []


def test_a_full_disk_while_the_adapters_are_written_keeps_the_old_ones(tmp_path: Path) -> None:
    def write(value: float) -> None:
        write_adapters(tmp_path, {"a": mx.full((4,), value)}, {"r": 1})

    write(1.0)
    for _ in faults(tmp_path, lambda: write(2.0)):
        value = mx.load(str(tmp_path / "adapters.safetensors"))["a"]
        assert value.tolist() in ([1.0] * 4, [2.0] * 4)
        assert json.loads((tmp_path / "adapter_config.json").read_text()) == {"r": 1}
        assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]


def test_an_interrupt_while_saving_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, 1)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stored(tmp_path, 2)
    assert hidden(tmp_path) == []
    assert is_whole(tmp_path, 1)


def test_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "somewhere")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(RunFailed) as caught:
        stored(tmp_path, 5)
    for part in ("step 5", "Read-only file system", "somewhere", "--resume"):
        assert part in str(caught.value)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import stored
from segtrain.storage import checkpoint
run, step = Path(sys.argv[1]), 1
print("ready", flush=True)
while True:
    stored(run, step % 3)  # new ones and replacements
    checkpoint.prune(run, 2)
    step += 1
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    stored(tmp_path, 0)
    script = tmp_path / "saver.py"
    script.write_text(KILLED)
    for attempt in range(6):
        command = [sys.executable, str(script), str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.03 + 0.017 * attempt)
            process.send_signal(signal.SIGKILL)
        clean(tmp_path)
        assert hidden(tmp_path) == []
        found, notices = newest(tmp_path)
        assert found is not None
        assert notices == []
        assert is_whole(tmp_path, found.step)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs can't be mounted here: {error}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_really_fills(small_disk: Path) -> None:
    big = {"a": mx.zeros((20_000,))}  # 80 kB: the third one doesn't fit

    def attempt(step: int) -> None:
        save(small_disk, step, adapters=big, adapter_config={}, optimizer={"step": mx.array(step)}, state={})

    attempt(1)
    attempt(2)
    for _ in range(2):
        with pytest.raises(RunFailed, match="No space left"):
            attempt(3)
        assert checkpoint.steps(small_disk) == [1, 2]
        assert hidden(small_disk) == []
    found, notices = newest(small_disk)
    assert found is not None
    assert (found.step, notices) == (2, [])
    assert prune(small_disk, 1) == []
    attempt(3)  # there is room again
    assert checkpoint.steps(small_disk) == [2, 3]


# --- corruption -------------------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"])
def test_one_flipped_bit_anywhere_in_a_file_is_found(name: str, tmp_path: Path) -> None:
    stored(tmp_path, 1)
    path = stored(tmp_path, 2) / name
    size = path.stat().st_size
    for position in range(0, size, max(1, size // 25)):
        flip(path, position)
        found, notices = newest(tmp_path)
        assert found is not None, position
        if found.step == 2:  # only white space of state.json changes nothing
            assert name == "state.json"
            assert found.state == content(2)["state"]
        else:
            assert len(notices) == 1
            assert "step-0000002" in notices[0]
        flip(path, position)
    assert newest(tmp_path)[0].step == 2  # type: ignore[union-attr]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_a_lost_or_cut_file_makes_the_one_before_the_newest(damage: Callable[[Path], object], tmp_path: Path) -> None:
    stored(tmp_path, 1)
    for name in [path.name for path in stored(tmp_path, 2).iterdir()]:
        damage(directory(tmp_path, 2) / name)
        found, notices = newest(tmp_path)
        assert found is not None
        assert found.step == 1
        assert len(notices) == 1
        assert newest_path(tmp_path) == directory(tmp_path, 1)
        stored(tmp_path, 2)  # training on from 1 reaches 2 again and replaces it
        assert is_whole(tmp_path, 2)


def test_without_a_good_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert newest_path(tmp_path) is None
    (stored(tmp_path, 1) / "state.json").write_text("{}")
    found, notices = newest(tmp_path)
    assert found is None
    assert len(notices) == 1


def test_leftovers_are_ignored_by_readers_and_removed_by_the_writer(tmp_path: Path) -> None:
    path = stored(tmp_path, 1)
    for prefix in (checkpoint.WRITING, checkpoint.REMOVED):
        shutil.copytree(path, path.with_name(f"{prefix}step-0000009"))
    (tmp_path / "checkpoints/notes.txt").write_text("mine")
    found, _ = newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(hidden(tmp_path)) == 2
    stored(tmp_path, 2)
    assert hidden(tmp_path) == []
    assert (tmp_path / "checkpoints/notes.txt").exists()


def test_half_a_replacement_is_undone(tmp_path: Path) -> None:
    path = stored(tmp_path, 3)
    os.rename(path, path.with_name(f"{checkpoint.REPLACED}{path.name}"))
    clean(tmp_path)
    assert is_whole(tmp_path, 3)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{}", '{"sha256": 3}', "\x00"])
def test_a_manifest_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = stored(tmp_path, 1)
    (path / "state.json").write_text(text)
    with pytest.raises(checkpoint.Unreadable, match=r"state\.json"):
        checkpoint.load(path)
    assert checkpoint.newest_path(tmp_path) is None


@pytest.mark.parametrize("files", [3, {}, [ALL[0]], dict.fromkeys(ALL[:3], 3), {name: {} for name in ALL[:3]}])
def test_a_manifest_whose_files_are_odd_is_refused(files: Any, tmp_path: Path) -> None:
    """Its own hash is right: somebody wrote it so."""
    path = stored(tmp_path, 1)
    manifest = json.loads((path / "state.json").read_text())
    del manifest["sha256"]
    manifest["files"] = files
    (path / "state.json").write_text(json.dumps({**manifest, "sha256": checkpoint._hash(manifest)}))
    with pytest.raises(checkpoint.Unreadable):
        checkpoint.load(path)
    assert checkpoint.newest_path(tmp_path) is None


def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path, 1) / "state.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../outside"] = manifest["files"].pop("adapter_config.json")
    del manifest["sha256"]
    path.write_text(json.dumps(manifest | {"sha256": checkpoint._hash(manifest)}))
    with pytest.raises(Unreadable, match="doesn't list the files"):
        load(path.parent)


def test_state_keeps_floats_exactly(tmp_path: Path) -> None:
    values = content(1) | {"state": {"best": 0.1 + 0.2, "loss": float("inf"), "seen": 2**60}}
    save(tmp_path, 1, **values)
    assert load(directory(tmp_path, 1)).state == values["state"]


# --- fitting the model ------------------------------------------------------------------------------------------------


def expected() -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    return {name: (value.shape, value.dtype) for name, value in content(1)["adapters"].items()}


def test_adapters_that_fit_pass(tmp_path: Path) -> None:
    load(stored(tmp_path, 1)).check(expected())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.q.lora_a": ((3, 2), mx.float32)}, r"model\.layers\.1\.q\.lora_a is missing"),
        ({"model.layers.0.q.lora_a": ((3, 4), mx.float32)}, r"\[3, 2\] .*the model's is \[3, 4\]"),
        ({"model.layers.0.q.lora_a": ((3, 2), mx.bfloat16)}, "float32, the model's is .*bfloat16"),
        ({"model.layers.0.q.lora_a": None}, r"lora_a is not in the model"),
    ],
)
def test_adapters_that_do_not_fit_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    wanted = {name: value for name, value in (expected() | change).items() if value is not None}
    with pytest.raises(RunFailed, match=message):
        load(stored(tmp_path, 1)).check(wanted)


def test_fingerprints_that_differ_are_named(tmp_path: Path) -> None:
    read = load(stored(tmp_path, 1))
    assert read.differing(recipe="r", model="m") == []
    assert read.differing(recipe="r", model="x") == ["model"]
    assert read.differing(tokenizer="t") == ["tokenizer"]


# --- pruning ----------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 6):
        stored(tmp_path, step)
    assert prune(tmp_path, 2, best=1) == []
    assert checkpoint.steps(tmp_path) == [1, 4, 5]
    assert prune(tmp_path, 2) == []
    assert checkpoint.steps(tmp_path) == [4, 5]
    assert prune(tmp_path, 7) == []
    assert checkpoint.steps(tmp_path) == [4, 5]


def test_prune_keeps_the_newest_complete_one_beside_damaged_newer_ones(tmp_path: Path) -> None:
    for step in range(1, 5):
        stored(tmp_path, step)
    for step in (3, 4):
        (directory(tmp_path, step) / "optimizer.safetensors").unlink()
    prune(tmp_path, 1)
    assert checkpoint.steps(tmp_path) == [2, 4]


def test_prune_leaves_what_comes_after_the_step_that_a_run_stands_at(tmp_path: Path) -> None:
    """Step 7 has its size but a flipped bit; the run went on from 4. Without `last` the good ones would go."""
    for step in (3, 4, 5, 7):
        stored(tmp_path, step)
    prune(tmp_path, keep=1, last=5)
    assert checkpoint.steps(tmp_path) == [5, 7]
    prune(tmp_path, keep=1)
    assert checkpoint.steps(tmp_path) == [7]


def test_a_checkpoint_that_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        stored(tmp_path, step)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "rename", refuse)
    (notice,) = prune(tmp_path, 1)
    assert "step-0000001" in notice
    assert "busy" in notice


def test_a_removal_that_is_cut_short_never_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        stored(tmp_path, step)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):

        def interrupted(path: Path) -> None:
            (path / "adapters.safetensors").unlink()
            raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", interrupted)
        prune(tmp_path, 1)
    assert checkpoint.steps(tmp_path) == [2]
    clean(tmp_path)
    assert hidden(tmp_path) == []


# --- durable files ----------------------------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    record = durable.write_new(tmp_path / "a", lambda file: [file.write(b"x" * 3), file.write(b"yz")])
    assert record == durable.record_of(tmp_path / "a")
    assert record.bytes == 5


def test_files_and_their_directory_are_flushed_before_they_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (order.append(name), real(*args))[1])
    stored(tmp_path, 1)
    assert order == ["fsync"] * 5 + ["rename", "fsync"]  # four files, their directory; then the parent
