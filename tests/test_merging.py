"""Merged models. Expected values: the base with its adapter as mlx-lm runs them, and W + scale * A B in NumPy."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
import tiny_configs
import tiny_run
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_adapters, load_model, quantize_model

from segtrain import cli
from segtrain.errors import UserError
from segtrain.lora import adapters
from segtrain.lora.layers import attach
from segtrain.recipe.schema import LoraRecipe, load_recipe
from segtrain.run import comparison
from segtrain.run.merging import export_merged
from segtrain.run.trainer import Trainer
from segtrain.storage.checkpoint import write_adapters

TOKENS = mx.array([[3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 2]])
KINDS: dict[str, dict[str, Any]] = {
    "4": {"group_size": 32, "bits": 4},
    "8": {"group_size": 32, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
FAMILIES = ["llama", "qwen2", "mixtral", "qwen3_moe", "gemma4", "gemma4_text", "gemma3n", "deepseek_v3", "lfm2"]


def saved(directory: Path, name: str, *, packed: str = "", dtype: mx.Dtype = mx.float32, **changes: Any) -> Path:
    """A model in `dtype`, quantised as `KINDS[packed]`."""
    tiny_configs.save(name, directory, **changes)
    config = json.loads((directory / "config.json").read_text())
    model, config = load_model(directory)
    model.update(tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters()))
    if packed:
        kind = {"mode": "affine", **KINDS[packed]}
        model, config = quantize_model(model, config, **kind, quant_predicate=lambda *_: True)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def adapted(base: Path, run: Path, **options: Any) -> Path:
    """An adapter directory with a random B, as training writes it."""
    model, _ = load_model(base)
    lora = attach(model, rank=4, scale=2.0, **options)
    random = np.random.default_rng(0)
    lora.set({n: mx.array(random.normal(0, 0.1, v.shape).astype(np.float32)) for n, v in lora.values().items()})
    config = adapters.mlx_config(
        LoraRecipe(rank=4),
        model=str(base),
        layers_total=len(lora.layers),
        lowest=lora.lowest,
        keys=lora.keys,
        rank=4,
        scale=2.0,
        dropout=0.0,
    )
    run.mkdir()
    write_adapters(run, lora.values(), config)
    return run


def logits(directory: Path, adapter: Path | None = None, dtype: mx.Dtype | None = None) -> np.ndarray:
    """Of stock mlx-lm; with `dtype`, of the weights cast to it."""
    model, _ = load_model(directory)
    if adapter:
        load_adapters(model, str(adapter))
    if dtype:
        model.update(
            tree_map(lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
        )
    return np.array(model.eval()(TOKENS).astype(mx.float32))


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def weights(directory: Path) -> dict[str, mx.array]:
    files = sorted(directory.glob("model*.safetensors"))
    return {name: array for file in files for name, array in mx.load(str(file)).items()}


# --- what a merged model computes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", ["", "4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_base_and_adapter(name: str, packed: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", name, packed=packed)
    run = adapted(base, tmp_path / "run")
    export_merged(run, tmp_path / "out", recipe=None)
    wanted = logits(base, run)
    assert distance(logits(base), wanted) > 0.02  # the adapter does something
    assert distance(logits(tmp_path / "out"), wanted) < 1e-4
    assert "quantization" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("packed", ["", *KINDS])
def test_in_bfloat16_it_is_as_near_to_the_truth(packed: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama", packed=packed, dtype=mx.bfloat16)
    run = adapted(base, tmp_path / "run")
    export_merged(run, tmp_path / "out", recipe=None)
    assert {array.dtype for array in weights(tmp_path / "out").values()} == {mx.bfloat16}
    dense, truth = tmp_path / "out", tmp_path / "truth"
    if packed:  # a float32 model of the same packed weights
        saved(tmp_path / "float32", "llama", packed=packed)
        export_merged(adapted(tmp_path / "float32", tmp_path / "run32"), truth, recipe=None)
        wanted = logits(truth)
    else:
        wanted = logits(base, run, dtype=mx.float32)
    assert distance(logits(dense), wanted) <= 1.1 * distance(logits(base, run), wanted) + 1e-3


def test_one_weight_is_rounded_once(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama", dtype=mx.bfloat16)
    run = adapted(base, tmp_path / "run", targets=["q_proj"])
    export_merged(run, tmp_path / "out", recipe=None)
    name = "model.layers.1.self_attn.q_proj"
    params = mx.load(str(run / "adapters.safetensors"))
    w = np.array(weights(base)[f"{name}.weight"].astype(mx.float32))
    wanted = w + 2.0 * (np.array(params[f"{name}.lora_a"]) @ np.array(params[f"{name}.lora_b"])).T
    found = weights(tmp_path / "out")
    error = np.abs(np.array(found[f"{name}.weight"].astype(mx.float32)) - wanted)
    assert np.all(error <= 1.001 * 2**-8 * np.abs(wanted) + 1e-7)  # half a unit in the last place
    untouched = "model.layers.1.self_attn.k_proj.weight"
    assert mx.array_equal(found[untouched], weights(base)[untouched])


@pytest.mark.parametrize("packed", ["", "4"])
@pytest.mark.parametrize(("tied", "key"), [(True, "model.embed_tokens"), (False, "lm_head")])
def test_adapters_outside_of_the_layers(packed: str, tied: bool, key: str, tmp_path: Path) -> None:
    """mlx-lm trains embeddings and the head too; a tied one is both."""
    base = saved(tmp_path / "base", "llama", packed=packed, tie_word_embeddings=tied)
    parameters = {"rank": 4, "scale": 3.0, "dropout": 0.0, "keys": [key, "self_attn.q_proj"]}
    model, _ = load_model(base)
    model.freeze()
    linear_to_lora_layers(model, 4, parameters)
    mx.random.seed(0)
    params = {n: 0.1 * mx.random.normal(v.shape) for n, v in tree_flatten(model.trainable_parameters())}
    run = tmp_path / "run"
    run.mkdir()
    write_adapters(
        run, params, {"fine_tune_type": "lora", "model": str(base), "num_layers": 4, "lora_parameters": parameters}
    )
    export_merged(run, tmp_path / "out", recipe=None)
    assert distance(logits(tmp_path / "out"), logits(base, run)) < 1e-4


def test_what_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    run = adapted(base, tmp_path / "run")
    params = mx.load(str(run / "adapters.safetensors"))
    config = json.loads((run / "adapter_config.json").read_text())
    wide = {n: mx.concatenate([v, v]) if "0.self_attn.q_proj.lora_a" in n else v for n, v in params.items()}
    half = {n: v for n, v in params.items() if n != "model.layers.0.self_attn.q_proj.lora_b"}
    for changed, message in (
        ({f"language_{n}": v for n, v in params.items()}, "language_model.layers.0.mlp.down_proj is no layer of this"),
        ({**params, "lm_heads.lora_a": mx.zeros((2, 2))}, "the adapter's lm_heads is no layer of this model"),
        (wide, r"0.self_attn.q_proj doesn't suit this model: it makes a matrix of shape \[32, 64\]"),
        (half, "0.self_attn.q_proj doesn't suit this model: it lacks 'lora_b'"),
    ):
        write_adapters(run, changed, config)
        with pytest.raises(UserError, match=message):
            export_merged(run, tmp_path / "out", recipe=None)
    write_adapters(run, params, config)
    for quantize, message in (("base", "--quantize base: .* isn't quantised; leave --quantize out"),):
        with pytest.raises(UserError, match=message):
            export_merged(run, tmp_path / "out", recipe=None, quantize=quantize)
    assert not (tmp_path / "out").exists()


# --- quantised again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", ["", "4"])
@pytest.mark.parametrize("kind", [4, 8, "mxfp4", "nvfp4"])
def test_quantised_as_mlx_lm_would(kind: int | str, packed: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama", packed=packed, hidden_size=64)
    run = adapted(base, tmp_path / "run")
    export_merged(run, tmp_path / "dense", recipe=None)
    (notice,) = export_merged(run, tmp_path / "out", recipe=None, quantize=kind)
    assert "no rows to measure" in notice
    model, config = load_model(tmp_path / "dense")
    bits, mode = (kind, "affine") if isinstance(kind, int) else (None, kind)
    model, config = quantize_model(model, config, None, bits, mode=mode)
    wanted = dict(tree_flatten(model.parameters()))
    found = weights(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert all(mx.array_equal(found[name], wanted[name]) for name in wanted)
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization"] == config["quantization"]
    assert logits(tmp_path / "out").shape[-1] == tiny_configs.VOCAB


@pytest.mark.parametrize("packed", KINDS)
def test_quantised_as_the_base(packed: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "mixtral", packed=packed)
    run = adapted(base, tmp_path / "run", targets=["q_proj", "gate_proj"])
    export_merged(run, tmp_path / "out", recipe=None, quantize="base")
    before, after = weights(base), weights(tmp_path / "out")
    changed = {name for name in before if not mx.array_equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "gate_proj"}
    assert isinstance(load_model(tmp_path / "out")[0].model.layers[0].self_attn.q_proj, nn.QuantizedLinear)


def test_the_loss_before_and_after_is_said() -> None:
    rows = "7 validation rows"
    assert comparison.said(2.0, 1.8, 1.85, rows) == (
        "loss on 7 validation rows: 2.0000 base, 1.8000 with the adapter, 1.8500 merged and quantised "
        "(75% of what training gained)"
    )
    assert comparison.said(2.0, 1.8, 1.95, rows).endswith(
        "(25% of what training gained; a dense model keeps all of it: leave --quantize out)"
    )
    assert comparison.said(1.8, 2.0, 1.9, rows).endswith("1.9000 merged and quantised")


# --- runs and commands ------------------------------------------------------------------------------------------------


def trained(folder: Path, loss: str = "sft", **changes: Any) -> Path:
    tiny_run.model(folder / "model", hidden_size=64, intermediate_size=64)
    recipe = tiny_run.recipe(folder, loss, output__dir=str(folder / "run"), **changes)
    for _ in Trainer(recipe, loss).events():
        pass
    return folder / "run"


def nats(directory: Path, adapter: Path | None, rows: list[dict[str, str]], answer: str) -> float:
    """Mean over the tokens of all answers, by stock mlx-lm."""
    model, tokenizer, *_ = mlx_lm.load(str(directory), adapter_path=adapter and str(adapter))
    total, count = 0.0, 0
    for row in rows:
        start = tokenizer.encode(row["prompt"])
        ids = [*start, *tokenizer.encode(row[answer].strip(), add_special_tokens=False), tokenizer.eos_token_id]
        z = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
        logp = z - mx.logsumexp(z, axis=-1, keepdims=True)
        total -= sum(logp[place - 1, ids[place]].item() for place in range(len(start), len(ids)))  # type: ignore[misc]
        count += len(ids) - len(start)
    return total / count


@pytest.mark.parametrize(("loss", "answer", "valid"), [("sft", "completion", True), ("dpo", "chosen", False)])
def test_a_run_quantised_again(
    loss: str, answer: str, valid: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = tiny_run.kind_of(loss)
    run = trained(tmp_path, loss, **({"data__valid": str(tmp_path / f"{kind}-valid.jsonl")} if valid else {}))
    capsys.readouterr()
    out = tmp_path / "out"
    assert cli.run(["export", str(run), "--format", "merged", "--quantize", "4", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    part = "valid" if valid else "train"
    rows = [json.loads(line) for line in (tmp_path / f"{kind}-{part}.jsonl").read_text().splitlines()]
    base = tmp_path / "model"
    figures = [nats(base, None, rows, answer), nats(base, run, rows, answer), nats(out, None, rows, answer)]
    said = f"loss on {len(rows)} {'validation' if valid else 'training'} rows"
    wanted = [
        float(word) for word in captured.err.replace(",", " ").split() if word.count(".") == 1 and word[0].isdigit()
    ]
    assert captured.err.startswith(said), captured.err
    assert wanted[:3] == pytest.approx(figures, abs=2e-3)
    assert captured.out == f"wrote {out}\n"


def test_files_beside_the_weights(tmp_path: Path) -> None:
    run = trained(tmp_path, data__chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")
    base, out = tmp_path / "model", tmp_path / "out"
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (base / "hf_quant_config.json").write_text("{}")
    (base / "README.md").write_text("mine")
    export_merged(run, out, recipe=load_recipe(run / "recipe.yaml"))
    names = {path.name for path in out.iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    _, tokenizer, *_ = mlx_lm.load(str(out))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "w1 "
    assert tokenizer.eos_token_ids == {1, 2}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights(out).keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights(out).values())


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = saved(tmp_path / "base", "llama")
    run = adapted(base, tmp_path / "run")

    def small(arrays: dict[str, mx.array]) -> list[dict[str, mx.array]]:
        names = list(arrays)
        return [{name: arrays[name] for name in names[at : at + 9]} for at in range(0, len(names), 9)]

    monkeypatch.setattr("segtrain.models.saving.make_shards", small)
    export_merged(run, tmp_path / "out", recipe=None)
    assert len(list((tmp_path / "out").glob("model-0000*-of-00005.safetensors"))) == 5
    assert distance(logits(tmp_path / "out"), logits(base, run)) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--format merged --out {0}/file",
            "--out {0}/file: there is a file of that name; give another --out, or remove it",
        ),
        ("--format merged --out {0}/model", "--out {0}/model: there is a directory of that name"),
        ("--format merged --out {0}/file/x", "{0}/file is a file; give another --out"),
        ("--format peft --out {0}/file", "--out {0}/file: there is a file of that name; give the name of a directory"),
        ("--format mlx --quantize 4 --out {0}/x", "--quantize is for --format merged, not mlx; leave it out"),
        ("--format merged --model {0}/none --out {0}/x", "model: there is no directory {0}/none"),
    ],
)
def test_bad_requests(arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved(tmp_path / "model", "llama")
    adapted(base, tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert cli.run(["export", str(tmp_path / "run"), *arguments.format(tmp_path).split()]) == 2
    assert message.format(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_kill_leaves_nothing_of_that_name(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    run = adapted(base, tmp_path / "run")
    script = (
        "import sys, time; from pathlib import Path\n"
        "from segtrain.models import saving; from segtrain.run import merging\n"
        "real = saving._bytes\n"
        "def slow(name, array):\n    print(name, flush=True); time.sleep(0.2); return real(name, array)\n"
        "saving._bytes = slow\n"
        "merging.export_merged(Path(sys.argv[1]), Path(sys.argv[2]), recipe=None)\n"
    )
    command = [sys.executable, "-c", script, str(run), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=tiny_run.ENVIRONMENT, cwd=tiny_run.ROOT)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    export_merged(run, tmp_path / "out", recipe=None)
    assert distance(logits(tmp_path / "out"), logits(base, run)) < 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "run"]


def test_a_tensor_at_a_time(tmp_path: Path) -> None:
    """Memory doesn't follow the number of layers."""
    peaks = {}
    for layers in (2, 12):
        base = saved(
            tmp_path / f"base{layers}", "llama", num_hidden_layers=layers, hidden_size=128, intermediate_size=512
        )
        run = adapted(base, tmp_path / f"run{layers}")
        size = sum(array.nbytes for array in weights(base).values())
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        export_merged(run, tmp_path / f"out{layers}", recipe=None)
        peaks[layers] = (mx.get_peak_memory() - before, size)
    adapter = 12 * 4 * 4 * (4 * 256 + 3 * 640)  # bytes of A and B
    assert peaks[12][0] <= peaks[2][0] + adapter + 100_000
    assert peaks[12][0] < 0.5 * peaks[12][1]


def test_transformers_loads_a_dense_llama(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    base = saved(tmp_path / "base", "llama", architectures=["LlamaForCausalLM"])
    run = adapted(base, tmp_path / "run")
    export_merged(run, tmp_path / "out", recipe=None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor(TOKENS.tolist())).logits.numpy()
    assert distance(found, logits(base, run)) < 1e-4
