"""What a user has is there after a refusal, a kill and a mistake: earlier runs, recipes, adapters."""

import json
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tiny_run
from processes import ended, start

from segtrain.data import dataset
from segtrain.errors import RunFailed, UserError
from segtrain.event import Notice, RunEnded, TrainStep
from segtrain.parallel.ranks import Ranks
from segtrain.recipe.schema import Recipe, load_recipe
from segtrain.run.trainer import Trainer
from segtrain.storage import checkpoint
from segtrain.storage.run_directory import RunDirectory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def old_run(folder: Path) -> Path:
    """A finished run of three updates."""
    recipe = tiny_run.recipe(folder, output__dir=str(folder / "old"), train__steps=3, output__save_every=1)
    list(Trainer(recipe).events())
    return folder / "old"


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"engine__memory_budget": "10KB", "engine__segment_size": "auto"}, RunFailed),
        ({"model": "nowhere"}, UserError),
        ({"data__train": "nowhere.jsonl"}, UserError),
        ({"lora__targets": ["nothing"]}, UserError),
        ({"train__weight_decay": 0.1, "train__optimizer": "adam"}, UserError),
    ],
)
@pytest.mark.parametrize("flag", ["overwrite", "resume"])
def test_a_run_that_is_refused_leaves_the_earlier_one(
    changes: dict[str, object], error: type, flag: str, folder: Path, old_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(old_run, tmp_path / "run")
    before = contents(run)
    recipe = tiny_run.recipe(folder, output__dir=str(run), **{"train__steps": 3, **changes})
    with pytest.raises(error):
        list(Trainer(recipe, **{flag: True}).events())  # type: ignore[arg-type]
    assert contents(run) == before


def test_a_recipe_in_its_own_output_directory(folder: Path, tmp_path: Path) -> None:
    path = tiny_run.recipe_file(folder, output__dir=str(tmp_path), train__steps=1)
    own = path.rename(tmp_path / "recipe.yaml")
    own.write_text("# my notes\n" + own.read_text())
    before = own.read_text()
    for flags in ({}, {"resume": True}, {"overwrite": True}):
        list(Trainer(load_recipe(own), **flags).events())
        assert own.read_text() == before
    assert checkpoint.steps(tmp_path) == [1]
    assert Recipe.from_mapping(tiny_run.mapping(folder, output__dir=str(tmp_path), train__steps=1)) == load_recipe(
        tmp_path / "recipe.resolved.yaml"
    )


def test_a_runs_own_recipe_goes_on_with_it(old_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(old_run, tmp_path / "run")
    text = (run / "recipe.yaml").read_text().replace(str(old_run), str(run))
    (run / "recipe.yaml").write_text(text)
    list(Trainer(load_recipe(run / "recipe.yaml"), overwrite=True).events())
    assert (run / "recipe.yaml").read_text() == text
    assert checkpoint.steps(run) == [2, 3] or checkpoint.steps(run) == [1, 2, 3]


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_it_replaces_a_run(kills: int, folder: Path, old_run: Path, tmp_path: Path) -> None:
    """At random moments from its start to its first checkpoints: the old run is whole, or the new one goes on."""
    draw = random.Random(kills)
    whole = tiny_run.recipe(folder, output__dir=str(tmp_path / "whole"), train__steps=2, train__learning_rate=0.02)
    list(Trainer(whole).events())
    options = {"train__steps": 2, "train__learning_rate": 0.02, "output__save_every": 1}
    found = {"old": 0, "new": 0}
    for number in range(kills):
        run = shutil.copytree(old_run, tmp_path / f"run-{number}")
        before = contents(run)
        path = tiny_run.recipe_file(folder, output__dir=str(run), **options).rename(tmp_path / f"{number}.yaml")
        process = start(["sft", str(path), "--overwrite"], tmp_path / "log")
        if draw.random() < 0.9:
            _wait_until_it_changes(run / "recipe.yaml")
        time.sleep(draw.uniform(0, 0.15))
        process.kill()
        ended(process)
        with RunDirectory(run, resume=True):
            pass
        if (run / "recipe.yaml").read_bytes() == before["recipe.yaml"]:
            found["old"] += 1
            assert contents(run) == before
            continue
        found["new"] += 1
        list(Trainer(load_recipe(path), resume=True).events())
        assert (run / "adapters.safetensors").read_bytes() == (tmp_path / "whole/adapters.safetensors").read_bytes()
        assert checkpoint.steps(run) == [1, 2]
    assert found["new"]
    print(found)


def _wait_until_it_changes(path: Path, limit: float = 60) -> None:
    before, patience = path.stat().st_ino, time.monotonic() + limit
    with suppress(FileNotFoundError):
        while time.monotonic() < patience and path.stat().st_ino == before:
            time.sleep(0.0005)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_row_that_cannot_fit_follows_on_long_where_lengths_are_not_known(
    streaming: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 11 of 13 is none of the three that are looked at, and no plan for it fits."""
    monkeypatch.setattr(dataset, "SAMPLE_ROWS", 3)
    monkeypatch.setattr(dataset, "LONGEST_ROWS", 0)
    monkeypatch.setattr(dataset, "EXACT_ROWS", 3)
    rows = [json.loads(line) for line in tiny_run.completions(tmp_path / "data.jsonl").read_text().splitlines()]
    rows.insert(10, {"prompt": "w1 " * 1500, "completion": " w2"})
    recipe = tiny_run.recipe(
        folder,
        train__steps=26,
        data__train=str(tiny_run.written(tmp_path / "data.jsonl", rows)),
        data__max_seq_length=2048,
        data__streaming=streaming,
        engine__memory_budget="800KB",
        output__dir=str(tmp_path / "run"),
    )
    events = list(Trainer(recipe).events())
    (said,) = [event.text for event in events if isinstance(event, Notice) and "don't fit" in event.text]
    assert "data.on_long (drop)" in said
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert ended.step == 26
    assert ended.summary["dropped"] >= 1
    assert all(event.tokens < 100 for event in events if isinstance(event, TrainStep))


def test_ranks_agree_on_the_rows_that_fit(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's memory holds 9 tokens: this one leaves out the same rows."""
    monkeypatch.setattr(dataset, "SAMPLE_ROWS", 3)
    monkeypatch.setattr(dataset, "EXACT_ROWS", 3)
    monkeypatch.setattr(Ranks, "gather", lambda self, text: [text, "9"] if text.isdigit() else [text])
    recipe = tiny_run.recipe(folder, train__steps=12, output__dir=str(tmp_path / "run"))
    events = list(Trainer(recipe).events())
    assert any(isinstance(event, Notice) and "rows above 9 tokens don't fit" in event.text for event in events)
    assert max(event.tokens for event in events if isinstance(event, TrainStep)) <= 9
