"""Updates of a hybrid model (Qwen3.5: three gated delta layers for each of attention) through the command line.

    python benchmarks/hybrid.py                                        the small shape, on a CPU
    python benchmarks/hybrid.py --shape 4b --tokens 8192 32768         Qwen3.5 4B's shape, 8 layers, bfloat16
    python benchmarks/hybrid.py --shape 4b --budget 12GB               in a lean plan
    python benchmarks/hybrid.py --shape 4b --objective orpo            1,792 tokens of prompt, answers of 128: one
                                                                       stream and two, in turns

Random weights and rows of exactly so many tokens; LoRA rank 8 on all linear layers. Each run is `segtrain sft` or
`segtrain orpo` in a process of its own. `seconds` is the fastest update after the first, `above_gib` the highest
`mx.get_peak_memory` of those over the model's own bytes (so it counts adapter, gradients and Adam's state), `ratio` the
time on a shared prompt over that on two streams.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GIB = 2**30
ROOT = Path(__file__).parents[1]
WORDS = [f"<w{number}>" for number in range(500)]  # each a token, whatever a tokenizer's class splits
ROPE = {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
SHAPES: dict[str, dict[str, Any]] = {
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "rope_parameters": ROPE | {"mrope_section": [11, 11, 10]},
        "torch_dtype": "bfloat16",
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": 1024,
        "rope_parameters": ROPE | {"mrope_section": [3, 3, 2]},
        "torch_dtype": "float32",
    },
}
LENGTHS = {"4b": {"sft": [8192], "orpo": (1792, 128)}, "small": {"sft": [512], "orpo": (448, 32)}}


def write_model(path: Path, shape: str, layers: int) -> int:
    """A random model with a tokenizer of whole words; its bytes."""
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": layers, "rms_norm_eps": 1e-6, **SHAPES[shape]}
    text |= {"linear_conv_kernel_dim": 4, "full_attention_interval": 4, "tie_word_embeddings": True}
    text |= {"max_position_embeddings": 1 << 18, "eos_token_id": 256}
    config = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 256, "torch_dtype": text["torch_dtype"]}
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, text["torch_dtype"]))
    weights = dict(tree_flatten(model.parameters()))
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.BPE(dict(zip(pre_tokenizers.ByteLevel.alphabet(), range(256), strict=True)), []))
    words.add_special_tokens(["</s>"])
    words.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    tokenizer.save_pretrained(path)
    return sum(w.nbytes for w in weights.values())


def write_rows(path: Path, objective: str, lengths: tuple[int, ...]) -> None:
    """Eight rows of so many tokens: the whole row, or prompt and answers, with the end token."""
    draw = random.Random(0)

    def text(count: int) -> str:
        return "".join(draw.choices(WORDS, k=count))

    lines = []
    for _ in range(8):
        if objective == "sft":
            lines.append({"prompt": text(lengths[0] // 2), "completion": text(lengths[0] - lengths[0] // 2)})
        else:
            lines.append({"prompt": text(lengths[0]), **{x: text(lengths[1] - 1) for x in ("chosen", "rejected")}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(folder: Path, objective: str, name: str, engine: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The updates of one run: seconds and peak, or what the command said."""
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / f"{objective}.jsonl"), "max_seq_length": 1 << 17},
        "lora": {"rank": 8},
        "engine": engine | ({"memory_budget": args.budget} if args.budget else {}),
        "train": {"steps": args.steps, "learning_rate": 1e-5, "warmup_steps": 0},
        "output": {"dir": str(folder / name), "save_every": 0, "eval_every": 0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "segtrain", objective, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    metrics = folder / name / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["event"] == "train"]
    if done.returncode or len(steps) < 2:
        return {"error": (done.stdout + done.stderr)[-600:]}
    peak = max(line["peak_gib"] for line in steps[1:])
    return {
        "first_seconds": steps[0]["step_seconds"],
        "seconds": min(line["step_seconds"] for line in steps[1:]),
        "peak_gib": peak,
        "loss": steps[-1]["loss"],
    }


def measured(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model_gib = write_model(folder / "model", args.shape, args.layers) / GIB
    if args.objective == "sft":
        for tokens in args.tokens or LENGTHS[args.shape]["sft"]:
            write_rows(folder / "sft.jsonl", "sft", (tokens,))
            found = run(folder, "sft", f"sft-{tokens}", {}, args)
            yield {"tokens": tokens, **found, "above_gib": found.get("peak_gib", 0.0) - model_gib}
        return
    lengths = LENGTHS[args.shape]["orpo"]
    write_rows(folder / "orpo.jsonl", "orpo", lengths)
    both = {}
    for shared in (False, True):
        both[shared] = run(folder, "orpo", f"orpo-{shared}", {"prefix_sharing": shared}, args)
        yield {"prompt": lengths[0], "answer": lengths[1], "shared": shared, **both[shared]}
    if all("seconds" in found for found in both.values()):
        yield {"ratio": both[True]["seconds"] / both[False]["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--objective", choices=["sft", "orpo"], default="sft")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of rows (sft)")
    parser.add_argument("--budget", help="engine.memory_budget, such as 12GB")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="append the lines here")
    args = parser.parse_args()
    about = {"shape": args.shape, "layers": args.layers, "objective": args.objective, "budget": args.budget}
    about |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": str(mx.default_device())}
    about |= {"mlx": version("mlx"), "mlx-lm": version("mlx-lm")}
    with tempfile.TemporaryDirectory() as folder:
        for line in measured(Path(folder), args):
            text = json.dumps({**about, **line})
            print(text, flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
