"""The scan over groups against the same function on all tokens at once, differentiated by MLX."""

import mlx.core as mx
import pytest
import tiny

from segtrain.recurrence import grouped as grouped_module
from segtrain.recurrence.grouped import MOST, group_of, scan

B, D = 2, 3


def relative_error(a, b):
    return (mx.linalg.norm(a - b) / (mx.linalg.norm(b) + 1e-30)).item()


def decayed_sum(x, decay, weight, state):
    """state = decay * state + x; y = tanh(state) * weight, a token at a time."""
    outputs = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        outputs.append(mx.tanh(state) * weight)
    return mx.stack(outputs, axis=1), state


def inputs(tokens):
    mx.random.seed(tokens)
    x, decay = mx.random.normal((B, tokens, D)), mx.random.uniform(shape=(B, tokens, D))
    return x, decay, mx.random.normal((D,)), mx.random.normal((B, D))


def grouped(group):
    return lambda x, decay, weight, state: scan(decayed_sum, [x, decay], state, group=group, fixed=[weight])


def value_and_gradients(f, args, y_cotangent, state_cotangent):
    outputs, gradients = mx.vjp(f, list(args), [y_cotangent, state_cotangent])
    return [*outputs, *gradients]


@pytest.mark.parametrize("tokens", [1, 4, 5, 11])
@pytest.mark.parametrize("through_state", [False, True])
def test_values_gradients_and_state_equal_one_call(tokens, through_state):
    args = inputs(tokens)
    cotangents = mx.random.normal((B, tokens, D)), mx.random.normal((B, D)) * through_state
    ours = value_and_gradients(grouped(4), args, *cotangents)
    theirs = value_and_gradients(decayed_sum, args, *cotangents)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("tokens", [4, 11])
def test_groups_compiled_as_on_a_gpu_equal_one_call(tokens, monkeypatch):
    """All scans share two graphs for each number of tokens in a group."""
    monkeypatch.setattr(grouped_module, "backend_name", lambda: "cuda")
    args = inputs(tokens)
    cotangents = mx.random.normal((B, tokens, D)), mx.random.normal((B, D))
    theirs = value_and_gradients(decayed_sum, args, *cotangents)
    for _ in range(2):
        ours = value_and_gradients(grouped(4), args, *cotangents)
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(ours, theirs, strict=True))
    assert grouped_module.passes(decayed_sum)[0] is grouped_module.passes(decayed_sum)[0]


def test_a_group_that_starts_from_a_wrong_state_is_seen():
    args = inputs(8)
    cotangents = mx.ones((B, 8, D)), mx.ones((B, D))
    halves = [decayed_sum(x[:, :4], d[:, :4], *args[2:]) for x, d in [args[:2], (args[0][:, 4:], args[1][:, 4:])]]
    ours = value_and_gradients(grouped(4), args, *cotangents)[0]
    assert relative_error(mx.concatenate([y for y, _ in halves], axis=1), ours) > 0.01


def test_adjoint_identity():
    args = inputs(9)
    tangents = [mx.random.normal(a.shape) for a in args]
    w = mx.random.normal((B, 9, D))
    _, forward = mx.jvp(lambda *a: decayed_sum(*a)[0], list(args), tangents)
    _, back = mx.vjp(lambda *a: grouped(2)(*a)[0], list(args), [w])
    left = (forward[0] * w).sum()
    right = sum((t * g).sum() for t, g in zip(tangents, back, strict=True))
    assert abs((left - right).item()) < 1e-4 * abs(left.item())


def test_bfloat16_inputs_keep_their_dtype():
    x, decay, weight, state = inputs(7)
    half = [a.astype(mx.bfloat16) for a in (x, decay, weight)]
    outputs, gradients = mx.vjp(grouped(3), [*half, state], [mx.ones((B, 7, D)), mx.ones((B, D))])
    assert [g.dtype for g in gradients] == [mx.bfloat16] * 3 + [mx.float32]
    assert outputs[1].dtype == mx.float32


@tiny.frees_at_once
def test_backward_runs_each_group_twice_and_needs_one_groups_memory():
    calls = []

    def wide(x, state):
        calls.append(x.shape[1])
        y = mx.exp(-(x[..., None] * mx.ones((512,)))).cumsum(axis=1).sum(axis=-1) + state[:, None]
        return y, y[:, -1]

    def peak(tokens):
        x, state = mx.ones((1, tokens, 8)), mx.zeros((1, 8))
        mx.eval(x, state)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(lambda x: scan(wide, [x], state, group=64)[0].sum())(x))
        return mx.get_peak_memory() - before

    short = peak(256)
    calls.clear()
    long = peak(1024)
    assert calls == [64] * 32
    assert long < 1.5 * short


def test_long_rows_have_larger_groups_not_more():
    assert group_of(64 * MOST, 64) == 64
    assert group_of(64 * MOST + 1, 64) == 128
    calls = []

    def kept(x, state):
        calls.append(x.shape[1])
        return x, state

    scan(kept, [mx.zeros((1, 5 * MOST, 2))], mx.zeros((1, 2)), group=2)
    assert len(calls) <= MOST
    assert set(calls[:-1]) == {6}


@pytest.mark.parametrize("lengths", [(3, 4), (0, 0)])
def test_lengths_that_do_not_fit_are_named(lengths):
    with pytest.raises(ValueError, match="tokens: give each the same number"):
        scan(decayed_sum, [mx.zeros((1, n, D)) for n in lengths], mx.zeros((1, D)), group=2, fixed=[mx.ones((D,))])
