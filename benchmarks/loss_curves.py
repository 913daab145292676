"""Loss curves over 200 updates with and without each engine option, against what rounding alone does.

    python benchmarks/loss_curves.py
    python benchmarks/loss_curves.py --only bfloat16 --steps 50
    python benchmarks/loss_curves.py --table benchmarks/results/loss_curves.jsonl

The demo model on examples/data/chat.jsonl, one row an update, AdamW at a constant 1e-3, rank 8 on all linear layers;
frozen weights in bf16, or quantised to 4 bits with bf16 activations. The truth is the same run with the same (rounded,
quantised) weights in float32, by plain full backward. `off` is the mean over updates of |loss - truth's loss|; an
option is within the noise of bf16 when its `off` is at most 1.1 times that of mlx-lm-like full backward, plus 1e-3.
`apart` is the mean distance to full backward's own curve, and `last` the mean loss of the last 20 updates.
"""

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"backward": "full"},
    "size 1": {"segment_size": 1},
    "size 2, head of 32 rows": {"segment_size": 2, "head_chunk": 32},
    "keep 2, look-ahead 2": {"keep": 2, "lookahead": 2},
    "3 boundaries, MLP of 64 rows": {"boundaries": 3, "mlp_rows": 64},
    "compiled": {"compiled": True, "lookahead": 1},
    "all of it": {"compiled": True, "keep": 1, "lookahead": 2, "mlp_rows": 64, "boundaries": 3, "head_chunk": 64},
}
DENSE = {"dense copies": {"dequantize": True}, "dense copies, compiled": {"dequantize": True, "compiled": True}}
LENGTH = 256


def curve(bits: int, dtype: str, engine: dict[str, Any], steps: int) -> list[float]:
    """The loss of each update's row before the update."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map
    from plan_accuracy import backward_of

    from segtrain.data import open_data
    from segtrain.engine import objectives
    from segtrain.engine.backward import no_meter
    from segtrain.lora import layers as lora_module
    from segtrain.models.load import load
    from segtrain.recipe.schema import Recipe
    from segtrain.run.optimizer import Optimizer

    loaded = load(str(ROOT / "examples/demo-model"))
    model = loaded.model
    model.set_dtype(mx.bfloat16)
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    if dtype == "float32":
        model.update(tree_map(widened, model.parameters()))
    recipe = Recipe.model_validate(
        {
            "model": "examples/demo-model",
            "data": {"train": str(ROOT / "examples/data/chat.jsonl"), "max_seq_length": LENGTH, "on_long": "drop"},
            "train": {"steps": steps, "learning_rate": 1e-3, "lr_schedule": "constant"},
        }
    )
    rows = open_data(recipe, loaded.tokenizer).train
    lora = lora_module.attach(model, rank=8, scale=2.0)
    backward = backward_of(model, lora, engine, objectives.sft, no_meter)
    optimizer = Optimizer(recipe.train, steps)
    found = []
    for _, row in zip(range(steps), rows, strict=False):
        step = backward.step(single(row))
        found.append(step.loss.total.item() / step.loss.weight)
        lora.set(optimizer.update(lora.flat(), step.grads, 1 / step.loss.weight))
    return found


def single(row: Any) -> Any:
    from segtrain.engine import layouts

    return layouts.single(row.tokens, row.supervised)


def widened(w: Any) -> Any:
    import mlx.core as mx

    return w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w


def distance(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def table(lines: list[dict[str, Any]]) -> str:
    rows = ["| weights | option | off | apart from full | last 20 | within |", "|---|---|---|---|---|---|"]
    for line in lines:
        if "machine" in line:
            rows.append(f"| {line['machine']} | | | | | |")
        if "option" in line:
            numbers = " | ".join(f"{line[key]:.5f}" for key in ("off", "apart", "last"))
            rows.append(f"| {line['weights']} | {line['option']} | {numbers} | {'yes' if line['within'] else 'NO'} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["bfloat16", "4bit"])
    parser.add_argument("--options", nargs="*", help="beside full backward, some options only")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/loss_curves.jsonl")
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    options = parser.parse_args()
    if options.table:
        return print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    lines: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(line: dict[str, Any]) -> None:
        lines.append(line)
        with options.out.open("a") as out:
            out.write(json.dumps(line) + "\n")

    keep({"date": now, "machine": platform.platform(), "versions": versions})
    for weights, bits in (("bfloat16", 0), ("4bit", 4)):
        if options.only not in (None, weights):
            continue
        truth = curve(bits, "float32", OPTIONS["full"], options.steps)
        keep({"weights": weights, "truth": [round(x, 5) for x in truth]})
        full: list[float] = []
        for name, engine in (OPTIONS | (DENSE if bits else {})).items():
            if options.options and name not in ("full", *options.options):
                continue
            begun = time.perf_counter()
            losses = curve(bits, "bfloat16", engine, options.steps)
            full = full or losses
            off, bound = distance(losses, truth), 1.1 * distance(full, truth) + 1e-3
            line = {"weights": weights, "option": name, "off": off, "apart": distance(losses, full)}
            line |= {"last": sum(losses[-20:]) / len(losses[-20:]), "within": off <= bound}
            line |= {"seconds": round(time.perf_counter() - begun, 1), "losses": [round(x, 5) for x in losses]}
            keep(line)
            print(weights, name, f"off {off:.5f} (bound {bound:.5f}), {line['seconds']} s", flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
