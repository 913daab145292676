"""Peak memory of one sliding-window layer's vjp as rows grow, in a real model (gemma3_text) and not just its attention.

    python benchmarks/window_layer.py                  segtrain and mlx-lm's own layer, T = 2k, 4k, 8k, window 512
    python benchmarks/window_layer.py --tokens 2048 4096 --only segtrain

A layer with LoRA on all linear modules; its vjp with respect to the hidden states and the LoRA weights, as a segment
of one layer takes it. Peak is `mx.get_peak_memory` above what was active before (weights, hidden states, cotangent).
Each measurement is a process of its own. `exponent` is log(peak ratio) / log(length ratio) from the shortest to the
longest row.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import gemma3_text

from segtrain.engine.layouts import Stream
from segtrain.engine.segments import HIDDEN
from segtrain.lora.layers import attach, swapped
from segtrain.models.stack import LayerStack

WINDOW = 512
CONFIG = {
    "model_type": "gemma3_text",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
}
KINDS = ("segtrain", "mlx-lm")


def measure(kind: str, tokens: int) -> dict:
    """One vjp of layer 0 (a sliding one): peak MiB and seconds."""
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(CONFIG))
    mx.eval(model.parameters())
    lora = attach(model, rank=8, scale=2.0)
    stack, slots = LayerStack(model), lora.slots(0, 1)
    tape = stack.begin(Stream(mx.zeros((1, tokens), mx.int32)))
    h, dh = (mx.random.normal((1, tokens, CONFIG["hidden_size"]), key=mx.random.key(i)) for i in range(2))
    mx.eval(h, dh)

    def layer(h: mx.array, *values: mx.array) -> list[mx.array]:
        with swapped(slots, values):
            if kind == "segtrain":
                return [stack.run(tape, {HIDDEN: h}, 0, 1)[HIDDEN]]
            return [model.layers[0](h, gemma3_text.create_attention_mask(h, window_size=WINDOW))]

    inputs = [h, *(slot.value for slot in slots)]
    before, begun = mx.get_active_memory(), time.perf_counter()
    mx.reset_peak_memory()
    mx.eval(mx.vjp(layer, inputs, [dh])[1])
    seconds = time.perf_counter() - begun
    return {"kind": kind, "tokens": tokens, "peak_mib": (mx.get_peak_memory() - before) / 2**20, "seconds": seconds}


def exponent(results: list[dict]) -> float:
    first, last = results[0], results[-1]
    return math.log(last["peak_mib"] / first["peak_mib"]) / math.log(last["tokens"] / first["tokens"])


def about() -> dict:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "command": " ".join(["python", "benchmarks/window_layer.py", *sys.argv[1:]]),
        "config": CONFIG,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/window_layer.jsonl"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tokens[0])))
        return
    lines = [about()]
    for kind in options.only:
        results = []
        for tokens in options.tokens:
            command = [sys.executable, __file__, "--one", kind, "--tokens", str(tokens)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(output))
            print(results[-1], flush=True)
        lines += [*results, {"kind": kind, "exponent": exponent(results)}]
        print(lines[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
