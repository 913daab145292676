"""PEFT conversion against the real thing: the same random model in torch and in mlx-lm, with the same adapter.

Expected values come from transformers and peft on CPU in float32.
"""

import json
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_adapters, load_model

from segtrain.errors import UserError
from segtrain.lora import adapters, peft
from segtrain.recipe.schema import LoraRecipe

torch = pytest.importorskip("torch")
real_peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

TOKENS = [[3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "query_pre_attn_scalar": 8,
}
LARGER = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "num_hidden_layers": 4, "sliding_window": 64},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 64},
    "mistral3": {"tie_word_embeddings": True},
    "gemma3": {"tie_word_embeddings": True, "num_hidden_layers": 6, "sliding_window": 64},
    "gemma3_text": {"tie_word_embeddings": True, "num_hidden_layers": 6, "sliding_window": 64},
    "mixtral": {"num_key_value_heads": 4},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 64},
}
FOR_MLX: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "gemma3": {"vocab_size": 96},
    "qwen3_moe": {"num_experts": 4},
}
"""What mlx-lm's reader of `config.json` wants beside what transformers writes."""
BASES_DIFFER = ("apertus", "gemma", "gemma3", "gemma3_text", "glm", "olmo3", "qwen2_vl", "starcoder2")
"""Without any adapter already: mlx-lm reads other rope or norm settings from so small a configuration."""


def torch_config(model_type: str) -> Any:
    sizes = {**SMALL, **LARGER.get(model_type, {})}
    known = set(transformers.AutoConfig.for_model(model_type).to_dict()) | {"head_dim"}
    if "text_config" not in known:
        return transformers.AutoConfig.for_model(model_type, **{k: v for k, v in sizes.items() if k in known})
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1}
    tied = sizes["tie_word_embeddings"]
    return transformers.AutoConfig.for_model(
        model_type, text_config=sizes, vision_config=vision, tie_word_embeddings=tied
    )


def torch_model(model_type: str) -> Any:
    torch.manual_seed(0)
    config = torch_config(model_type)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except ValueError:
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    return model.float().eval()


def saved(model: Any, directory: Path) -> Path:
    """The model as transformers saves it, with the rope settings where mlx-lm looks for them."""
    model.save_pretrained(directory)
    path = directory / "config.json"
    config = {**model.config.to_dict(), **json.loads(path.read_text())}
    for section in (config, config.get("text_config", {})):
        rope = section.get("rope_parameters") or {}
        section.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        section["rope_scaling"] = None
        if "partial_rotary_factor" in rope:
            section["partial_rotary_factor"] = rope["partial_rotary_factor"]
    config |= FOR_MLX.get(model.config.model_type, {})
    path.write_text(json.dumps(config, default=str))
    return directory


def layer_linears(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Path within a layer -> weight shape, of linear and expert modules."""
    return {
        path: tuple(module.weight.shape)
        for layer in model.layers
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear | SwitchLinear)
    }


def random_adapter(
    directory: Path,
    model: nn.Module,
    out: Path,
    *,
    lo: int = 0,
    keys: list[str] | None = None,
    rslora: bool = False,
    kind: Literal["lora", "dora"] = "lora",
) -> Path:
    """An mlx-lm adapter with random A, B and magnitudes on `keys` (all linear modules) of layers lo.., as a run would
    leave it.
    """
    keys = sorted(layer_linears(model)) if keys is None else keys
    lora = LoraRecipe(kind=kind, rank=4, alpha=6.0, rslora=rslora)
    names = {id(module): name for name, module in model.named_modules()}
    params = {}
    random = np.random.default_rng(0)
    for layer in model.layers[lo:]:
        for path, module in layer.named_modules():
            if path in keys and isinstance(module, nn.Linear | SwitchLinear):
                *experts, outputs, inputs = module.weight.shape
                a, b = ((*experts, 4, inputs), (*experts, outputs, 4)) if experts else ((inputs, 4), (4, outputs))
                params[f"{names[id(module)]}.lora_a"] = mx.array(random.normal(0, 0.3, a).astype(np.float32))
                params[f"{names[id(module)]}.lora_b"] = mx.array(random.normal(0, 0.3, b).astype(np.float32))
                if kind == "dora":
                    params[f"{names[id(module)]}.m"] = mx.array(random.uniform(0.5, 1.5, outputs).astype(np.float32))
    config = adapters.mlx_config(
        lora,
        model=str(directory),
        model_type=json.loads((directory / "config.json").read_text())["model_type"],
        layers_total=len(model.layers),
        lowest=lo,
        keys=keys,
        rank=4,
        scale=lora.effective_scale,
        dropout=0.0,
    )
    out.mkdir()
    mx.save_safetensors(str(out / "adapters.safetensors"), params)
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def mlx_logits(directory: Path, adapter: Path | None = None) -> np.ndarray:
    model, _ = load_model(directory)
    model.set_dtype(mx.float32)
    if adapter is not None:
        load_adapters(model, str(adapter)).eval()
    return np.array(model(mx.array(TOKENS)))


def torch_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def peft_logits(model: Any, directory: Path) -> np.ndarray:
    wrapped = real_peft.PeftModel.from_pretrained(model, str(directory)).eval()
    assert wrapped.get_nb_trainable_parameters()[1] > 0
    return torch_logits(wrapped)


CASES = {
    "all": {},
    "last layers": {"lo": 1},
    "rslora": {"rslora": True},
    "dora": {"kind": "dora"},
    "some modules": {"keys": ["self_attn.q_proj", "mlp.down_proj"]},
}


@pytest.mark.parametrize("case", CASES)
def test_exported_adapter_gives_the_same_logits_in_peft(case: str, tmp_path: Path) -> None:
    base = torch_model("llama")
    directory = saved(base, tmp_path / "model")
    mlx_model, _ = load_model(directory)
    run = random_adapter(directory, mlx_model, tmp_path / "run", **CASES[case])
    assert adapters.export(run, tmp_path / "peft", "peft") == []

    ours, bare = mlx_logits(directory, run), mlx_logits(directory)
    np.testing.assert_allclose(bare, torch_logits(base), atol=1e-4)
    assert np.abs(ours - bare).max() > 0.1  # the adapter does something
    np.testing.assert_allclose(peft_logits(base, tmp_path / "peft"), ours, atol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_adapter_that_peft_made_is_imported(dora: bool, tmp_path: Path) -> None:
    base = torch_model("llama")
    directory = saved(base, tmp_path / "model")
    config = real_peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        use_dora=dora,
        target_modules=["q_proj", "up_proj"],
        layers_to_transform=[1, 2],
    )
    wrapped = real_peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    wrapped.eval().save_pretrained(str(tmp_path / "peft"))
    expected = torch_logits(wrapped)

    with pytest.raises(UserError, match="--model"):  # the adapter names no base model
        adapters.export(tmp_path / "peft", tmp_path / "mlx", "mlx")
    adapters.export(tmp_path / "peft", tmp_path / "mlx", "mlx", model=str(directory))
    assert json.loads((tmp_path / "mlx/adapter_config.json").read_text())["num_layers"] == 2
    np.testing.assert_allclose(mlx_logits(directory, tmp_path / "mlx"), expected, atol=1e-4)


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "qwen3_moe"])
def test_experts_give_the_same_logits_in_peft(model_type: str, tmp_path: Path) -> None:
    base = torch_model(model_type)
    directory = saved(base, tmp_path / "model")
    mlx_model, _ = load_model(directory)
    run = random_adapter(directory, mlx_model, tmp_path / "run")
    adapters.export(run, tmp_path / "peft", "peft")
    ours, bare = mlx_logits(directory, run), mlx_logits(directory)
    np.testing.assert_allclose(bare, torch_logits(base), atol=1e-4)
    assert np.abs(ours - bare).max() > 0.1
    np.testing.assert_allclose(peft_logits(base, tmp_path / "peft"), ours, atol=1e-4)


@pytest.mark.parametrize("model_type", sorted(peft.COMPARED))
def test_every_family_round_trips_through_peft_by_name(model_type: str, tmp_path: Path) -> None:
    """peft finds every array's place in transformers' model, no place stays without one, and the logits agree."""
    base = torch_model(model_type)
    directory = saved(base, tmp_path / "model")
    mlx_model, _ = load_model(directory)
    experts = peft.FAMILIES[model_type].experts
    keys = [path for path in layer_linears(mlx_model) if not experts or path.startswith("self_attn")]
    run = random_adapter(directory, mlx_model, tmp_path / "run", keys=keys)
    adapters.export(run, tmp_path / "peft", "peft")
    wrapped = real_peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    loaded = real_peft.get_peft_model_state_dict(wrapped)
    written = mx.load(str(tmp_path / "peft/adapter_model.safetensors"))
    assert loaded.keys() == written.keys()
    for name, value in written.items():
        np.testing.assert_array_equal(loaded[name].numpy(), np.array(value))
    if model_type not in BASES_DIFFER:
        np.testing.assert_allclose(torch_logits(wrapped), mlx_logits(directory, run), atol=1e-4)
