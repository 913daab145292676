"""PEFT's module names for families that differ, against transformers' source: nothing of torch is needed.

Each module that mlx-lm trains must have, part by part, a name that the family's modeling file assigns.
"""

import importlib.util
import json
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_configs
from mlx_lm.models.switch_layers import SwitchLinear

from segtrain.errors import UserError
from segtrain.lora import peft

# Configurations and modeling files that go by another name than the type.
TINY = {"qwen2_5_vl": "qwen2_vl", "lfm2_vl": "lfm2-vl"}
SOURCES = {"gemma4_text": "gemma4", "lfm2-vl": "lfm2", "lfm2_vl": "lfm2"}


def source(model_type: str) -> str:
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    name = SOURCES.get(model_type, model_type)
    return (Path(found.origin).parent / "models" / name / f"modeling_{name}.py").read_text()


def linears(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Path within a layer -> where its layers are, and whether it is a stack of experts."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        path: (names[id(layer)].rpartition(".")[0], isinstance(module, SwitchLinear))
        for layer in model.layers
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear | SwitchLinear)
    }


def assigned(path: str, text: str) -> bool:
    return all(re.search(rf"self\.{part} = ", text) for part in path.split(".") if not part.isdigit())


def adapter(model_type: str, paths: list[str], base: str) -> tuple[dict, dict]:
    arrays = {}
    for path in paths:
        arrays[f"{base}.1.{path}.lora_a"] = mx.ones((4, 2))
        arrays[f"{base}.1.{path}.lora_b"] = mx.ones((2, 6))
    lora = {"rank": 2, "scale": 2.0, "dropout": 0.0}
    return arrays, {"model": "", "lora_parameters": lora, "segtrain": {"model_type": model_type, "layers_total": 2}}


@pytest.mark.parametrize("model_type", sorted(peft.READ))
def test_every_name_is_one_of_transformers(model_type: str, tmp_path: Path) -> None:
    family, text = peft.READ[model_type], source(model_type)
    found = linears(tiny_configs.build(TINY.get(model_type, model_type)))
    assert {base for base, _ in found.values()} == {family.mlx}
    plain = [path for path, (_, stacked) in found.items() if not stacked and path not in family.routers]
    arrays, config = adapter(model_type, plain, family.mlx)
    written, settings, notices = peft.to_peft(arrays, config)
    for name in written:
        path = name.removeprefix(f"{peft.ROOT}{family.hf}.1.").rpartition(".lora_")[0]
        assert assigned(path, text), path
    assert any("transformers' source only" in notice for notice in notices)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 2}))
    mx.save_safetensors(str(tmp_path / peft.WEIGHTS), written)
    (tmp_path / peft.CONFIG).write_text(json.dumps(settings))
    back, _ = peft.import_peft(tmp_path, str(tmp_path))
    assert back.keys() == arrays.keys()


@pytest.mark.parametrize("model_type", sorted(name for name, family in peft.READ.items() if family.routers))
def test_what_is_no_linear_layer_there_is_refused(model_type: str) -> None:
    family = peft.READ[model_type]
    (router,) = family.routers
    arrays, config = adapter(model_type, [router], family.mlx)
    with pytest.raises(UserError, match=f"{router}: it is no linear layer in Hugging Face's {model_type}"):
        peft.to_peft(arrays, config)
    experts = {
        name: mx.zeros((3, *value.shape))
        for name, value in adapter(model_type, ["mlp.experts.up"], family.mlx)[0].items()
    }
    with pytest.raises(UserError, match=f"can't express LoRA on the stacked experts of {model_type}"):
        peft.to_peft(experts, config)


def test_a_name_that_transformers_lacks_would_be_seen() -> None:
    assert not assigned("feed_forward.gate_proj", source("lfm2_moe"))
    assert assigned("feed_forward.w1", source("lfm2_moe"))
