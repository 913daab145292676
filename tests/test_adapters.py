"""Adapter files. Expected values: mlx-lm itself loading or fusing them, and W + scale * A B in NumPy.

The comparison with torch and peft is in test_peft.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, mixtral
from mlx_lm.utils import load_adapters, load_model

from segtrain.errors import UserError
from segtrain.lora import adapters, peft
from segtrain.lora.layers import Lora, attach
from segtrain.recipe.schema import LoraRecipe
from segtrain.storage.checkpoint import write_adapters

TOKENS = mx.array([[1, 5, 9, 2, 7]])
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
CLASSES: dict[str, Any] = {"llama": llama, "mixtral": mixtral}
CASES = {
    "all": {},
    "last two": {"layers": (2, 4)},
    "middle": {"layers": (1, 3)},
    "q and down": {"targets": ["q_proj", "*mlp.down_proj"]},
}


def saved_model(directory: Path, model_type: str = "llama") -> Path:
    config = {"model_type": model_type, **CONFIG}
    module = CLASSES[model_type]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return directory


def trained(directory: Path, recipe: LoraRecipe, **options: Any) -> tuple[nn.Module, Lora]:
    """The model with LoRA attached as the trainer attaches it, and B no longer zero."""
    model, _ = load_model(directory)
    lora = attach(model, rank=recipe.rank, scale=recipe.effective_scale, **options)
    random = np.random.default_rng(0)
    lora.set({n: mx.array(random.normal(0, 0.3, v.shape).astype(np.float32)) for n, v in lora.values().items()})
    return model.eval(), lora


def written(run: Path, directory: Path, recipe: LoraRecipe, lora: Lora, **options: Any) -> Path:
    config = adapters.mlx_config(
        recipe,
        model=str(directory),
        layers_total=len(lora.layers),
        lowest=lora.lowest,
        keys=lora.keys,
        rank=lora.rank,
        scale=lora.scale,
        dropout=lora.dropout,
        **options,
    )
    run.mkdir(exist_ok=True)
    write_adapters(run, lora.values(), config)
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")


def run_of(directory: Path, run: Path, recipe: LoraRecipe | None = None, **options: Any) -> tuple[Path, mx.array]:
    recipe = recipe or LoraRecipe(rank=4)
    model, lora = trained(directory, recipe, **options)
    return written(run, directory, recipe, lora), model(TOKENS)


# --- mlx-lm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["base", "experts"])
def test_mlx_lm_loads_what_was_trained(case: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    run, expected = run_of(directory, tmp_path / "run", **CASES[case])
    model, _ = load_model(directory)
    bare = model(TOKENS)
    load_adapters(model, str(run)).eval()
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(expected), atol=1e-5)
    assert np.abs(np.array(expected - bare)).max() > 0.01


def test_every_array_of_the_file_is_in_the_loaded_model(base: Path, tmp_path: Path) -> None:
    run, _ = run_of(base, tmp_path / "run", layers=(1, 3))
    model, _ = load_model(base)
    load_adapters(model, str(run))
    loaded = dict(tree_flatten(model.parameters()))
    for name, value in mx.load(str(run / "adapters.safetensors")).items():
        np.testing.assert_array_equal(np.array(loaded[name]), np.array(value))


def test_num_layers_counts_from_the_last() -> None:
    config = adapters.mlx_config(
        LoraRecipe(rank=2, alpha=4.0),
        model="m",
        layers_total=10,
        lowest=4,
        keys=["self_attn.q_proj"],
        rank=2,
        scale=2.0,
        dropout=0.1,
    )
    assert config["num_layers"] == 6
    assert config["lora_parameters"] == {"rank": 2, "scale": 2.0, "dropout": 0.1, "keys": ["self_attn.q_proj"]}
    assert json.loads(json.dumps(config)) == config


@pytest.mark.slow
def test_stock_load_and_fuse_accept_the_run(base: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {f"w{i}": i for i in range(30)} | {"<unk>": 30, "<eos>": 31}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(str(base))
    run, expected = run_of(base, tmp_path / "run")

    from mlx_lm import load

    model, *_ = load(str(base), adapter_path=str(run))
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(expected), atol=1e-5)
    fused = tmp_path / "fused"
    command = ["fuse", "--model", str(base), "--adapter-path", str(run), "--save-path", str(fused)]
    subprocess.run([sys.executable, "-m", "mlx_lm", *command], check=True, capture_output=True)
    model, *_ = load(str(fused))
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(expected), atol=1e-4)


# --- PEFT's files -----------------------------------------------------------------------------------------------------


def exported(run: Path, out: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    adapters.export(run, out, "peft")
    weights = {name: np.array(value) for name, value in mx.load(str(out / "adapter_model.safetensors")).items()}
    return weights, json.loads((out / "adapter_config.json").read_text())


def test_peft_names_shapes_and_strength(base: Path, tmp_path: Path) -> None:
    """PEFT: delta W [out, in] = lora_alpha / r * B A."""
    run, _ = run_of(base, tmp_path / "run", LoraRecipe(rank=4, alpha=6.0), layers=(1, 3), targets=["q_proj", "up_proj"])
    ours = mx.load(str(run / "adapters.safetensors"))
    weights, config = exported(run, tmp_path / "peft")
    paths = [f"model.layers.{i}.{path}" for i in (1, 2) for path in ("self_attn.q_proj", "mlp.up_proj")]
    assert set(weights) == {f"base_model.model.{path}.lora_{side}.weight" for path in paths for side in "AB"}
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 6, False)
    for path in paths:
        a, b = (weights[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
        delta = config["lora_alpha"] / config["r"] * b @ a
        expected = 1.5 * (np.array(ours[f"{path}.lora_a"]) @ np.array(ours[f"{path}.lora_b"])).T
        np.testing.assert_allclose(delta, expected, rtol=1e-4, atol=1e-6)
    assert config["target_modules"] == ["mlp.up_proj", "self_attn.q_proj"]
    assert config["layers_to_transform"] == [1, 2]
    assert config["base_model_name_or_path"] == str(base)
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")


def test_rslora_keeps_its_alpha(base: Path, tmp_path: Path) -> None:
    run, _ = run_of(base, tmp_path / "run", LoraRecipe(rank=4, alpha=6.0, rslora=True))
    _, config = exported(run, tmp_path / "peft")
    assert (config["lora_alpha"], config["use_rslora"]) == (6, True)
    assert "layers_to_transform" not in config  # every layer


def test_experts_become_one_linear_each(experts: Path, tmp_path: Path) -> None:
    run, _ = run_of(experts, tmp_path / "run", targets=["*.switch_mlp.*", "o_proj"])
    ours = mx.load(str(run / "adapters.safetensors"))
    weights, config = exported(run, tmp_path / "peft")
    for name, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        for expert in range(3):
            stem = f"base_model.model.model.layers.2.block_sparse_moe.experts.{expert}.{theirs}"
            for side in "ab":
                stacked = ours[f"model.layers.2.block_sparse_moe.switch_mlp.{name}.lora_{side}"]
                np.testing.assert_array_equal(weights[f"{stem}.lora_{side.upper()}.weight"], np.array(stacked[expert]))
    assert config["target_modules"] == ["o_proj", "w1", "w2", "w3"]


@pytest.mark.parametrize("kind", ["base", "experts"])
@pytest.mark.parametrize("options", [{}, {"layers": (1, 3)}], ids=["all", "range"])
def test_round_trip_is_exact(
    kind: str, options: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(kind)
    run, _ = run_of(directory, tmp_path / "run", **options)
    adapters.export(run, tmp_path / "peft", "peft")
    params, config = peft.import_peft(tmp_path / "peft")
    original = mx.load(str(run / "adapters.safetensors"))
    assert params.keys() == original.keys()
    for name, value in original.items():
        np.testing.assert_array_equal(np.array(params[name]), np.array(value))
    assert config["lora_parameters"] == json.loads((run / "adapter_config.json").read_text())["lora_parameters"]
    assert config["num_layers"] == (3 if options else 4)

    adapters.export(tmp_path / "peft", tmp_path / "back", "mlx")
    model, _ = load_model(directory)
    load_adapters(model, str(tmp_path / "back"))  # stock mlx-lm takes it


def test_layers_with_different_modules_are_named_exactly(base: Path, tmp_path: Path) -> None:
    run, _ = run_of(base, tmp_path / "run")
    path = run / "adapters.safetensors"
    kept = {n: v for n, v in mx.load(str(path)).items() if ".3." not in n or "q_proj" in n}
    mx.eval(kept)
    mx.save_safetensors(str(path), kept)
    _, config = exported(run, tmp_path / "peft")
    assert "model.layers.3.self_attn.q_proj" in config["target_modules"]
    assert "model.layers.3.self_attn.k_proj" not in config["target_modules"]
    assert "model.layers.2.self_attn.k_proj" in config["target_modules"]
    assert "layers_to_transform" not in config


def test_wrapped_models_move_their_layers(tmp_path: Path) -> None:
    config = {"model": "x", "lora_parameters": {"rank": 1, "scale": 1.0}, "segtrain": {"model_type": "gemma3"}}
    name = "language_model.model.layers.5.self_attn.q_proj"
    params = {f"{name}.lora_a": mx.ones((2, 1)), f"{name}.lora_b": mx.ones((1, 3))}
    weights, peft_config, _ = peft.to_peft(params, config)
    theirs = "model.language_model.layers.5.self_attn.q_proj"  # its tower of vision has a q_proj too
    assert set(weights) == {f"base_model.model.{theirs}.lora_{side}.weight" for side in "AB"}
    assert peft_config["target_modules"] == [theirs]


def test_a_quantised_base_is_remarked(base: Path, tmp_path: Path) -> None:
    run, _ = run_of(base, tmp_path / "run")
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    config = json.loads((base / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4}}))
    (notice,) = adapters.export(run, tmp_path / "peft", "peft", model=str(quantised))
    assert "original model" in notice
    assert adapters.export(run, tmp_path / "peft2", "peft") == []


# --- refusals ---------------------------------------------------------------------------------------------------------


def small_config(model_type: str) -> dict[str, Any]:
    return {"model": "x", "lora_parameters": {"rank": 1, "scale": 1.0}, "segtrain": {"model_type": model_type}}


@pytest.mark.parametrize(
    ("model_type", "name", "shape", "message"),
    [
        ("deepseek_v3", "model.layers.0.mlp.up_proj", (2, 1), "deepseek_v3 aren't mapped"),
        ("llama", "model.layers.0.mlp.switch_mlp.up_proj", (3, 1, 2), "stacked experts of llama"),
        ("mixtral", "model.layers.0.block_sparse_moe.other.up_proj", (3, 1, 2), "stacked experts"),
        ("qwen3_moe", "model.layers.0.mlp.up_proj", (2, 1), "can't tell it from the experts"),
        ("llama", "lm_head", (2, 1), "lm_head.lora_a"),
        ("llama", "language_model.model.layers.0.mlp.up_proj", (2, 1), "covers model.layers"),
    ],
)
def test_what_peft_cannot_express_is_refused_by_name(
    model_type: str, name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        peft.to_peft({f"{name}.lora_a": mx.ones(shape)}, small_config(model_type))


def test_an_unknown_base_model_asks_for_one(base: Path, tmp_path: Path) -> None:
    run, _ = run_of(base, tmp_path / "run")
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps(config | {"model": "nobody/nothing", "segtrain": {}}))
    with pytest.raises(UserError, match="--model"):
        adapters.export(run, tmp_path / "peft", "peft")
    assert not (tmp_path / "peft").exists()
    adapters.export(run, tmp_path / "peft", "peft", model=str(base))


def peft_directory(base: Path, tmp_path: Path, **changes: Any) -> Path:
    run, _ = run_of(base, tmp_path / "run")
    adapters.export(run, tmp_path / "peft", "peft")
    path = tmp_path / "peft/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / "peft"


@pytest.mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
        {"fan_in_fan_out": True},
        {"target_parameters": ["experts.down_proj"]},
        {"r": 0},
        {"r": "4"},
        {"lora_alpha": None},
    ],
    ids=str,
)
def test_options_that_are_not_plain_lora_are_refused(change: dict[str, Any], base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        peft.import_peft(peft_directory(base, tmp_path, **change))


def change_weights(directory: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> None:
    path = directory / "adapter_model.safetensors"
    weights = mx.load(str(path))
    mx.eval(weights)
    mx.save_safetensors(str(path), change(weights))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"base_model.model.lm_head.lora_A.weight": mx.ones((4, 2))}, "lm_head"),
        (lambda w: w | {"base_model.model.model.layers.0.x.lora_embedding_A": mx.ones((4, 2))}, "lora_embedding_A"),
        (lambda w: {n: v[:2] if n.endswith("lora_A.weight") else v for n, v in w.items()}, "rank 2"),
        (lambda w: {}, "no arrays"),
        (lambda w: w | {"base_model.model.model.layers.0.mlp.experts.0.up.lora_A.weight": mx.ones((4, 2))}, "expert"),
    ],
)
def test_arrays_without_a_place_are_refused(change: Any, message: str, base: Path, tmp_path: Path) -> None:
    directory = peft_directory(base, tmp_path)
    change_weights(directory, change)
    with pytest.raises(UserError, match=message):
        peft.import_peft(directory)


def test_a_missing_expert_is_refused(experts: Path, tmp_path: Path) -> None:
    directory = peft_directory(experts, tmp_path)
    change_weights(directory, lambda w: {n: v for n, v in w.items() if "layers.2" not in n or "experts.1" not in n})
    with pytest.raises(UserError, match=r"layers\.2.*experts are missing"):
        peft.import_peft(directory)


def test_a_pickle_is_refused(base: Path, tmp_path: Path) -> None:
    directory = peft_directory(base, tmp_path)
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(UserError, match="pickle"):
        adapters.export(directory, tmp_path / "out", "mlx")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"fine_tune_type": "full"}', '{"lora_parameters": {"rank": 1}}'])
def test_broken_configurations_are_the_users_error(content: str, base: Path, tmp_path: Path) -> None:
    run, _ = run_of(base, tmp_path / "run")
    (run / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match="run"):
        adapters.export(run, tmp_path / "out", "peft")
    directory = peft_directory(base, tmp_path)
    (directory / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match="peft"):
        adapters.export(directory, tmp_path / "out", "mlx")


@pytest.mark.parametrize("name", ["run", "peft"])
def test_broken_weights_are_the_users_error(name: str, base: Path, tmp_path: Path) -> None:
    peft_directory(base, tmp_path)
    for path in (tmp_path / name).glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match="can't be read"):
        adapters.export(tmp_path / name, tmp_path / "out", "mlx")


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no adapters\.safetensors"):
        adapters.export(tmp_path, tmp_path / "out", "mlx")


def test_an_adapter_is_never_written_over(base: Path, tmp_path: Path) -> None:
    run, _ = run_of(base, tmp_path / "run")
    with pytest.raises(UserError, match="exists"):
        adapters.export(run, run, "mlx")
    before = (run / "adapter_config.json").read_text()
    with pytest.raises(UserError, match="exists"):  # the same name in both formats
        adapters.export(run, run, "peft")
    assert (run / "adapter_config.json").read_text() == before
