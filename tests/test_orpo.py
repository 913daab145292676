"""ORPO on a model: both preference layouts against full backward, and against TRL's definition on mlx-lm's own logits.

Which norm is honest? The loss's gradient is a sum over spans of slope * d(sum of log-probs)/dp. Where the chosen and
the rejected response pull in opposite directions the sum is small and its rounding error is not, so an error relative
to the sum would measure the cancellation, not the layout. Errors here are relative, per tensor, to the sum of the
norms of the spans' contributions.
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objectives import trl_orpo

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward, Step
from segtrain.engine.layouts import Layout, Stream, padded, pair, shared_prefix
from segtrain.engine.objectives import Objective
from segtrain.lora.layers import Lora
from segtrain.models import stream_ops
from segtrain.models.stack import LayerStack

BETA = 1.0
LOSS_TOLERANCE, TOLERANCE = 2e-6, 1e-5 * tiny.ROUNDING
FLOOR = 1e-1 if tiny.ON_CUDA else 1e-3  # there a gradient of zero is a rounding's size, 2e-7 of the largest

LLAMA = tiny.FAMILIES["llama"][1]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0] * 4}


def short(name: str, config: dict, **changes) -> nn.Module:
    return tiny.build_module(name, {**config, "num_hidden_layers": 3, **changes})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "default rope": lambda: short("llama", LLAMA),
    "traditional rope": lambda: short("llama", LLAMA, rope_traditional=True),
    "linear rope": lambda: short("llama", LLAMA, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama3 rope": lambda: short("llama", LLAMA, rope_scaling={**LLAMA3, "original_max_position_embeddings": 64}),
    "yarn rope": lambda: short(
        "qwen3",
        tiny.FAMILIES["qwen3"][1],
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "longrope": lambda: short(
        "phi3", LLAMA, rope_scaling=LONGROPE, original_max_position_embeddings=64, tie_word_embeddings=True
    ),
    "window (gemma3)": lambda: short("gemma3_text", tiny.FAMILIES["gemma3_text"][1], sliding_window=9),
    "window, shared K/V (gemma4)": lambda: tiny.build("gemma4_text"),
    "window (mistral)": lambda: tiny.build("mistral"),
    "alternating streams (gemma3n)": lambda: tiny.build("gemma3n"),
}

_cache: dict[str, tuple[LayerStack, Lora]] = {}


def setup(name: str) -> tuple[LayerStack, Lora]:
    if name not in _cache:
        model = MODELS[name]()
        lora = tiny.attach(model)
        _cache[name] = LayerStack(model), lora
    return _cache[name]


def parts(P: int, Rc: int, Rr: int) -> tuple[list[int], list[int], list[int]]:
    return tiny.tokens(P, 1), tiny.tokens(Rc, 2), tiny.tokens(Rr, 3)


def segmented(name: str, layout: Layout, **engine) -> Step:
    stack, lora = setup(name)
    return tiny.segmented(stack, lora, objectives.orpo(BETA), **engine).step(layout)


def full(name: str, layout: Layout) -> Step:
    stack, lora = setup(name)
    return FullBackward(stack, lora, objectives.orpo(BETA)).step(layout)


def contributions(name: str, layout: Layout) -> dict[str, float]:
    """Per tensor, the sum over spans of |slope| * |d(sum of log-probs)/dp|."""
    stack, lora = setup(name)
    slopes: dict[str, float] = {}

    def spy(scores):
        value, grads = objectives.value_and_grad(objectives.orpo(BETA), scores)
        slopes.update({span: grad.item() for span, grad in grads.items()})
        return value

    SegmentedBackward(stack, lora, Objective("spy", spy)).evaluate(layout)  # calls its loss once
    assert all(slopes.values())
    sizes = dict.fromkeys(lora.values(), 0.0)
    for span, slope in slopes.items():
        alone = Objective("one span", lambda scores, span=span: objectives.LossValue(scores.sums[span], 1.0, {}))
        one = FullBackward(stack, lora, alone).step(layout)
        for parameter, grad in one.grads.items():
            sizes[parameter] += abs(slope) * tiny.norm(grad)
    return sizes


def error(expected: Step, actual: Step, sizes: dict[str, float]) -> float:
    """The largest error of a tensor, relative to its contributions, or to `FLOOR` of the largest tensor's.

    For a row of one token, queries and keys have a gradient of exactly zero, but for rounding.
    """
    floor = FLOOR * max(sizes.values())
    return max(tiny.norm(expected.grads[n] - actual.grads[n]) / max(sizes[n], floor) for n in sizes)


def check_layouts(name: str, P: int, Rc: int, Rr: int, size: int) -> None:
    two, one = pair(*parts(P, Rc, Rr)), shared_prefix(*parts(P, Rc, Rr))
    expected, sizes = full(name, two), contributions(name, two)
    for layout in (two, one):
        step = segmented(name, layout, segment_size=size)
        assert step.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=LOSS_TOLERANCE)
        assert error(expected, step, sizes) < TOLERANCE


LENGTHS = st.one_of(st.sampled_from([1, 2, 127, 128, 129]), st.integers(1, 40))


# Around 128 tokens attention works in another number of blocks; by day both ends of it.
@pytest.mark.parametrize(
    ("P", "Rc", "Rr", "size"),
    [
        (1, 1, 1, 1),
        (129, 127, 128, 3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((127, 1, 129, 2), (128, 128, 1, 1), (1, 129, 2, 1))),
    ],
)
def test_shared_prefix_equals_pair_equals_full(P: int, Rc: int, Rr: int, size: int):
    check_layouts("default rope", P, Rc, Rr, size)


# Prompts longer than each window and than what a rope was made for; by day each class of rope and each kind of window,
# other lengths only on one.
LONG_PROMPT = (70, 5, 9)
SHARING = "window, shared K/V (gemma4)"
BY_DAY = {"llama3 rope", "yarn rope", "longrope", "window (gemma3)", "window (mistral)", SHARING}
ROPES_AND_WINDOWS = [
    pytest.param(
        name, lengths, marks=() if name in (BY_DAY if lengths == LONG_PROMPT else {SHARING}) else pytest.mark.slow
    )
    for name in sorted({*MODELS} - {"default rope"})
    for lengths in ((1, 1, 1), LONG_PROMPT, (6, 30, 17))
]


@pytest.mark.parametrize(("name", "lengths"), ROPES_AND_WINDOWS, ids=str)
def test_every_rope_and_window(name: str, lengths: tuple[int, int, int]):
    check_layouts(name, *lengths, size=2)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.sampled_from(sorted(MODELS)), LENGTHS, LENGTHS, LENGTHS, st.integers(1, 6))
def test_shared_prefix_over_all_models(name: str, P: int, Rc: int, Rr: int, size: int):
    check_layouts(name, P, Rc, Rr, size)


@cache
def reference(name: str, build: Callable) -> tuple[Layout, Step, dict[str, float]]:
    layout = build(*parts(11, 4, 7))
    return layout, full(name, layout), contributions(name, layout)


@pytest.mark.parametrize(
    "engine", [{"keep": 2}, {"leanest": True}, {"keep": 1, "leanest": True, "lookahead": 1}], ids=str
)
@pytest.mark.parametrize("build", [pair, shared_prefix])
@pytest.mark.parametrize("name", [pytest.param("default rope", marks=pytest.mark.slow), SHARING])
def test_engine_options(name: str, build: Callable, engine: dict):
    layout, expected, sizes = reference(name, build)
    assert error(expected, segmented(name, layout, **engine), sizes) < TOLERANCE


@pytest.mark.parametrize("build", [pair, shared_prefix])
def test_padding_changes_nothing(build: Callable):
    name, layout = "window (mistral)", build(*parts(11, 4, 7))
    expected, actual = segmented(name, layout), segmented(name, padded(layout, 16))
    assert actual.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=LOSS_TOLERANCE)
    assert error(expected, actual, contributions(name, layout)) < TOLERANCE


@pytest.mark.parametrize("scope", ["full", "response"])
@pytest.mark.parametrize("lengths", [(9, 5, 7), (1, 1, 1), (1, 2, 1), (5, 1, 1)], ids=str)
def test_loss_is_trls_on_mlx_lms_logits(scope: str, lengths: tuple[int, int, int]):
    """Logits from mlx-lm's own forward pass, then TRL's formula in double precision."""
    prompt, chosen, rejected = parts(*lengths)
    stack, lora = setup("default rope")
    ids = [np.array(prompt + response) for response in (chosen, rejected)]
    logits = [np.array(stack.model(mx.array([x.tolist()]))[0].tolist()) for x in ids]
    expected = trl_orpo(logits[0], ids[0], logits[1], ids[1], len(prompt), BETA)
    if scope == "response":
        z = logits[0] - np.log(np.exp(logits[0]).sum(-1, keepdims=True))
        per_token = z[np.arange(len(ids[0]) - 1), ids[0][1:]]
        expected += per_token.mean() - per_token[len(prompt) - 1 :].mean()
    for build in (pair, shared_prefix):
        layout = build(prompt, chosen, rejected, score_prompt=scope == "full")
        step = SegmentedBackward(stack, lora, objectives.orpo(BETA, scope)).step(layout)
        assert step.loss.total.item() == pytest.approx(expected, rel=5e-6)


def test_identical_responses_have_no_odds():
    prompt, chosen, _ = parts(7, 5, 1)
    metrics = segmented("default rope", shared_prefix(prompt, chosen, chosen)).loss.metrics
    assert metrics["log_odds"].item() == pytest.approx(0.0, abs=1e-5)


# Controls: each breaks the shared prefix in one way, and must be seen.


class Unreset(Stream):
    """A shared prefix whose rejected response goes on counting positions."""

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        return ((0, len(self)),)


def gap(name: str, layout: Layout) -> float:
    """How far the shared layout is from the pair, as the tests above measure it."""
    two = pair(*parts(11, 12, 7))
    return error(full(name, two), segmented(name, layout), contributions(name, two))


def test_control_positions_that_are_not_reset_are_seen():
    layout = shared_prefix(*parts(11, 12, 7))
    (stream,) = layout.streams
    broken = Layout((Unreset(stream.tokens, stream.prefix, stream.branches),), layout.spans)
    assert gap("default rope", layout) < TOLERANCE
    assert gap("default rope", broken) > 1e-2


def test_control_visible_chosen_columns_are_seen(monkeypatch):
    original = stream_ops.attend
    monkeypatch.setattr(stream_ops, "attend", lambda q, k, v, *, prefix, branches, **rest: original(q, k, v, **rest))
    assert gap("default rope", shared_prefix(*parts(11, 12, 7))) > 1e-2


def test_control_a_window_on_physical_positions_is_seen(monkeypatch):
    layout = shared_prefix(*parts(11, 12, 7))
    (stream,) = layout.streams

    def physical(q, k, v, *, scale, window, sinks, prefix, branches):
        rows = mx.arange(q.shape[2])
        mask = stream_ops.dense_mask(stream, q.shape[2], None)
        if window:
            mask &= rows[:, None] - rows[None] < window
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    assert gap("window (mistral)", layout) < TOLERANCE
    monkeypatch.setattr(stream_ops, "attend", physical)
    assert gap("window (mistral)", layout) > 1e-2
