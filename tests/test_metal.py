"""What mlx 0.32.4 does with an attention call on Metal, as a table, and that nothing here asks for what it can't do.

The table was read from the binaries and not run on a Mac: a call raises an exception, is fused (bounded in memory), or
makes the array of all scores. `Asked` stands in for MLX's function: it looks each call up and answers with zeros, so
that every head dim, group and length can be tried on any machine.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import pytest
import tiny

from segtrain.attention import band as band_module
from segtrain.attention import dispatch
from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward
from segtrain.engine.layouts import Layout, padded, pair, shared_prefix, single
from segtrain.models import stream_ops
from segtrain.models.stack import LayerStack

METAL = dispatch.BACKENDS["metal"]
SUPPORTED = (64, 72, 80, 96, 128, 192, 256)
VECTOR = (64, 96, 128, 192, 256)  # those with a kernel for at most 8 rows
HALF = (mx.float16, mx.bfloat16)
DIMS = (8, 16, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 288, 512)


@dataclass(frozen=True)
class Asked:
    """A call of `mx.fast.scaled_dot_product_attention`. `mask`: None, "causal" or "array"."""

    rows: int
    keys: int
    dim: int
    value_dim: int
    group: int  # query heads for each key-value head
    dtype: mx.Dtype
    mask: str | None
    sinks: bool
    gradient: bool

    def outcome(self) -> Literal["fused", "raises", "array"]:
        """On M1 to M4; an M5 fuses half-precision calls of head dim 256 with 1,024 rows or more besides."""
        if self.dim != self.value_dim or self.dim not in SUPPORTED or self.dtype not in (*HALF, mx.float32):
            return "array"
        if self.mask == "causal" and self.rows > self.keys:
            return "array"
        return self._with_gradient() if self.gradient else self._without()

    def _with_gradient(self) -> Literal["fused", "raises", "array"]:
        if self.mask == "array" or self.sinks:
            return "array"
        if self.rows > 8:
            return "fused"
        return "raises" if self.dim in VECTOR and self.rows * self.group <= 32 else "array"

    def _without(self) -> Literal["fused", "raises", "array"]:
        if self.rows > 8:
            return "array" if self.dim in (192, 256) else "fused"
        fits = self.dim in VECTOR and self.rows * self.group <= 32 and self.rows <= self.keys
        return "fused" if fits and self.dim != 192 else "array"


@dataclass
class Metal:
    """In MLX's place: `calls` so far. `compute` also computes them, on this machine."""

    compute: bool = False
    gradients: int = 0
    calls: list[Asked] = field(default_factory=list)

    def sdpa(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: mx.array | None = None
    ) -> mx.array:
        kind = mask if mask is None or isinstance(mask, str) else "array"
        group = q.shape[1] // k.shape[1]
        asked = Asked(
            q.shape[2], k.shape[2], q.shape[3], v.shape[3], group, q.dtype, kind, sinks is not None, self.gradients > 0
        )
        self.calls.append(asked)
        if self.compute:
            return REAL(q, k, v, scale=scale, mask=mask, sinks=sinks)
        return mx.zeros((*q.shape[:3], v.shape[3]), q.dtype) + 0 * q[..., :1]

    def outcomes(self) -> set[str]:
        return {call.outcome() for call in self.calls}


REAL = mx.fast.scaled_dot_product_attention


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Metal:
    """Metal's row of the table for this machine's device, and `Metal` where MLX's attention was."""
    found = Metal()

    def counting(transform: Callable[..., Any]) -> Callable[..., Any]:
        def vjp(function: Callable[..., Any], *args: Any) -> Any:
            def counted(*inputs: Any) -> Any:
                with _inside(found):
                    return function(*inputs)

            return transform(counted, *args)

        return vjp

    def value_and_grad(function: Callable[..., Any], **options: Any) -> Any:
        def counted(*inputs: Any) -> Any:
            with _inside(found):
                return function(*inputs)

        return original(counted, **options)

    original = mx.value_and_grad
    monkeypatch.setattr(mx, "vjp", counting(mx.vjp))
    monkeypatch.setattr(mx, "value_and_grad", value_and_grad)
    for module in (dispatch, band_module, stream_ops):
        monkeypatch.setattr(module, "_sdpa", found.sdpa)
    monkeypatch.setitem(dispatch._steered, dispatch.backend().name, METAL)
    return found


@contextmanager
def _inside(metal: Metal) -> Any:
    metal.gradients += 1
    try:
        yield
    finally:
        metal.gradients -= 1


FACTS = [
    # A gradient through 8 rows or fewer, with few rows a group: taken as fused, and then without a logsumexp.
    ({"rows": 8, "dim": 128, "gradient": True}, "raises"),
    ({"rows": 1, "dim": 64, "gradient": True}, "raises"),
    ({"rows": 8, "dim": 128, "group": 4, "gradient": True}, "raises"),
    ({"rows": 8, "dim": 128, "group": 5, "gradient": True}, "array"),
    ({"rows": 8, "dim": 72, "gradient": True}, "array"),
    ({"rows": 9, "dim": 128, "gradient": True}, "fused"),
    ({"rows": 32, "dim": 256, "gradient": True}, "fused"),
    ({"rows": 32, "dim": 128, "gradient": True, "mask": "array"}, "array"),
    ({"rows": 32, "dim": 128, "gradient": True, "sinks": True}, "array"),
    # The forward pass outside a gradient.
    ({"rows": 4096, "dim": 256}, "array"),
    ({"rows": 4096, "dim": 192}, "array"),
    ({"rows": 4096, "dim": 128}, "fused"),
    ({"rows": 4, "dim": 128}, "fused"),
    # Never.
    ({"rows": 4096, "dim": 192, "value_dim": 128, "gradient": True}, "array"),
    ({"rows": 4096, "dim": 112, "gradient": True}, "array"),
    ({"rows": 64, "keys": 32, "dim": 128, "gradient": True}, "array"),
]


@pytest.mark.parametrize(("call", "outcome"), FACTS, ids=[f"{i}-{o}" for i, (_, o) in enumerate(FACTS)])
def test_the_table(call: dict[str, Any], outcome: str) -> None:
    given = {"keys": call["rows"], "value_dim": call["dim"], "group": 1, "dtype": mx.bfloat16, "mask": "causal"}
    assert Asked(**{**given, "sinks": False, "gradient": False, **call}).outcome() == outcome


LENGTHS = [*range(1, 41), *(edge + near for edge in (2048, 4096, 8192) for near in (-33, -8, -1, 0, 1, 8, 9, 33))]


def ask(rows: dispatch.Backend, dim: int, group: int, length: int, *, gradient: bool, **rule: Any) -> None:
    """One call of `attend`, not computed."""
    q, k = mx.zeros((1, 2 * group, length, dim), mx.bfloat16), mx.zeros((1, 2, length, dim), mx.bfloat16)

    def attention(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [dispatch.attend(q, k, v, scale=1.0, rows=rows, **rule)]

    if gradient:
        mx.vjp(attention, [q, k, k], [q])
    else:
        attention(q, k, k)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("gradient", [False, True])
def test_no_length_raises_or_makes_an_array(metal: Metal, dim: int, group: int, gradient: bool) -> None:
    for length in LENGTHS if group in (1, 4) else LENGTHS[:40]:
        ask(METAL, dim, group, length, gradient=gradient)
    assert metal.outcomes() <= {"fused"}
    assert bool(metal.calls) == (dim in SUPPORTED)
    assert max((call.rows for call in metal.calls), default=0) <= 2048


@pytest.mark.parametrize("dim", [64, 72, 128, 192, 256])
@pytest.mark.parametrize(("prefix", "branches"), [(0, (3, 5)), (20, (1, 1)), (20, (8, 9)), (40, (40, 33, 1))])
@pytest.mark.parametrize("window", [None, 16])
def test_no_branch_does(metal: Metal, dim: int, prefix: int, branches: tuple[int, ...], window: int | None) -> None:
    for gradient in (False, True):
        ask(METAL, dim, 2, prefix + sum(branches), gradient=gradient, prefix=prefix, branches=branches, window=window)
    assert metal.outcomes() <= {"fused"}


@pytest.mark.parametrize(
    ("changed", "dim", "gradient", "outcome"),
    [({"query_multiple": 1}, 128, True, "raises"), ({"differentiated": False}, 256, False, "array")],
)
def test_the_faults_put_back_are_found(
    metal: Metal, changed: dict[str, Any], dim: int, gradient: bool, outcome: str
) -> None:
    for length in LENGTHS[:40]:
        ask(replace(METAL, **changed), dim, 1, length, gradient=gradient)
    assert outcome in metal.outcomes()


@pytest.mark.parametrize(("dim", "value_dim", "fused"), [(192, 128, True), (128, 192, False), (192, 100, False)])
def test_narrower_values_are_widened(metal: Metal, dim: int, value_dim: int, fused: bool) -> None:
    """As latent attention has them."""
    metal.compute = True
    q, k, v = (mx.random.normal((1, 2, 40, n)) for n in (dim, dim, value_dim))

    def run(**options: Any) -> list[mx.array]:
        outputs, grads = mx.vjp(
            lambda *x: [dispatch.attend(*x, scale=0.07, **options)], [q, k, v], [mx.cos(mx.ones((1, 2, 40, value_dim)))]
        )
        return [*outputs, *grads]

    found = run(rows=METAL)
    assert metal.outcomes() == ({"fused"} if fused else set())
    for a, b in zip(found, run(rows=dispatch.BACKENDS["cpu"]), strict=True):
        assert mx.allclose(a, b, atol=1e-5)


def test_long_keys_split_the_heads(metal: Metal) -> None:
    """A call's backward stays under some trillions of operations: the display's watchdog ends longer kernels."""
    q, k = mx.zeros((1, 32, 4096, 128), mx.bfloat16), mx.zeros((1, 8, 65536, 128), mx.bfloat16)
    dispatch.attend(q, k, k, scale=1.0, rows=METAL)
    assert {(call.rows, call.group) for call in metal.calls} == {(2048, 4)}
    assert len(metal.calls) == 4  # two blocks of rows, two halves of the heads


@pytest.mark.parametrize("rows", [1, 7, 8, 33])
def test_attention_without_a_mask_takes_any_number_of_rows(metal: Metal, rows: int) -> None:
    metal.compute = True
    q, k = mx.random.normal((1, 2, rows, 64)), mx.random.normal((1, 2, 12, 64))
    found, _ = mx.vjp(lambda q: [dispatch.unmasked(q, k, k, scale=0.1)], [q], [mx.ones_like(q)])
    assert metal.outcomes() == {"fused"}
    assert mx.allclose(found[0], REAL(q, k, k, scale=0.1), atol=1e-5)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("length", [1, 8, 33, 70])
def test_a_call_made_as_if_differentiated_is_the_same(dim: int, length: int) -> None:
    """Values, gradients, and gradients inside a compiled graph."""
    q, k = mx.random.normal((1, 2, length, dim)), mx.random.normal((1, 1, length, dim))

    def gradients(*inputs: mx.array, rows: dispatch.Backend) -> list[mx.array]:
        outputs, grads = mx.vjp(
            lambda *x: [dispatch.attend(*x, scale=dim**-0.5, rows=rows)], list(inputs), [mx.sin(inputs[0])]
        )
        return [*outputs, *grads]

    plain = gradients(q, k, k, rows=replace(METAL, differentiated=False))
    for function in (gradients, mx.compile(lambda *x: gradients(*x, rows=METAL))):
        found = function(q, k, k) if function is not gradients else gradients(q, k, k, rows=METAL)
        for a, b in zip(found, plain, strict=True):
            assert mx.allclose(a, b, atol=1e-5)


def layouts(shared: bool) -> list[Layout]:
    """Rows of a few tokens: a plain one, a preference pair with branches of one token, and one with a shared prompt."""
    ids = tiny.tokens(40)
    found = [single(ids[:n], [True] * n) for n in (2, 3, 9, 10, 34)]
    found += [pair(ids[:4], ids[4:5], ids[5:7]), pair(ids[:1], ids[1:3], ids[3:4])]
    return [*found, shared_prefix(ids[:20], ids[20:21], ids[21:23])] if shared else found


@pytest.mark.parametrize(
    ("family", "changes", "rows"),
    [
        ("llama", {"head_dim": 64}, slice(None, None, 2)),
        ("gemma3_text", {"head_dim": 256}, slice(1, None, 3)),
        ("qwen3", {"head_dim": 192}, slice(1, None, 3)),
        pytest.param("llama", {"head_dim": 64}, slice(None), marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"head_dim": 256}, slice(None), marks=pytest.mark.slow),
        pytest.param("qwen3", {"head_dim": 192}, slice(None), marks=pytest.mark.slow),
    ],
)
def test_no_step_and_no_evaluation_does(metal: Metal, family: str, changes: dict[str, Any], rows: slice) -> None:
    metal.compute = True
    model = tiny.build(family, num_hidden_layers=3, **changes)
    lora = tiny.attach(model)
    stack = LayerStack(model)
    for layout in [padded(row, dispatch.align()) for row in layouts(stack.shares_prefix)[rows]]:
        loss = objectives.sft if len(layout.spans) == 1 else objectives.orpo(0.1, "response")
        for backward in (SegmentedBackward(stack, lora, loss), FullBackward(stack, lora, loss)):
            backward.step(layout)
            backward.evaluate(layout)
    assert metal.outcomes() == {"fused"}
    assert any(call.gradient for call in metal.calls)
