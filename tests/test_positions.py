"""Rows longer than what a model's positions were made for: refused where learnt, said where computed."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_configs
import tiny_run

from segtrain.attention import dispatch
from segtrain.cli import run as command_line
from segtrain.errors import UserError
from segtrain.models.positions import check_positions, learnt, pads, positions

GPT2 = {"model_type": "gpt2", "n_positions": 128}


@pytest.mark.parametrize(
    ("config", "longest", "said"),
    [
        (GPT2, 128, None),
        (GPT2, 129, "error"),
        ({"model_type": "llama", "max_position_embeddings": 64}, 64, None),
        ({"model_type": "llama", "max_position_embeddings": 64}, 65, "beyond the 64 positions"),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 64}}, 65, "beyond the 64 positions"),
        ({"model_type": "llama"}, 10**6, None),
    ],
)
def test_what_is_said_of_rows(config: dict[str, Any], longest: int, said: str | None) -> None:
    if said == "error":
        with pytest.raises(UserError, match=r"129 tokens don't fit the 128 positions .* data\.max_seq_length to 128"):
            check_positions(config, longest)
    else:
        assert [said in text for text in check_positions(config, longest) if said] == ([True] if said else [])
    assert (learnt(config) is None) == (config is not GPT2)
    assert positions({"model_type": "x"}) is None


@pytest.fixture
def learnt_run(tmp_path: Path) -> Path:
    """A recipe for a gpt2 of 128 positions, with a row of 150 tokens."""
    model = tiny_run.model(tmp_path / "words")  # its tokenizer
    target = tiny_configs.save("gpt2", tmp_path / "model", vocab_size=64)
    for file in model.glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    rows = [{"text": "w1 w2 w3"}] * 3 + [{"text": "w1 " * 150}]
    tiny_run.written(tmp_path / "train.jsonl", rows)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(tiny_run.mapping(tmp_path, data__train=str(tmp_path / "train.jsonl"))))
    return path


@pytest.mark.parametrize("command", ["sft", "check", "verify-grads"])
def test_a_row_beyond_a_learnt_table_is_refused(
    command: str, learnt_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, str(learnt_run), "--set", "data.max_seq_length=200"]
    assert command_line(arguments) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "152 tokens don't fit the 128 positions" in said or "151 tokens don't fit the 128 positions" in said
    assert command_line([command, str(learnt_run), "--set", "data.max_seq_length=128"]) == 0  # as it says


@pytest.mark.parametrize(
    ("name", "padded"), [("llama", True), ("gpt2", False), ("internlm2", False), ("internlm3", False)]
)
def test_rows_are_padded_only_where_that_changes_nothing(name: str, padded: bool) -> None:
    changes = {
        "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 16,
    }
    config = {**tiny_configs.CONFIGS[name], **(changes if name.startswith("internlm") else {})}
    model = tiny_configs.build_config(config)
    assert pads(model, {"model_type": name, "n_positions": 128}) == padded
    tokens = mx.arange(1, 21)[None]
    longer = mx.concatenate([tokens, mx.ones((1, 12), mx.int32)], axis=1)
    same = bool(mx.allclose(model(tokens), model(longer)[:, :20], atol=1e-5))
    assert same == (padded or name == "gpt2")
    assert dispatch.align(dispatch.BACKENDS["cuda"]) == 128


def test_a_generation_ends_with_a_learnt_table(learnt_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond it tokens would be made of memory that isn't the table's."""
    options = ["--set", "data.max_seq_length=64", "--set", "eval.max_tokens=500", "--set", "train.steps=1", "--set"]
    long = f"eval.prompts=['{'w1 ' * 120}']"
    assert command_line(["sft", str(learnt_run), *options, long]) == 0
    samples = tiny_run.lines(learnt_run.parent / "run", "samples.jsonl")
    assert [0 < len(sample["text"].split()) <= 8 for sample in samples] == [True]
    capsys.readouterr()
    assert command_line(["sft", str(learnt_run), "--overwrite", *options, f"eval.prompts=['{'w1 ' * 128}']"]) == 2
    assert "128 tokens, which leaves no room for an answer in the 128 positions" in capsys.readouterr().err
