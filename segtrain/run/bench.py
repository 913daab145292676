"""`segtrain bench`: times the choices whose outcome depends on the machine, and writes them where the planner looks.

Each choice is measured on a random model of a few layers, as whole training steps, against the plain way: products of
packed weights against a dense copy, look-ahead, compiled segments, the MLP in chunks of tokens, and fused attention
against blocks. Fused attention must also be right and take memory that grows linearly, by the checks of
`segtrain doctor`. Peaks are `mx.get_peak_memory` above what was in use before.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from segtrain.attention import dispatch
from segtrain.engine import layouts, objectives
from segtrain.engine.backward import SegmentedBackward
from segtrain.lora import layers as lora_module
from segtrain.memory import machine
from segtrain.models.stack import Execution, LayerStack
from segtrain.run import checks, disk

GIB = 2**30
DISK_BYTES = 512 << 20
SECONDS = 80.0  # the whole of it; what is left undone is said
REPEATS, SLOW = 3, 2.0  # what takes longer than so many seconds is run once more, not three times
PACKED_SHARE = {"cpu": 8}  # packed products are slow on a CPU: so much shorter a row


@dataclass(frozen=True)
class Size:
    """The model and row to time with."""

    hidden: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    tokens: int
    vocabulary: int = 4096


SIZES = {
    "cpu": Size(256, 768, 4, 4, 2, 512),
    "metal": Size(2048, 5632, 4, 16, 4, 2048),
    "cuda": Size(4096, 14336, 4, 32, 8, 4096),
}
SMALLEST = Size(32, 64, 2, 4, 2, 32, 64)


@dataclass
class Report:
    """`results`: one row a measurement; `choices`: what the planner reads."""

    device: str
    backend: str
    results: list[dict[str, Any]] = field(default_factory=list)
    choices: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    until: float = float("inf")


class OutOfTime(Exception):
    """The time for all measurements is over."""


def bench(*, size: Size | None = None, budget: float = SECONDS, path: Path | None = None) -> Report:
    """Measure, write and return this machine's choices."""
    backend = dispatch.backend().name
    report = Report(str(mx.device_info().get("device_name", backend)), backend)
    size = size or SIZES[backend]
    report.until = time.perf_counter() + budget
    for measure in (_attention, _engine, _packed, _disk):
        try:
            measure(report, size)
        except OutOfTime:
            report.results.append({"name": measure.__name__.strip("_"), "note": "not measured in full: out of time"})
    report.path = str(_write(report, path or machine.path()))
    return report


def _disk(report: Report, size: Size) -> None:
    """Where streamed weights would come from: the disk of the cache, which holds the hub's models too by default."""
    if time.perf_counter() > report.until:
        raise OutOfTime
    amount = DISK_BYTES if size != SMALLEST else DISK_BYTES >> 6
    try:
        speed = disk.read_speed(machine.cache(), amount)
    except OSError as error:
        report.results.append({"name": "disk", "note": f"not measured: {error.strerror or error}"})
        return
    report.results.append({"name": f"disk, {amount >> 20} MiB read", "seconds": amount / speed})
    report.choices["disk_bytes_a_second"] = round(speed)


def _write(report: Report, path: Path) -> Path:
    content = {
        "backend": report.backend,
        "device": report.device,
        "mlx": machine.mlx_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "choices": report.choices,
        "results": report.results,
    }
    machine.write(path, content)
    return path


def _timed(report: Report, name: str, run: Callable[[], Any], note: str = "") -> tuple[float, int]:
    """Seconds (the fastest of some) and peak bytes of `run`; adds a row."""
    if time.perf_counter() > report.until:
        raise OutOfTime
    begun = time.perf_counter()
    run()  # kernels compile
    mx.synchronize()
    repeats = 1 if time.perf_counter() - begun > SLOW else REPEATS
    mx.clear_cache()
    before, best = mx.get_active_memory(), float("inf")
    mx.reset_peak_memory()
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        mx.synchronize()
        best = min(best, time.perf_counter() - begun)
    peak = max(0, mx.get_peak_memory() - before)
    report.results.append({"name": name, "seconds": best, "peak_gib": peak / GIB, "note": note})
    return best, peak


def _attention(report: Report, size: Size) -> None:
    """Fused causal attention with its backward against blocks: time, results, and memory at two lengths."""
    table, dtype = dispatch.backend(), _dtype(report.backend)
    dim, group = size.hidden // size.heads, size.heads // size.kv_heads
    keys = mx.random.split(mx.random.key(0), 4)
    heads = (size.heads, size.kv_heads, size.kv_heads, size.heads)
    q, k, v, do = (
        mx.random.normal((1, n, size.tokens, dim), key=key).astype(dtype) for n, key in zip(heads, keys, strict=True)
    )
    mx.eval(q, k, v, do)
    forms = {"fused": replace(table, head_dims=frozenset({dim}), dtypes=(dtype,))}
    forms["blocks"] = replace(table, head_dims=frozenset())

    def step(rows: dispatch.Backend) -> Callable[[], None]:
        attend = partial(dispatch.attend, scale=dim**-0.5, rows=rows)
        return lambda: mx.eval(mx.vjp(lambda *x: [attend(*x)], [q, k, v], [do]))

    seconds = {name: _timed(report, f"attention, {name}", step(rows))[0] for name, rows in forms.items()}
    kind = checks.AttentionKind(group, dim, dim, dtype)
    bounded = checks.attention_is_linear(kind, forms["fused"], size.tokens // 2)
    right = checks.attention_is_right(kind, forms["fused"])
    report.results[0]["note"] = "; ".join(x.found for x in (right, bounded) if not x.right) or bounded.found
    name = str(dtype).rsplit(".", 1)[-1]
    report.choices |= attention_choice(bounded.right and right.right, seconds["fused"], seconds["blocks"], dim, name)


def attention_choice(sound: bool, fused: float, blocks: float, dim: int, dtype: str) -> dict[str, Any]:
    """What `dispatch.steered` and the estimate read: fused only where it is right, bounded and not slower."""
    kind = "fused" if sound and fused <= blocks else "blocks"
    return {"attention": kind, "attention_dim": dim, "attention_dtype": dtype, "fused_is_sound": sound}


def _engine(report: Report, size: Size) -> None:
    """The engine's settings, each against the plain step."""
    stack, lora = _model(size, report.backend)
    row = _row(size)

    def step(*, mlp_rows: int | None = None, **options: Any) -> Callable[[], None]:
        def run() -> None:
            engine.step(row)

        running = stack.executing(Execution(mlp_rows))
        engine = SegmentedBackward(running, lora, objectives.sft, head_chunk=256, **options)
        return run

    plain, _ = _timed(report, "step, plain", step())
    ahead = [_timed(report, f"step, look-ahead {n}", step(lookahead=n))[0] / plain for n in (1, 2)]
    report.choices["lookahead"] = [1.0, *(round(x, 3) for x in ahead)]
    report.choices["compiled"] = round(_timed(report, "step, compiled segments", step(compiled=True))[0] / plain, 3)
    chunks = _timed(report, "step, MLP in chunks", step(mlp_rows=max(1, size.tokens // 4)))[0]
    report.choices["mlp_chunks"] = round(chunks / plain, 3)


def _packed(report: Report, size: Size) -> None:
    """4-bit weights: products of packed weights against a dense copy per segment."""
    stack, lora = _model(size, report.backend, bits=4)
    row = _row(replace(size, tokens=size.tokens // PACKED_SHARE.get(report.backend, 1)))

    def step(dense: bool) -> Callable[[], None]:
        running = stack.executing(Execution(dequantize=dense))
        engine = SegmentedBackward(running, lora, objectives.sft, head_chunk=256)

        def run() -> None:
            engine.step(row)

        return run

    packed, _ = _timed(report, "4-bit step, packed", step(False))
    dense, _ = _timed(report, "4-bit step, dense copies", step(True))
    report.choices["packed"] = round(packed / dense, 3)


def _dtype(backend: str) -> mx.Dtype:
    return mx.float32 if backend == "cpu" else mx.bfloat16


def _model(size: Size, backend: str, bits: int = 0) -> tuple[LayerStack, lora_module.Lora]:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=size.vocabulary,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    model.set_dtype(_dtype(backend))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    lora = lora_module.attach(model, rank=8, scale=2.0)
    return LayerStack(model), lora


def _row(size: Size) -> layouts.Layout:
    tokens = [(i * 7919) % size.vocabulary for i in range(size.tokens + 1)]
    return layouts.single(tokens, [True] * len(tokens))
