"""`train.patience` ends a run by its evaluations, and `output.final` says which adapter it leaves."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run

from segtrain.errors import UserError
from segtrain.event import Evaluated, Notice, RunEnded, TrainStep
from segtrain.recipe.schema import Recipe
from segtrain.run.state import RunState
from segtrain.run.trainer import Trainer
from segtrain.run.validation import Validation
from segtrain.storage import checkpoint

LOSSES = {0: 5.0, 2: 4.0, 4: 3.0, 6: 3.5, 8: 3.0, 10: 2.0, 12: 2.5}  # by step; an equal one is no better one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patience")


@pytest.fixture(autouse=True, scope="module")
def _evaluations_of_the_table() -> Iterator[None]:
    inner = Validation.__call__

    def call(self: Validation, state: RunState, stop: Callable[[], bool]) -> Evaluated | None:
        found = SimpleNamespace(stop=False, rows=5, mean_metrics={}, mean_loss=LOSSES[state.step])
        found.exchange = lambda ranks, arrays: None
        self._totals = lambda stop: found  # type: ignore[method-assign, assignment, return-value]
        return inner(self, state, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validation, "__call__", call)
        yield


def recipe(folder: Path, name: str, **changes: Any) -> Recipe:
    values = {"train__steps": 12, "train__patience": 2, "output__eval_every": 2, "output__save_every": 5, **changes}
    values = {"data__valid": str(folder / "sft-valid.jsonl"), "output__dir": str(folder / name), **values}
    return tiny_run.recipe(folder, **values)


def trained(recipe: Recipe, **flags: bool) -> list[Any]:
    return list(Trainer(recipe, **flags).events())


def adapter(folder: Path) -> bytes:
    return (folder / "adapters.safetensors").read_bytes()


def at(folder: Path, name: str, step: int) -> bytes:
    return adapter(checkpoint.directory(folder / name, step))


def notices(events: list[Any]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Notice))


def test_a_run_ends_when_nothing_gets_better(folder: Path) -> None:
    events = trained(recipe(folder, "whole"))
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.reason, ended.step, ended.summary["best_step"]) == ("done", 8, 4)
    said = "ends early, after step 8 of 12: 2 evaluations without a better loss than 3.0000 at step 4 (train.patience)"
    assert said in notices(events)
    assert said in [line.get("text") for line in tiny_run.lines(folder / "whole")]
    assert checkpoint.steps(folder / "whole")[-1] == 8
    assert adapter(folder / "whole") == at(folder, "whole", 8) != at(folder, "whole", 4)


def test_without_patience_it_goes_to_the_end(folder: Path) -> None:
    events = trained(recipe(folder, "patient", train__patience=None))
    assert events[-1].step == 12
    assert "ends early" not in notices(events)


def test_patience_at_the_last_step_is_the_ordinary_end(folder: Path) -> None:
    events = trained(recipe(folder, "last step", train__steps=8))
    assert events[-1].step == 8
    assert "ends early" not in notices(events)


@pytest.fixture(scope="module")
def unstopped(folder: Path, _evaluations_of_the_table: None) -> Any:
    trained(recipe(folder, "unstopped"))
    return tiny_run.result(folder / "unstopped")[:2]


@pytest.mark.parametrize("stops", [(4,), (6,), (5, 7), (8,)])
def test_stopped_and_resumed_it_ends_at_the_same_step(folder: Path, unstopped: Any, stops: tuple[int, ...]) -> None:
    name = f"stopped {stops}"
    for step in stops:
        events = Trainer(recipe(folder, name), resume=step != stops[0]).events()
        for event in events:
            if isinstance(event, TrainStep) and event.step == step:
                break
        events.close()
    trained(recipe(folder, name), resume=True)
    assert tiny_run.result(folder / name)[:2] == unstopped


def test_a_run_that_ended_early_stays_ended_until_its_patience_is_raised(folder: Path) -> None:
    trained(recipe(folder, "again"))
    before = tiny_run.result(folder / "again")
    events = trained(recipe(folder, "again"), resume=True)
    assert "a higher one goes on (--set train.patience=N --resume)" in notices(events)
    assert tiny_run.result(folder / "again") == before
    events = trained(recipe(folder, "again", train__patience=3), resume=True)
    assert [event.step for event in events if isinstance(event, TrainStep)] == [9, 10, 11, 12]
    assert "train.patience" not in notices(events)


def test_the_best_adapter_is_left(folder: Path) -> None:
    events = trained(recipe(folder, "best", output__final="best"))
    assert "the run's adapter is that of step 4, the best one" in notices(events)
    assert adapter(folder / "best") == at(folder, "best", 4) != at(folder, "best", 8)
    trained(recipe(folder, "best", output__final="best"), resume=True)  # there is nothing to do
    assert adapter(folder / "best") == at(folder, "best", 4)
    trained(recipe(folder, "best"), resume=True)
    assert adapter(folder / "best") == at(folder, "best", 8)
    config = json.loads((folder / "best" / "adapter_config.json").read_text())
    assert config == json.loads((checkpoint.directory(folder / "best", 8) / "adapter_config.json").read_text())


def test_an_interrupted_run_leaves_the_last_adapter(folder: Path) -> None:
    events = Trainer(recipe(folder, "interrupted", output__final="best", train__patience=None)).events()
    for event in events:
        if isinstance(event, TrainStep) and event.step == 7:
            break
    events.close()
    assert adapter(folder / "interrupted") == at(folder, "interrupted", 7)
    events = iter(trained(recipe(folder, "interrupted", output__final="best", train__patience=None), resume=True))
    assert adapter(folder / "interrupted") == at(folder, "interrupted", 10)


def test_a_best_checkpoint_that_is_broken_is_said(folder: Path) -> None:
    events = Trainer(recipe(folder, "broken", output__final="best")).events()
    for event in events:
        if isinstance(event, TrainStep) and event.step == 7:
            (checkpoint.directory(folder / "broken", 4) / "adapters.safetensors").write_bytes(b"")
        last = event
    assert isinstance(last, RunEnded)
    assert adapter(folder / "broken") == at(folder, "broken", 8)
    texts = [line.get("text", "") for line in tiny_run.lines(folder / "broken")]
    assert any("so the run's adapter is the last one" in text for text in texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__valid": []}, "train.patience goes by the loss on validation rows, and there are none"),
        ({"eval__rows": 0}, "train.patience goes by the loss on validation rows, and there are none"),
        (
            {"data__valid": [], "train__patience": None, "output__final": "best"},
            "output.final: best goes by the loss on validation rows, and there are none",
        ),
        ({"output__eval_every": 0}, "output.eval_every: 0 makes one at the end only"),
    ],
)
def test_what_goes_by_evaluations_needs_them(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trained(recipe(folder, "refused", **changes))
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("changes", [{"train__patience": 0}, {"output__final": "first"}])
def test_values_that_are_none(folder: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"train\.patience must be at least 1|output\.final must be one of"):
        recipe(folder, "none", **changes)


def test_a_checkpoint_from_before_there_was_a_patience() -> None:
    saved = RunState(step=3).as_json()
    del saved["waited"]
    assert RunState.from_json(json.loads(json.dumps(saved))) == RunState(step=3)
