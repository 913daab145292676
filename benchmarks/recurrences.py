"""Time and peak memory of one recurrence's value and gradient, in chunks and a token at a time.

    python benchmarks/recurrences.py                                 all, 1,024 tokens, small shapes on a CPU
    python benchmarks/recurrences.py --tokens 4096 8192 --only gated_delta kimi --kinds chunks
    python benchmarks/recurrences.py --only gated_delta --chunk 32 64 128 --group-mib 16 64 256    its table of sizes

Every recurrence at a shape of a model that uses it: on a GPU of hidden size 2,048 (gated delta: 16 key heads and 32
value heads of 128, as Qwen3.5 4B), on a CPU small ones. `chunks` is `segtrain.recurrence`'s function, `steps` the same
rule a token at a time under autodiff, which is how mlx-lm trains it; `mlx-lm` is what it does for Mamba-2 instead,
chunks of 256 tokens. Value and gradient of every input, for a fixed cotangent, inputs in `--dtype` (decays and states
in float32). `seconds` is the best of `--repeat` after one that compiles; `peak_mib` is above the inputs and the
cotangent, outputs and gradients included. With `steps` among the kinds, `error` is the largest relative difference of
outputs and gradients to them. Lines are appended to `--json`.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from segtrain.memory.backends import LONG
from segtrain.run.environment import prepare

prepare(os.environ, longest=LONG)  # as a run on long rows does, before mlx is imported

import mlx.core as mx  # noqa: E402
from mlx_lm.models.ssm import ssm_attn  # noqa: E402

from segtrain.recurrence import diagonal, gated_delta, rwkv7, selective_scan, ssd  # noqa: E402
from segtrain.recurrence.sizes import Sizes  # noqa: E402

normal = mx.random.normal
Make = Callable[..., list[mx.array]]


def delta_inputs(tokens: int, key_heads: int, heads: int, dim: int, channels: bool = False) -> list[mx.array]:
    """Keys with a common part, of length 1; decays of about 0.95."""
    q, k = normal((1, tokens, key_heads, dim)) * dim**-0.5, normal((1, tokens, key_heads, dim)) + 1
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    decay = mx.sigmoid(normal((1, tokens, heads, dim) if channels else (1, tokens, heads)) + 3)
    beta = mx.sigmoid(normal((1, tokens, heads)))
    return [q, k, normal((1, tokens, heads, dim)), mx.log(decay), beta, mx.zeros((1, heads, dim, dim))]


def selective_inputs(tokens: int, width: int, states: int) -> list[mx.array]:
    x, dt = normal((1, tokens, width)), mx.exp(normal((1, tokens, width)) - 4)
    B, C = normal((1, tokens, states)), normal((1, tokens, states))
    return [x, dt, B, C, -mx.broadcast_to(mx.arange(1.0, states + 1), (width, states)), mx.zeros((1, width, states))]


def ssd_inputs(tokens: int, groups: int, heads: int, dim: int, states: int) -> list[mx.array]:
    x, dt = normal((1, tokens, heads, dim)), mx.exp(normal((1, tokens, heads)) - 4)
    B, C = normal((1, tokens, groups, states)), normal((1, tokens, groups, states))
    return [x, dt, B, C, -mx.arange(1.0, heads + 1), mx.zeros((1, heads, dim, states))]


def mlx_lm_ssd(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, A: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """mlx-lm's function on the same inputs: it takes dt before its softplus."""
    before_softplus, heads = mx.log(mx.expm1(dt)), A.shape[0]
    zeros = mx.zeros((heads,), x.dtype)
    return ssm_attn(x, mx.log(-A), B, C, zeros, before_softplus, mx.zeros((heads,)), state, (0.0, 100.0))


def linear_inputs(tokens: int, width: int) -> list[mx.array]:
    x, log_decay = normal((1, tokens, width)), mx.random.uniform(shape=(1, tokens, width))
    return [x, mx.exp(-log_decay), mx.zeros((1, width))]


def linear_steps(x: mx.array, a: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    h = diagonal.reference(a, x, state)
    return h, h[:, -1]


def rwkv7_inputs(tokens: int, heads: int, dim: int) -> list[mx.array]:
    shape = (1, tokens, heads, dim)
    r, k, v, removed = (normal(shape) * scale for scale in (1, dim**-0.5, 1, 1))
    removed = removed / mx.linalg.norm(removed, axis=-1, keepdims=True)
    w = mx.exp(-0.606531 * mx.sigmoid(normal(shape)))
    return [r, w, k, v, -removed, removed * mx.sigmoid(normal(shape)), mx.zeros((1, heads, dim, dim))]


@dataclass(frozen=True)
class Case:
    """A recurrence, its rule a token at a time, and its inputs by backend; `half`: inputs that a model has in bf16."""

    chunks: Callable[..., Any]
    steps: Callable[..., Any]
    make: Make
    gpu: dict[str, Any]
    cpu: dict[str, Any]
    half: tuple[int, ...]
    theirs: Callable[..., Any] | None = None


_DELTA = gated_delta.gated_delta, gated_delta.reference
CASES = {
    "gated_delta": Case(
        *_DELTA,
        delta_inputs,
        {"key_heads": 16, "heads": 32, "dim": 128},
        {"key_heads": 4, "heads": 8, "dim": 64},
        (0, 1, 2),
    ),
    "kimi": Case(
        *_DELTA,
        partial(delta_inputs, channels=True),
        {"key_heads": 16, "heads": 16, "dim": 128},
        {"key_heads": 8, "heads": 8, "dim": 64},
        (0, 1, 2),
    ),
    "selective_scan": Case(
        selective_scan.selective_scan,
        selective_scan.reference,
        selective_inputs,
        {"width": 4096, "states": 16},
        {"width": 512, "states": 16},
        (0, 2, 3),
    ),
    "ssd": Case(
        ssd.ssd,
        ssd.reference,
        ssd_inputs,
        {"groups": 1, "heads": 64, "dim": 64, "states": 128},
        {"groups": 1, "heads": 8, "dim": 64, "states": 64},
        (0, 2, 3),
        mlx_lm_ssd,
    ),
    "rg_lru": Case(diagonal.linear_recurrence, linear_steps, linear_inputs, {"width": 2560}, {"width": 512}, (0,)),
    "rwkv7": Case(
        rwkv7.rwkv7, rwkv7.reference, rwkv7_inputs, {"heads": 32, "dim": 64}, {"heads": 8, "dim": 64}, (0, 2, 3, 4, 5)
    ),
}
KINDS = ["steps", "mlx-lm", "chunks"]


def measure(f: Callable[..., Any], inputs: list[mx.array], repeat: int) -> tuple[dict[str, Any], list[mx.array]]:
    """The best time and its peak, and the results: outputs and gradients."""
    y, _ = f(*inputs)
    cotangent = mx.sin(mx.arange(y.size)).reshape(y.shape).astype(y.dtype)
    del y
    mx.eval(inputs, cotangent)
    runs = []
    for _ in range(repeat + 1):
        results = None
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        begun, worked = time.perf_counter(), time.process_time()
        results = [x for part in mx.vjp(lambda *x: [f(*x)[0]], inputs, [cotangent]) for x in part]
        mx.eval(results)
        taken = time.perf_counter() - begun, time.process_time() - worked
        runs.append((*taken, (mx.get_peak_memory() - before) / 2**20))
    seconds, cpu_seconds, peak = min(runs[1:])
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak}, results or []


def variants(name: str, case: Case, args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Callable[..., Any]]]:
    """Labels and functions to measure."""
    if "steps" in args.kinds:
        yield {"kind": "steps"}, case.steps
    if "mlx-lm" in args.kinds and case.theirs:
        yield {"kind": "mlx-lm"}, case.theirs
    if "chunks" in args.kinds and not args.chunk:
        yield {"kind": "chunks"}, case.chunks
    for chunk in args.chunk:
        for mib in args.group_mib:
            sizes = Sizes(chunk, int(mib * 2**20))
            yield {"kind": "chunks", "chunk": chunk, "group_mib": mib}, partial(case.chunks, sizes=sizes)


def error(truth: list[mx.array], other: list[mx.array]) -> float:
    def norm(x: mx.array) -> float:
        return mx.linalg.norm(x.astype(mx.float32).flatten()).item()

    return max(norm(a.astype(mx.float32) - b) / (norm(a) + 1e-30) for a, b in zip(truth, other, strict=True))


def run(name: str, tokens: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    case, on_cpu = CASES[name], mx.default_device() == mx.Device(mx.cpu)
    shape = case.cpu if on_cpu else case.gpu
    mx.random.seed(0)
    dtype = getattr(mx, args.dtype)
    inputs = [x.astype(dtype) if i in case.half else x for i, x in enumerate(case.make(tokens, **shape))]
    truth = None
    for label, f in variants(name, case, args):
        found, results = measure(f, inputs, args.repeat)
        if label["kind"] == "steps":
            truth = results
        elif truth is not None:
            found["error"] = error(truth, results)
        yield {"recurrence": name, "tokens": tokens, **shape, "dtype": args.dtype, **label, **found}


def about() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "device": str(mx.default_device()),
        "mlx": version("mlx"),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--chunk", type=int, nargs="+", default=[], help="gated delta: these instead of the table's")
    parser.add_argument("--group-mib", type=float, nargs="+", default=[64])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append the lines here")
    return parser


def main() -> None:
    args = parser().parse_args()
    for name in args.only:
        for tokens in args.tokens:
            for line in run(name, tokens, args):
                text = json.dumps({**about(), **line})
                print(text, flush=True)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(text + "\n")


if __name__ == "__main__":
    main()
