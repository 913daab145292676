"""Memory and time of one training step at the 8B shape: segtrain, mlx-lm's trainer and the strongest control, in one run.

    python benchmarks/floor.py --out benchmarks/results/floor.jsonl             everything in the README's table
    python benchmarks/floor.py --jobs jobs.json --out …                         other variants

The model has Llama-8B's shape (hidden 4096, 32 layers, MLP 14336, 32/8 heads, vocabulary 128256) and random weights; LoRA rank 8 on all
linear layers. `above_gib` is the peak of `mx.get_peak_memory` over the resident model; `seconds` the fastest of the timed steps, optimiser
included. Each job is a process of its own, since `MLX_…` variables are read at start; its variants share one model.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

SHAPES = {
    "8b": dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256),
    "1b": dict(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256),
    "tiny": dict(hidden_size=256, num_hidden_layers=8, intermediate_size=768, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=8192),
}  # fmt: skip
SMALL_BUFFERS = {"MLX_MAX_MB_PER_BUFFER": "50", "MLX_MAX_OPS_PER_BUFFER": "2"}
GIB = 2**30


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


def measure(step, steps: int) -> dict:
    import mlx.core as mx

    step()  # warm-up: kernels compile
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    times, loss = [], 0.0
    for _ in range(steps):
        begun = time.perf_counter()
        loss = step()
        mx.synchronize()
        times.append(time.perf_counter() - begun)
    return {"seconds": round(min(times), 4), "peak_gib": mx.get_peak_memory() / GIB, "loss": round(loss, 4)}


def segtrain_step(model, args, job):
    import mlx.core as mx
    import mlx.optimizers as optim

    from segtrain import losses, lora
    from segtrain.engine import FullBackward, SegmentedBackward
    from segtrain.layouts import pair, shared_prefix, single
    from segtrain.models.stack import LayerStack

    attached = lora.attach(model, rank=8, scale=20.0) if not getattr(model, "_lora", None) else model._lora
    model._lora = attached
    stack = LayerStack(model)
    stack.mlp_rows, stack.dequantize = job.get("mlp_rows"), job.get("dequantize", False)
    T = job["T"]
    ids = mx.random.randint(0, args.vocab_size, (T + 1,)).tolist()
    if job.get("layout", "sft") == "sft":
        layout, loss = single(ids, [True] * (T + 1)), losses.sft
    else:
        R = job["response"]
        build_layout = shared_prefix if job["layout"] == "shared" else pair
        layout, loss = build_layout(ids[: T - 2 * R], ids[:R], ids[R : 2 * R]), losses.orpo()
    options = {k: job[k] for k in ("segment_size", "head_chunk", "keep", "stride", "lookahead", "compiled") if k in job}
    engine = FullBackward(stack, attached, loss, compiled=job.get("compiled", False)) if job.get("full") else SegmentedBackward(stack, attached, loss, **options)
    optimizer = optim.Adam(1e-5)
    optimizer.init(attached.values())

    def step():
        result = engine.step(layout)
        grads = {name: g / result.loss.weight for name, g in result.grads.items()}
        attached.set(optimizer.apply_gradients(grads, attached.values()))
        mx.eval(attached.values(), optimizer.state)
        return result.loss.total.item() / result.loss.weight

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

    from segtrain import lora

    lora.attach(model, rank=8, scale=20.0)
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
            result = measure(STEPS[settings.get("system", "segtrain")](model, args, settings), settings.get("steps", 3))
            result |= {"base_gib": base / GIB, "above_gib": round(result["peak_gib"] - base / GIB, 3)}
        except Exception as error:  # a variant that fails must not hide the others
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        mx.clear_cache()
        print(json.dumps({**settings, **result}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/floor.jsonl"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        work(json.loads(options.job))
        return
    jobs = json.loads(options.jobs.read_text())
    head = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as out:
        out.write(json.dumps(head) + "\n")
        for job in jobs:
            environment = {**os.environ, **job.get("env", {})}
            command = [sys.executable, __file__, "--job", json.dumps(job)]
            try:
                done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, timeout=job.get("timeout", 200))
                text = done.stdout
            except subprocess.TimeoutExpired as error:
                text = (error.stdout or b"").decode() + json.dumps({"job": job, "error": "timeout"}) + "\n"
            out.write(text)
            out.flush()
            print(text, end="", flush=True)


if __name__ == "__main__":
    main()
