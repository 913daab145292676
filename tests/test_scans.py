"""Mamba's selective scan, SSD and RWKV-7 by groups of tokens, against their rules a token at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from segtrain.recurrence import diagonal
from segtrain.recurrence.rwkv7 import reference as rwkv7_reference
from segtrain.recurrence.rwkv7 import rwkv7
from segtrain.recurrence.selective_scan import reference as selective_reference
from segtrain.recurrence.selective_scan import selective_scan
from segtrain.recurrence.ssd import reference as ssd_reference
from segtrain.recurrence.ssd import ssd
from segtrain.recurrence.triangular import unit_lower_inverse

LENGTHS = [1, 2, 63, 64, 65, 300, pytest.param(1000, marks=pytest.mark.slow)]
normal = mx.random.normal


def selective_inputs(tokens: int, gate: float = 0, width: int = 6, states: int = 4) -> list[mx.array]:
    """dt over some orders of magnitude; a large `gate` forgets at once, a very negative one never."""
    x, dt = normal((1, tokens, width)), mx.exp(3 * normal((1, tokens, width)) - 2 + gate)
    B, C = normal((1, tokens, states)), normal((1, tokens, states))
    return [x, dt, B, C, -mx.exp(2 * normal((width, states))), normal((1, width, states))]


def ssd_inputs(tokens: int, gate: float = 0) -> list[mx.array]:
    """Four heads in two groups; log decays from almost 0 to -100 and less."""
    x, dt = normal((1, tokens, 4, 3)), mx.exp(3 * normal((1, tokens, 4)) - 2 + gate)
    B, C = normal((1, tokens, 2, 5)), normal((1, tokens, 2, 5))
    return [x, dt, B, C, -mx.exp(2 * normal((4,))), normal((1, 4, 3, 5))]


def rwkv7_inputs(tokens: int, gate: float = 0, same_key: bool = False) -> list[mx.array]:
    """As the model makes them: decays exp(-0.606531 sigmoid(.)), keys to remove of length 1."""
    shape = (1, tokens, 2, 8)
    r, k, v = normal(shape), normal(shape), normal(shape)
    w = mx.exp(-0.606531 * mx.sigmoid(6 * normal(shape) + gate))
    removed = normal((1, 1, 2, 8) if same_key else shape)
    removed = mx.broadcast_to(removed / mx.linalg.norm(removed, axis=-1, keepdims=True), shape)
    return [r, w, k, v, -removed, removed * mx.sigmoid(3 * normal(shape)), normal((1, 2, 8, 8))]


@dataclass(frozen=True)
class Rule:
    """A recurrence, its step-by-step form, inputs for it, and how many of those have a token axis."""

    ours: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[..., list[mx.array]]
    sequences: int


RULES = {
    "selective scan": Rule(selective_scan, selective_reference, selective_inputs, 4),
    "ssd": Rule(ssd, ssd_reference, ssd_inputs, 4),
    "rwkv7": Rule(rwkv7, rwkv7_reference, rwkv7_inputs, 6),
}
EACH = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def error(a: mx.array, truth: mx.array) -> float:
    difference = mx.linalg.norm((a - truth).astype(mx.float32).reshape(-1))
    return (difference / (mx.linalg.norm(truth.astype(mx.float32).reshape(-1)) + 1e-30)).item()


def everything(f: Callable[..., Any], inputs: list[mx.array]) -> list[mx.array]:
    """Outputs, final state and the gradient of every input, for fixed cotangents of outputs and state."""
    y, state = f(*inputs)
    cotangents = [mx.sin(mx.arange(x.size) + 1.0).reshape(x.shape).astype(x.dtype) for x in (y, state)]
    return [y, state, *mx.vjp(f, inputs, cotangents)[1]]


def errors(rule: Rule, inputs: list[mx.array]) -> list[float]:
    pairs = zip(everything(rule.ours, inputs), everything(rule.reference, inputs), strict=True)
    return [error(ours, truth) for ours, truth in pairs]


@pytest.mark.parametrize("tokens", LENGTHS)
@EACH
def test_values_state_and_gradients_are_the_rules(rule: Rule, tokens: int):
    mx.random.seed(tokens)
    assert max(errors(rule, rule.inputs(tokens))) <= 1e-5


@pytest.mark.parametrize("gate", [-30, 20])
@EACH
def test_gates_that_keep_or_forget_everything(rule: Rule, gate: float):
    mx.random.seed(3)
    assert max(errors(rule, rule.inputs(150, gate=gate))) <= 1e-5


def test_a_repeated_key_is_removed_exactly():
    mx.random.seed(4)
    assert max(errors(RULES["rwkv7"], rwkv7_inputs(150, gate=-30, same_key=True))) <= 1e-5


def test_rwkv7s_decays_down_to_the_smallest_that_is_promised():
    mx.random.seed(10)
    r, w, *rest = rwkv7_inputs(70)
    assert max(errors(RULES["rwkv7"], [r, mx.full(w.shape, 0.1), *rest])) <= 1e-5


def test_weak_decays_after_strong_ones_keep_their_digits():
    """Differences of running sums would lose 1e-3 of each weak decay here."""
    mx.random.seed(5)
    x, _, B, C, _, state = ssd_inputs(64)
    dt = mx.where(mx.arange(64)[:, None] % 8 == 0, 2000.0, 0.01) * mx.ones((1, 64, 4))
    assert max(errors(RULES["ssd"], [x, dt, B, C, mx.full((4,), -1.0), state])) <= 1e-5


@EACH
def test_a_row_in_two_parts_is_the_row(rule: Rule):
    """The state that one part leaves is what the next begins with; without it the outputs differ."""
    mx.random.seed(6)
    inputs = rule.inputs(90)
    sequences, rest = inputs[: rule.sequences], inputs[rule.sequences :]
    whole, end = rule.ours(*inputs)
    first, state = rule.ours(*(x[:, :37] for x in sequences), *rest)
    tail = [x[:, 37:] for x in sequences]
    second, last = rule.ours(*tail, *rest[:-1], state)
    assert error(mx.concatenate([first, second], axis=1), whole) <= 1e-6
    assert error(last, end) <= 1e-6
    assert error(rule.ours(*tail, *rest[:-1])[0], whole[:, 37:]) > 1e-3


@EACH
def test_no_state_is_a_state_of_zeros(rule: Rule):
    mx.random.seed(7)
    *inputs, state = rule.inputs(5)
    assert mx.array_equal(rule.ours(*inputs)[0], rule.ours(*inputs, mx.zeros_like(state))[0])


@EACH
def test_adjoint_identity(rule: Rule):
    """<J t, w> by differences of the value against <t, J^T w> by the gradient."""
    mx.random.seed(8)
    inputs = rule.inputs(70, gate=-2)
    tangents = [x * normal(x.shape) * 1e-3 for x in inputs]
    up, down = (rule.ours(*(x + s * t for x, t in zip(inputs, tangents, strict=True)))[0] for s in (1, -1))
    weights = mx.sign(up - down)
    _, gradients = mx.vjp(lambda *x: rule.ours(*x)[0], inputs, [weights])
    by_values = ((up - down) * weights).sum().item() / 2
    by_gradients = sum((t * g).sum().item() for t, g in zip(tangents, gradients, strict=True))
    assert by_gradients == pytest.approx(by_values, rel=2e-3)


@EACH
def test_in_bf16_no_further_from_the_truth_than_the_steps(rule: Rule):
    mx.random.seed(9)
    half = [x.astype(mx.bfloat16) for x in rule.inputs(100)]
    truth = everything(rule.reference, [x.astype(mx.float32) for x in half])
    ours, steps = everything(rule.ours, half), everything(rule.reference, half)
    for a, b, exact in zip(ours, steps, truth, strict=True):
        assert error(a, exact) <= 1.1 * error(b, exact) + 1e-3
    assert ours[0].dtype == mx.bfloat16
    assert ours[1].dtype == mx.float32


def above_inputs(rule: Rule, inputs: list[mx.array]) -> int:
    """Bytes at the peak of the gradients of all inputs, those included."""
    mx.eval(inputs)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(mx.grad(lambda *x: rule.ours(*x)[0].sum(), list(range(len(inputs))))(*inputs))
    return mx.get_peak_memory() - before


@EACH
def test_memory_grows_with_the_row_by_its_outputs_and_states(rule: Rule):
    """Doubling a row adds its own arrays, not what the arithmetic of the added tokens needs."""
    short, long = (above_inputs(rule, rule.inputs(tokens)) for tokens in (1024, 2048))
    own = sum(x.nbytes for x in rule.inputs(1024)[: rule.sequences])
    assert long - short <= 4 * own


def test_the_state_between_groups_does_not_hold_its_groups_states():
    """With 32 states a channel: 1,024 more tokens have 4 MiB of states."""
    rule = RULES["selective scan"]
    short, long = (above_inputs(rule, selective_inputs(tokens, width=32, states=32)) for tokens in (1024, 2048))
    assert long - short <= 2 << 20


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 16, 17])
def test_states_of_a_diagonal_recurrence(tokens: int):
    mx.random.seed(tokens)
    inputs = [mx.random.uniform(shape=(2, tokens, 3)), normal((2, tokens, 3)), normal((2, 3))]
    cotangent = normal((2, tokens, 3))
    (ours,), our_gradients = mx.vjp(diagonal.states, inputs, [cotangent])
    (theirs,), their_gradients = mx.vjp(diagonal.reference, inputs, [cotangent])
    assert error(ours, theirs) <= 1e-6
    assert all(error(a, b) <= 1e-6 for a, b in zip(our_gradients, their_gradients, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 1000])
def test_a_linear_recurrence_with_its_state(tokens: int):
    mx.random.seed(tokens)
    decays = mx.sigmoid(20 * normal((1, tokens, 3)))  # some 0, some 1

    def steps(x: mx.array, a: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        h = diagonal.reference(a, x, state)
        return h, h[:, -1]

    rule = Rule(diagonal.linear_recurrence, steps, lambda: [], 2)
    assert max(errors(rule, [normal((1, tokens, 3)), decays, normal((1, 3))])) <= 1e-5


@pytest.mark.parametrize("size", [1, 2, 5, 32])
def test_inverse_of_a_unit_lower_triangle(size: int):
    """All ones below the diagonal: the inverse is 1 on it and -1 just below, while a series' terms reach 1e8."""
    a = mx.tril(mx.ones((size, size)), -1)
    inverse = unit_lower_inverse(a)
    assert mx.allclose(inverse, mx.eye(size) - mx.eye(size, k=-1), atol=1e-6)
