"""The training loop against CONTRACT and arithmetic done here: what is learnt, written and refused."""

import json
import math
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import tiny_run

from segtrain.data.check import check_data
from segtrain.engine import objectives
from segtrain.engine.backward import Step
from segtrain.errors import RunFailed, UserError
from segtrain.event import (
    DataRead,
    Evaluated,
    Event,
    Memory,
    Notice,
    PlanChosen,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    TrainStep,
)
from segtrain.models.load import load
from segtrain.recipe.schema import load_recipe
from segtrain.run.guards import ALLOWANCE, SLACK, WARM_UP, Growth
from segtrain.run.passes import is_out_of_memory
from segtrain.run.sampling import prompts
from segtrain.run.state import SETTLED, RunningLoss, RunState
from segtrain.run.trainer import Trainer, total_steps
from segtrain.run.updates import Updates
from segtrain.storage import checkpoint
from segtrain.storage.run_directory import best

TRAIN = {
    "event", "step", "loss", "learning_rate", "grad_norm", "tokens", "supervised_tokens", "tokens_per_second",
    "step_seconds", "padding_tokens", "peak_gib", "active_gib", "cache_gib", "rss_gib",
}  # fmt: skip
ORPO = {"nll", "log_odds", "chosen_logp", "rejected_logp", "accuracy", "shared_tokens"}
MEMORY = {"step", "phase", "stream", "tokens", "padding", "seconds", "peak_gib", "active_gib", "cache_gib"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


def run(folder: Path, name: str, loss: Any = "sft", **changes: Any) -> tuple[list[Event], Path]:
    flags = {key: changes.pop(key) for key in ("resume", "overwrite", "force", "dry_run") if key in changes}
    recipe = tiny_run.recipe(folder, loss, output__dir=str(folder / name), **changes)
    return list(Trainer(recipe, loss, **flags).events()), folder / name


def of(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("loss", ["sft", "orpo"])
def test_files_are_those_of_the_contract(folder: Path, loss: str) -> None:
    valid = str(folder / f"{loss}-valid.jsonl")
    events, out = run(
        folder, f"files-{loss}", loss, data__valid=valid, output__eval_every=3, output__keep_checkpoints=1
    )
    lines = tiny_run.lines(out, readings=True)
    assert [line["event"] for line in lines if line["event"] != "notice"] == (
        ["data", "plan", "eval", *["train"] * 3, "eval", *["train"] * 3, "eval"]
    )
    for line in lines:
        if line["event"] == "train":
            assert set(line) == TRAIN | (ORPO if loss == "orpo" else set())
            assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_seconds"])
        if line["event"] == "eval":
            assert {"event", "step", "loss", "rows"} <= set(line)
            assert line["rows"] == 5
    memory = tiny_run.lines(out, "memory.jsonl", readings=True)
    assert all(set(line) == MEMORY for line in memory)
    assert {line["phase"] for line in memory if line["step"] == 1} == {
        *(f"{kind}[{n}:{n + 1}]" for kind in ("forward", "backward") for n in range(3)), "head", "optimizer",
    }  # fmt: skip
    assert (out / "recipe.yaml").read_text().startswith("# resolved by segtrain-mlx")
    recipe = load_recipe(out / "recipe.yaml")
    checked = check_data(recipe, pairs=loss == "orpo", tokenizer=load(recipe.model).tokenizer).sample
    assert checked is not None
    assert json.loads((out / "data_row.json").read_text()) == checked.as_json()
    assert best(out) == checkpoint.directory(out, of(events, RunEnded)[0].summary["best_step"])
    assert not (out / ".lock").exists()


def test_the_adapter_loads_in_mlx_lm(folder: Path) -> None:
    _, out = run(folder, "loads")
    plain, _ = mlx_lm.load(str(folder / "model"))  # type: ignore[misc]
    tuned, _ = mlx_lm.load(str(folder / "model"), adapter_path=str(out))  # type: ignore[misc]
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.abs(plain(tokens) - tuned(tokens)).max().item() > 1e-3


def losses_of(folder: Path, part: str) -> list[list[float]]:
    """The loss of each supervised token, by row, by mlx-lm's model applied here."""
    loaded = load(str(folder / "model"))
    rows = [json.loads(line) for line in (folder / f"sft-{part}.jsonl").read_text().splitlines()]
    losses = []
    for row in rows:
        prompt = loaded.tokenizer.encode(row["prompt"])
        answer = [*loaded.tokenizer.encode(row["completion"], add_special_tokens=False), 1]
        logits = np.array(loaded.model(mx.array([[*prompt, *answer]]))[0].astype(mx.float32), np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses.append([-logp[len(prompt) - 1 + k, token] for k, token in enumerate(answer)])
    return losses


def test_loss_is_the_mean_over_tokens_of_all_rows(folder: Path) -> None:
    """12 rows of unequal length in one update: not a mean of means."""
    changes = {"train__steps": 1, "train__grad_accumulation_steps": 12}
    events, _ = run(folder, "mean", **changes)
    by_row = losses_of(folder, "train")
    losses = np.concatenate(by_row)
    (step,) = of(events, TrainStep)
    assert step.supervised_tokens == len(losses)
    assert step.loss == pytest.approx(np.mean(losses), rel=1e-5)
    means = [np.mean(own) for own in by_row]
    assert abs(np.mean(means) / np.mean(losses) - 1) > 1e-4  # the control: here the two do differ


def test_weights_of_rows_are_weights_in_the_mean(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "sft-train.jsonl").read_text().splitlines()]
    weights = [0.5 if n % 2 else 3.0 for n in range(len(rows))]
    path = folder / "weighted.jsonl"
    path.write_text("".join(json.dumps({**row, "weight": w}) + "\n" for row, w in zip(rows, weights, strict=True)))
    changes = {"train__steps": 1, "train__grad_accumulation_steps": len(rows), "data__train": str(path)}
    events, _ = run(folder, "weighted", **changes)
    by_row = losses_of(folder, "train")
    total = sum(w * sum(own) for w, own in zip(weights, by_row, strict=True))
    mean = total / sum(w * len(own) for w, own in zip(weights, by_row, strict=True))
    (step,) = of(events, TrainStep)
    assert step.loss == pytest.approx(mean, rel=1e-5)
    assert step.supervised_tokens == sum(map(len, by_row))
    assert abs(mean / np.mean(np.concatenate(by_row)) - 1) > 1e-4


def test_the_model_is_evaluated_before_it_is_trained(folder: Path) -> None:
    """The loss of the model without the adapter, which then is no candidate for the best: nothing of it is kept."""
    changes = {"train__learning_rate": 5.0, "train__optimizer": "sgd", "train__max_grad_norm": 0.0}
    valid = str(folder / "sft-valid.jsonl")
    events, out = run(folder, "before", data__valid=valid, output__eval_every=2, train__steps=2, **changes)
    before, after = of(events, Evaluated)
    assert events.index(before) < events.index(of(events, TrainStep)[0])
    assert (before.step, before.best) == (0, False)
    assert before.loss == pytest.approx(np.mean(np.concatenate(losses_of(folder, "valid"))), rel=1e-5)
    assert after.loss > before.loss  # with such a rate it only got worse
    assert best(out) == checkpoint.directory(out, 2)
    assert checkpoint.steps(out) == [2]


@pytest.mark.parametrize("changes", [{"eval__at_start": False}, {"output__eval_every": 0}])
def test_evaluation_before_training_can_be_left_out(folder: Path, changes: dict[str, Any]) -> None:
    options = {"data__valid": str(folder / "sft-valid.jsonl"), "output__eval_every": 3, "train__steps": 3, **changes}
    events, _ = run(folder, f"not before {changes}", **options)
    assert [event.step for event in of(events, Evaluated)] == [3]


def test_evaluated_rows_are_no_part_of_a_steps_prediction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer validation rows: what is said of the first step's memory is about the row that it trained on."""
    long = tiny_run.text(random.Random(0), 50, 50)
    (folder / "long-valid.jsonl").write_text(json.dumps({"prompt": "w1", "completion": long}) + "\n")
    changes = {"output__eval_every": 5, "train__steps": 1, "data__valid": str(folder / "long-valid.jsonl")}
    monkeypatch.setattr("segtrain.run.planning.QUIET_BYTES", 0)
    events, _ = run(folder, "watched", **changes)
    (notice,) = [event.text for event in of(events, Notice) if event.text.startswith("memory at")]
    assert f"memory at {of(events, TrainStep)[0].tokens} tokens" in notice


def test_an_sgd_update_is_the_gradient_times_the_rate(folder: Path) -> None:
    """|B| after one step is rate * |grad|: B was 0, and so is the gradient of A there."""
    changes = {"train__steps": 1, "train__optimizer": "sgd", "train__learning_rate": 0.01, "train__max_grad_norm": 0.0}
    events, out = run(folder, "sgd", **changes)
    params = mx.load(str(out / "adapters.safetensors"))
    moved = math.sqrt(sum(mx.square(v).sum().item() for k, v in params.items() if k.endswith("lora_b")))  # type: ignore[union-attr, misc]
    assert moved == pytest.approx(0.01 * of(events, TrainStep)[0].grad_norm, rel=1e-5)


def test_evaluation_takes_the_same_rows_each_time(folder: Path) -> None:
    changes = {"train__learning_rate": 1e-12, "output__eval_every": 1, "eval__rows": 3}
    events, _ = run(folder, "same rows", data__valid=str(folder / "sft-valid.jsonl"), **changes)
    losses = {event.loss for event in of(events, Evaluated)}
    assert [event.step for event in of(events, Evaluated)] == list(range(7))
    assert max(losses) == pytest.approx(min(losses), rel=1e-6)
    assert {event.rows for event in of(events, Evaluated)} == {3}


def test_warm_up_counts_updates(folder: Path) -> None:
    changes = {"train__warmup_steps": 3, "train__lr_schedule": "constant", "train__grad_accumulation_steps": 4}
    events, _ = run(folder, "warm-up", train__steps=4, **changes)
    rates = [event.learning_rate for event in of(events, TrainStep)]
    assert rates == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01])


@pytest.mark.parametrize(("epochs", "accumulation", "ranks", "expected"), [(1, 1, 1, 12), (2, 5, 1, 5), (1, 2, 3, 2)])
def test_epochs_in_steps(folder: Path, epochs: int, accumulation: int, ranks: int, expected: int) -> None:
    changes = {"train__epochs": epochs, "train__steps": None, "train__grad_accumulation_steps": accumulation}
    recipe = tiny_run.recipe(folder, **changes)

    class Twelve:
        rows_per_epoch = 12

    assert total_steps(recipe, Twelve(), ranks) == expected  # type: ignore[arg-type]


def test_epochs_of_a_stream_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"train\.steps"):
        run(folder, "stream", data__streaming=True, train__steps=None, train__epochs=1)


def test_each_row_once_an_epoch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    inner = Updates._accumulate

    def watched(self: Updates, update: Any, rows: Any) -> None:
        seen.extend(row.origin.line for _, row in rows)
        inner(self, update, rows)

    monkeypatch.setattr(Updates, "_accumulate", watched)
    run(folder, "epoch", train__steps=24)
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(1, 13))


@pytest.mark.parametrize("changes", [{}, {"lora__dropout": 0.2}], ids=["plain", "dropout"])
@pytest.mark.parametrize("loss", ["sft", "orpo"])
def test_rows_together_learn_what_they_learn_alone(folder: Path, loss: str, changes: dict[str, Any]) -> None:
    """And are evaluated alike."""
    valid = {"data__valid": str(folder / f"{loss}-valid.jsonl"), "output__eval_every": 3}
    changes = {"train__grad_accumulation_steps": 4, "train__steps": 3, **valid, **changes}
    name = f"{loss}-{len(changes)}"
    alone, joint = (run(folder, f"{name}-{n}", loss, engine__rows_together=n, **changes)[0] for n in (1, 4))
    for one, other in zip(of(alone, TrainStep), of(joint, TrainStep), strict=True):
        assert (one.tokens, one.supervised_tokens) == (other.tokens, other.supervised_tokens)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-5)
    assert sum(step.padding_tokens for step in of(joint, TrainStep)) > 0
    assert not any(step.padding_tokens for step in of(alone, TrainStep))
    for one, other in zip(of(alone, Evaluated), of(joint, Evaluated), strict=True):
        assert (one.rows, one.loss) == (other.rows, pytest.approx(other.loss, rel=1e-5))
        assert one.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-5)
    for number, events in ((1, alone), (4, joint)):
        first = of(events, TrainStep)[0]
        lines = [line for line in tiny_run.lines(folder / f"{name}-{number}", "memory.jsonl") if line["step"] == 1]
        assert max(line["padding"] for line in lines) <= first.padding_tokens
        assert any(line["padding"] for line in lines) == bool(first.padding_tokens)
        assert 0 < max(line["tokens"] for line in lines) <= first.tokens


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    events, out = run(folder, "dry", dry_run=True)
    assert not out.exists()
    kinds = [type(event) for event in events if not isinstance(event, Notice)]
    assert kinds == [RunStarted, DataRead, PlanChosen, RunEnded]


def test_a_run_is_never_written_over(folder: Path) -> None:
    _, out = run(folder, "kept", train__steps=2)
    before = tiny_run.result(out)
    with pytest.raises(UserError, match="--overwrite"):
        run(folder, "kept", train__steps=2)
    assert tiny_run.result(out) == before
    run(folder, "kept", train__steps=1, overwrite=True)
    assert len([line for line in tiny_run.lines(out) if line["event"] == "train"]) == 1


def poisoned(monkeypatch: pytest.MonkeyPatch, *bad: int) -> None:
    """Rows on these lines of the file give a NaN gradient."""
    inner, joint = Updates._step, Updates._step_together

    def step(self: Updates, number: int, row: Any) -> Any:
        found, layout = inner(self, number, row)
        if row.origin.line in bad:
            found = Step(found.loss, found.grads.with_array(found.grads.array * float("nan")))
        return found, layout

    def together(self: Updates, rows: Any) -> Any:
        found, layout = joint(self, rows)
        if any(row.origin.line in bad for _, row in rows):
            found = Step(found.loss, found.grads.with_array(found.grads.array * float("nan")))
        return found, layout

    monkeypatch.setattr(Updates, "_step", step)
    monkeypatch.setattr(Updates, "_step_together", together)


@pytest.mark.parametrize("together", [1, 4])
def test_a_gradient_that_isnt_finite_is_skipped_and_its_row_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    poisoned(monkeypatch, 7)
    changes = {"train__grad_accumulation_steps": 4, "train__steps": 3, "engine__rows_together": together}
    events, out = run(folder, f"nan-{together}", **changes)
    warnings = [event.text for event in of(events, Notice) if event.level == "warning"]
    (text,) = [text for text in warnings if "update skipped" in text]
    assert "sft-train.jsonl:7:" in text
    assert text.count("sft-train.jsonl") == 1  # not the three rows beside it
    assert len(of(events, TrainStep)) == 2
    assert all(np.isfinite(np.array(value)).all() for value in mx.load(str(out / "adapters.safetensors")).values())  # type: ignore[union-attr]


def test_three_in_a_row_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, out = run(folder, "three", train__steps=4)
    poisoned(monkeypatch, *range(1, 13))
    with pytest.raises(RunFailed, match=r"3rd update in a row.*step-0000006") as error:
        run(folder, "three", train__steps=9, resume=True, force=True)
    assert "step 7" in str(error.value)
    found, _ = checkpoint.newest(out)
    assert found is not None
    assert all(np.isfinite(np.array(value)).all() for value in found.adapters.values())
    assert len(of(events, TrainStep)) == 4


def test_out_of_memory_names_the_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 123 bytes.")

    monkeypatch.setattr("segtrain.engine.backward.SegmentedBackward.step", fail)
    with pytest.raises(RunFailed, match=r"out of memory on .*sft-train\.jsonl:\d+ \(\d+ tokens\)"):
        run(folder, "oom")
    assert not is_out_of_memory(RuntimeError("shapes don't match"))


def test_prompts_are_sampled(folder: Path) -> None:
    changes = {"eval__prompts": ["w1 w2"], "eval__max_tokens": 4, "output__eval_every": 2, "train__steps": 2}
    _, out = run(folder, "samples", data__valid=str(folder / "sft-valid.jsonl"), **changes)
    samples = tiny_run.lines(out, "samples.jsonl")
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(0, "w1 w2"), (2, "w1 w2")]


def test_prompts_are_asked_as_rows_are_shown(folder: Path) -> None:
    """By the recipe's template and its arguments, which the tokenizer doesn't have."""
    recipe = tiny_run.recipe(
        folder,
        data__chat_template="w7 {{ messages[0].content }}{{ ' w8' if add_generation_prompt }} {{ end }}",
        data__chat_template_kwargs={"end": "w9"},
        eval__prompts=["w1 w2"],
    )
    loaded = load(recipe.model)
    ((tokens, _),) = prompts(loaded, recipe)
    assert loaded.tokenizer.decode(tokens) == "w7 w1 w2 w8 w9"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no') }}", "eval.prompts: the chat template refuses 'w1 w2': no"),
        ("{{ messages", "eval.prompts: the chat template refuses"),
    ],
)
def test_a_prompt_that_can_not_be_asked_is_refused_before_anything_runs(
    template: str, said: str, folder: Path, tmp_path: Path
) -> None:
    """Not at the run's end, where its last updates would be lost."""
    recipe = tiny_run.recipe(
        folder,
        output__dir=str(tmp_path / "run"),
        data__train=str(tiny_run.written(tmp_path / "text.jsonl", [{"text": "w1 w2 w3"}])),
        data__chat_template=template,
        eval__prompts=["w1 w2"],
    )
    with pytest.raises(UserError, match=said):
        list(Trainer(recipe).events())
    assert not (tmp_path / "run").exists()


def test_prompts_are_sampled_without_validation_rows_too(folder: Path) -> None:
    path = str(folder / "prompts alone")
    recipe = tiny_run.recipe(
        folder, output__dir=path, output__eval_every=2, train__steps=3, eval__prompts=["w1 w2"], eval__max_tokens=2
    )
    events = list(Trainer(recipe).events())
    assert [event.step for event in events if isinstance(event, Sampled)] == [0, 2, 3]
    assert not any(isinstance(event, Evaluated) for event in events)


def test_a_resumed_run_counts_its_own_steps(folder: Path) -> None:
    recipe = tiny_run.recipe(folder, output__dir=str(folder / "parts"), train__steps=4, output__save_every=3)
    events = Trainer(recipe).events()
    next(event for event in events if isinstance(event, Saved))
    events.close()  # type: ignore[attr-defined]
    (*_, ended) = Trainer(recipe, resume=True).events()
    assert isinstance(ended, RunEnded)
    assert (ended.first_step, ended.step) == (3, 4)


def test_spikes() -> None:
    losses = RunningLoss()
    draw = np.random.default_rng(0)
    assert not any(losses.spikes(float(x)) for x in draw.normal(2, 0.2, 500))
    mean = losses.mean
    assert losses.spikes(9.0)
    assert losses.mean - mean < 0.1  # a spike doesn't move what is usual
    assert not losses.spikes(2.1)


def test_no_spike_before_there_is_a_usual_loss() -> None:
    losses = RunningLoss()
    assert not any(losses.spikes(x) for x in [1.0] * (SETTLED - 1) + [50.0])


def test_growth_of_the_process_is_said_once() -> None:
    growth = Growth()

    def read(step: int, rss: float) -> list[Notice]:
        return growth(step, Memory(0.0, 0.0, 0.5, rss + 0.5))

    assert not any(read(step, 2.0) for step in range(WARM_UP))
    assert not read(101, 2.0 * ALLOWANCE + SLACK - 0.1)
    assert read(102, 2.0 * ALLOWANCE + SLACK + 0.1)
    assert not read(103, 90.0)


def test_a_device_cache_hides_no_growth_of_the_host() -> None:
    """On CUDA the allocator's cache isn't memory of the process."""

    def warned(unified: bool) -> bool:
        growth = Growth(unified)
        readings = [(20.0, 2.0)] * WARM_UP + [(20.0, 21.0)]  # GiB of cache, of the process
        return any(growth(step, Memory(0.0, 0.0, cache, rss)) for step, (cache, rss) in enumerate(readings))

    assert warned(unified=False)
    assert not warned(unified=True)


def test_state_round_trip() -> None:
    state = RunState(step=3, rows=6, losses=RunningLoss(0.1, 1 / 3, 3))
    assert RunState.from_json(json.loads(json.dumps(state.as_json()))) == state
    state.best_loss, state.best_step = 1.25, 2
    assert RunState.from_json(json.loads(json.dumps(state.as_json()))) == state


def test_the_lines_of_a_pair_have_the_objectives_metrics() -> None:
    assert set(objectives.orpo().metrics) == ORPO - {"shared_tokens"}
