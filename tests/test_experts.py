"""LoRA on experts where MLX's product of chosen matrices takes float32 only: trained, or refused with what to do."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import tiny_configs
import tiny_run
from mlx.utils import tree_flatten

from segtrain.cli import run as command_line

pytestmark = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="the CPU's product of chosen matrices")


def recipe(folder: Path, bits: int = 0) -> Path:
    """For a qwen3_moe in bfloat16, its experts packed where `bits` is given."""
    words = tiny_run.model(folder / "words")
    directory = tiny_configs.save("qwen3_moe", folder / "model", vocab_size=64)
    config = json.loads((directory / "config.json").read_text())
    model = tiny_configs.build_config(config)
    model.set_dtype(mx.bfloat16)
    if bits:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=_divisible)
        config["quantization"] = {"group_size": 32, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    for file in words.glob("tokenizer*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return tiny_run.recipe_file(folder, train__steps=2)


def _divisible(_: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def test_packed_experts_are_trained(tmp_path: Path) -> None:
    assert command_line(["sft", str(recipe(tmp_path, bits=4))]) == 0
    adapter = mx.load(str(tmp_path / "run" / "adapters.safetensors"))
    experts = {name: value for name, value in adapter.items() if "switch_mlp" in name}  # type: ignore[union-attr]
    assert any(name.endswith("lora_b") and bool(mx.any(value != 0)) for name, value in experts.items())


def test_dense_experts_in_16_bits_are_refused_and_the_advice_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path)
    assert command_line(["sft", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"mlx_lm.convert --hf-path {tmp_path / 'model'} --mlx-path NEW --dtype float32" in said
    assert not (tmp_path / "run").exists()
    mlx_lm.convert(str(tmp_path / "model"), mlx_path=str(tmp_path / "NEW"), dtype="float32")
    assert command_line(["sft", str(path), "--set", f"model={tmp_path / 'NEW'}"]) == 0
