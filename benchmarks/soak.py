"""A long run of rows of varied length on a tiny model: does memory, or the number of open files, creep?

    python benchmarks/soak.py --out benchmarks/results/soak.jsonl             2,000 steps of SFT and of ORPO

After a warm-up of 200 steps, over the rest: active memory within 1 MB, RSS within 50 MB, open files the same.
Active memory is read after each step, when the adapter, the optimiser and the model are all that is left.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny_run  # noqa: E402

from segtrain.event import TrainStep  # noqa: E402
from segtrain.recipe.schema import Recipe  # noqa: E402
from segtrain.run.trainer import Trainer  # noqa: E402

WARM_UP = 200
ACTIVE, RSS = 1e6, 50e6  # bytes


def recipe(folder: Path, loss: str, steps: int, backward: str) -> Recipe:
    """Rows of 4 to 200 tokens, most of them of a length that no other has."""
    draw = random.Random(0)
    if loss == "sft":
        rows = [
            {"prompt": tiny_run.text(draw, 2, 60), "completion": " " + tiny_run.text(draw, 1, 130)} for _ in range(400)
        ]
    else:
        rows = [
            {
                "prompt": tiny_run.text(draw, 2, 90),
                "chosen": " " + tiny_run.text(draw, 1, 50),
                "rejected": " " + tiny_run.text(draw, 1, 50),
            }
            for _ in range(400)
        ]
    data = tiny_run.written(folder / f"{loss}-soak.jsonl", rows)
    return tiny_run.recipe(
        folder,
        loss,
        data__train=str(data),
        data__valid=str(folder / f"{loss}-valid.jsonl"),
        data__max_seq_length=256,
        engine__backward=backward,
        train__steps=steps,
        output__dir=str(folder / f"{loss}-{backward}"),
        output__save_every=100,
        output__eval_every=100,
    )


def soak(folder: Path, loss: str, steps: int, backward: str) -> dict:
    process = psutil.Process()
    readings: list[tuple[int, int, int, int]] = []
    begun = time.monotonic()
    for event in Trainer(recipe(folder, loss, steps, backward), loss).events():  # type: ignore[arg-type]
        if isinstance(event, TrainStep):
            readings.append(
                (mx.get_active_memory(), process.memory_info().rss, process.num_fds(), mx.get_cache_memory())
            )
    active, rss, files, cache = zip(*readings[min(WARM_UP, steps // 2) :], strict=True)
    half = len(active) // 2
    line = {
        "loss": loss,
        "backward": backward,
        "steps": len(readings),
        "seconds": round(time.monotonic() - begun, 1),
        "active_bytes": [min(active), max(active)],
        "active_growth": max(active[half:]) - max(active[:half]),
        "rss_bytes": [min(rss), max(rss)],
        "rss_growth": max(rss[half:]) - max(rss[:half]),
        "rss_first_and_last": [rss[0], rss[-1]],
        "cache_bytes": [min(cache), max(cache)],
        "open_files": [min(files), max(files)],
    }
    flat = max(active) - min(active) <= ACTIVE and max(rss) - rss[0] <= RSS and max(files) == min(files)
    return {**line, "ok": flat}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/soak.jsonl")
    parser.add_argument("--cases", default="sft:segmented,orpo:segmented,sft:full")
    options = parser.parse_args()
    head = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "command": " ".join(sys.argv),
    }
    with tempfile.TemporaryDirectory() as temporary:
        lines = [soak(Path(temporary), *_case(case, options.steps)) for case in options.cases.split(",")]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as out:
        for line in (head, *lines):
            out.write(json.dumps(line) + "\n")
    for line in lines:
        print(json.dumps(line))
    sys.exit(0 if all(line["ok"] for line in lines) else 1)


def _case(text: str, steps: int) -> tuple[str, int, str]:
    loss, backward = text.split(":")
    return loss, steps, backward


if __name__ == "__main__":
    main()
