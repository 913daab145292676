"""A tiny model directory, data and recipes: whole runs whose steps take milliseconds."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from segtrain.engine.objectives import of_recipe
from segtrain.recipe.schema import Recipe

ROOT = Path(__file__).parents[1]
WORDS = [f"w{number}" for number in range(60)]
READINGS = ("tokens_per_second", "step_seconds", "peak_gib", "active_gib", "cache_gib", "rss_gib", "seconds")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def model(path: Path, **changes: Any) -> Path:
    """A random float32 llama of three layers, with a tokenizer of 64 words."""
    config = {**CONFIG, **changes}
    mx.random.seed(0)
    net = llama.Model(llama.ModelArgs.from_dict(config))
    net.update({})
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(net.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", "<s>", ".", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", bos_token="<s>"
    ).save_pretrained(path)
    return path


def examples(path: Path) -> None:
    """The repository's examples, with the demo model's first two layers in float32: a tenth of the work on a CPU."""
    path.mkdir(parents=True)
    for one in (ROOT / "examples").iterdir():
        (path / one.name).symlink_to(one)
    demo, made = ROOT / "examples/demo-model", path / "demo-model"
    made.unlink()
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).symlink_to(demo / name)
    config = json.loads((demo / "config.json").read_text())
    shallow = {"num_hidden_layers": 2, "torch_dtype": "float32"}
    (made / "config.json").write_text(json.dumps({**config, **shallow}))
    weights: dict[str, mx.array] = mx.load(str(demo / "model.safetensors"))  # type: ignore[assignment]
    deep = tuple(f"model.layers.{number}." for number in range(2, config["num_hidden_layers"]))
    kept = {name: value.astype(mx.float32) for name, value in weights.items() if not name.startswith(deep)}
    mx.save_safetensors(str(made / "model.safetensors"), kept, {"format": "mlx"})


def text(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def completions(path: Path, rows: int = 12, seed: int = 0, longest: int = 12) -> Path:
    draw = random.Random(seed)
    lines = [{"prompt": text(draw, 2, 6), "completion": " " + text(draw, 1, longest)} for _ in range(rows)]
    return written(path, lines)


def preferences(path: Path, rows: int = 12, seed: int = 0) -> Path:
    """Every other prompt is long enough to be shared."""
    draw = random.Random(seed)
    lines = []
    for number in range(rows):
        least = 18 if number % 2 else 2
        chosen = " " + text(draw, 1, 9)
        lines.append({"prompt": text(draw, least, least + 4), "chosen": chosen, "rejected": chosen + " w0"})
    return written(path, lines)


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def kind_of(loss: str) -> str:
    """How the files begin whose rows this loss takes."""
    return "orpo" if of_recipe(loss).pairs else loss


def mapping(folder: Path, loss: str = "sft", **changes: Any) -> dict[str, Any]:
    """A recipe over `folder`, where model and data are made if they aren't there; `train__steps=3` sets train.steps."""
    if not (folder / "model").exists():
        model(folder / "model")
    for name, make in (("sft", completions), ("orpo", preferences)):
        for part, rows in (("train", 12), ("valid", 5)):
            if not (path := folder / f"{name}-{part}.jsonl").exists():
                make(path, rows, seed=len(part) + rows)
    values: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / f"{kind_of(loss)}-train.jsonl"), "max_seq_length": 64},
        "lora": {"rank": 2},
        "engine": {"backward": "segmented", "segment_size": 1, "keep_layers": 0, "memory_budget": "1GB"},
        "train": {"steps": 6, "learning_rate": 1e-2},
        "output": {"dir": str(folder / "run"), "save_every": 2, "eval_every": 0},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return values


def recipe(folder: Path, loss: str = "sft", **changes: Any) -> Recipe:
    return Recipe.from_mapping(mapping(folder, loss, **changes))


def recipe_file(folder: Path, loss: str = "sft", **changes: Any) -> Path:
    path = folder / f"{loss}.yaml"
    path.write_text(json.dumps(mapping(folder, loss, **changes)))  # JSON is YAML
    return path


def lines(run: Path, name: str = "metrics.jsonl", readings: bool = False) -> list[dict[str, Any]]:
    """A run's log, by default without what times and memory were: what two equal runs have in common."""
    parsed = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return parsed if readings else [without_readings(line) for line in parsed if not _of_memory(line)]


def _of_memory(line: Mapping[str, Any]) -> bool:
    return line.get("event") == "notice" and str(line["text"]).startswith("memory")


def without_readings(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in READINGS}


def result(run: Path) -> tuple[bytes, list[dict[str, Any]], list[str]]:
    """What an exact resume must leave: the adapter's bytes, the metrics, and the names of the checkpoints."""
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    return (run / "adapters.safetensors").read_bytes(), lines(run), names


def command(loss: str, path: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "segtrain", loss, str(path), *options]


def cli(loss: str, path: Path, *options: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(loss, path, *options), capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, cwd=ROOT
    )
