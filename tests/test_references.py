"""Runs whose loss compares with the start: the reference computed each time, and kept by row."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
import tiny_run

from segtrain.data.rows import Origin, PreferenceRow
from segtrain.engine.backward import FullBackward, SegmentedBackward
from segtrain.engine.layouts import CHOSEN, REJECTED, Layout, pair, shared_prefix
from segtrain.engine.objectives import Objective, Scores, dpo
from segtrain.errors import UserError
from segtrain.event import TrainStep
from segtrain.lora.layers import Lora
from segtrain.models.stack import LayerStack
from segtrain.run import trainer
from segtrain.run.references import References
from segtrain.run.trainer import Trainer

IDS = tiny.tokens(17)
ROW = PreferenceRow(IDS[:6], IDS[6:11], IDS[11:17], Origin("a.jsonl", 1))
LAYOUT = pair(ROW.prompt, ROW.chosen, ROW.rejected, score_prompt=False)
SHARED = shared_prefix(ROW.prompt, ROW.chosen, ROW.rejected, score_prompt=False)


def engine(objective: Objective | None = None) -> SegmentedBackward:
    model = tiny.build("llama")
    return tiny.segmented(LayerStack(model), tiny.attach(model), objective or dpo())


def values(lora: Lora, factor: float) -> dict[str, mx.array]:
    return {name: factor * value for name, value in lora.values().items()}


def numbers(sums: Any) -> dict[str, float]:
    return {name: value.item() for name, value in sums.items()}


def test_the_reference_is_the_model_at_the_start() -> None:
    """Without the adapter where it is new, else with the values that it began with, whatever it has learnt."""
    backward = engine()
    lora = backward.lora
    with lora.disabled():
        base = numbers(backward.score(LAYOUT).sums)
    with lora.as_at_start():
        assert numbers(backward.score(LAYOUT).sums) == base
    begun = values(lora, 3.0)
    with lora.with_values(begun):
        expected = numbers(backward.score(LAYOUT).sums)
    lora.begin_from(begun)
    lora.set(values(lora, 2.0))  # as training or a checkpoint does
    with lora.as_at_start():
        assert numbers(backward.score(LAYOUT).sums) == expected
    assert expected != base


def test_fingerprints_of_starts_differ() -> None:
    lora = engine().lora
    prints, begun = [lora.start_fingerprint], lora.values()
    for factor in (1.0, 1.0, 2.0):
        lora.begin_from({name: factor * value for name, value in begun.items()})
        prints.append(lora.start_fingerprint)
    assert prints[0] == ""
    assert prints[1] == prints[2]
    assert len(set(prints)) == 3


def test_the_first_step_has_no_margin() -> None:
    model = tiny.build("llama")
    lora = tiny.attach(model)
    lora.begin_from(lora.values())
    value = FullBackward(LayerStack(model), lora, dpo()).step(LAYOUT).loss
    assert value.total.item() == pytest.approx(0.6931472, rel=1e-5)
    assert value.metrics["rewards_margins"].item() == pytest.approx(0.0, abs=1e-5)


def test_kept_sums_give_the_same_step_without_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = engine()
    lines: list[Any] = []
    references = References("model", "", lines.append)
    plain, kept = backward.step(SHARED), backward.step(references([ROW], SHARED, backward))
    assert tiny.relative(plain.grads, kept.grads) == 0.0
    assert plain.loss.total.item() == kept.loss.total.item()

    def refuse(layout: Layout) -> Scores:
        raise AssertionError("a pass")

    monkeypatch.setattr(backward, "score", refuse)
    again = references([ROW], SHARED, backward)
    backward.step(again)
    assert numbers(again.reference) == {name: lines[0][name] for name in (CHOSEN, REJECTED)}
    assert len(lines) == 1
    with pytest.raises(AssertionError, match="a pass"):  # the control
        backward.step(SHARED)


@pytest.mark.parametrize(
    ("model", "start", "row", "found"),
    [
        ("model", "start", ROW, True),
        ("model", "start", PreferenceRow(ROW.prompt, ROW.chosen, ROW.rejected, Origin("moved.jsonl", 9)), True),
        ("other", "start", ROW, False),
        ("model", "other", ROW, False),
        ("model", "start", PreferenceRow(ROW.prompt, ROW.rejected, ROW.chosen, ROW.origin), False),
        ("model", "start", PreferenceRow(ROW.prompt, ROW.chosen, ROW.rejected, ROW.origin, IDS[:5]), False),
    ],
)
def test_what_is_kept_is_found_for_the_same_model_start_and_tokens(
    tmp_path: Path, model: str, start: str, row: PreferenceRow, found: bool
) -> None:
    backward, path = engine(), tmp_path / "reference.jsonl"
    with open(path, "w") as file:
        References("model", "start", lambda line: print(json.dumps(line), file=file))([ROW], LAYOUT, backward)
    new: list[Any] = []
    references = References(model, start, new.append)
    references.load(path)
    references([row], LAYOUT, backward)
    assert (new == []) == found


def run(folder: Path, name: str, stop_after: int = 0, **flags: bool) -> Path:
    """A run of two epochs over 12 pairs, with 5 held-out ones; the name begins with `dpo.reference`."""
    changes = {"dpo": {"reference": name.split()[0]}, "train__grad_accumulation_steps": 4, "output__eval_every": 3}
    changes |= {"data__valid": str(folder / "orpo-valid.jsonl"), "output__dir": str(folder / name)}
    recipe = tiny_run.recipe(folder, "dpo", **changes)
    events = Trainer(recipe, "dpo", **flags).events()
    for event in events:
        if isinstance(event, TrainStep) and event.step == stop_after:
            break
    events.close()  # type: ignore[attr-defined]
    return Path(recipe.output.dir)


def test_a_run_with_kept_references_is_the_run_with_passes(tmp_path: Path) -> None:
    """To the bit; each row is kept once, and a run that stopped and went on leaves the same files."""
    passed, cached = run(tmp_path, "pass"), run(tmp_path, "cached")
    assert tiny_run.result(cached)[0] == tiny_run.result(passed)[0]
    kept = (cached / "reference.jsonl").read_text().splitlines()
    assert len(kept) == len({json.loads(line)["row"] for line in kept}) == 17
    assert not (passed / "reference.jsonl").exists()
    stopped = run(tmp_path, "cached stopped", stop_after=3)
    run(tmp_path, "cached stopped", resume=True)
    assert tiny_run.result(stopped) == tiny_run.result(cached)
    assert (stopped / "reference.jsonl").read_text().splitlines() == kept
    metrics = [line for line in tiny_run.lines(cached) if line["event"] == "train"]
    assert metrics[0]["rewards_margins"] == pytest.approx(0.0, abs=1e-5)
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_a_run_from_another_adapter_compares_with_that_one(tmp_path: Path) -> None:
    """Not with the base model: the first update has no margin, and after a resume the reference is the same."""
    first = run(tmp_path, "pass")
    options = {"lora__init_from": str(first), "output__save_every": 1, "train__steps": 4}
    whole, stopped = (
        tiny_run.recipe(tmp_path, "dpo", output__dir=str(tmp_path / name), **options) for name in ("whole", "stopped")
    )
    list(Trainer(whole, "dpo").events())
    for event in (events := Trainer(stopped, "dpo").events()):
        if isinstance(event, TrainStep) and event.step == 3:
            break
    events.close()  # type: ignore[attr-defined]
    list(Trainer(stopped, "dpo", resume=True).events())
    results = [tiny_run.result(Path(recipe.output.dir)) for recipe in (whole, stopped)]
    assert results[0] == results[1]
    metrics = [line for line in results[0][1] if line["event"] == "train"]
    assert metrics[0]["rewards_margins"] == pytest.approx(0.0, abs=1e-5)
    assert metrics[-1]["rewards_margins"] != pytest.approx(0.0, abs=1e-5)


def test_another_start_is_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "pass", stop_after=3)
    opened = trainer.open_session

    def begun(*arguments: Any) -> Any:
        session = opened(*arguments)
        session.lora.begin_from(values(session.lora, 2.0))
        return session

    monkeypatch.setattr(trainer, "open_session", begun)
    with pytest.raises(UserError, match="the adapter that the run began with"):
        run(tmp_path, "pass", resume=True)
