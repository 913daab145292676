"""`segtrain eval` against log-probs from mlx-lm's own model and adapter loading, row by row."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import tiny_run
from processes import ended, start_ranks

from segtrain import cli
from segtrain.models.weights import Streamed
from segtrain.recipe.schema import load_recipe
from segtrain.run.trainer import Trainer
from segtrain.storage.run_directory import best


def trained(folder: Path, loss: str, **changes: Any) -> Path:
    recipe = tiny_run.recipe(folder, loss, output__dir=str(folder / loss), **changes)
    for _ in Trainer(recipe, loss).events():
        pass
    return Path(recipe.output.dir)


def logps(model: Any, tokenizer: Any, prompt: str, answer: str) -> list[float]:
    """Log-probs of the answer's tokens and the end of the turn."""
    start = tokenizer.encode(prompt)
    ids = [*start, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    z = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
    logp = z - mx.logsumexp(z, axis=-1, keepdims=True)
    return [logp[place - 1, ids[place]].item() for place in range(len(start), len(ids))]  # type: ignore[misc]


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.run(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def models(folder: Path, adapter: Path) -> dict[str, tuple[Any, Any]]:
    """Stock mlx-lm's, with the adapter and without."""
    load = mlx_lm.load
    return {
        "adapter": load(str(folder / "model"), adapter_path=str(adapter))[:2],
        "base": load(str(folder / "model"))[:2],
    }


def test_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, "sft", output__eval_every=2, data__valid=str(tmp_path / "sft-valid.jsonl"))
    test = tiny_run.completions(tmp_path / "test.jsonl", 7, seed=5)
    found = evaluated(capsys, str(run), "--data", str(test), "--base")
    assert (found["rows"], found["command"], found["adapter"]) == (7, "sft", str(best(run)))
    for name, (model, tokenizer) in models(tmp_path, Path(found["adapter"])).items():
        rows = [json.loads(line) for line in test.read_text().splitlines()]
        each = [logps(model, tokenizer, row["prompt"], row["completion"].strip()) for row in rows]
        nats = -sum(map(sum, each)) / sum(map(len, each))
        assert found["models"][name] == pytest.approx({"loss": nats, "perplexity": math.exp(nats)}, rel=1e-4)
        assert found["tokens"] == sum(map(len, each))
    assert found["models"]["adapter"]["loss"] < found["models"]["base"]["loss"]


def test_weights_on_disk_stay_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = tiny_run.preferences(tmp_path / "test.jsonl", 6, seed=5)
    run = trained(tmp_path, "dpo", data__test=str(test))
    inside = evaluated(capsys, str(run), "--base")
    recipe = (run / "recipe.yaml").read_text()
    assert "weights: auto" in recipe
    (run / "recipe.yaml").write_text(recipe.replace("weights: auto", "weights: streamed"))
    read = []
    whole = Streamed.held
    monkeypatch.setattr(Streamed, "held", lambda self, lo, hi: read.append((lo, hi)) or whole(self, lo, hi))
    outside = evaluated(capsys, str(run), "--base")
    assert {lo for lo, _ in read} == {0, 1, 2}  # its layers, each by itself
    for name, figures in inside["models"].items():
        assert outside["models"][name] == pytest.approx(figures, rel=1e-4)


def test_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = tiny_run.preferences(tmp_path / "test.jsonl", 6, seed=5)
    run = trained(tmp_path, "dpo", data__test=str(test), engine__rows_together=4)
    found = evaluated(capsys, str(run), "--base")
    rows = [json.loads(line) for line in test.read_text().splitlines()]
    sums: dict[str, list[list[float]]] = {}
    for name, (model, tokenizer) in models(tmp_path, Path(found["adapter"])).items():
        pairs = [
            [logps(model, tokenizer, row["prompt"], row[side].strip()) for side in ("chosen", "rejected")]
            for row in rows
        ]
        leads = [sum(c) / len(c) - sum(r) / len(r) for c, r in pairs]
        nats = -sum(sum(c) for c, _ in pairs) / sum(len(c) for c, _ in pairs)
        figures = found["models"][name]
        assert figures["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
        assert figures["chosen_lead"] == pytest.approx(sum(leads) / 6, rel=1e-3, abs=1e-4)
        assert figures["chosen_likelier"] == pytest.approx(sum(lead > 0 for lead in leads) / 6)
        sums[name] = [[sum(c), sum(r)] for c, r in pairs]
    margins = [0.1 * ((a[0] - b[0]) - (a[1] - b[1])) for a, b in zip(sums["adapter"], sums["base"], strict=True)]
    adapter, base = found["models"]["adapter"], found["models"]["base"]
    assert adapter["rewards_margins"] == pytest.approx(sum(margins) / 6, rel=1e-3, abs=1e-4)
    assert adapter["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 6)
    assert (base["rewards_margins"], base["loss"]) == pytest.approx((0.0, math.log(2)), abs=1e-5)
    assert adapter["loss"] < base["loss"]


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_beside_the_model_that_the_run_began_with(
    loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained(tmp_path, "orpo", train__steps=2)
    test = tiny_run.preferences(tmp_path / "test.jsonl", 6, seed=5)
    run = trained(tmp_path, loss, lora={"rank": 2, "init_from": str(first)})
    found = evaluated(capsys, str(run), "--data", str(test), "--base")["models"]
    before = evaluated(capsys, str(first), "--data", str(test), "--base")["models"]
    assert list(found) == ["adapter", "start", "base"]
    for name in ("perplexity", "chosen_likelier", "chosen_lead"):
        assert found["start"][name] == pytest.approx(before["adapter"][name], rel=1e-4, abs=1e-5)
        assert found["base"][name] == pytest.approx(before["base"][name], rel=1e-4, abs=1e-5)
    assert found["start"]["perplexity"] != pytest.approx(found["base"]["perplexity"], rel=1e-3)
    if loss == "dpo":
        assert found["start"]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert found["start"]["rewards_margins"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "sizes"), [("sft", (2, 4)), ("dpo", (2,)), pytest.param("dpo", (4,), marks=pytest.mark.slow)]
)
def test_ranks_share_the_rows_and_find_the_same(
    loss: str, sizes: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, loss, train__steps=2)
    make = tiny_run.preferences if loss == "dpo" else tiny_run.completions
    arguments = [str(run), "--data", str(make(tmp_path / "test.jsonl", 3, seed=5)), "--base"]
    expected = evaluated(capsys, *arguments)
    for size in sizes:  # the last one of 4 gets no row
        folder = tmp_path / str(size)
        folder.mkdir()
        ranks = start_ranks(["eval", *arguments, "--json"], folder, size)
        assert [ended(rank) for rank in ranks] == [0] * size
        (line,) = [text for text in (folder / "rank-0.log").read_text().splitlines() if text.startswith("{")]
        assert json.loads(line) == expected
        assert not any("models" in (folder / f"rank-{rank}.log").read_text() for rank in range(1, size))


def test_the_table_and_the_last_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    valid = str(tmp_path / "sft-valid.jsonl")
    run = trained(tmp_path, "sft", output__eval_every=2, data__valid=valid, output__save_every=1)
    last = evaluated(capsys, str(run), "--data", valid, "--last")
    assert last["adapter"].endswith("step-0000006")
    assert list(last["models"]) == ["adapter"]
    lines = [line for line in tiny_run.lines(run) if line["event"] == "eval"]
    assert last["models"]["adapter"]["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-5)
    assert evaluated(capsys, str(run), "--data", valid)["models"]["adapter"]["loss"] == pytest.approx(
        min(line["loss"] for line in lines[1:]), rel=1e-5
    )
    assert cli.run(["eval", str(run), "--data", valid, "--base"]) == 0
    out = capsys.readouterr().out
    assert f"{min(line['loss'] for line in lines[1:]):.4f}" in out
    assert {"sft", "adapter", "base", "loss", "perplexity"} <= set(out.split())
    assert f"5 rows of {valid}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "there is no test file beside data.train; give rows with --data FILE"),
        ("file", "no such file"),
        ("rank", "doesn't fit the run's recipe"),
        ("checkpoints", "holds no checkpoint"),
        ("recipe", "is no run directory"),
        ("pairs", "pairs need the fields chosen and rejected"),
    ],
)
def test_what_cannot_be_evaluated(
    tmp_path: Path, change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "simpo" if change == "pairs" else "sft", train__steps=1)
    data = ["--data", str(tmp_path / ("sft-valid.jsonl"))]
    if change == "none":
        data = []
    if change == "file":
        data = ["--data", str(tmp_path / "gone.jsonl")]
    if change == "rank":
        path = run / "recipe.yaml"
        path.write_text(path.read_text().replace("rank: 2", "rank: 3"))
        assert load_recipe(path).lora.rank == 3
    if change == "checkpoints":
        (run / "checkpoints").rename(run / "elsewhere")
    if change == "recipe":
        (run / "recipe.yaml").unlink()
    assert cli.run(["eval", str(run), *data]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
