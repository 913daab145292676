"""The chunked head against autodiff through a naive head: each model's own norm and projection, written out here."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

from segtrain.engine.head import cotangent, log_softmax_at, score
from segtrain.engine.layouts import Span
from segtrain.models.stack import LayerStack

T, M = 11, 7
ROWS = [0, 2, 3, 5, 6, 9, 10]

GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}
COMMON = tiny.FAMILIES["llama"][1]


def llama(bits: int = 0, tied: bool = True) -> tuple[nn.Module, Callable]:
    model = tiny.build("llama", bits=bits, tie_word_embeddings=tied)
    project = model.model.embed_tokens.as_linear if tied else model.lm_head
    return model, lambda h: project(model.model.norm(h))


def gemma4() -> tuple[nn.Module, Callable]:
    model = tiny.build("gemma4_text", final_logit_softcapping=3.0)
    return model, lambda h: 3.0 * mx.tanh(model.model.embed_tokens.as_linear(model.model.norm(h)) / 3.0)


def granite() -> tuple[nn.Module, Callable]:
    changes = {**GRANITE, "attention_bias": False, "mlp_bias": False}
    model = tiny.build_module("granite", {**COMMON, **changes})
    return model, lambda h: model.model.embed_tokens.as_linear(model.model.norm(h)) / 3.0


def cohere() -> tuple[nn.Module, Callable]:
    model = tiny.build_module("cohere", {**COMMON, "logit_scale": 0.25})
    return model, lambda h: 0.25 * model.model.embed_tokens.as_linear(model.model.norm(h))


def phi() -> tuple[nn.Module, Callable]:
    model = tiny.build_module("phi", {**COMMON, "partial_rotary_factor": 0.5})
    model.lm_head.bias = mx.random.normal(model.lm_head.bias.shape)
    return model, lambda h: model.model.final_layernorm(h) @ model.lm_head.weight.T + model.lm_head.bias


HEADS = {
    "tied": lambda: llama(),
    "untied": lambda: llama(tied=False),
    "tied, 4 bits": lambda: llama(bits=4),
    "untied, 4 bits": lambda: llama(bits=4, tied=False),
    "soft-cap": gemma4,
    "logits scaling": granite,
    "logit scale": cohere,
    "bias": phi,
}


@pytest.fixture(scope="module", params=HEADS)
def head(request: pytest.FixtureRequest) -> tuple[Callable, Callable]:
    """(what is under test: logits through the model itself, what it should equal)"""
    model, naive = HEADS[request.param]()
    model.freeze()
    return LayerStack(model).logits, naive


def hidden(rows: int = T) -> mx.array:
    return mx.random.normal((1, rows, 32), key=mx.random.key(3))


def span(rows: list[int] = ROWS) -> Span:
    targets = mx.random.randint(0, tiny.VOCAB, (len(rows),), key=mx.random.key(4))
    return Span(0, mx.array(rows), targets)


def truth(naive: Callable, h: mx.array, span: Span) -> tuple[mx.array, mx.array]:
    """Sum of log-probs and its gradient: log-softmax over all rows, plain autodiff."""

    def total(h: mx.array) -> mx.array:
        logps = nn.log_softmax(naive(h).astype(mx.float32), axis=-1)[0]
        return sum(logps[r, y] for r, y in zip(span.rows.tolist(), span.targets.tolist(), strict=True))

    return mx.value_and_grad(total)(h)


@pytest.mark.parametrize("chunk", [1, 2, 3, M, M + 5])
def test_value_and_gradient_equal_autodiff(head, chunk: int):
    logits, naive = head
    expected, expected_dh = truth(naive, hidden(), span())
    scored = score(logits, hidden(), span(), chunk, gradient=True)
    assert [unit.shape[-2] for unit in scored.units] == [min(chunk, M - at) for at in range(0, M, chunk)]
    assert scored.logp.item() == pytest.approx(expected.item(), rel=1e-6)
    dh = cotangent(hidden(), [(span(), scored.units, mx.array(1.0))])
    assert tiny.relative({"dh": expected_dh}, {"dh": dh}) < 2e-6


def test_without_gradient_only_the_value(head):
    scored = score(head[0], hidden(), span(), 3, gradient=False)
    assert scored.units == []
    assert scored.logp.item() == pytest.approx(truth(head[1], hidden(), span())[0].item(), rel=1e-6)


def test_only_scored_rows_go_through_the_head_a_chunk_at_a_time():
    logits, _ = LayerStack(llama()[0]).logits, None
    seen: list[int] = []

    def watched(h: mx.array) -> mx.array:
        seen.append(h.shape[-2])
        return logits(h)

    score(watched, hidden(), span(), 3, gradient=False)
    assert seen == [3, 3, 1]


def test_spans_that_share_a_row_add_up():
    """Row P - 1 predicts the first token of both responses of a shared prefix."""
    model, naive = llama()
    first, second = span([1, 4, 5]), span([4, 8])
    h = hidden()
    spans = [
        (s, score(LayerStack(model).logits, h, s, 2, gradient=True).units, w) for s, w in ((first, 2.0), (second, -0.5))
    ]
    expected = 2.0 * truth(naive, h, first)[1] - 0.5 * truth(naive, h, second)[1]
    assert tiny.relative({"dh": expected}, {"dh": cotangent(h, [(s, u, mx.array(w)) for s, u, w in spans])}) < 2e-6


def test_log_softmax_at_is_log_softmax():
    z = 30 * mx.random.normal((1, 5, 13))
    targets = mx.array([0, 12, 3, 3, 7])
    naive = nn.log_softmax(z, axis=-1)[0, mx.arange(5), targets]
    assert mx.allclose(log_softmax_at(z, targets)[0], naive, atol=1e-5)


def test_bf16_hidden_states_keep_their_dtype_and_reduce_in_float32():
    model, naive = llama()
    model.set_dtype(mx.bfloat16)
    h = hidden().astype(mx.bfloat16)
    scored = score(LayerStack(model).logits, h, span(), 3, gradient=True)
    assert scored.logp.dtype == mx.float32
    assert {unit.dtype for unit in scored.units} == {mx.bfloat16}
    assert scored.logp.item() == pytest.approx(
        truth(naive, h, span())[0].item(), rel=1e-6
    )  # same logits, so the same sum
