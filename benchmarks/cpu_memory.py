"""Peak memory and time of one training step on the CPU: segmented backward against mlx-lm's, option by option.

    python benchmarks/cpu_memory.py                          every variant, one process each
    python benchmarks/cpu_memory.py --only size-1 checkpoint --repeats 3
    python benchmarks/cpu_memory.py --set segment_size=1 mlp_rows=256 limit_mb=60
    python benchmarks/cpu_memory.py --flat 200               is active memory flat over steps of varying lengths?

Model: llama, 16 layers, hidden 512, MLP 1536, 8/2 heads, vocabulary 32,000, float32, random weights; rank 8 on
all linear layers; a row of 1,024 tokens. `peak_mb` is the highest `mx.get_peak_memory` of the timed steps above
what was active before the first one (model and LoRA weights), in MiB; `seconds` and `cpu_seconds` the fastest
step; `phases` the highest peak above the model of each kind of phase. For quick float32 products on Linux:
LD_PRELOAD an OpenBLAS, and OPENBLAS_NUM_THREADS=1.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

MB = 2**20
CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 16,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
LEAN = {"segment_size": 1, "head_chunk": 64, "mlp_rows": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "mlx-lm": {"kind": "mlx-lm"},
    "checkpoint": {"kind": "mlx-lm", "checkpoint": True},
    "full": {"kind": "full"},
    "size-1": {"segment_size": 1},
    "size-2": {"segment_size": 2},
    "size-4": {"segment_size": 4},
    "size-16": {"segment_size": 16},
    "size-1-head-64": {"segment_size": 1, "head_chunk": 64},
    "size-1-head-1024": {"segment_size": 1, "head_chunk": 1024},
    "size-1-mlp-256": {"segment_size": 1, "mlp_rows": 256},
    "lean": LEAN,
    "lean-mlp-128": {**LEAN, "mlp_rows": 128},
    "lean-mlp-512": {**LEAN, "mlp_rows": 512},
    "lean-boundaries-6": {**LEAN, "boundaries": 6},
    "lean-limit": {**LEAN, "limit_mb": 60},
    "lean-limit-20": {**LEAN, "limit_mb": 20},
    "lean-cache-0": {**LEAN, "cache_mb": 0},
    "lean-boundaries-6-limit": {**LEAN, "boundaries": 6, "limit_mb": 40},
    "size-1-limit": {"segment_size": 1, "limit_mb": 60},
    "checkpoint-limit": {"kind": "mlx-lm", "checkpoint": True, "limit_mb": 60},
    "keep-2": {"segment_size": 1, "head_chunk": 64, "keep": 2},
    "keep-4": {"segment_size": 1, "head_chunk": 64, "keep": 4},
    "keep-8": {"segment_size": 1, "head_chunk": 64, "keep": 8},
    "lookahead-1": {"segment_size": 1, "lookahead": 1},
    "lookahead-2": {"segment_size": 1, "lookahead": 2},
}


def build_model() -> Any:
    import mlx.core as mx
    from mlx_lm.models import llama

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.freeze()
    mx.eval(model.parameters())
    return model


def ids(rows: int, seed: int = 0) -> list[int]:
    import mlx.core as mx

    return mx.random.randint(0, CONFIG["vocab_size"], (rows + 1,), key=mx.random.key(seed)).tolist()


def mlx_lm_step(model: Any, rows: int, *, checkpoint: bool = False) -> Callable[[], float]:
    """Loss and gradients by mlx-lm's own LoRA layers, `default_loss` and `grad_checkpoint`, uncompiled."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers

    linear_to_lora_layers(model, len(model.layers), {"rank": 8, "scale": 2.0, "dropout": 0.0})
    model.train()
    mx.eval(model.parameters())
    if checkpoint:
        grad_checkpoint(model.layers[0])
    batch, lengths = mx.array([ids(rows)]), mx.array([[1, rows]])
    function = nn.value_and_grad(model, default_loss)

    def step() -> float:
        (loss, _), grads = function(model, batch, lengths)
        mx.eval(loss, grads)
        return loss.item()

    return step


class Phases:
    """The highest peak of each kind of phase, and its seconds."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.highest = 0

    @contextmanager
    def __call__(self, phase: str, stream: int) -> Iterator[None]:
        import mlx.core as mx

        kind = phase.split("[")[0]
        self.close()
        begun = time.perf_counter()
        yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - begun
        self.peaks[kind] = max(self.peaks.get(kind, 0), mx.get_peak_memory())
        self.close()

    def close(self) -> int:
        import mlx.core as mx

        self.highest = max(self.highest, mx.get_peak_memory())
        mx.reset_peak_memory()
        return self.highest


def segtrain_backward(model: Any, options: dict[str, Any], loss: Any, meter: Any) -> Any:
    """The engine under test: `options` are the engine's, or `mlp_rows`, or `kind: full`."""
    import mlx.core as mx

    from segtrain.engine.backward import FullBackward, SegmentedBackward
    from segtrain.lora import layers as L
    from segtrain.models.stack import Execution, LayerStack

    lora = L.attach(model, rank=8, scale=2.0)
    lora.set({n: mx.random.normal(v.shape) * 0.02 if n.endswith("b") else v for n, v in lora.values().items()})
    mx.eval(lora.values())
    options = dict(options)
    stack = LayerStack(model).executing(Execution(options.pop("mlp_rows", None)))
    if options.pop("kind", "segmented") == "full":
        return FullBackward(stack, lora, loss, meter=meter, **options)
    return SegmentedBackward(stack, lora, loss, meter=meter, **options)


def measure(options: dict[str, Any], rows: int, repeats: int) -> dict[str, Any]:
    """One variant, in this process."""
    import mlx.core as mx

    options = dict(options)
    limit, cache = options.pop("limit_mb", None), options.pop("cache_mb", None)
    model, phases = build_model(), Phases()
    if options.get("kind") == "mlx-lm":
        options.pop("kind")
        step = mlx_lm_step(model, rows, **options)
    else:
        from segtrain.engine import layouts, objectives

        row = layouts.single(ids(rows), [True] * (rows + 1))
        backward = segtrain_backward(model, options, objectives.sft, phases)

        def step() -> float:
            value = backward.step(row).loss
            return value.total.item() / value.weight

    base = mx.get_active_memory()
    if limit is not None:
        mx.set_memory_limit(base + limit * MB)
    if cache is not None:
        mx.set_cache_limit(cache * MB)
    phases.close()
    phases.highest = 0
    seconds, cpu, losses_seen = [], [], []
    for _ in range(repeats):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        phases.seconds.clear()
        losses_seen.append(step())
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - begun_cpu)
    return {
        "peak_mb": round((phases.close() - base) / MB, 1),
        "seconds": round(min(seconds), 2),
        "cpu_seconds": round(min(cpu), 2),
        "base_mb": round(base / MB, 1),
        "phases": {kind: round((peak - base) / MB, 1) for kind, peak in phases.peaks.items()},
        "phase_seconds": {kind: round(s, 2) for kind, s in phases.seconds.items()},
        "loss": losses_seen[-1],
    }


def measure_flat(options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Active memory after each of `steps` steps of varying lengths, optimiser-free; gradients are dropped at once."""
    import mlx.core as mx

    from segtrain.engine import layouts, objectives
    from segtrain.engine.backward import no_meter

    backward = segtrain_backward(build_model(), options, objectives.sft, no_meter)
    active = []
    for number in range(steps):
        rows = 16 + (number * 37) % 112
        layout = layouts.single(ids(rows, number), [True] * (rows + 1))
        backward.step(layout)
        del layout
        mx.synchronize()
        active.append(mx.get_active_memory())
    after = active[1:]
    return {
        "steps": steps,
        "spread_mb": round((max(after) - min(after)) / MB, 3),
        "drift_mb": round((active[-1] - active[1]) / MB, 3),
    }


def environment() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "openblas": "preloaded" if "openblas" in os.environ.get("LD_PRELOAD", "") else "no",
    }


def spawn(name: str, job: dict[str, Any], out: Path) -> None:
    """Run one job in a process of its own, append its line to `out`, print it."""
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}
    line = {"variant": name, **job, **result, **environment()}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{name:20}", json.dumps(result), flush=True)


def parsed(pairs: list[str]) -> dict[str, Any]:
    return {
        key: json.loads(value) if value[0] in "0123456789tf" else value for key, value in (p.split("=") for p in pairs)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="variants to run")
    parser.add_argument("--set", nargs="*", default=[], help="one variant of your own: option=value")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--flat", type=int, default=0, help="steps of varying lengths")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_memory.jsonl")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        job = json.loads(args.child)
        flat = "flat" in job
        print(json.dumps(measure_flat(job["options"], job["flat"]) if flat else measure(**job)))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = {"custom": parsed(args.set)} if args.set else {n: VARIANTS[n] for n in args.only or VARIANTS}
    if args.flat:
        chosen = (
            {n: v for n, v in chosen.items() if v.get("kind") != "mlx-lm"} if args.only or args.set else {"lean": LEAN}
        )
    for name, options in chosen.items():
        job = (
            {"options": options, "flat": args.flat}
            if args.flat
            else {"options": options, "rows": args.rows, "repeats": args.repeats}
        )
        spawn(name, job, args.out)


if __name__ == "__main__":
    main()
