"""Two ranks of a ring on this machine: equal to one process with twice the accumulation; none waits for ever.

The processes get what `mlx.launch` gives them (a host file and a rank); the tests at the end go through it.
"""

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
import tiny_run
from processes import LIMIT, ended, free_ports, said, send, start, start_ranks, wait_for

from segtrain.event import PlanChosen
from segtrain.parallel import lifeline
from segtrain.parallel.lifeline import Lifeline
from segtrain.parallel.ranks import Ranks, _pieces
from segtrain.recipe.schema import load_recipe
from segtrain.run.trainer import Trainer
from segtrain.storage import checkpoint

AUTO = {"backward": "auto", "memory_budget": "1GB"}
LAUNCH = Path(sys.executable).with_name("mlx.launch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def recipe_file(folder: Path, name: str, loss: str, accumulation: int, **changes: Any) -> Path:
    """Rows of 3 to 130 tokens, under a budget that only the short ones run full backward within."""
    (folder / name).mkdir()
    options = {
        "output__dir": str(folder / name / "run"),
        "output__eval_every": 3,
        "data__train": str(rows_of_unlike_lengths(folder, loss)),
        "data__valid": str(folder / f"{loss}-valid.jsonl"),
        "data__max_seq_length": 160,
        "engine": {**AUTO, "memory_budget": budget_between(folder, loss)},
        "lora__dropout": 0.1,
        "train__grad_accumulation_steps": accumulation,
    }
    return tiny_run.recipe_file(folder, loss, **{**options, **changes}).rename(folder / name / "recipe.yaml")


def rows_of_unlike_lengths(folder: Path, loss: str) -> Path:
    path, draw = folder / f"{loss}-unlike.jsonl", random.Random(0)
    rows = []
    for least in (1, 100) * 6:
        answer = " " + tiny_run.text(draw, least, least + 6)
        answers = {"completion": answer} if loss == "sft" else {"chosen": answer, "rejected": answer + " w0"}
        rows.append({"prompt": tiny_run.text(draw, 2, 20), **answers})
    return path if path.exists() else tiny_run.written(path, rows)


@functools.cache
def budget_between(folder: Path, loss: str) -> str:
    """Half way from what the longest row needs segmented to what full backward takes, as predicted here."""
    peaks = []
    for backward in ("segmented", "full"):
        changes = {"data__train": str(rows_of_unlike_lengths(folder, loss)), "data__max_seq_length": 160}
        recipe = tiny_run.recipe(folder, loss, engine={**AUTO, "backward": backward}, **changes)
        events = Trainer(recipe, loss, dry_run=True).events()  # type: ignore[arg-type]
        peaks += [event.plan["peak_gib"] for event in events if isinstance(event, PlanChosen)]
    return f"{round(sum(peaks) / 2 * 2**20)}KiB"


def unlike_updates(two: Path, one: Path) -> list[int]:
    """Updates of two ranks in which one row ran segmented and the other didn't, by `one`, which ran both."""
    ours, theirs = (tiny_run.lines(run, "memory.jsonl") for run in (two, one))
    kinds = [{(line["step"], line["phase"][:4]) for line in lines} for lines in (ours, theirs)]
    steps = range(1, theirs[-1]["step"] + 1)
    return [n for n in steps if {(n, "step"), (n, "back")} <= kinds[1] and not {(n, "step"), (n, "back")} <= kinds[0]]


def alone(folder: Path, name: str, loss: str, **changes: Any) -> Path:
    """The run directory of one process with two rows of accumulation."""
    path = recipe_file(folder, name, loss, 2, **changes)
    list(Trainer(load_recipe(path), loss).events())  # type: ignore[arg-type]
    return folder / name / "run"


def difference(a: Path, b: Path) -> float:
    """The largest norm-relative difference of any adapter array."""
    one, other = (mx.load(str(run / "adapters.safetensors")) for run in (a, b))
    assert one.keys() == other.keys()  # type: ignore[union-attr]
    norm = mx.linalg.norm
    return max((norm(one[k] - other[k]) / norm(one[k])).item() for k in one)  # type: ignore[call-overload, index, union-attr]


def assert_same_metrics(a: Path, b: Path) -> None:
    for ours, theirs in zip(tiny_run.lines(a), tiny_run.lines(b), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


@pytest.fixture(scope="module")
def sft_alone(folder: Path) -> Path:
    return alone(folder, "alone-sft", "sft")


@pytest.mark.parametrize("loss", ["sft", "orpo"])
def test_two_ranks_equal_two_rows_of_accumulation(folder: Path, sft_alone: Path, loss: str) -> None:
    """In some updates, of rows whose plans differ, and with them the order in which gradients are made."""
    one = sft_alone if loss == "sft" else alone(folder, "alone-orpo", "orpo")
    path = recipe_file(folder, f"two-{loss}", loss, 1)
    ranks = start_ranks([loss, str(path)], path.parent)
    assert [ended(rank) for rank in ranks] == [0, 0]
    assert len(unlike_updates(path.parent / "run", one)) >= 2
    assert difference(one, path.parent / "run") <= 1e-6
    assert_same_metrics(path.parent / "run", one)
    assert not (path.parent / "rank-1.log").read_text()  # only rank 0 speaks


def test_dealt_rows_in_groups_equal_accumulation(folder: Path) -> None:
    """Two ranks of three rows each: whichever they take, and whichever run together, with dropout."""
    changes = {"train__steps": 2, "engine": {"rows_together": 2}}
    one = folder / "alone-six" / "run"
    list(Trainer(load_recipe(recipe_file(folder, "alone-six", "sft", 6, train__steps=2))).events())
    path = recipe_file(folder, "two-dealt", "sft", 3, **changes)
    ranks = start_ranks(["sft", str(path)], path.parent)
    assert [ended(rank) for rank in ranks] == [0, 0]
    assert difference(one, path.parent / "run") <= 2e-6
    ours, theirs = (
        [line for line in tiny_run.lines(run) if line["event"] == "train"] for run in (path.parent / "run", one)
    )
    assert [line["tokens"] for line in ours] == [line["tokens"] for line in theirs]
    assert sum(line["padding_tokens"] for line in ours) > 0


def adjacent_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_ports(1)[0]
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def test_one_rank_alone_differs(folder: Path, sft_alone: Path) -> None:
    """The control: without the other rank's rows the adapter is another one."""
    path = recipe_file(folder, "control", "sft", 1)
    list(Trainer(load_recipe(path)).events())
    assert difference(sft_alone, path.parent / "run") > 1e-3


def test_resume_and_a_rank_without_validation_rows(folder: Path) -> None:
    """Rank 1 has no validation row; the run stops by a signal to that rank, and goes on from rank 0's checkpoint."""
    changes = {"eval__rows": 1, "output__save_every": 4, "train__steps": 5}
    one = alone(folder, "alone-one-row", "sft", **changes)
    path = recipe_file(folder, "stopped", "sft", 1, **changes)
    ranks = start_ranks(["sft", str(path)], path.parent, slow="segtrain.run.updates:Updates._apply")
    wait_for(said(path.parent / "rank-1.log", "<_apply>", 2), "two updates")
    send(ranks[1], signal.SIGTERM)
    assert [ended(rank) for rank in ranks] == [130, 130]
    found, _ = checkpoint.newest(path.parent / "run")
    assert found is not None
    assert 0 < found.step < 5
    ranks = start_ranks(["sft", str(path), "--resume"], path.parent)
    assert [ended(rank) for rank in ranks] == [0, 0]
    assert difference(one, path.parent / "run") <= 1e-6
    assert len(tiny_run.lines(path.parent / "run")) == len(tiny_run.lines(one))


@pytest.mark.parametrize(
    ("lost", "how"),
    [(0, "killed"), *(pytest.param(1, how, marks=pytest.mark.slow) for how in ("killed", "interrupted twice"))],
)
def test_a_lost_rank_ends_the_other(folder: Path, sft_alone: Path, lost: int, how: str) -> None:
    path = recipe_file(folder, f"lost {lost} {how}", "sft", 1)
    ranks = start_ranks(["sft", str(path)], path.parent, slow="segtrain.run.updates:Updates._apply")
    wait_for(said(path.parent / "run" / "metrics.jsonl", '"step": 3'), "three updates")
    lose(ranks[lost], how, path.parent / f"rank-{lost}.log")
    begun = time.monotonic()
    assert ended(ranks[1 - lost]) == 1
    assert time.monotonic() - begun < 30
    said_by_other = (path.parent / f"rank-{1 - lost}.log").read_text()
    assert f"rank {lost} is gone" in said_by_other or "one of them has ended" in said_by_other
    found, notices = checkpoint.newest(path.parent / "run")
    assert found is not None
    assert not notices
    ranks = start_ranks(["sft", str(path), "--resume"], path.parent)
    assert [ended(rank) for rank in ranks] == [0, 0]
    assert difference(sft_alone, path.parent / "run") <= 1e-6


def lose(rank: BaseProcess, how: str, log: Path) -> None:
    if how == "killed":
        rank.kill()
        return
    send(rank)
    wait_for(said(log, "finishing this step"), "the answer")
    send(rank)
    assert ended(rank) == 130


def test_ranks_of_one_host_share_its_memory(folder: Path) -> None:
    path = recipe_file(folder, "sharing", "sft", 1, engine={"backward": "auto"})
    ranks = start_ranks(["sft", str(path), "--dry-run"], path.parent)
    assert [ended(rank) for rank in ranks] == [0, 0]
    assert "2 ranks share this machine's memory: each plans for" in (path.parent / "rank-0.log").read_text()


def test_ranks_with_different_recipes_are_refused(folder: Path) -> None:
    ports = free_ports(2)
    hosts = folder / "two-recipes.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    processes = []
    for rank, rate in enumerate([0.01, 0.02]):
        path = recipe_file(folder, f"recipe-{rank}", "sft", 1, train__learning_rate=rate)
        environment = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        processes.append(start(["sft", str(path)], path.parent / "log", environment=environment))
    assert [ended(process) for process in processes] == [2, 2]
    assert "the recipe of rank 1 isn't that of rank 0" in (folder / "recipe-0" / "log").read_text()


def test_arrays_are_summed_by_name_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose rows had different plans make their gradients in different orders."""
    arrays = {"b": mx.array([1.0, 2.0]), "a": mx.array([[3.0], [4.0]])}
    sent: list[mx.array] = []

    def exchange(_: Ranks, array: mx.array) -> mx.array:
        sent.append(array)
        return array if len(sent) == 1 else sent[0] + sent[1]

    monkeypatch.setattr(Ranks, "_all_sum", exchange)
    Ranks(0, 2).sum(arrays, [0.5])
    summed, numbers = Ranks(1, 2).sum(dict(reversed(arrays.items())), [0.25])
    assert {name: array.tolist() for name, array in summed.items()} == {"b": [2.0, 4.0], "a": [[6.0], [8.0]]}
    assert numbers == [0.75]


def test_a_group_of_one_exchanges_nothing() -> None:
    ranks = Ranks()
    arrays, numbers = ranks.sum({"a": mx.array([1.0])}, [0.1])
    assert arrays["a"].item() == 1.0
    assert numbers == [0.1]
    assert ranks.broadcast(b"abc") == b"abc"
    assert ranks.gather("text") == ["text"]
    ranks.barrier()
    ranks.leave()


@pytest.mark.parametrize("value", [0.1, 1e300, -(2.0**53) + 1, 5e-40, 123456789.123456789])
def test_numbers_travel_exactly(value: float) -> None:
    if abs(value) > 1e38:
        pytest.skip("beyond float32's range, which no sum here reaches")
    pieces = np.array(_pieces(value), np.float32)
    assert pieces.astype(np.float64).sum() == pytest.approx(value, rel=1e-15, abs=1e-44)


def test_what_isnt_finite_stays_so() -> None:
    for value in (float("nan"), float("inf")):
        assert not np.isfinite(np.array(_pieces(value)).sum())


class Pair:
    """Two ends of a lifeline in this process, and what each said of a loss."""

    def __init__(self) -> None:
        self.sockets = socket.socketpair()
        self.heard: list[list[str]] = [[], []]
        self.ends = [Lifeline({1 - n: one}, self.heard[n].append) for n, one in enumerate(self.sockets)]


def test_a_closed_connection_is_a_loss() -> None:
    theirs, ours = socket.socketpair()
    heard: list[str] = []
    line = Lifeline({1: ours}, heard.append)
    theirs.close()
    wait_for(lambda: bool(heard), "the loss", 10)
    assert "rank 1 is gone" in heard[0]
    line.leave()


def test_an_orderly_end_is_none() -> None:
    pair = Pair()
    pair.ends[0].leave()
    pair.sockets[0].close()
    pair.ends[1]._thread.join(10)
    assert not pair.ends[1]._thread.is_alive()
    assert pair.heard == [[], []]


def test_silence_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "BEAT", 0.05)
    monkeypatch.setattr(lifeline, "SILENCE", 1.0)
    silent, ours = socket.socketpair()
    heard: list[str] = []
    Lifeline({3: ours}, heard.append)
    wait_for(lambda: bool(heard), "the loss", 30)
    assert "rank 3 has been silent" in heard[0]
    silent.close()


def test_beats_keep_it_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "BEAT", 0.05)
    monkeypatch.setattr(lifeline, "SILENCE", 0.8)
    pair = Pair()
    time.sleep(1.5)
    assert pair.heard == [[], []]
    for end in pair.ends:
        end.leave()


def test_a_sign_of_life_is_not_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two ranks answer one another as fast as they can, which takes a core."""
    monkeypatch.setattr(lifeline, "BEAT", 0.2)
    theirs, ours = socket.socketpair()
    theirs.settimeout(30)
    line = Lifeline({1: ours}, [].append)
    begun, received = time.monotonic(), 0
    while time.monotonic() < begun + 0.5:
        received += len(theirs.recv(16))
        theirs.send(lifeline.ALIVE)
    assert 1 <= received <= 10
    line.leave()


def test_strangers_are_turned_away() -> None:
    server, found = lifeline.listen("127.0.0.1")
    stranger = socket.create_connection(("127.0.0.1", found[4]))
    stranger.sendall(b"x" * (lifeline.TOKEN + 4))
    friend = lifeline.connect(found, 1)
    peers = lifeline.accept(server, found[5:], 2)
    assert list(peers) == [1]
    assert stranger.recv(1) == b""
    for one in (stranger, *friend.values(), *peers.values()):
        one.close()


def launched(path: Path, *options: str) -> subprocess.Popen[bytes]:
    """`mlx.launch -n 2 segtrain sft ...` in a group of its own, as a shell would start it; its output is in launch.log.

    Its standard input stays open: mlx.launch waits for it busily once it is at its end. It waits busily for its ranks
    in any case, so on Linux it gets the lowest priority, or it would take a core from them.
    """
    launch = [str(LAUNCH), "-n", "2", "--backend", "ring", "--starting-port", str(adjacent_ports(2)), "--"]
    with (path.parent / "launch.log").open("ab") as log:
        process = subprocess.Popen(
            launch + tiny_run.command("sft", path, *options),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=tiny_run.ENVIRONMENT,
            cwd=tiny_run.ROOT,
            start_new_session=True,
        )
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 2, "the ranks")
    for thread in Path(f"/proc/{process.pid}/task").glob("*"):  # where there is one
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
    return process


def finished(process: subprocess.Popen[bytes]) -> int:
    """The launcher's exit code; what it started ends with it."""
    try:
        return process.wait(2 * LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch isn't beside this Python")
def test_through_mlx_launch(folder: Path, sft_alone: Path) -> None:
    path = recipe_file(folder, "launched", "sft", 1)
    assert finished(launched(path)) == 0, (path.parent / "launch.log").read_text()
    assert difference(sft_alone, path.parent / "run") <= 1e-6
    assert_same_metrics(path.parent / "run", sft_alone)


@pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch isn't beside this Python")
@pytest.mark.slow
def test_ctrl_c_and_resume_through_mlx_launch(folder: Path) -> None:
    """Ctrl-C goes to the launcher and to both ranks: they save together; the resumed run ends as one process would."""
    changes = {"train__steps": 30, "output__save_every": 10, "output__eval_every": 15}
    one = alone(folder, "alone-long", "sft", **changes)
    path = recipe_file(folder, "ctrl-c", "sft", 1, **changes)
    process = launched(path)
    wait_for(said(path.parent / "run" / "metrics.jsonl", '"step": 3,'), "three updates")
    os.killpg(process.pid, signal.SIGINT)
    finished(process)
    found, notices = checkpoint.newest(path.parent / "run")
    assert found is not None
    assert not notices
    assert 3 <= found.step < 30
    assert found.step == tiny_run.lines(path.parent / "run")[-1]["step"]
    assert finished(launched(path, "--resume")) == 0, (path.parent / "launch.log").read_text()
    assert difference(one, path.parent / "run") <= 1e-6
    assert_same_metrics(path.parent / "run", one)
