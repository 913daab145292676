"""The gated delta rule in chunks against the same rule a token at a time, and that against mlx-lm's."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from segtrain.recurrence import gated_delta as gated_delta_module
from segtrain.recurrence.gated_delta import follow, gated_delta, reference
from segtrain.recurrence.sizes import Sizes, backend_name, group_tokens

BATCH, KEY_HEADS, HEADS, KEY, VALUE = 2, 1, 2, 8, 4
GATES = {"near 0": -4.0, "mixed": 1.0, "near 1": 9.0}


def sized(chunk, chunks=2):
    """Groups of so many chunks for the shapes here."""
    return Sizes(chunk, 4 * BATCH * HEADS * (2 * KEY + VALUE) * chunk * chunks)


def inputs(tokens, *, channels=False, gate="mixed", repeated=False, dtype=mx.float32):
    mx.random.seed(tokens)
    q, k = (mx.random.normal((BATCH, tokens, KEY_HEADS, KEY)) for _ in range(2))
    if repeated:
        k = mx.broadcast_to(k[:, :1], k.shape)
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = mx.random.normal((BATCH, tokens, HEADS, VALUE))
    shape = (BATCH, tokens, HEADS, KEY) if channels else (BATCH, tokens, HEADS)
    log_decay = -mx.exp(2 * mx.random.normal(shape) - GATES[gate])
    beta = mx.sigmoid(2 * mx.random.normal((BATCH, tokens, HEADS)))
    state = mx.random.normal((BATCH, HEADS, VALUE, KEY))
    return [*(x.astype(dtype) for x in (q, k, v)), log_decay, beta, state]


def all_of(f, args):
    """Outputs, final state, and the gradient of each argument for random cotangents of both."""
    mx.random.seed(1)
    cotangents = [mx.random.normal(args[2].shape).astype(args[0].dtype), mx.random.normal(args[5].shape)]
    outputs, gradients = mx.vjp(f, args, cotangents)
    return [*outputs, *gradients]


def errors(truth, other):
    return [
        (mx.linalg.norm((a - b).astype(mx.float32).flatten()) / (mx.linalg.norm(a.flatten()) + 1e-30)).item()
        for a, b in zip(truth, other, strict=True)
    ]


def chunked(chunk, chunks=2):
    return partial(gated_delta, sizes=sized(chunk, chunks))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65])
def test_values_state_and_gradients_equal_the_rule(tokens, repeated, gate, channels):
    args = inputs(tokens, channels=channels, gate=gate, repeated=repeated)
    assert max(errors(all_of(reference, args), all_of(chunked(16), args))) < 1e-5


THOUSAND = [(64, False), (1, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((64, True), (1, False)))]


@pytest.mark.parametrize(("chunk", "channels"), THOUSAND)
def test_a_thousand_tokens(chunk, channels):
    args = inputs(1000, channels=channels, repeated=True)
    assert max(errors(all_of(reference, args), all_of(chunked(chunk, 256 // chunk), args))) < 1e-5


@pytest.mark.parametrize("channels", [False, True])
def test_a_decay_of_zero_in_a_row_leaves_the_tokens_after_it_exact(channels):
    args = inputs(64, channels=channels, gate="near 1")
    args[3][:, 20:23] = -1e8
    assert max(errors(all_of(reference, args), all_of(chunked(64), args))) < 1e-5


def test_the_rule_is_mlx_lms():
    for channels in (False, True):
        q, k, v, log_decay, beta, state = inputs(9, channels=channels)
        theirs = gated_delta_ops(q, k, v, mx.exp(log_decay), beta, state)
        assert max(errors(theirs, reference(q, k, v, log_decay, beta, state))) < 1e-6


def test_a_wrong_decay_or_state_is_seen():
    args = inputs(20)
    ours = all_of(chunked(16), args)
    halved = [*args[:3], args[3] / 2, *args[4:]]
    assert max(errors(ours, all_of(reference, halved))) > 0.01
    assert errors(ours, all_of(reference, [*args[:5], 0 * args[5]]))[0] > 0.01


@pytest.mark.parametrize("channels", [False, True])
def test_bfloat16_is_as_near_to_the_truth_as_a_token_at_a_time(channels):
    half = inputs(130, channels=channels, dtype=mx.bfloat16)
    truth = all_of(reference, [x.astype(mx.float32) for x in half])
    theirs, ours = (all_of(f, half) for f in (reference, chunked(16)))
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    for reference_error, error in zip(errors(truth, theirs), errors(truth, ours), strict=True):
        assert error <= 1.1 * reference_error + 1e-3


def test_no_state_is_a_state_of_zeros():
    args = inputs(20)
    zeros = [*args[:5], mx.zeros_like(args[5])]
    assert max(errors(gated_delta(*zeros), gated_delta(*args[:5]))) == 0


@pytest.fixture
def kernel_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """This backend as one with MLX's kernel for the shapes here; how many tokens each of its calls had."""
    calls, original = [], mx.fast.gated_delta_update
    monkeypatch.setattr(gated_delta_module, "FUSED_HEADS", {backend_name(): {(KEY_HEADS, HEADS)}})
    monkeypatch.setattr(gated_delta_module, "FUSED_DIM", KEY)
    monkeypatch.setattr(mx.fast, "gated_delta_update", lambda *x: calls.append(x[0].shape[1]) or original(*x))
    yield calls
    follow({})


def square(args: list[mx.array]) -> list[mx.array]:
    """With values as wide as keys."""
    q, k, v, log_decay, beta, state = args
    return [q, k, mx.concatenate([v, v], axis=-1), log_decay, beta, mx.concatenate([state, state], axis=-2)]


def test_the_kernel_is_used_where_it_was_chosen_and_is_the_rule(kernel_here: list[int]):
    args = square(inputs(9))
    assert max(errors(all_of(reference, args), all_of(gated_delta, args))) < 1e-5
    assert kernel_here == []
    follow({"gated_delta": "fused"})
    assert max(errors(all_of(reference, args), all_of(gated_delta, args))) < 1e-5
    assert kernel_here == [9]


@pytest.mark.parametrize("args", [square(inputs(9, channels=True)), inputs(9)], ids=["channels", "narrow values"])
def test_shapes_without_a_kernel_go_in_chunks(args: list[mx.array], kernel_here: list[int]):
    follow({"gated_delta": "fused"})
    gated_delta(*args)
    assert kernel_here == []


@pytest.mark.parametrize("channels", [False, True])
def test_adjoint_identity(channels):
    args = inputs(40, channels=channels)
    tangents = [mx.random.normal(x.shape) for x in args]
    _, forward = mx.jvp(lambda *x: reference(*x)[0], args, tangents)
    w = mx.random.normal(args[2].shape)
    _, back = mx.vjp(lambda *x: chunked(16)(*x)[0], args, [w])
    left, right = (forward[0] * w).sum(), sum((t * g).sum() for t, g in zip(tangents, back, strict=True))
    assert abs((left - right).item()) < 1e-4 * abs(left.item())


def test_group_sizes_are_multiples_of_the_chunk_and_at_least_one():
    assert group_tokens(Sizes(16, 4 * 10 * 70), 10) == 64
    assert group_tokens(Sizes(16, 1), 10**6) == 16
