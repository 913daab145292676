"""Weights read from disk while their layers run, beside all in memory: one step's peak, time and gradients.

    python benchmarks/streamed.py MODEL 512 --out benchmarks/results/streamed.jsonl
    python benchmarks/streamed.py MODEL 512 --boundaries 8 --repeats 5

MODEL is a directory (SmolLM2-135M in float32 gives the published line). Both ways run the same plan, each in a process
of its own, turn about. Streamed, the head takes the vocabulary by blocks; `--blocks both` lets the resident one do so
too, which gives the same bits, while `--blocks streamed` compares with the head as it is otherwise.

`peak_mib` is `mx.get_peak_memory` from the start of loading, in all; `rss_mib` the process's highest resident set;
`seconds` the median step after the first and `cpu_seconds` the processor time of a step, which a busy machine changes
less; `equal` whether the gradients are, to the bit, and `error` how far they are apart otherwise.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
WAYS = ("resident", "streamed")
KEYS = ("peak_mib", "rss_mib", "seconds", "cpu_seconds", "waited")


def measure(model: str, tokens: int, way: str, steps: int, engine: dict[str, Any], save: str) -> dict[str, Any]:
    """Steps on a row of made-up tokens, in this process; the last one's gradients go to the file `save`."""
    import mlx.core as mx

    from segtrain.engine.backward import SegmentedBackward
    from segtrain.engine.layouts import single
    from segtrain.engine.objectives import sft
    from segtrain.lora.layers import attach
    from segtrain.models.load import load
    from segtrain.models.stack import Execution, LayerStack

    loaded = load(model, stream=lambda path: way == "streamed")
    lora = attach(loaded.model, rank=8, scale=20.0)
    stack = LayerStack(loaded.model, loaded.weights).executing(Execution(blocks=engine.pop("blocks") == "both"))
    mx.clear_cache()
    backward = SegmentedBackward(stack, lora, sft, **engine)
    row = [(7 * i * i + 3 * i) % min(loaded.vocabulary, 40000) for i in range(tokens + 1)]
    seconds, processor = [], []
    for _ in range(steps):
        begun, used = time.perf_counter(), time.process_time()
        step = backward.step(single(row, [True] * len(row)))
        mx.eval(step.grads.array)
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - used)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)
    np.save(save, np.array(step.grads.array))
    return {
        "way": way,
        "peak_mib": round(mx.get_peak_memory() / MIB, 1),
        "rss_mib": round(rss / MIB if sys.platform == "darwin" else rss, 1),
        "seconds": round(statistics.median(seconds[1:]), 4),
        "cpu_seconds": round(statistics.median(processor[1:]), 4),
        "waited": round(loaded.weights.waited / steps, 4) if loaded.weights else 0.0,
    }


def compared(model: str, tokens: int, repeats: int, steps: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Both ways, `repeats` times turn about; the median of each."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{way}.npy" for way in WAYS]
        for _ in range(repeats):
            for way, save in zip(WAYS, files, strict=True):
                given = json.dumps([model, tokens, way, steps, engine, save])
                done = subprocess.run([sys.executable, __file__, "--measure", given], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                runs[way].append(json.loads(done.stdout.splitlines()[-1]))
        held, read = (np.load(save) for save in files)
    line: dict[str, Any] = {"model": Path(model).name, "tokens": tokens, "engine": engine}
    for way, found in runs.items():
        line[way] = {key: statistics.median(x[key] for x in found) for key in KEYS}
    line["cpu_times"] = round(line["streamed"]["cpu_seconds"] / line["resident"]["cpu_seconds"], 3)
    line["times"] = round(line["streamed"]["seconds"] / line["resident"]["seconds"], 3)
    line["equal"] = bool((held == read).all())
    line["error"] = float(f"{np.linalg.norm(held - read) / np.linalg.norm(held):.3g}")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("tokens", nargs="?", type=int, default=512)
    parser.add_argument("--boundaries", type=int)
    parser.add_argument("--head-chunk", type=int, default=64)
    parser.add_argument("--segment-size", type=int, default=1)
    parser.add_argument("--blocks", choices=("streamed", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(*json.loads(given.measure))))
        return
    engine = {"segment_size": given.segment_size, "head_chunk": given.head_chunk, "boundaries": given.boundaries}
    engine["blocks"] = given.blocks
    line = compared(given.model, given.tokens, given.repeats, given.steps, engine)
    line |= {"date": datetime.now(UTC).date().isoformat(), "mlx": version("mlx"), "cores": os.cpu_count()}
    line["command"] = " ".join(["python", "benchmarks/streamed.py", line["model"], *sys.argv[2:]])
    print(json.dumps(line))
    if given.out:
        with given.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
