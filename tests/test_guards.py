"""Updates that aren't finite and losses that leap, in whole runs; test_trainer.py has the gradient's case."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_run

from segtrain.cli import run as command_line
from segtrain.event import Notice, Saved, TrainStep
from segtrain.run.state import SETTLED
from segtrain.run.trainer import Trainer
from segtrain.run.updates import Updates
from segtrain.storage import checkpoint


def scaled_loss(monkeypatch: pytest.MonkeyPatch, factor: float, *lines: int) -> None:
    """The loss, and not the gradient, of the rows on these lines of the file is another."""
    inner = Updates._step

    def step(self: Updates, number: int, row: Any) -> Any:
        found, layout = inner(self, number, row)
        if row.origin.line in lines:
            found = dataclasses.replace(found, loss=dataclasses.replace(found.loss, total=found.loss.total * factor))
        return found, layout

    monkeypatch.setattr(Updates, "_step", step)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_isnt_finite_is_skipped_and_its_row_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    scaled_loss(monkeypatch, factor, 7)
    events = list(Trainer(tiny_run.recipe(tmp_path, train__grad_accumulation_steps=4, train__steps=3)).events())
    (text,) = [event.text for event in events if isinstance(event, Notice) and "update skipped" in event.text]
    assert "sft-train.jsonl:7:" in text
    assert text.count("sft-train.jsonl") == 1
    assert len([event for event in events if isinstance(event, TrainStep)]) == 2


def test_a_skipped_update_leaves_the_schedule_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of update k is that of update k in a run without faults, also after a resume."""
    scaled_loss(monkeypatch, float("nan"), 7)
    found: dict[int, float] = {}
    recipe = tiny_run.recipe(
        tmp_path,
        train__lr_schedule="linear",
        output__save_every=1,
        output__dir=str(tmp_path / "other"),
        train__steps=12,
    )
    long = [0.01 * (1 - step / 12) for step in range(12)]
    for stop, flags in ((5, {}), (12, {"resume": True})):
        events = Trainer(recipe, **flags).events()
        for event in events:
            if isinstance(event, TrainStep):
                found[event.step] = event.learning_rate
            if isinstance(event, Saved) and event.step >= stop:
                break
        events.close()  # type: ignore[attr-defined]
    assert len(found) == 11
    assert all(rate == pytest.approx(long[step - 1]) for step, rate in found.items())


def test_the_third_in_a_row_ends_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_run.recipe_file(tmp_path, train__steps=20, output__save_every=4)
    assert command_line(["sft", str(path), "--set", "train.steps=4"]) == 0
    good = (tmp_path / "run" / "checkpoints" / "step-0000004" / "adapters.safetensors").read_bytes()
    scaled_loss(monkeypatch, float("nan"), *range(1, 13))
    assert command_line(["sft", str(path), "--resume", "--force"]) == 1
    said = capsys.readouterr().err
    assert "3rd update in a row" in said
    assert "step-0000004: --set train.learning_rate=0.001 --resume --force goes on from it" in said
    assert (tmp_path / "run" / "adapters.safetensors").read_bytes() == good
    arrays = mx.load(str(tmp_path / "run" / "adapters.safetensors"))
    assert all(np.isfinite(np.array(value)).all() for value in arrays.values())  # type: ignore[union-attr]


def test_a_checkpoint_of_spoilt_weights_is_not_called_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first update spoils the weights; the advice for that case works."""
    path = tiny_run.recipe_file(tmp_path, train__learning_rate=1e30, output__save_every=1)
    assert command_line(["sft", str(path)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "good" not in said
    assert command_line(["sft", str(path), "--set", "train.learning_rate=1e-3", "--resume", "--force"]) == 1
    assert "begin anew by --set train.learning_rate=1e+29 --overwrite" in said
    assert command_line(["sft", str(path), "--set", "train.learning_rate=1e-3", "--overwrite"]) == 0


def test_a_checkpoint_before_the_last_good_update_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_run.recipe_file(tmp_path, train__steps=20, output__save_every=2)
    assert command_line(["sft", str(path), "--set", "train.steps=2"]) == 0
    inner, calls = Updates.next, iter(range(100))

    def one_good(self: Updates, *args: Any) -> Any:
        if next(calls) == 1:
            scaled_loss(monkeypatch, float("nan"), *range(1, 13))
        return inner(self, *args)

    monkeypatch.setattr(Updates, "next", one_good)
    assert command_line(["sft", str(path), "--resume", "--set", "output.save_every=0"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("step-0000002: --set train.learning_rate=0.001 --resume --force goes on from it.")


def test_before_the_first_update_the_rate_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled_loss(monkeypatch, float("nan"), *range(1, 13))
    assert command_line(["sft", str(tiny_run.recipe_file(tmp_path))]) == 1
    said = capsys.readouterr().err
    assert "the learning rate has no part in it" in said
    assert "lower" not in said


def test_the_advice_of_a_failed_run_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_run.recipe_file(tmp_path, train__steps=6, output__save_every=2)
    with monkeypatch.context() as patched:
        scaled_loss(patched, float("nan"), *range(1, 13))
        inner, calls = Updates.next, iter(range(100))

        def good_at_first(self: Updates, *args: Any) -> Any:
            if next(calls) < 2:
                patched.undo()
            else:
                scaled_loss(patched, float("nan"), *range(1, 13))
            return inner(self, *args)

        monkeypatch.setattr(Updates, "next", good_at_first)
        assert command_line(["sft", str(path)]) == 1
    advice = re.search(r"(--set) (train\S+) (--resume) (--force)", " ".join(capsys.readouterr().err.split()))
    assert advice
    monkeypatch.undo()
    assert command_line(["sft", str(path), *advice.groups()]) == 0
    assert checkpoint.steps(tmp_path / "run") == [4, 6] or checkpoint.steps(tmp_path / "run") == [2, 4, 6]


def test_a_leap_of_the_loss_is_logged_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the run without the leap: it has no such line."""
    recipe = tiny_run.recipe(tmp_path, train__steps=SETTLED + 16, train__learning_rate=1e-6)
    list(Trainer(recipe).events())
    plain = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "was usual" not in plain
    seen = 0

    def once(self: Updates, number: int, row: Any) -> Any:
        nonlocal seen
        seen += 1
        found, layout = inner(self, number, row)
        if seen == SETTLED + 5:
            found = dataclasses.replace(found, loss=dataclasses.replace(found.loss, total=found.loss.total * 30))
        return found, layout

    inner = Updates._step
    monkeypatch.setattr(Updates, "_step", once)
    list(Trainer(recipe, overwrite=True).events())
    (line,) = [line for line in tiny_run.lines(tmp_path / "run") if "was usual" in str(line.get("text"))]
    assert line["event"] == "notice"
    assert f"step {SETTLED + 5}:" in line["text"]
    assert "sft-train.jsonl:" in line["text"]
