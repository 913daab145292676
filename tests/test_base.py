"""`quantize` in the recipe: the copy is what `mlx_lm.convert -q` makes, made once, and found by every command.

The cache is that of the tests (conftest.py).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import tiny_configs
import tiny_run
from test_merging import distance, logits, weights

from segtrain import cli
from segtrain.errors import UserError
from segtrain.event import Notice
from segtrain.memory import anatomy, machine
from segtrain.memory.source import find
from segtrain.models import quantise
from segtrain.models.convert import convert
from segtrain.recipe.schema import Recipe, load_recipe
from segtrain.run import base as base_module
from segtrain.run.base import base, pending, planned
from segtrain.run.trainer import Trainer

KINDS: list[int | str] = [4, 8, "mxfp4", "nvfp4"]


def recipe(folder: Path, seed: int = 0, **changes: Any) -> Recipe:
    """Over a model of its own for each `seed`, so that no other test has quantised it."""
    if not (folder / "model").exists():
        tiny_run.model(
            folder / "model",
            hidden_size=64,
            intermediate_size=64,
            torch_dtype="float32",
            seed_of_test=f"{folder.name}{seed}",
        )
    return tiny_run.recipe(folder, **{"quantize": 4, **changes})


def by_mlx_lm(source: Path, out: Path, kind: int | str) -> Path:
    bits, mode = (kind, "affine") if isinstance(kind, int) else (None, kind)
    mlx_lm.convert(str(source), str(out), quantize=True, q_bits=bits, q_mode=mode)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_is_mlx_lms(kind: int | str, tmp_path: Path) -> None:
    made = recipe(tmp_path, quantize=kind)
    place = Path(base(made))
    wanted = by_mlx_lm(tmp_path / "model", tmp_path / "wanted", kind)
    found, expected = weights(place), weights(wanted)
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)
    assert json.loads((place / "config.json").read_text()) == json.loads((wanted / "config.json").read_text())
    assert {path.name for path in wanted.iterdir()} - {path.name for path in place.iterdir()} == {"README.md"}


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_rows_are_quantised_in_pieces(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' too, with a last piece of fewer rows."""
    source = tiny_configs.save("qwen3_moe", tmp_path / "source", hidden_size=64)
    sizes, real = [], mx.quantize
    for piece, name in ((1 << 16, "whole"), (7 * 64, "pieces")):
        monkeypatch.setattr(quantise, "PIECE", piece)
        monkeypatch.setattr(mx, "quantize", lambda w, *a, **k: (sizes.append(w.size), real(w, *a, **k))[1])
        (tmp_path / name).mkdir()
        convert(source, tmp_path / name, kind)
    whole, pieces = weights(tmp_path / "whole"), weights(tmp_path / "pieces")
    assert whole.keys() == pieces.keys()
    assert all(mx.array_equal(whole[name], pieces[name]) for name in whole)
    assert sizes.count(7 * 64) > 50


@pytest.mark.parametrize("name", ["gemma4", "qwen3_moe", "lfm2_moe", "deepseek_v3"])
def test_other_families_and_their_dtype(name: str, tmp_path: Path) -> None:
    """The dtype that `config.json` names, and the model's own choice of what is quantised."""
    source = tiny_configs.save(name, tmp_path / "source", hidden_size=64, torch_dtype="bfloat16")
    tokenizer = tiny_run.model(tmp_path / "words")
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, source)
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", 4)
    wanted = by_mlx_lm(source, tmp_path / "wanted", 4)
    found, expected = weights(tmp_path / "out"), weights(wanted)
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)
    assert mx.bfloat16 in {array.dtype for array in found.values()}


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path)
    assert pending(made).startswith(
        f"quantising {made.model} (4), once: the copy is kept in {machine.cache()}/models/model-4-"
    )
    place = base(made)
    assert pending(made) == ""
    monkeypatch.setattr("segtrain.models.convert.convert", lambda *_, **__: pytest.fail("made again"))
    assert base(made) == place
    others = recipe(tmp_path, quantize=8), recipe(tmp_path / "two", seed=1)
    assert len({place, *(str(base_module._place(one, Path(one.model))) for one in others)}) == 3
    assert base(recipe(tmp_path, quantize=None)) == str(tmp_path / "model")


def test_two_processes_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = recipe(tmp_path), []
    monkeypatch.setattr("segtrain.models.convert.convert", lambda *a, **k: (calls.append(1), convert(*a, **k)))
    threads = [threading.Thread(target=base, args=(made,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


def test_a_kill_leaves_no_half_copy(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    script = (
        "import sys, time; from segtrain.models import saving; from segtrain.recipe.schema import load_recipe\n"
        "from segtrain.run.base import base\n"
        "real = saving._bytes\n"
        "def slow(name, array):\n    print(name, flush=True); time.sleep(0.2); return real(name, array)\n"
        "saving._bytes = slow\n"
        "base(load_recipe(sys.argv[1]))\n"
    )
    file = tiny_run.recipe_file(tmp_path, quantize=4)
    environment = {**tiny_run.ENVIRONMENT, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, env=environment, cwd=tiny_run.ROOT
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert pending(made)
    place = Path(base(made))
    assert len(weights(place)) > 20
    assert not place.with_name(f".{place.name}.unfinished").exists()


# --- commands ---------------------------------------------------------------------------------------------------------


def test_a_run_and_what_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recipe(tmp_path, data__valid=str(tmp_path / "sft-valid.jsonl"), output__dir=str(tmp_path / "run"))
    said = [event.text for event in Trainer(made).events() if isinstance(event, Notice)]
    assert [text for text in said if text.startswith("quantising")] != []
    place, run = base(made), tmp_path / "run"
    config = json.loads((run / "adapter_config.json").read_text())
    assert (config["model"], config["segtrain"]["made_from"]) == (place, made.model)
    kept = load_recipe(run / "recipe.yaml")
    assert (kept.model, kept.quantize) == (made.model, 4)
    model, *_ = mlx_lm.load(place, adapter_path=str(run))  # as mlx_lm.generate --adapter-path does with its --model
    assert isinstance(model.model.layers[0].self_attn.q_proj.linear, nn.QuantizedLinear)

    longer = recipe(tmp_path, output__dir=str(tmp_path / "run"), train__steps=7, data__valid=made.data.valid[0].path)
    said = [event.text for event in Trainer(longer, resume=True).events() if isinstance(event, Notice)]
    assert [text for text in said if text.startswith("quantising")] == []

    shutil.rmtree(place)  # a cache may be emptied
    test = tiny_run.completions(tmp_path / "test.jsonl", 4, seed=5)
    capsys.readouterr()
    assert cli.run(["eval", str(run), "--data", str(test), "--json"]) == 0
    captured = capsys.readouterr()
    assert "note: quantising" in captured.err
    assert json.loads(captured.out)["rows"] == 4
    assert cli.run(["export", str(run), "--format", "merged", "--out", str(tmp_path / "merged")]) == 0
    assert distance(logits(tmp_path / "merged"), logits(Path(place), run)) < 1e-4
    assert cli.run(["export", str(run), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    assert "quantised for MLX" not in capsys.readouterr().err
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["base_model_name_or_path"] == made.model


def test_an_export_that_needs_no_copy_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    made = recipe(tmp_path)
    for _ in Trainer(made).events():
        pass
    shutil.rmtree(base(made))
    assert cli.run(["export", str(tmp_path / "run"), "--format", "gguf", "--out", str(tmp_path / "a.gguf")]) == 0
    assert "quantising" not in capsys.readouterr().err
    assert pending(made)


def test_mlx_lm_is_given_the_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recipe(tmp_path)
    assert cli.run(["sft", str(tiny_run.recipe_file(tmp_path, quantize=4))]) == 0
    assert f"mlx_lm.generate --model {base(made)}" in "".join(capsys.readouterr().out.split("\n"))


def test_another_quantisation_is_another_run(tmp_path: Path) -> None:
    for _ in Trainer(recipe(tmp_path)).events():
        pass
    changed = recipe(tmp_path, quantize=8)
    with pytest.raises(UserError, match=r"made with other settings: .*quantize: 4 → 8"):
        list(Trainer(changed, resume=True).events())


@pytest.mark.parametrize("command", ["plan-segments", "doctor", "verify-grads"])
def test_commands_with_a_recipe(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planning and the doctor need no copy; the gradients do."""
    recipe(tmp_path)  # for its model
    file = tiny_run.recipe_file(tmp_path, quantize="mxfp4" if command == "doctor" else 4)
    assert cli.run([command, str(file)]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert ("note: quantising" in captured.err) == (command == "verify-grads")
    assert (pending(load_recipe(file)) == "") == (command == "verify-grads")
    if command == "doctor":
        assert "mxfp4, groups of 32" in captured.out


# By day all kinds on one model, and two on the others.
PLANNED = [
    pytest.param(name, kind, marks=() if name == "llama" or kind in (4, "mxfp4") else pytest.mark.slow)
    for name in ("llama", "qwen3_moe", "gemma4")
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "kind"), PLANNED)
def test_what_is_planned_is_what_is_made(name: str, kind: int | str, tmp_path: Path) -> None:
    source = tiny_configs.save(name, tmp_path / "source", hidden_size=64, torch_dtype="float32")
    config, size = anatomy.quantised(find(str(source)).config, kind)
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", kind)
    made = find(str(tmp_path / "out"))
    assert config["quantization"] == made.config["quantization"]
    assert size == made.weights
    shape = anatomy.of_config(config, "cpu")
    assert shape.bytes == anatomy.of_config(made.config, "cpu").bytes
    assert shape.packed


def test_planning_uses_the_copy_where_there_is_one(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    before = planned(made)
    place = base(made)
    assert planned(made).name == place
    assert (planned(made).weights, planned(made).config["quantization"]) == (
        before.weights,
        before.config["quantization"],
    )
    assert before.weights is not None
    assert before.weights < (find(made.model).weights or 0) / 3


@pytest.mark.parametrize("command", ["sft", "check", "plan-segments", "doctor", "verify-grads"])
def test_a_quantised_model_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = base(recipe(tmp_path))
    file = tiny_run.recipe_file(tmp_path, model=place, quantize=8)
    assert cli.run([command, str(file)]) == 2
    message = (
        f"quantize: {place} is quantised already (4 bits, groups of 64); leave quantize out, or give the model that"
    )
    assert message in capsys.readouterr().err


def test_a_model_too_narrow_is_refused(tmp_path: Path) -> None:
    tiny_run.model(tmp_path / "model")  # rows of 16 and 32
    made = tiny_run.recipe(tmp_path, quantize=8)
    with pytest.raises(UserError, match=r"quantize: 8: no layer of .* has rows that groups of 64 divide"):
        base(made)
    assert pending(made)


def test_the_key_is_checked(tmp_path: Path) -> None:
    for value in (5, "4", "q4_0", True):
        with pytest.raises(UserError, match="quantize must be one of null, 4, 8, mxfp4, nvfp4, not"):
            recipe(tmp_path, quantize=value)
