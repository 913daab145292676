"""SIGINT and SIGTERM to real processes at each kind of moment; a slowed function makes it long enough to hit."""

import os
import signal
import time
from pathlib import Path

import pytest
import tiny_run
from processes import ended, said, send, start, wait_for

from segtrain import checkpoint
from segtrain.recipe import load_recipe
from segtrain.signals import StopRequest
from segtrain.trainer import Trainer

STEP = "segtrain.updates:Updates._apply"
EVALUATION = "segtrain.engine:SegmentedBackward.evaluate"
SAVING = "segtrain.durable:write_new"
TOKENISING = "segtrain.data.dataset:Pipeline.encode"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def whole(folder: Path) -> object:
    recipe_file(folder, "whole")
    return finished(folder, "whole")


def recipe_file(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    values = {"output__dir": str(folder / name / "run"), "output__eval_every": 2, "output__save_every": 4}
    values["eval__at_start"] = False
    path = tiny_run.recipe_file(folder, data__valid=str(folder / "sft-valid.jsonl"), **values)
    return path.rename(folder / name / "recipe.yaml")


def finished(folder: Path, name: str) -> object:
    """The run's result, after going on with it to its end."""
    for _ in Trainer(load_recipe(folder / name / "recipe.yaml"), resume=True).events():
        pass
    return tiny_run.result(folder / name / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("moment", "slow", "mark", "times"),
    [
        ("step", STEP, "<_apply>", 3),
        ("evaluation", EVALUATION, "<evaluate>", 3),
        ("saving", SAVING, "<write_new>", 2),
    ],
)
def test_the_first_signal_saves_and_ends_with_130(
    folder: Path, whole: object, moment: str, slow: str, mark: str, times: int, number: signal.Signals
) -> None:
    name = f"{moment} {number.name}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow=slow)
    wait_for(said(log, mark, times), f"the {moment}")
    send(process, number)
    assert ended(process) == 130
    assert "finishing this step and saving" in log.read_text()
    found, notices = checkpoint.newest(path.parent / "run")
    assert found is not None
    assert not notices
    assert 0 < found.step < 6
    assert [line["step"] for line in tiny_run.lines(path.parent / "run") if line["event"] == "train"][-1] == found.step
    adapter, lines, _ = finished(folder, name)  # type: ignore[misc]
    assert (adapter, lines) == whole[:2]  # type: ignore[index]


@pytest.mark.parametrize(("slow", "mark"), [(STEP, "<_apply>"), (SAVING, "<write_new>")])
def test_the_second_signal_ends_at_once(folder: Path, whole: object, slow: str, mark: str) -> None:
    name = f"twice {mark[1:-1]}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow=slow, seconds=20.0 if slow == STEP else 1.0)
    wait_for(said(log, mark), "the moment")
    send(process)
    wait_for(said(log, "finishing this step"), "the announcement")
    begun = time.monotonic()
    send(process)
    assert ended(process) == 130
    assert time.monotonic() - begun < 15  # not the 20 s that the step still takes
    adapter, lines, _ = finished(folder, name)  # type: ignore[misc]
    assert (adapter, lines) == whole[:2]  # type: ignore[index]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_tokenising_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    name = f"tokenising {number.name}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow=TOKENISING)
    wait_for(said(log, "<encode>", 2), "a row")
    send(process, number)
    assert ended(process) == 130
    assert not (path.parent / "run").exists()
    assert "Traceback" not in log.read_text()


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop, stop.held():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_a_step_a_signal_interrupts() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
