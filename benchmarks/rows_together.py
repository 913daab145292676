"""Loss curves of rows together and of rows one at a time, through the command, against what rounding alone does.

    python benchmarks/rows_together.py
    python benchmarks/rows_together.py --steps 20
    python benchmarks/rows_together.py --speed

A small random llama in float32, 8 rows of 10 to 40 tokens an update, AdamW at 1e-3; ORPO's pairs have prompts of 16 to
30 tokens, each computed once. Runs: `alone`, rows one at a time; `together`, `engine.rows_together: 8`; `rounding`,
one at a time by segments, which computes the same in another order. `apart` is the largest |loss - loss of alone| over
the updates, `rounding` the same of that run.

`--speed`: seconds of processor time an update of the demo model takes on a CPU, 8 rows of 60 tokens, by the difference
of a longer and a shorter run of the command. Matrix products there take a row as long alone as with others.
"""

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import user_models

ROWS = 8
RUNS = {
    "alone": {"engine.rows_together": 1, "engine.backward": "full"},
    "together": {"engine.rows_together": ROWS, "engine.backward": "full"},
    "rounding": {"engine.rows_together": 1, "engine.backward": "segmented"},
}


def rows(loss: str, count: int) -> list[dict[str, str]]:
    if loss == "sft":
        return [{"text": text} for text in user_models.texts(count, 10, 40)]
    draw = random.Random(0)
    answers = iter(user_models.texts(2 * count, 4, 12, seed=1))
    prompts = (user_models.texts(1, 16, 30, seed=draw.randrange(10**6))[0] for _ in range(count))
    return [{"prompt": prompt + " ", "chosen": next(answers), "rejected": next(answers)} for prompt in prompts]


def losses(loss: str, settings: dict[str, Any], steps: int, folder: Path) -> tuple[list[float], int, int]:
    """Of every update, before it; and the tokens and the filler of the run."""
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / loss / "train.jsonl"), "max_seq_length": 64},
        "lora": {"rank": 8, "scale": 2.0},
        "train": {"steps": steps, "learning_rate": 1e-3, "grad_accumulation_steps": ROWS},
        "output": {"dir": str(folder / "run"), "save_every": 0, "eval_every": 0},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "segtrain", loss, str(folder / "recipe.yaml"), "--overwrite"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["event"] == "train"]
    tokens, filler = (sum(line[key] for line in found) for key in ("tokens", "padding_tokens"))
    return [line["loss"] for line in found], tokens, filler


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def processor_seconds(folder: Path, together: int, steps: int) -> float:
    """Of the command, with all that it begins with."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    losses("sft", {"engine.rows_together": together}, steps, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def speed(folder: Path, few: int = 2, many: int = 8) -> dict[str, Any]:
    (folder / "model").symlink_to(user_models.TOKENIZER)
    user_models.write_rows(folder / "sft", [{"text": text} for text in user_models.texts(64, 60, 60)])
    found = {n: processor_seconds(folder, n, many) - processor_seconds(folder, n, few) for n in (1, ROWS)}
    alone, together = (seconds / (many - few) for seconds in found.values())
    return {
        "rows": ROWS,
        "alone": round(alone, 3),
        "together": round(together, 3),
        "factor": round(alone / together, 3),
    }


def measured(loss: str, steps: int, folder: Path) -> dict[str, Any]:
    user_models.write_rows(folder / loss, rows(loss, min(steps * ROWS, 400)))
    curves = {name: losses(loss, settings, steps, folder) for name, settings in RUNS.items()}
    alone, together, rounding = (curve for curve, *_ in curves.values())
    line: dict[str, Any] = {"loss": loss, "updates": steps, "first": alone[0], "last": alone[-1]}
    line |= {"apart": apart(together, alone), "rounding": apart(rounding, alone)}
    return line | {"tokens": curves["together"][1], "padding_tokens": curves["together"][2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=["sft", "orpo"])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = [
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.platform(),
            "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        }
    ]
    with tempfile.TemporaryDirectory() as folder:
        if given.speed:
            found.append(speed(Path(folder)))
            print(json.dumps(found[-1]), flush=True)
        else:
            user_models.make_model("tiny", Path(folder) / "model", dtype="float32")
        for loss in [] if given.speed else given.only:
            found.append(measured(loss, given.steps, Path(folder)))
            print(json.dumps(found[-1]), flush=True)
    if given.out:
        with given.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in found)


if __name__ == "__main__":
    main()
