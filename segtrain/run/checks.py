"""What segtrain relies on, tried on this machine: each check compares a fast form with its definition.

A check looks for wrong results and for memory that grows with the square of a row's length, not for rounding: products
may round to TF32 (1e-3), half precision to 1e-2. `doctor` says which checks a model needs, and what follows.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx

from segtrain.attention import dispatch
from segtrain.attention.dispatch import Backend
from segtrain.errors import reason
from segtrain.models.quantized_check import ROWS, Quantisation, wrong_rows
from segtrain.recurrence import gated_delta, rwkv7, selective_scan, ssd

Arrays: TypeAlias = list[mx.array]
TOLERANCE = {mx.float32: 1e-2, mx.float16: 5e-2, mx.bfloat16: 5e-2}
FLOOR = 0.1  # a number: where a gradient is nearly zero, errors count as if it were so large
LINEAR = 2.6  # times the memory at twice the length: linear gives 2, quadratic 4 (2.7 with what is linear beside it)
LENGTH = {"cpu": 256, "cuda": 2048, "metal": 2048}  # tokens of the shorter row that memory is compared at
IN_BLOCKS = "computes attention in blocks: exact, slower"
NEWER_MLX = "install a newer mlx"
SLACK = 4 << 20  # bytes that the allocator may round up to


@dataclass(frozen=True)
class Finding:
    """One line of the report. `does`: what segtrain does about it; `can`: what the user can do."""

    name: str
    right: bool
    found: str
    does: str = ""
    can: str = ""
    fatal: bool = False  # segtrain has no other form: gradients would be wrong
    choice: str = ""  # the faster form that this check allows, as NAME=FORM


@dataclass(frozen=True)
class AttentionKind:
    """A model's attention as far as kernels differ by it. `group`: query heads for each key-value head."""

    group: int
    dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None
    softcap: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        extra = f", window {self.window}" if self.window else ""
        dims = str(self.dim) if self.dim == self.value_dim else f"{self.dim}/{self.value_dim}"
        return f"head dim {dims}, {str(self.dtype).rsplit('.', 1)[-1]}{extra}"

    def form(self, rows: Backend, length: int = 1 << 20) -> dispatch.Kind:
        """How it is computed for rows of `length` tokens."""
        softcap = 1.0 if self.softcap else None
        call = dispatch.Call(
            self.group, length, length, self.dim, self.value_dim, self.dtype, self.window, softcap, self.sinks
        )
        return dispatch.choose(rows, call)


def attention_is_right(kind: AttentionKind, rows: Backend) -> Finding:
    """Values and gradients of `kind` on backend `rows` against the definition, in float32."""
    name = f"attention, {kind}"
    try:
        errors = {text: _attention_error(kind, rows, rule) for text, rule in _cases(kind, rows)}
    except (RuntimeError, ValueError) as error:
        return Finding(name, False, f"MLX's kernel fails: {reason(error)}")
    worst = max(errors, key=lambda text: errors[text] if math.isfinite(errors[text]) else math.inf)
    found = f"error {errors[worst]:.1e} at most, over {len(errors)} shapes ({worst})"
    return Finding(name, errors[worst] <= TOLERANCE[kind.dtype], f"{kind.form(rows)}: {found}")


def attention_is_linear(kind: AttentionKind, rows: Backend, length: int | None = None) -> Finding:
    """Memory of `kind`, forward and backward, at `length` (None: `LENGTH`) and at twice as many tokens."""
    length = length or LENGTH[dispatch.backend().name]
    try:
        peaks = [attention_peaks(kind, rows, n) for n in (length, 2 * length)]
    except (RuntimeError, ValueError) as error:
        return Finding(f"memory of attention, {kind}", False, f"MLX's kernel fails: {reason(error)}")
    passes = list(zip(("forward", "backward"), *peaks, strict=True))
    wrong = [name for name, small, large in passes if not is_linear(small, large)]
    figures = ", ".join(f"{name} {small / 2**20:.0f} to {large / 2**20:.0f} MiB" for name, small, large in passes)
    grows = f"{' and '.join(wrong)} grow with the square of the length" if wrong else "linear"
    return Finding(
        f"memory of attention, {kind}", not wrong, f"{grows}: {figures} from {length} to {2 * length} tokens"
    )


def with_safe_form(test: Callable[[AttentionKind, Backend], Finding], kind: AttentionKind, rows: Backend) -> Finding:
    """What `test` finds, and what follows: attention in blocks where that is right, else wrong gradients are fatal."""
    finding = test(kind, rows)
    if finding.right:
        return finding
    if kind.form(rows) != "blocks" and test(kind, replace(rows, head_dims=frozenset())).right:
        return replace(finding, does=IN_BLOCKS)
    if test is attention_is_linear:
        return replace(finding, does="nothing: long rows may need more than the plan says", can=NEWER_MLX)
    return replace(finding, can=NEWER_MLX, fatal=True)


def is_linear(small: int, large: int) -> bool:
    """Whether memory that is `small` bytes at some length and `large` at twice that one grows linearly."""
    return large <= LINEAR * small + SLACK


def attention_peaks(kind: AttentionKind, rows: Backend, length: int) -> tuple[int, int]:
    """Bytes above its inputs that a call takes: its forward pass alone, and with its backward."""
    q, k, v, do = _attention_inputs(kind, length, length)
    mx.eval(q, k, v, do)

    def attend(*x: mx.array) -> Arrays:
        return [dispatch.attend(*x, scale=kind.dim**-0.5, window=kind.window, rows=rows)]

    return peak(lambda: attend(q, k, v)), peak(lambda: mx.vjp(attend, [q, k, v], [do]))


def peak(make: Callable[[], Any]) -> int:
    """Bytes that evaluating what `make` returns takes above what is in use before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(make())
    mx.synchronize()
    return int(mx.get_peak_memory() - before)


def quantised_products(kind: Quantisation, dtype: mx.Dtype) -> Finding:
    """Products of `dtype` with packed weights against dense ones, at the row counts where they have been wrong."""
    name = f"products with {kind.bits}-bit weights ({kind.mode}, groups of {kind.group_size})"
    try:
        wrong = wrong_rows(kind, (dtype,))
    except (RuntimeError, ValueError) as error:
        return Finding(name, False, f"MLX's kernel fails: {reason(error)}", can=OTHER_MLX, fatal=True)
    if not wrong:
        return Finding(name, True, f"right at {ROWS[0]} to {ROWS[-1]} rows")
    found = f"wrong at {', '.join(map(str, wrong))} rows, so gradients would be wrong"
    return Finding(name, False, found, "refuses such a model", OTHER_MLX, fatal=True)


OTHER_MLX = "install a newer mlx, or use a model that isn't quantised"


def recurrence(rule: str) -> Finding:
    """A scan in chunks, with its gradients, against the same rule a token at a time."""
    name, entry, reference, inputs = RECURRENCES[rule]
    try:
        arrays = inputs()
        pairs = zip(_differentiated(entry, arrays), _differentiated(reference, arrays), strict=True)
        error = max(_error(found, wanted) for found, wanted in pairs)
    except (RuntimeError, ValueError) as failure:
        return Finding(name, False, f"MLX fails: {reason(failure)}", can=NEWER_MLX, fatal=True)
    right = error <= TOLERANCE[mx.float32]
    can = "" if right else "install a newer mlx, or use a model without such layers"
    return Finding(name, right, f"error {error:.1e} at most", can=can, fatal=not right)


KERNEL_TOKENS = 1024


def delta_kernel() -> Finding:
    """MLX's kernel for the gated delta rule against chunks: used if it is right, faster, and takes no more memory."""
    name = "kernel of the gated delta rule"
    try:
        error = max(
            _error(a, b)
            for a, b in zip(
                *(_differentiated(f, _kernel_inputs(TOKENS)) for f in (gated_delta.fused, gated_delta.reference)),
                strict=True,
            )
        )
        arrays = _kernel_inputs(KERNEL_TOKENS)
        (seconds, memory), (chunk_seconds, chunk_memory) = (
            _costs(f, arrays) for f in (gated_delta.fused, gated_delta.gated_delta)
        )
    except (RuntimeError, ValueError) as failure:
        return Finding(name, True, f"not used, it fails: {reason(failure)}")
    better = error <= TOLERANCE[mx.bfloat16] and seconds < chunk_seconds and memory <= chunk_memory
    found = f"error {error:.1e}, {seconds:.3f} s and {memory / 2**20:.0f} MiB for {KERNEL_TOKENS} tokens"
    text = f"{found}; in chunks {chunk_seconds:.3f} s and {chunk_memory / 2**20:.0f} MiB"
    return Finding(name, True, f"{'used' if better else 'not used'}: {text}", choice="gated_delta=fused" * better)


def _costs(function: Callable[..., Any], arrays: Arrays) -> tuple[float, int]:
    """Seconds and bytes of value and gradient, after a first time that compiles."""
    mx.eval(arrays, _differentiated(function, arrays))
    begun = time.perf_counter()
    memory = peak(lambda: _differentiated(function, arrays))
    return time.perf_counter() - begun, memory


def _kernel_inputs(tokens: int) -> Arrays:
    """At the largest model's shape that has a kernel."""
    q, k, v, log_decay, beta, _ = _delta_inputs(tokens, *max(gated_delta.FUSED_HEADS["metal"]), gated_delta.FUSED_DIM)
    return [*(x.astype(mx.bfloat16) for x in (q, k, v)), log_decay, beta, mx.zeros((1, v.shape[2], *[v.shape[3]] * 2))]


def memory_limit() -> Finding:
    """Whether allocations over the limit wait for work that runs, as the plan counts on."""
    name = "memory limit"
    free = peak(_independent)
    before = mx.set_memory_limit(mx.get_active_memory() + free // 8)
    try:
        held = peak(_independent)
    finally:
        mx.set_memory_limit(before)
    found = f"{held / 2**20:.0f} MiB held under a limit of {free / 2**23:.0f}, {free / 2**20:.0f} without one"
    if held <= 0.85 * free:
        return Finding(name, True, f"waits for running work: {found}")
    does = "nothing: peaks may exceed the plan's"
    return Finding(name, False, f"has no effect: {found}", does, "set engine.memory_budget lower than what there is")


def speed(dtype: mx.Dtype, size: int) -> float:
    """Operations a second of a square product."""
    a = mx.random.normal((size, size)).astype(dtype)
    mx.eval(a, a @ a)
    begun = time.perf_counter()
    mx.eval(a @ a)
    return 2 * size**3 / (time.perf_counter() - begun)


def _independent() -> Arrays:
    """Many results that need nothing of each other, each with temporaries of 2 MiB, behind a slow one they wait for."""
    size = 384 if dispatch.backend().name == "cpu" else 4096
    slow = mx.ones((size, size))
    x = mx.ones((512, 1024)) + 0 * (slow @ slow)[0, 0]
    return [((x + i) * x).sum() for i in range(48)]


def _cases(kind: AttentionKind, rows: Backend) -> Sequence[tuple[str, dict[str, Any]]]:
    """Short rows, the edges of blocks and of calls, fewer rows than keys, and a shared prefix."""
    edge = max(32, rows.query_multiple)
    lengths = [1, 5, 8, 9, 33, edge - 1, edge + 1, 4 * edge + 5]
    found: list[tuple[str, dict[str, Any]]] = [(f"{n} tokens", {"rows": n, "keys": n}) for n in lengths]
    found.append(("7 rows of 60 tokens", {"rows": 7, "keys": 60}))
    for prefix, branches in ((40, (1, 9)), (edge, (3, edge))):
        total = prefix + sum(branches)
        text = f"{total} tokens with a shared prefix"
        found.append((text, {"rows": total, "keys": total, "prefix": prefix, "branches": branches}))
    return found


def _attention_error(kind: AttentionKind, rows: Backend, rule: dict[str, Any]) -> float:
    """The largest error of output, dq, dk and dv of one case."""
    rule = dict(rule)
    q, k, v, do = _attention_inputs(kind, rule.pop("rows"), rule.pop("keys"))
    window = None if kind.window is None else min(kind.window, 24)
    rule |= {"scale": kind.dim**-0.5, "window": window, "softcap": 2.0 if kind.softcap else None}
    small = replace(rows, fused_rows=2 * max(32, rows.query_multiple))  # so that several calls take turns
    sinks = [mx.random.normal((kind.group,), key=mx.random.key(9))] if kind.sinks else []

    def run(function: Callable[..., mx.array], arrays: Arrays, **options: Any) -> Arrays:
        def call(q: mx.array, k: mx.array, v: mx.array, *sinks: mx.array) -> Arrays:
            given = {"sinks": sinks[0]} if sinks else {}
            return [function(q, k, v, **rule, **given, **options)]

        outputs, grads = mx.vjp(call, [*arrays, *sinks], [do.astype(arrays[0].dtype)])
        return [*outputs, *grads]

    found = run(dispatch.attend, [q, k, v], rows=small)
    wanted = run(dispatch.reference, [x.astype(mx.float32) for x in (q, k, v)])
    return max(_error(a, b) for a, b in zip(found, wanted, strict=True))


def _attention_inputs(kind: AttentionKind, rows: int, keys: int) -> Arrays:
    """q, k, v of one group, and a cotangent of the output."""
    shapes = [(kind.group, rows, kind.dim), (1, keys, kind.dim), (1, keys, kind.value_dim)]
    shapes.append((kind.group, rows, kind.value_dim))
    drawn = zip(shapes, mx.random.split(mx.random.key(rows), 4), strict=True)
    return [mx.random.normal((1, *shape), key=key).astype(kind.dtype) for shape, key in drawn]


def _error(found: mx.array, wanted: mx.array) -> float:
    """Of the Euclidean norm, relative; infinite where a number isn't finite."""
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    least = FLOOR * math.sqrt(wanted.size)
    error = (mx.linalg.norm(found - wanted) / mx.maximum(mx.linalg.norm(wanted), least)).tolist()
    return float(error) if math.isfinite(error) else math.inf  # type: ignore[arg-type]  # a scalar's list is a number


def _differentiated(function: Callable[..., Any], arrays: Arrays) -> Arrays:
    """Outputs, and gradients along fixed directions."""
    outputs = function(*arrays)
    _, grads = mx.vjp(lambda *x: list(function(*x)), arrays, [mx.cos(3 * out) for out in outputs])
    return [*outputs, *grads]


def _normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _uniform(*shape: int, seed: int, low: float, high: float) -> mx.array:
    return mx.random.uniform(low, high, shape, key=mx.random.key(seed))


TOKENS = 70  # more than a chunk, and no multiple of one


def _delta_inputs(tokens: int = TOKENS, key_heads: int = 1, heads: int = 2, dim: int = 16) -> Arrays:
    k = _normal(1, tokens, key_heads, dim, seed=1)
    return [
        _normal(1, tokens, key_heads, dim, seed=0) / dim**0.5,
        k / mx.linalg.norm(k, axis=-1, keepdims=True),
        _normal(1, tokens, heads, dim, seed=2),
        -_uniform(1, tokens, heads, seed=3, low=0.01, high=1.0),
        _uniform(1, tokens, heads, seed=4, low=0.0, high=1.0),
        _normal(1, heads, dim, dim, seed=5),
    ]


def _selective_inputs() -> Arrays:
    x, dt = _normal(1, TOKENS, 8, seed=0), _uniform(1, TOKENS, 8, seed=1, low=0.01, high=1.0)
    B, C = _normal(1, TOKENS, 4, seed=2), _normal(1, TOKENS, 4, seed=3)
    return [x, dt, B, C, -_uniform(8, 4, seed=4, low=0.1, high=2.0), _normal(1, 8, 4, seed=5)]


def _ssd_inputs() -> Arrays:
    x, dt = _normal(1, TOKENS, 2, 8, seed=0), _uniform(1, TOKENS, 2, seed=1, low=0.01, high=1.0)
    B, C = _normal(1, TOKENS, 1, 8, seed=2), _normal(1, TOKENS, 1, 8, seed=3)
    return [x, dt, B, C, -_uniform(2, seed=4, low=0.1, high=2.0), _normal(1, 2, 8, 8, seed=5)]


def _rwkv_inputs() -> Arrays:
    r, k, v = (_normal(1, TOKENS, 2, 8, seed=seed) / 3 for seed in (0, 1, 2))
    a = _normal(1, TOKENS, 2, 8, seed=3)
    a = a / mx.linalg.norm(a, axis=-1, keepdims=True)
    w = _uniform(1, TOKENS, 2, 8, seed=4, low=0.6, high=1.0)
    return [r, w, k, v, -a, a * _uniform(1, TOKENS, 2, 8, seed=5, low=0.0, high=1.0), _normal(1, 2, 8, 8, seed=6)]


# By the module in `recurrence` (`Scan.rule`).
RECURRENCES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], Callable[[], Arrays]]] = {
    gated_delta.RULE: ("gated delta rule", gated_delta.gated_delta, gated_delta.reference, _delta_inputs),
    "selective_scan": ("selective scan", selective_scan.selective_scan, selective_scan.reference, _selective_inputs),
    "ssd": ("state space duality", ssd.ssd, ssd.reference, _ssd_inputs),
    "rwkv7": ("RWKV-7", rwkv7.rwkv7, rwkv7.reference, _rwkv_inputs),
}
