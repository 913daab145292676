"""Model directories and rows for `as_a_user.py`: real shapes, random weights, the demo model's tokenizer.

    python benchmarks/user_models.py llama-8b DIR [--bits 4]

A directory holds what a downloaded model holds: `config.json`, `model*.safetensors` and a tokenizer. Weights are
normal with deviation 0.02 (ones for norms), in bfloat16; `--bits` quantises as `mlx_lm.convert -q` does. A shape with
fewer layers than the model that it is named after says so.
"""

import argparse
import importlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "examples" / "demo-model"
TEXTS = ROOT / "examples" / "data" / "chat.jsonl"

COMMON = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 1e6}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {**COMMON, "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
                 "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "vocab_size": 128256},
    "llama-1.6b": {**COMMON, "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 24,
                   "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "vocab_size": 128256},
    "gemma3-12-layers": {**COMMON, "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 12,
                         "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
                         "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024,
                         "sliding_window_pattern": 6, "vocab_size": 262208, "rope_local_base_freq": 10000.0,
                         "tie_word_embeddings": False},
    "qwen3-moe-6-layers": {**COMMON, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 6,
                           "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
                           "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                           "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
                           "norm_topk_prob": True, "vocab_size": 151936},
    "gpt-oss-6-layers": {**COMMON, "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 6,
                         "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
                         "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
                         "rope_scaling": None, "vocab_size": 201088},
    "qwen3.5-8-layers": {**COMMON, "model_type": "qwen3_5", "text_config": {
        **COMMON, "model_type": "qwen3_5", "hidden_size": 2560, "num_hidden_layers": 8, "intermediate_size": 9216,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "mrope_section": [11, 11, 10], "rope_theta": 1e7,
                            "partial_rotary_factor": 0.25}}},
    "tiny": {**COMMON, "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    "small": {**COMMON, "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    "tiny-delta": {**COMMON, "model_type": "qwen3_5", "text_config": {
        **COMMON, "model_type": "qwen3_5", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e7,
                            "partial_rotary_factor": 0.5}}},
}  # fmt: skip


def make_model(shape: str, path: Path, *, bits: int = 0, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write a model directory of `shape`; it stays where it is already there."""
    if (path / "config.json").exists():
        return path
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import save_config, save_model

    config = dict(SHAPES[shape])
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    target = getattr(mx, dtype)

    def drawn(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2 or not mx.issubdtype(value.dtype, mx.floating):
            return value.astype(target) if mx.issubdtype(value.dtype, mx.floating) else value
        return (0.02 * mx.random.normal(value.shape)).astype(target)

    model.update(tree_map_with_path(drawn, model.parameters()))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    path.mkdir(parents=True)
    save_model(path, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)
    save_config(config, config_path=path / "config.json")
    return path


def texts(count: int, least: int, most: int, seed: int = 0) -> list[str]:
    """Texts of `least` to `most` tokens of the demo model's tokenizer (the file's one token at the end not counted)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    lines = [json.loads(line) for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    words = " ".join(turn["content"] for line in lines for turn in line["messages"]).split()
    draw, found = random.Random(seed), []
    for _ in range(count):
        wanted = draw.randint(least, most)
        start = draw.randrange(len(words))
        picked = [words[(start + k) % len(words)] for k in range(wanted)]
        encoding = tokenizer.encode(" ".join(picked), add_special_tokens=False)
        found.append(tokenizer.decode(encoding.ids[:wanted]))
    return found


def write_rows(folder: Path, rows: list[dict[str, str]]) -> Path:
    """A folder with `train.jsonl`, which both commands read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--bits", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    print(make_model(given.shape, given.path, bits=given.bits, dtype=given.dtype))


if __name__ == "__main__":
    main()
