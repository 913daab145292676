"""Attention's peak memory and time for one vjp, by kind, against `mx.fast.scaled_dot_product_attention`.

    python benchmarks/attention.py                                   the default device, 1k to 8k tokens
    python benchmarks/attention.py --dtype bfloat16 --heads 32 --kv-heads 8 --dim 128
    python benchmarks/attention.py --tiles 0.25 1 4 16 --limits 40 --tokens 4096 --cases causal --kinds blocks

Peak is that of `mx.get_peak_memory` above what was active before (q, k, v and the cotangent), output and gradients
included. Seconds are the fastest of the repeats, by the clock and of CPU time. `exponent` is log(peak) over
log(tokens), between two lengths. One JSON line a measurement goes to `--out`.

What was tried on the CPU (OpenBLAS on one core, 8 heads of 64, float32; T = 4096, CPU seconds), and its outcome:
- all heads in each block instead of parts of the heads: 110 MB and 5.4 s instead of 85 and 2.1 at a tile of 1 MiB
  (3.1 s at 4 MiB), for the matrix shapes (16 rows) and for copies of whole dk and dv;
- writing each block into one output or sum (`at[...].add`, slice assignment): not in place, since scheduled work still
  holds the array before. Sixty-four such updates in a row had 15 copies alive; hence small sums, a part of the heads
  at a time, and outputs concatenated;
- other tiles than 1 MiB: 0.25 MiB 77 MB and 2.7 s, 4 MiB 111 MB and 2.1 s (T = 1024: 22 MB at 1 MiB, 43 at 4);
- blocks of at least 64 or 256 rows instead of 128: no difference at 1 MiB (84 and 83 MB, 2.0 and 2.1 s);
- `mx.exp` instead of e ** x: 12 instead of 4.6 ns an element, 3.1 s instead of 2.1 for the whole vjp;
- the band without a fused kernel: linear, but each of its arrays is 2 x window x T x heads;
- one dense call for short rows: no faster than blocks from T = 256 up, so there is no such kind;
- branches through `mx.split` instead of slices (whose gradients are sums of full-length arrays): 47 MB instead of 44 at
  T = 1024, for the copies of the keys; ordering the branches' calls one after the other changed nothing there;
- `mx.set_memory_limit` 40 MiB above the inputs: 56 MB instead of 88, 2.5 CPU seconds instead of 2.1. A limit that the
  arithmetic cannot keep is exceeded, not an error (20 MiB at T = 1024: 22 MB, same time).
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from segtrain.attention.dispatch import Backend, attend, backend, reference, visibility

CASES = ("causal", "window", "shared", "softcap")
KINDS = ("mlx", "attend", "blocks", "band")


@dataclass(frozen=True)
class Setting:
    case: str
    kind: str
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str
    window: int
    tile_mib: float | None = None
    limit_mib: float | None = None

    def rule(self) -> dict:
        extra = {
            "window": {"window": self.window},
            "softcap": {"softcap": 30.0},
            "shared": {"prefix": self.tokens * 3 // 4, "branches": (self.tokens // 8, self.tokens // 8)},
        }
        return {"scale": self.dim**-0.5, **extra.get(self.case, {})}


def function(setting: Setting) -> Callable:
    """The attention to measure; `mlx` is what one has without this package."""
    rule = setting.rule()
    if setting.kind == "mlx":
        if setting.case == "softcap":
            return lambda q, k, v: reference(q, k, v, **rule)
        scale, tokens = rule.pop("scale"), setting.tokens
        mask = visibility(tokens, tokens, **rule) if rule else "causal"
        return lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return lambda q, k, v: attend(q, k, v, rows=table_row(setting), **rule)


def table_row(setting: Setting) -> Backend:
    rows = backend()
    if setting.tile_mib is not None:
        rows = replace(rows, tile_bytes=int(setting.tile_mib * 2**20))
    if setting.kind == "blocks":
        rows = replace(rows, head_dims=frozenset())
    if setting.kind == "band":
        dtypes = (mx.float16, mx.bfloat16, mx.float32)
        rows = replace(rows, head_dims=frozenset({setting.dim}), dtypes=dtypes, array_mask=True)
    return rows


def measure(setting: Setting, repeats: int) -> dict:
    mx.random.seed(0)
    shapes = [(1, heads, setting.tokens, setting.dim) for heads in (setting.heads, *[setting.kv_heads] * 2)]
    *qkv, cotangent = [mx.random.normal(s).astype(getattr(mx, setting.dtype)) for s in (*shapes, shapes[0])]
    mx.eval(qkv, cotangent)
    attention, base = function(setting), mx.get_active_memory()
    before = mx.set_memory_limit(base + int(setting.limit_mib * 2**20)) if setting.limit_mib else None
    peaks, seconds, cpu = [], [], []
    try:
        for _ in range(repeats):
            mx.clear_cache()
            mx.reset_peak_memory()
            start, cpu_start = time.perf_counter(), time.process_time()
            mx.eval(mx.vjp(attention, qkv, [cotangent]))
            mx.synchronize()
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
            peaks.append((mx.get_peak_memory() - base) / 1e6)
    finally:
        if before is not None:
            mx.set_memory_limit(before)
    return {**asdict(setting), "peak_mb": max(peaks), "seconds": min(seconds), "cpu_seconds": min(cpu)}


def settings(args: argparse.Namespace) -> list[Setting]:
    found = []
    for case in args.cases:
        for kind in args.kinds:
            for tokens in args.tokens:
                if (kind == "band" and case != "window") or (kind == "mlx" and tokens > args.mlx_up_to):
                    continue
                own = kind != "mlx"
                for tile in args.tiles if own else [None]:
                    for limit in args.limits if own else [None]:
                        shape = (tokens, args.heads, args.kv_heads or args.heads, args.dim, args.dtype, args.window)
                        found.append(Setting(case, kind, *shape, tile, limit))
    return found


def machine() -> dict:
    packages = {name: version(name) for name in ("mlx", "segtrain-mlx")}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "backend": backend().name, "machine": platform.platform(), **packages}


def exponents(results: list[dict], low: int, high: int) -> list[str]:
    """How peak grows from `low` to `high` tokens, for each case and kind."""
    lines = []
    peaks: dict[tuple, dict[int, float]] = {}
    for r in results:
        peaks.setdefault((r["case"], r["kind"], r["tile_mib"], r["limit_mib"]), {})[r["tokens"]] = r["peak_mb"]
    for (case, kind, *_), by_tokens in peaks.items():
        if low in by_tokens and high in by_tokens:
            power = math.log(by_tokens[high] / by_tokens[low]) / math.log(high / low)
            lines.append(f"{case:8} {kind:7} peak grows as tokens^{power:.2f} from {low} to {high}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tiles", type=float, nargs="+", default=[None], help="tile sizes to try, MiB")
    parser.add_argument("--limits", type=float, nargs="+", default=[None], help="memory limits above the inputs, MiB")
    parser.add_argument("--mlx-up-to", type=int, default=8192, help="longest row for MLX's own attention")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/attention-{backend().name}.jsonl"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about, results = machine(), []
    with args.out.open("a") as file:
        for setting in settings(args):
            result = measure(setting, args.repeats)
            results.append(result)
            file.write(json.dumps({**about, **result}) + "\n")
            file.flush()
            tuned = "".join(f" {n} {v} MiB" for n, v in (("tile", setting.tile_mib), ("limit", setting.limit_mib)) if v)
            print(
                f"{setting.case:8} {setting.kind:7} {setting.tokens:6} tokens {result['peak_mb']:9.1f} MB"
                f" {result['seconds']:7.2f} s {result['cpu_seconds']:7.2f} CPU s{tuned}",
                flush=True,
            )
    print(*exponents(results, 2048, 8192), sep="\n")


if __name__ == "__main__":
    main()
