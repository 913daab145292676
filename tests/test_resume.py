"""A run that stops anywhere and goes on must leave what an uninterrupted one leaves.

Identical means: the bytes of adapters.safetensors, the names of the checkpoints, and every line of metrics.jsonl but
for its readings of clocks and memory (`tiny_run.READINGS`) and notices about memory. Here a run stops when its events
are no longer asked for; test_faults.py kills real processes.
"""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run

from segtrain.errors import RunFailed, UserError
from segtrain.event import Evaluated, Event, Notice, RunEnded, Saved, TrainStep
from segtrain.recipe.schema import Recipe
from segtrain.run.trainer import Trainer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "dropout, accumulation": ("sft", {"lora__dropout": 0.2, "train__grad_accumulation_steps": 2}),
    "streaming": ("sft", {"data__streaming": True, "data__shuffle_window": 5, "train__steps": 8}),
    "orpo": ("orpo", {"lora__dropout": 0.1, "train__optimizer": "muon"}),
    "orpo, all at once": (
        "orpo",
        {
            "lora__dropout": 0.1,
            "train__grad_accumulation_steps": 2,
            "data__streaming": True,
            "data__shuffle_window": 5,
        },
    ),
    "dpo": ("dpo", {"lora__dropout": 0.1}),
    "dpo, cached": ("dpo", {"dpo": {"reference": "cached"}, "train__grad_accumulation_steps": 3}),
    "adafactor, momentum": ("sft", {"train__optimizer": "adafactor", "train__warmup_steps": 4}),
}


def recipe_of(folder: Path, case: str, run: str) -> tuple[Recipe, Any]:
    loss, changes = CASES[case]
    valid = str(folder / f"{tiny_run.kind_of(loss)}-valid.jsonl")
    options = {"data__valid": valid, "output__eval_every": 3, "output__keep_checkpoints": 2, **changes}
    return tiny_run.recipe(folder, loss, output__dir=str(folder / run), **options), loss


def train(
    recipe: Recipe, loss: Any, stop_after: int | None = None, kind: type = TrainStep, **flags: bool
) -> list[Event]:
    """The events of a run, killed after the first of `kind` at step `stop_after`: it saves nothing more."""
    seen: list[Event] = []
    events = Trainer(recipe, loss, **flags).events()
    for event in events:
        seen.append(event)
        if stop_after is not None and isinstance(event, kind) and getattr(event, "step", 0) >= stop_after:
            with suppress(Killed):
                events.throw(Killed())
    return seen


class Killed(Exception):
    """What ends a run wherever it is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


class Whole(dict[str, Any]):
    """What each case leaves without interruption, found when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __missing__(self, case: str) -> Any:
        recipe, loss = recipe_of(self.folder, case, f"whole {case}")
        train(recipe, loss)
        self[case] = tiny_run.result(Path(recipe.output.dir))
        return self[case]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


QUICK = {"sft", "orpo", "orpo, all at once", "dpo, cached", "adafactor, momentum"}  # what the others have is in these
STOPS = [
    pytest.param(stops, case, marks=() if stops == (2, 5) and case in QUICK else pytest.mark.slow)
    for stops in ((2, 5), (1,), (3, 4))
    for case in CASES
]


@pytest.mark.parametrize(("stops", "case"), STOPS)
def test_resumed_equals_uninterrupted(folder: Path, whole: dict[str, Any], case: str, stops: tuple[int, ...]) -> None:
    recipe, loss = recipe_of(folder, case, f"{case} {stops}")
    for step in stops:
        train(recipe, loss, step, resume=step != stops[0])
    events = train(recipe, loss, resume=True)
    assert isinstance(events[-1], RunEnded)
    assert tiny_run.result(Path(recipe.output.dir)) == whole[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_stopped_after_every_step(folder: Path, whole: dict[str, Any], case: str) -> None:
    """A run that does one step each time, and runs that stop once, after each of the steps."""
    recipe, loss = recipe_of(folder, case, f"{case} at every step")
    recipe = recipe.model_copy(update={"output": recipe.output.model_copy(update={"save_every": 1})})
    for step in range(1, recipe.train.steps + 1):  # type: ignore[operator]
        train(recipe, loss, step, Saved, resume=True)
    train(recipe, loss, resume=True)
    assert tiny_run.result(Path(recipe.output.dir))[:2] == whole[case][:2]
    for step in range(recipe.train.steps):  # type: ignore[arg-type]
        recipe, loss = recipe_of(folder, case, f"{case} once after {step}")
        train(recipe, loss, step, TrainStep if step else Event)  # type: ignore[type-abstract]
        train(recipe, loss, resume=True)
        assert tiny_run.result(Path(recipe.output.dir)) == whole[case]


@pytest.mark.parametrize("kind", [Evaluated, Saved])
def test_stopped_between_evaluation_and_save(folder: Path, whole: dict[str, Any], kind: type) -> None:
    recipe, loss = recipe_of(folder, "sft", f"after {kind.__name__}")
    train(recipe, loss, 3, kind)
    train(recipe, loss, resume=True)
    assert tiny_run.result(Path(recipe.output.dir)) == whole["sft"]


def test_stopped_right_after_the_evaluation_before_training(folder: Path, whole: dict[str, Any]) -> None:
    recipe, loss = recipe_of(folder, "sft", "at the start")
    assert [event.step for event in train(recipe, loss, 0, Evaluated) if isinstance(event, Evaluated)] == [0]
    train(recipe, loss, resume=True)
    assert tiny_run.result(Path(recipe.output.dir)) == whole["sft"]
    assert [line["step"] for line in whole["sft"][1] if line["event"] == "eval"] == [0, 3, 6]


def test_the_comparison_notices_a_lost_place(
    folder: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a resume that forgets the data's place ends elsewhere."""
    recipe, loss = recipe_of(folder, "sft", "forgetful")
    train(recipe, loss, 3)
    monkeypatch.setattr("segtrain.data.dataset.TrainRows.load_state_dict", lambda self, state: None)
    train(recipe, loss, resume=True)
    adapter, lines, _ = tiny_run.result(Path(recipe.output.dir))
    assert adapter != whole["sft"][0]
    assert lines != whole["sft"][1]


def test_resume_of_a_finished_run_says_so(folder: Path, whole: dict[str, Any]) -> None:
    assert whole["sft"]
    recipe, loss = recipe_of(folder, "sft", "whole sft")
    events = train(recipe, loss, resume=True)
    assert any(isinstance(event, Notice) and "finished already" in event.text for event in events)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].reason == "done"
    assert not any(isinstance(event, TrainStep) for event in events)
    assert tiny_run.result(Path(recipe.output.dir)) == whole["sft"]


def test_resume_without_a_checkpoint_starts(folder: Path) -> None:
    recipe, loss = recipe_of(folder, "sft", "nothing yet")
    events = train(recipe, loss, 1, resume=True)
    assert any(isinstance(event, Notice) and "starting from step 0" in event.text for event in events)
    assert isinstance(events[-1], TrainStep)
    assert events[-1].step == 1


def test_a_changed_recipe_needs_force(folder: Path) -> None:
    recipe, loss = recipe_of(folder, "sft", "changed")
    train(recipe, loss, 2, Saved)
    path = str(folder / "changed")
    changed = tiny_run.recipe(folder, output__dir=path, train__learning_rate=0.5, engine__segment_size=2)
    with pytest.raises(UserError, match=r"train\.learning_rate: 0\.01 → 0\.5.*--force") as error:
        train(changed, loss, resume=True)
    assert "segment_size" not in str(error.value)  # it doesn't change what is learnt
    events = train(changed, loss, resume=True, force=True)
    steps = [event.step for event in events if isinstance(event, TrainStep)]
    assert steps[0] == 3


def test_another_number_of_layers_is_refused(folder: Path) -> None:
    recipe, loss = recipe_of(folder, "sft", "layers")
    train(recipe, loss, 2, Saved)
    other = tiny_run.recipe(folder, output__dir=str(folder / "layers"), lora__layers=1)
    with pytest.raises((UserError, RunFailed), match=r"lora\.layers"):
        train(other, loss, resume=True)


def test_changed_data_is_refused(folder: Path) -> None:
    data = tiny_run.completions(folder / "moving.jsonl")
    recipe = tiny_run.recipe(folder, output__dir=str(folder / "moved"), data__train=str(data))
    train(recipe, "sft", 2, Saved)
    tiny_run.completions(data, rows=13)
    with pytest.raises(UserError, match=r"data has changed.*--force goes on"):
        train(recipe, "sft", resume=True)
    events = train(recipe, "sft", resume=True, force=True)
    assert [event.step for event in events if isinstance(event, TrainStep)] == [3, 4, 5, 6]
    assert any(isinstance(event, Notice) and "from their beginning" in event.text for event in events)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("adafactor", "adamw"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("adamw", "sgd"), ("adam", "muon"))),
    ],
)
def test_another_optimizer_by_force_and_then_exactly(folder: Path, before: str, after: str) -> None:
    """What `--force` is advised for works, and a run that did so resumes to the bit."""
    results = []
    for stop in (None, 4):
        path = str(folder / f"{before} {after} {stop}")
        first = tiny_run.recipe(folder, output__dir=path, output__save_every=1, train__optimizer=before)
        train(first, "sft", 2, Saved)
        changed = tiny_run.recipe(folder, output__dir=path, output__save_every=1, train__optimizer=after)
        with pytest.raises(UserError, match=r"train\.optimizer: .*--force"):
            train(changed, "sft", resume=True)
        events = train(changed, "sft", stop, *([Saved] if stop else []), resume=True, force=True)
        assert any(isinstance(event, Notice) and "moments begin anew" in event.text for event in events)
        if stop:
            train(changed, "sft", resume=True)
        results.append((Path(path) / "adapters.safetensors").read_bytes())
    assert results[0] == results[1]


def test_an_adapter_that_cannot_fit_is_not_said_to_be_forced(folder: Path) -> None:
    recipe, loss = recipe_of(folder, "sft", "ranks")
    train(recipe, loss, 2, Saved)
    other = tiny_run.recipe(folder, output__dir=str(folder / "ranks"), lora__rank=3)
    with pytest.raises(UserError, match=r"lora\.rank: 2 → 3.*another output\.dir") as error:
        train(other, loss, resume=True)
    assert "--force" not in str(error.value)


@pytest.mark.parametrize("longer", [{"train__steps": 9}, {"train__steps": None, "train__epochs": 1}])
def test_a_finished_run_can_be_made_longer(folder: Path, longer: dict[str, Any]) -> None:
    path = str(folder / f"longer {len(longer)}")
    events = train(tiny_run.recipe(folder, output__dir=path), "sft")
    first = [event.loss for event in events if isinstance(event, TrainStep)]
    again = train(tiny_run.recipe(folder, output__dir=path), "sft", resume=True)
    assert any(isinstance(event, Notice) and "finished already (6 steps)" in event.text for event in again)
    events = train(tiny_run.recipe(folder, output__dir=path, **longer), "sft", resume=True)
    steps = [event for event in events if isinstance(event, TrainStep)]
    total = 9 if longer["train__steps"] else 12
    assert [event.step for event in steps] == list(range(7, total + 1))
    assert steps[0].learning_rate == pytest.approx(0.01 * 0.5 * (1 + math.cos(math.pi * 6 / total)))
    assert any(isinstance(event, Notice) and f"a run of {total} updates" in event.text for event in events)
    logged = [line["loss"] for line in tiny_run.lines(Path(path)) if line["event"] == "train"]
    assert logged[:6] == first
    assert len(logged) == total


def test_a_finished_run_is_left_as_it_is(folder: Path) -> None:
    """Also by a recipe that asks for less."""
    path = folder / "left alone"
    train(tiny_run.recipe(folder, output__dir=str(path)), "sft")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    events = train(tiny_run.recipe(folder, output__dir=str(path), train__steps=4), "sft", resume=True)
    said = [event.text for event in events if isinstance(event, Notice)]
    assert any(text.endswith("the run has made 6 updates already") for text in said)
    assert any("finished already (6 steps)" in text for text in said)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.skipif(tiny.ON_CUDA, reason="MLX's workspace there is larger than this tiny model's budgets")
def test_the_length_that_a_refusal_names_resumes(folder: Path) -> None:
    path = str(folder / "refused")
    rows = [{"prompt": "w1 " * length, "completion": " w2"} for length in (3, 4, 5, 200, 3, 4, 5)]
    data = str(tiny_run.written(folder / "refused.jsonl", rows))
    options = {"output__dir": path, "data__train": data, "data__max_seq_length": 256}
    train(tiny_run.recipe(folder, **options), "sft", 2, Saved)
    options["engine__memory_budget"] = "800KB"
    with pytest.raises(RunFailed, match=r"set data\.max_seq_length to \d+") as refused:
        train(tiny_run.recipe(folder, **options), "sft", resume=True)
    options["data__max_seq_length"] = int(str(refused.value).split("max_seq_length to ")[1].split(",")[0])
    events = train(tiny_run.recipe(folder, **options), "sft", resume=True)
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].reason, events[-1].step) == ("done", 6)


def test_the_limit_on_rows_may_change(folder: Path) -> None:
    path = str(folder / "shorter rows")
    train(tiny_run.recipe(folder, output__dir=path), "sft", 2, Saved)
    shorter = tiny_run.recipe(folder, output__dir=path, data__max_seq_length=12, data__on_long="truncate")
    events = train(shorter, "sft", resume=True)
    steps = [event for event in events if isinstance(event, TrainStep)]
    assert [event.step for event in steps] == [3, 4, 5, 6]
    assert max(event.tokens for event in steps) <= 12
    text = next(event.text for event in events if isinstance(event, Notice) and "max_seq_length" in event.text)
    assert text == "data.max_seq_length: 64 → 12, data.on_long: drop → truncate for the rows after step 2"


def test_another_loss_is_no_resume(folder: Path) -> None:
    path = str(folder / "other loss")
    train(tiny_run.recipe(folder, "orpo", output__dir=path), "orpo", 2, Saved)
    with pytest.raises(UserError, match=r"preference row|loss: orpo → sft"):
        train(tiny_run.recipe(folder, "orpo", output__dir=path), "sft", resume=True)
