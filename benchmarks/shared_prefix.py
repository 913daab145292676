"""One ORPO step on a shared prefix against the same step on two streams: time and peak memory, on the CPU.

    python benchmarks/shared_prefix.py                            prompt 896, responses of 64 each
    python benchmarks/shared_prefix.py --sizes 1024,128,128 8,64,64

The model and the measure are `cpu_memory.py`'s. The claim: at prompt 896 and responses of 64 tokens, shared takes
at most 0.60 of pair's time, at a lower peak. Both take turns in one process, so that a busy machine slows both.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cpu_memory import LEAN, MB, Phases, build_model, environment, ids, segtrain_backward

ENGINES: dict[str, dict[str, Any]] = {"size-1": {"segment_size": 1}, "lean": LEAN}


def measure(engine: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Both layouts in turn, in this process: the fastest step and the highest peak above the model of each."""
    import mlx.core as mx

    from segtrain.engine import layouts, objectives

    phases = Phases()
    backward = segtrain_backward(build_model(), ENGINES[engine], objectives.orpo(), phases)
    parts = [ids(n - 1, seed) for seed, n in enumerate(sizes)]
    rows = {"pair": layouts.pair(*parts), "shared": layouts.shared_prefix(*parts)}
    base = mx.get_active_memory()
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    cpu: dict[str, list[float]] = {name: [] for name in rows}
    peaks, values = dict.fromkeys(rows, 0), {}
    for _ in range(repeats):
        for name, row in rows.items():
            mx.clear_cache()
            phases.close()
            phases.highest = 0
            begun, begun_cpu = time.perf_counter(), time.process_time()
            values[name] = backward.step(row).loss.total.item()
            seconds[name].append(time.perf_counter() - begun)
            cpu[name].append(time.process_time() - begun_cpu)
            peaks[name] = max(peaks[name], phases.close())
    result: dict[str, Any] = {
        name: {
            "tokens": rows[name].tokens,
            "peak_mb": round((peaks[name] - base) / MB, 1),
            "seconds": round(min(seconds[name]), 2),
            "cpu_seconds": round(min(cpu[name]), 2),
            "loss": values[name],
        }
        for name in rows
    }
    for key in ("seconds", "cpu_seconds", "peak_mb"):
        result[f"{key}_ratio"] = round(result["shared"][key] / result["pair"][key], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["896,64,64"], help="prompt,chosen,rejected tokens")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "shared_prefix.jsonl")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(**json.loads(args.child))))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for sizes in args.sizes:
        for engine in args.engines:
            job = {"engine": engine, "sizes": [int(n) for n in sizes.split(",")], "repeats": args.repeats}
            command = [sys.executable, __file__, "--child", json.dumps(job)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            line = {**job, **json.loads(done.stdout.splitlines()[-1])}
            with args.out.open("a") as file:
                file.write(json.dumps({**line, **environment()}) + "\n")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
