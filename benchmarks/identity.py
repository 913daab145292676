"""Are the adapters of two versions of segtrain the same, byte for byte? Twelve tiny recipes, ten updates each.

    python benchmarks/identity.py                                   the sha256 of each adapter, one a line
    PYTHONPATH=other/checkout python benchmarks/identity.py         of another checkout; compare with diff

Models and rows are made here, with random weights, and training goes through the command line alone, so that the script
serves any version with these recipe keys. A difference is no fault by itself (another order of summation changes the
last bits), but a change that is meant to move code must show none.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

STEPS = 10
WORDS = [f"w{number}" for number in range(90)]
VOCAB = len(WORDS) + 4
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 32,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_theta": None,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": True,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
# Name -> (command, model, bits, recipe keys).
RECIPES: dict[str, tuple[str, str, int, dict[str, dict[str, Any]]]] = {
    "sft-llama": ("sft", "llama", 0, {}),
    "sft-llama-4bit": ("sft", "llama", 4, {}),
    "sft-llama-dropout": ("sft", "llama", 0, {"lora": {"dropout": 0.1}}),
    "sft-llama-accumulation": ("sft", "llama", 0, {"train": {"grad_accumulation_steps": 3}}),
    "sft-llama-full": ("sft", "llama", 0, {"engine": {"backward": "full"}}),
    "sft-gemma4": ("sft", "gemma4", 0, {"engine": {"segment_size": 2}}),
    "sft-moe": ("sft", "moe", 0, {}),
    "sft-moe-4bit": ("sft", "moe", 4, {"lora": {"dropout": 0.1}}),
    "pair-llama": ("orpo", "llama", 0, {"engine": {"prefix_sharing": False}}),
    "shared-llama": ("orpo", "llama", 0, {"engine": {"prefix_sharing": True}}),
    "shared-gemma4": ("orpo", "gemma4", 0, {"engine": {"prefix_sharing": True}}),
    "shared-moe-4bit": ("orpo", "moe", 4, {"train": {"grad_accumulation_steps": 2}}),
}


def write_model(path: Path, kind: str, bits: int) -> None:
    """A random float32 model, quantised in groups of 32 if `bits`, with a tokenizer of whole words."""
    config = {**BASE, **MODELS[kind]}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", "<s>", ".", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", bos_token="<s>")
    tokenizer.save_pretrained(path)


def write_rows(path: Path, command: str) -> None:
    """Twelve rows; every other prompt is long."""
    draw = random.Random(0)
    lines = []
    for number in range(12):
        row = {"prompt": text(draw, 20 if number % 2 else 4)}
        names = ["completion"] if command == "sft" else ["chosen", "rejected"]
        lines.append(row | {name: " " + text(draw, draw.randint(2, 14)) for name in names})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def text(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def write_recipe(folder: Path, name: str) -> Path:
    command, kind, bits, keys = RECIPES[name]
    recipe: dict[str, dict[str, Any]] = {
        "data": {"train": str(folder / f"{command}.jsonl"), "max_seq_length": 64},
        "lora": {"rank": 4},
        "engine": {"backward": "segmented", "segment_size": 1, "keep_layers": 0, "memory_budget": "1GB"},
        "train": {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 0},
        "output": {"dir": str(folder / name), "save_every": 0, "eval_every": 0},
    }
    for section, values in keys.items():
        recipe[section] |= values
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"model": str(folder / f"{kind}-{bits}"), **recipe}))  # JSON is YAML
    return path


def hashes(folder: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """(name, sha256 of the adapter's file) of each recipe, trained in a process of its own."""
    for command in ("sft", "orpo"):
        write_rows(folder / f"{command}.jsonl", command)
    for name in names:
        command, kind, bits, _ = RECIPES[name]
        if not (path := folder / f"{kind}-{bits}").exists():
            write_model(path, kind, bits)
        run = [sys.executable, "-m", "segtrain", command, str(write_recipe(folder, name))]
        done = subprocess.run(run, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        yield name, hashlib.sha256((folder / name / "adapters.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="these recipes alone")
    parser.add_argument("--keep", type=Path, help="a new directory for models, recipes and runs; left there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, digest in hashes(folder.resolve(), options.only):
            print(digest, name, flush=True)


if __name__ == "__main__":
    main()
