"""What is said of a run at its end: nothing of one that learnt; the cause and the key of one that didn't."""

import random
from pathlib import Path

import pytest
import tiny_run

from segtrain.event import Notice, RunEnded
from segtrain.recipe.schema import TrainRecipe
from segtrain.run.trainer import Trainer
from segtrain.run.verdict import Trend, verdict


def trend(first: float, last: float, steps: int, scatter: float = 0.0) -> Trend:
    draw, found = random.Random(0), Trend()
    for step in range(steps):
        found.add(first + (last - first) * step / max(1, steps - 1) + draw.gauss(0, scatter))
    return found


@pytest.mark.parametrize(
    ("found", "steps", "train", "words"),
    [
        (trend(4.7, 9.9, 8), 8, {"learning_rate": 3.0}, ["rose", "train.learning_rate (3)", "try 0.3"]),
        (trend(4.7, 4.69, 8), 8, {"epochs": 1}, ["hardly moved in 8 updates", "train.epochs"]),
        (trend(4.7, 4.69, 8), 8, {"steps": 8}, ["hardly moved", "train.steps"]),
        (
            trend(2.0, 2.0, 8),
            8,
            {"grad_accumulation_steps": 16},
            ["hardly moved", "lower train.grad_accumulation_steps (16)"],
        ),
        (
            trend(4.1, 4.1, 8),
            8,
            {"learning_rate": 30.0},
            ["hardly moved", "train.learning_rate (30) is probably too high"],
        ),
        (trend(1.5, 1.5, 900, 0.2), 900, {}, ["train.learning_rate (0.0001) may be too low"]),
        (trend(4.7, 3.0, 8), 8, {}, None),
        (trend(2.0, 1.5, 900, 0.2), 900, {}, None),
        (trend(2.0, 3.0, 3), 3, {}, None),
    ],
)
def test_verdicts(found: Trend, steps: int, train: dict[str, float], words: list[str] | None) -> None:
    text = verdict(found, steps, TrainRecipe(**train))  # type: ignore[arg-type]
    assert (text is None) == (words is None), text
    assert all(word in str(text) for word in words or [])


def test_evaluations_decide_where_there_are_two() -> None:
    found = trend(4.7, 3.0, 50)
    for loss in (4.6, 4.1, 5.9):
        found.evaluate(loss)
    text = str(verdict(found, 50, TrainRecipe()))
    assert "validation loss rose from 4.6 to 5.9; the rows to validate differ" in text


@pytest.mark.parametrize(("rate", "words"), [(1e-9, "hardly moved"), (0.02, None)])
def test_a_run_says_it_once_at_its_end(rate: float, words: str | None, tmp_path: Path) -> None:
    recipe = tiny_run.recipe(
        tmp_path,
        train__learning_rate=rate,
        train__lr_schedule="constant",
        train__steps=24,
        data__train=str(tiny_run.completions(tmp_path / "few.jsonl", 2)),
        data__valid=str(tmp_path / "few.jsonl"),
        output__eval_every=100,
        output__dir=str(tmp_path / f"run-{rate}"),
    )
    events = list(Trainer(recipe).events())
    said = [event.text for event in events if isinstance(event, Notice) and "loss" in event.text]
    assert isinstance(events[-1], RunEnded)
    assert [words in text for text in said if words] == ([True] if words else [])
    assert bool(said) == bool(words)
