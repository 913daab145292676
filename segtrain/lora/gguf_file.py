"""An adapter as a GGUF LoRA file, for llama.cpp and what is built on it.

Tensor names and layouts are those of llama.cpp's `convert_lora_to_gguf.py`; names come from the `gguf` package's own
table. A is [r, in], B is [out, r], experts are stacked: `blk.<n>.<module>.weight.lora_a` and `.lora_b`, in float32.

llama.cpp's Llama rotates neighbouring pairs of a head's numbers, where Hugging Face's rotates its two halves, so its
conversion reorders the rows of the q and k projections. An adapter's B has the same rows and is reordered alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from segtrain.errors import UserError
from segtrain.lora.peft import FAMILIES, MLX_NAME, STACKED, Family, model_config, type_of
from segtrain.storage.fresh import beside, put

Arrays = Mapping[str, mx.array]


@dataclass(frozen=True)
class Architecture:
    """A model type in GGUF: its name there, and whether its q and k projections' rows are reordered."""

    name: str
    reordered: bool = False


# Those whose conversion in llama.cpp changes no other matrix that LoRA can be on.
ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), Architecture("llama", reordered=True)),
    "granite": Architecture("granite", reordered=True),
    **{name: Architecture(name) for name in ("qwen2", "qwen3", "gemma", "gemma2", "phi3")},
    "qwen3_moe": Architecture("qwen3moe"),
    **dict.fromkeys(("gemma3", "gemma3_text"), Architecture("gemma3")),
}
SUFFIX = ".weight"
INSTEAD = (
    "export --format peft and convert that with llama.cpp's convert_lora_to_gguf.py, or export --format gguf-model"
)


def write(params: Arrays, config: Mapping[str, Any], out: Path) -> None:
    """Write the file `out`. `config`: mlx-lm's adapter configuration.

    Raises UserError for what GGUF can't express, by name, and where `out` exists.
    """
    gguf = _package()
    architecture, tensors = named_tensors(params, config, gguf)
    lora = config["lora_parameters"]
    with beside(out, "--out") as folder:
        made = folder / out.name
        writer = gguf.GGUFWriter(str(made), architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(lora["scale"]) * int(lora["rank"]))  # it divides by rank
        for name, array in tensors.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        put(made, out, "--out")


def knows(config: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether an adapter of this mlx-lm configuration, on a model of this `config.json`, can be written."""
    return base.get("model_type") in ARCHITECTURES and config.get("fine_tune_type", "lora") == "lora"


def named_tensors(params: Arrays, config: Mapping[str, Any], gguf: Any) -> tuple[str, dict[str, np.ndarray]]:
    """GGUF's name of the architecture, and its tensors. Raises UserError."""
    model = str(config.get("segtrain", {}).get("made_from") or config.get("model", ""))
    model_type = type_of(config, model)
    architecture = ARCHITECTURES.get(model_type)
    if config.get("fine_tune_type") == "dora":
        raise UserError("a GGUF adapter is LoRA, and this one is DoRA; export --format merged or gguf-model")
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(
            f"how llama.cpp lays out the matrices of {model_type} isn't known here (it is for {known}); {INSTEAD}"
        )
    heads = _heads(model) if architecture.reordered else {}
    number = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture.name]
    names = gguf.get_tensor_name_map(number, 1 + max((_layer(name) for name in params), default=0))
    tensors = {}
    for name in sorted(params):
        match = MLX_NAME.fullmatch(name)
        if match is None or match["base"] != FAMILIES[model_type].mlx:
            raise UserError(f"{name}: only LoRA of layers is written to GGUF; leave it out of lora.targets")
        path = _hugging_face(match["path"], FAMILIES[model_type])
        target = names.get_name(f"model.layers.{match['layer']}.{path}{SUFFIX}", try_suffixes=(SUFFIX,))
        if target is None:
            raise UserError(f"{name}: GGUF has no name for {path} of {model_type}; leave it out of lora.targets")
        array = params[name] if params[name].ndim == 3 else params[name].T
        if match["key"] == "lora_b" and path in heads:
            array = _reordered(array, heads[path])
        tensors[f"{target}.{match['key']}"] = np.array(array.astype(mx.float32))
    return architecture.name, tensors


def _hugging_face(path: str, family: Family) -> str:
    """A path within a layer, as a published model has it; experts as if they were stacked there."""
    outer, stacked, leaf = path.rpartition(f".{STACKED}.")
    return f"{outer}.experts.{family.experts.get(leaf, leaf)}" if stacked else path


def _heads(model: str) -> dict[str, int]:
    """How many heads' rows each reordered projection has. Raises UserError."""
    config = model_config(model)
    if config is None:
        raise UserError(
            f"the base model {model!r} isn't on this machine, and GGUF needs its numbers of heads; give --model"
        )
    every = int(config["num_attention_heads"])
    return {"self_attn.q_proj": every, "self_attn.k_proj": int(config.get("num_key_value_heads") or every)}


def _reordered(b: mx.array, heads: int) -> mx.array:
    """B [out, r], the halves of each head's rows interleaved."""
    return b.reshape(heads, 2, -1, b.shape[-1]).swapaxes(1, 2).reshape(b.shape)


def _layer(name: str) -> int:
    match = MLX_NAME.fullmatch(name)
    return int(match["layer"]) if match else 0


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        fix = 'pip install "segtrain-mlx[gguf]"'
        raise UserError(f"--format gguf needs the package gguf, which isn't installed: {fix}") from None
    return gguf
