"""Does SFT, and DPO from it, move the accuracy of pairs that were not trained on? All of it by the commands.

    python benchmarks/preferences.py MODEL ROWS --folder DIR [--sft-updates 40] [--dpo-updates 60]
    python benchmarks/preferences.py --table benchmarks/results/preferences.jsonl

MODEL is a model directory. ROWS holds train.jsonl and test.jsonl of {"prompt": messages, "chosen", "rejected"}. For a
CPU the rows are made short: of a conversation the last question, where that has at most `--words` words; of the
answers, what `--tokens` leave (`data.on_long: truncate`). Then

    segtrain sft DIR/sft.yaml            on the chosen answers
    segtrain dpo DIR/dpo.yaml            from the adapter of that run (lora.init_from)
    segtrain eval DIR/dpo --base         on the pairs of test.jsonl

The line of the result file has the figures of the last command for three models: `base` without an adapter, `start`
with that of SFT, `adapter` with that of DPO. `chosen_likelier`: the share of pairs whose chosen answer is the likelier
one per token. `accuracy`: the share whose chosen answer has gained more than the rejected one on `start`.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

FIGURES = ("chosen_likelier", "chosen_lead", "perplexity", "loss", "accuracy", "rewards_margins")


def short_rows(source: Path, target: Path, words: int) -> int:
    """Write the pairs whose last question is short, with that question alone; returns their number."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    kept = []
    for row in rows:
        question = row["prompt"][-1]
        if len(question["content"].split()) <= words and row["chosen"] != row["rejected"]:
            kept.append({**row, "prompt": [question]})
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    return len(kept)


def recipes(options: argparse.Namespace) -> None:
    """sft.yaml and dpo.yaml in the folder; JSON is YAML."""
    folder = options.folder
    data = {"train": str(folder / "train.jsonl"), "test": str(folder / "held-out.jsonl")}
    data |= {"max_seq_length": options.tokens, "on_long": "truncate"}  # type: ignore[dict-item]
    lora = {"rank": 8, "alpha": 16, "layers": options.layers}
    output = {"eval_every": 0, "save_every": 0, "report_every": 10}
    sft = {
        "model": options.model,
        "data": data | {"columns": {"completion": "chosen"}},
        "lora": lora,
        "train": {"steps": options.sft_updates, "learning_rate": 5e-4, "warmup_ratio": 0.1},
        "output": output | {"dir": str(folder / "sft")},
    }
    dpo = {
        "model": options.model,
        "data": data | {"format": "preference"},
        "lora": lora | {"init_from": str(folder / "sft")},
        "dpo": {"beta": 0.1},
        "train": {"steps": options.dpo_updates, "learning_rate": 2e-4, "warmup_ratio": 0.1},
        "output": output | {"dir": str(folder / "dpo")},
    }
    for name, recipe in (("sft", sft), ("dpo", dpo)):
        (folder / f"{name}.yaml").write_text(json.dumps(recipe, indent=2) + "\n")


def segtrain(*arguments: str) -> tuple[str, float]:
    """What the command prints, and its seconds."""
    begun = time.perf_counter()
    print("segtrain", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "segtrain", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, round(time.perf_counter() - begun, 1)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    trained = short_rows(options.rows / "train.jsonl", folder / "train.jsonl", options.words)
    held_out = short_rows(options.rows / "test.jsonl", folder / "held-out.jsonl", options.words)
    recipes(options)
    seconds = {loss: segtrain(loss, str(folder / f"{loss}.yaml"), "--overwrite")[1] for loss in ("sft", "dpo")}
    text, seconds["eval"] = segtrain("eval", str(folder / "dpo"), "--base", "--json")
    found = json.loads(text)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "model": Path(options.model).name,
        "pairs": {"train": trained, "test": held_out, "evaluated": found["rows"]},
        "updates": {"sft": options.sft_updates, "dpo": options.dpo_updates},
        "tokens": options.tokens,
        "layers": options.layers,
        "seconds": seconds,
        "models": found["models"],
    }


def print_table(path: Path) -> None:
    for line in map(json.loads, path.read_text().splitlines()):
        print(f"\n{line['model']}, {line['updates']}, {line['pairs']['evaluated']} pairs")
        print("| held-out pairs |", " | ".join(FIGURES), "|\n|---|" + "---:|" * len(FIGURES))
        for name in ("base", "start", "adapter"):
            print(f"| {name} |", " | ".join(f"{line['models'][name][figure]:.3f}" for figure in FIGURES), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("rows", nargs="?", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/preferences"))
    parser.add_argument("--sft-updates", type=int, default=40)
    parser.add_argument("--dpo-updates", type=int, default=60)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/preferences.jsonl"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if not options.table:
        line = measured(options)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print_table(options.table or options.out)


if __name__ == "__main__":
    main()
