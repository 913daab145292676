"""Memory and time of one training step at the 8B shape: segtrain, mlx-lm's trainer and the strongest control, in one
run.

    python benchmarks/floor.py                                      every job, the most important first
    python benchmarks/floor.py --minutes 10                         as many of them as end within ten minutes
    python benchmarks/floor.py --only memory speed                  some of them
    python benchmarks/floor.py --only speed --set '[{"keep": 20}]'  with variants of your own
    python benchmarks/floor.py --only short mlx-lm-short short mlx-lm-short    in turns
    python benchmarks/floor.py --table benchmarks/results/floor.jsonl

The model has Llama-8B's shape (hidden 4096, 32 layers, MLP 14336, 32/8 heads, vocabulary 128256) and random weights;
LoRA rank 8 on all linear layers. `above_gib` is the peak of `mx.get_peak_memory` over the resident model, so it
counts adapter, gradients and Adam's state; `seconds` the fastest of the timed steps, optimiser and (segtrain's) the
gradient's norm included;
`first_seconds` the first step, in which kernels are compiled. Each job is a process of its own, since the
environment's `MLX_…` variables are read at start; its variants share one model.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

SHAPES = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 8192},
}  # fmt: skip
GIB = 2**30

# A command buffer holds its kernels' temporaries until it completes: small ones for memory.
SMALL = {"MLX_MAX_MB_PER_BUFFER": "100", "MLX_MAX_OPS_PER_BUFFER": "8"}
PLAIN = {**SMALL, "MLX_USE_CUDA_GRAPHS": "0"}
LEAN = {"compiled": True, "mlp_rows": 2048, "head_chunk": 512}
LEANER: list[dict] = [
    {"lookahead": 1},
    {"lookahead": 2, "limit_gib": 3.0},
    {"lookahead": 2, "limit_gib": 3.0, "boundaries": 28},
    {"lookahead": 2, "limit_gib": 2.0, "boundaries": 16},
]
FAST = {"compiled": True, "head_chunk": 1024, "lookahead": 2}
SHARED = {"T": 8192, "response": 512}

JOBS: dict[str, dict] = {  # the most important first; a key of a variant overrides the job's
    "memory": {"title": "bf16, memory first", "T": 8192, "env": SMALL, **LEAN, "timeout": 150, "variants": LEANER},
    "speed": {"title": "bf16, speed first", "T": 8192, "env": SMALL, **FAST, "limit_gib": 21.3, "timeout": 150,
              "variants": [{"keep": 0}, {"keep": 24}, {"keep": 26}]},
    "mlx-lm": {"title": "bf16, mlx-lm --grad-checkpoint", "T": 8192, "system": "mlx-lm", "timeout": 120,
               "variants": [{}]},
    "packed": {"title": "4-bit", "bits": 4, "T": 8192, "env": SMALL, **LEAN, "dequantize": True, "timeout": 150,
               "variants": LEANER},
    "packed-plain": {"title": "4-bit, without CUDA graphs", "bits": 4, "T": 8192, "env": PLAIN, **LEAN,
                     "dequantize": True, "timeout": 100, "variants": LEANER[1:3]},
    "longest": {"title": "4-bit, longest context", "bits": 4, "T": 131072, "env": SMALL, **LEAN, "dequantize": True,
                "boundaries": 8, "limit_gib": 20, "steps": 1, "warm": False, "timeout": 240, "variants": [{}]},
    "16k": {"title": "bf16, T = 16384", "T": 16384, "env": SMALL, **LEAN, "mlp_rows": 4096, "timeout": 120,
            "variants": [{"lookahead": 2, "limit_gib": 6.5}, {"lookahead": 2, "limit_gib": 6.0, "boundaries": 28}]},
    "shared": {"title": "ORPO, shared prefix", "layout": "shared", **SHARED, **FAST, "timeout": 100, "variants": [{}]},
    "pair": {"title": "ORPO, two branches", "layout": "pair", **SHARED, **FAST, "timeout": 100, "variants": [{}]},
    "short": {"title": "bf16, T = 512", "T": 512, "full": True, "compiled": True, "steps": 5, "timeout": 150,
              "variants": [{}]},
    "short-small": {"title": "bf16, T = 512, small buffers", "T": 512, "full": True, "compiled": True, "steps": 5,
                    "env": SMALL, "timeout": 60, "variants": [{}]},
    "mlx-lm-short": {"title": "bf16, T = 512, mlx-lm", "T": 512, "system": "mlx-lm", "checkpoint": False, "steps": 5,
                     "timeout": 180, "variants": [{}]},
    "control": {"title": "bf16, strongest control", "T": 8192, "system": "control", "timeout": 90, "variants": [{}]},
    "mlx-lm-packed": {"title": "4-bit, mlx-lm --grad-checkpoint", "bits": 4, "T": 8192, "system": "mlx-lm",
                      "timeout": 150, "variants": [{}]},
}  # fmt: skip
ENGINE = ("segment_size", "head_chunk", "keep", "boundaries", "lookahead", "compiled")
SHOWN = (*ENGINE[1:5], "mlp_rows", "dequantize", "limit_gib", "full")


def build(shape: str, bits: int, dtype: str):
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models import llama

    mx.random.seed(0)
    args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, rope_theta=500000.0,
                           max_position_embeddings=131072, tie_word_embeddings=False, **SHAPES[shape])  # fmt: skip
    model = llama.Model(args)
    model.set_dtype(getattr(mx, dtype))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    model.freeze()
    return model, args


def measure(step, steps: int, warm: bool) -> dict:
    import mlx.core as mx

    mx.clear_cache()
    mx.reset_peak_memory()
    times, loss = [], 0.0
    for number in range(steps + warm):
        if warm and number == 1:
            mx.clear_cache()
            mx.reset_peak_memory()
        begun = time.perf_counter()
        loss = step()
        mx.synchronize()
        times.append(time.perf_counter() - begun)
    return {
        "seconds": round(min(times[warm:]), 4),
        "first_seconds": round(times[0], 2),
        "peak_gib": mx.get_peak_memory() / GIB,
        "loss": round(loss, 4),
    }


def segtrain_step(model, args, job):
    import mlx.core as mx

    from segtrain.engine import objectives
    from segtrain.engine.backward import FullBackward, SegmentedBackward
    from segtrain.engine.layouts import pair, shared_prefix, single
    from segtrain.lora import layers
    from segtrain.models.stack import Execution, LayerStack
    from segtrain.recipe.schema import TrainRecipe
    from segtrain.run.optimizer import Optimizer, clip_factor, global_norm

    if not hasattr(model, "_lora"):
        model._lora = layers.attach(model, rank=8, scale=20.0)
    stack = LayerStack(model).executing(Execution(job.get("mlp_rows"), job.get("dequantize", False)))
    T = job["T"]
    ids = mx.random.randint(0, args.vocab_size, (T + 1,)).tolist()
    if job.get("layout", "sft") == "sft":
        layout, loss = single(ids, [True] * (T + 1)), objectives.sft
    else:
        R = job["response"]
        build_layout = shared_prefix if job["layout"] == "shared" else pair
        layout, loss = build_layout(ids[: T - 2 * R], ids[:R], ids[R : 2 * R]), objectives.orpo()
    if job.get("full"):
        engine = FullBackward(stack, model._lora, loss, compiled=job.get("compiled", False))
    else:
        engine = SegmentedBackward(stack, model._lora, loss, **{k: job[k] for k in ENGINE if k in job})
    adam = {"optimizer": "adam", "learning_rate": 1e-5, "lr_schedule": "constant"}
    optimizer = Optimizer(TrainRecipe.model_validate(adam), 10**6)

    def step():
        begun = time.perf_counter()
        result = engine.step(layout)
        loss = (result.loss.total / result.loss.weight).item()
        step.engine.append(time.perf_counter() - begun)
        factor = clip_factor(global_norm(result.grads) / result.loss.weight, 1e9) / result.loss.weight
        model._lora.set(optimizer.update(model._lora.flat(), result.grads, factor))
        return loss

    step.engine = []
    return step


def mlx_lm_step(model, args, job):
    """mlx-lm's own loss, LoRA layers, checkpointing and compiled step, as its trainer puts them together."""
    from functools import partial

    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers

    linear_to_lora_layers(model, args.num_hidden_layers, {"rank": 8, "scale": 20.0, "dropout": 0.0})
    model.train()
    if job.get("checkpoint", True):
        grad_checkpoint(model.layers[0])
    T = job["T"]
    batch, lengths = mx.random.randint(0, args.vocab_size, (1, T + 1)), mx.array([[0, T]])
    optimizer = optim.Adam(1e-5)
    value_and_grad = nn.value_and_grad(model, default_loss)
    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def compiled(batch, lengths):
        (loss, tokens), grads = value_and_grad(model, batch, lengths)
        optimizer.update(model, grads)
        return loss, tokens

    def step():
        loss, tokens = compiled(batch, lengths)
        mx.eval(state, loss, tokens)
        return loss.item()

    return step


def control_step(model, args, job):
    """Checkpointed layers, chunked head, LoRA in the activations' dtype, gradients evaluated last layer first."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import grad_checkpoint

    from segtrain.lora import layers

    layers.attach(model, rank=8, scale=20.0)
    grad_checkpoint(model.layers[0])
    T, chunk = job["T"], 1024
    ids = mx.random.randint(0, args.vocab_size, (1, T + 1))
    inner = model.model
    optimizer = optim.Adam(1e-5)

    def head(h, y):
        z = model.lm_head(inner.norm(h)).astype(mx.float32)
        return (mx.logsumexp(z, -1) - mx.take_along_axis(z, y[..., None], -1)[..., 0]).sum()

    def loss_fn(model, ids):
        h = inner.embed_tokens(ids[:, :-1])
        for layer in inner.layers:
            h = layer(h, "causal", None)
        total = mx.array(0.0)
        for c in range(0, T, chunk):
            y = ids[:, 1 + c : 1 + c + chunk]
            total = total + mx.checkpoint(lambda x, y=y: head(x, y))(h[:, c : c + chunk])
        return total / T

    value_and_grad = nn.value_and_grad(model, loss_fn)

    def step():
        loss, grads = value_and_grad(model, ids)
        mx.eval(loss)
        for layer in reversed(grads["model"]["layers"]):
            mx.eval(layer)
        optimizer.update(model, grads)
        mx.eval(model.trainable_parameters(), optimizer.state)
        return loss.item()

    return step


STEPS = {"segtrain": segtrain_step, "mlx-lm": mlx_lm_step, "control": control_step}


def work(job: dict) -> None:
    """Run a job's variants in this process, printing one JSON line each."""
    import mlx.core as mx

    model, args = build(job.get("shape", "8b"), job.get("bits", 0), job.get("dtype", "bfloat16"))
    base = mx.get_active_memory()
    for variant in job["variants"]:
        settings = {**{k: v for k, v in job.items() if k != "variants"}, **variant}
        limit = settings.get("limit_gib")
        mx.set_memory_limit(base + int(limit * GIB) if limit else 2**40)
        mx.set_cache_limit(int(settings["cache_gib"] * GIB) if "cache_gib" in settings else 2**40)
        try:
            step = STEPS[settings.get("system", "segtrain")](model, args, settings)
            result = measure(step, settings.get("steps", 3), settings.get("warm", True))
            if hasattr(step, "engine"):  # of `seconds`, without the optimiser
                result["engine_seconds"] = round(min(step.engine), 4)
            result |= {"base_gib": base / GIB, "above_gib": round(result["peak_gib"] - base / GIB, 3)}
            del step
        except Exception as error:  # a variant that fails must not hide the others
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()  # the last variant's engine and optimiser hold each other, and would count as this one's memory
        mx.clear_cache()
        print(json.dumps({**settings, **result}), flush=True)


def run(name: str, job: dict, seconds: float) -> list[dict]:
    """The results of one job, in a process of its own that is stopped after `seconds`."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    environment = {**os.environ, **job.get("env", {})}
    try:
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, timeout=seconds)
        lines, error = done.stdout.splitlines(), f"exit status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as expired:
        lines, error = (expired.stdout or b"").decode().splitlines(), f"stopped after {seconds:.0f} s"
    results = [{"job": name, **json.loads(line)} for line in lines if line.startswith("{")]
    if error:
        results.append({"job": name, **{k: v for k, v in job.items() if k != "variants"}, "error": error})
    return results


def table(lines: list[dict]) -> str:
    """Results as Markdown, one row a variant."""
    rows = ["| what | settings | s/step | tokens/s | GiB above the model | GiB in all |", "|---|---|---|---|---|---|"]
    for line in lines:
        if "job" not in line:
            continue
        settings = ", ".join(f"{key} {line[key]}" for key in SHOWN if line.get(key))
        if "error" in line:
            rows.append(f"| {line['title']} | {settings} | {line['error']} | | | |")
            continue
        speed = f"{line['seconds']:.3f} | {line['T'] / line['seconds']:,.0f}"
        rows.append(f"| {line['title']} | {settings} | {speed} | {line['above_gib']:.2f} | {line['peak_gib']:.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--set", type=json.loads, help="variants (JSON) instead of the chosen jobs' own")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no job that may end later")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/floor.jsonl"))
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return work(json.loads(options.job))
    if options.table:
        return print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
    end = time.monotonic() + 60 * options.minutes
    head = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict] = [head]
    with options.out.open("a") as out:
        out.write(json.dumps(head) + "\n")
        for name in options.only:
            job = JOBS[name] | {"shape": options.shape} | ({"variants": options.set} if options.set else {})
            left = end - time.monotonic()
            if left < job["timeout"] / 2:
                print(f"{name}: left out, {left:.0f} s are left", flush=True)
                continue
            results = run(name, job, min(left, job["timeout"]))
            lines += results
            out.writelines(json.dumps(line) + "\n" for line in results)
            out.flush()
            print(*(json.dumps(line) for line in results), sep="\n", flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
