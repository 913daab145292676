"""The capture stack against the model's own forward pass, and what it refuses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
import tiny_configs
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from segtrain.engine.layouts import Stream, shared_prefix
from segtrain.engine.segments import HIDDEN, cuts, split
from segtrain.models import recurrences
from segtrain.models.stack import LayerStack, UnsupportedModel

FAMILIES = list(tiny.FAMILIES)


@pytest.fixture(scope="module", params=FAMILIES)
def stack(request: pytest.FixtureRequest) -> LayerStack:
    return LayerStack(tiny.build(request.param))


def stream(count: int = 13) -> Stream:
    return Stream(mx.array([tiny.tokens(count)]))


def by_segments(stack: LayerStack, stream: Stream, size: int) -> mx.array:
    """Logits by running segments on declared carries only."""
    tape = stack.begin(stream)
    carry = {HIDDEN: tape.embedded}
    for s in split(len(stack), cuts(0, len(stack), size), stack.reads, stack.writes):
        out = stack.run(tape, {name: carry[name] for name in s.reads}, s.lo, s.hi)
        carry |= {name: out[name] for name in s.writes}
        mx.eval(carry)
    return stack.logits(carry[HIDDEN])


@pytest.mark.parametrize("size", [1, 2, 4, 99])
def test_segments_and_head_equal_the_model_to_the_bit(stack: LayerStack, size: int):
    assert mx.array_equal(by_segments(stack, stream(), size), stack.whole(stream()))


def test_whole_is_mlx_lms_forward_pass(stack: LayerStack):
    """With mlx-lm's own caches, masks, rope and attention; orders of summation differ."""
    expected = stack.model(stream().tokens, cache=make_prompt_cache(stack.model))
    assert mx.allclose(stack.whole(stream()), expected, rtol=1e-4, atol=1e-4)


def test_head_takes_any_rows(stack: LayerStack):
    h = mx.random.normal(stack.begin(stream()).embedded.shape)
    rows = mx.array([1, 4, 5])
    assert mx.allclose(stack.logits(mx.take(h, rows, axis=-2))[0], stack.logits(h)[0, rows], rtol=1e-5, atol=1e-5)


def test_one_tape_replays_many_times(stack: LayerStack):
    tape = stack.begin(stream())
    outs = [stack.run(tape, {HIDDEN: tape.embedded}, 0, len(stack))[HIDDEN] for _ in range(2)]
    assert mx.array_equal(*outs)


def test_plain_models_carry_only_hidden_states():
    stack = LayerStack(tiny.build("llama"))
    assert all(stack.reads(i) == stack.writes(i) == () for i in range(len(stack)))


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n"])
def test_shared_keys_and_values_are_learnt(family: str):
    """Layers 3, 4 (sliding) use layer 1's keys and values, layer 5 (full) uses layer 2's: by the configuration."""
    stack = LayerStack(tiny.build(family))
    assert [len(stack.writes(i)) for i in range(6)] == [0, 2, 2, 0, 0, 0]
    assert [stack.reads(i) for i in range(6)] == [(), (), (), stack.writes(1), stack.writes(1), stack.writes(2)]


def test_streams_are_independent():
    stack = LayerStack(tiny.build("gemma4_text"))
    first, second = stack.begin(stream(9)), stack.begin(stream(13))
    outs = [stack.run(tape, {HIDDEN: tape.embedded}, 0, 6)[HIDDEN] for tape in (first, second, first)]
    assert mx.array_equal(outs[0], outs[2])
    assert outs[1].shape[-2] == 13


def state(model: nn.Module) -> tuple:
    classes = {type(layer): type(layer).__call__ for layer in model.layers}
    return (
        mx.fast.rope,
        mx.fast.scaled_dot_product_attention,
        classes,
        [v for _, v in tree_flatten(model.parameters())],
    )


def same(before: tuple, after: tuple) -> bool:
    return before[:3] == after[:3] and all(a is b for a, b in zip(before[3], after[3], strict=True))


@contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    """`module`'s class raises when called, from inside a layer."""
    kind, original = type(module), type(module).__call__

    def call(self: nn.Module, *args, **kwargs):
        if self is module:
            raise RuntimeError("boom")
        return original(self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


ACTIONS: dict[str, Callable] = {
    "begin": lambda stack: stack.begin(stream()),
    "whole": lambda stack: stack.whole(stream()),
    "logits": lambda stack: stack.logits(mx.zeros((1, 2, 32))),
    "run": lambda stack: by_segments(stack, stream(), 2),
}


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "gemma3n"])
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_left_behind(family: str, action: str):
    model = tiny.build(family)
    before = state(model)
    stack = LayerStack(model)
    if not (family == "gemma3n" and action == "logits"):  # its last hidden states have one more axis
        ACTIONS[action](stack)
    if not (family == "gemma3n" and action == "whole"):  # mlx-lm's own pass clips weights in place
        assert same(before, state(model))


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "gemma3n"])
@pytest.mark.parametrize("action", ["whole", "run"])
def test_an_exception_inside_a_layer_leaves_nothing_behind(family: str, action: str):
    model = tiny.build(family)
    stack = LayerStack(model)
    before = state(model)
    with failing(model.layers[3].mlp), pytest.raises(RuntimeError, match="boom"):
        ACTIONS[action](stack)
    after = state(model)
    assert before[:2] == after[:2]
    assert before[2] == after[2]
    if not (family == "gemma3n" and action == "whole"):
        assert same(before, after)
    by_segments(stack, stream(), 1)


def test_an_exception_while_learning_leaves_nothing_behind():
    model = tiny.build("llama")
    before = state(model)
    with failing(model.layers[3].mlp), pytest.raises(RuntimeError, match="boom"):
        LayerStack(model)
    assert same(before, state(model))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def __call__(self, h: mx.array, mask=None, cache=None) -> mx.array:
        return self.mlp(h)


class Odd(nn.Module):
    """A model whose way of calling its three layers is given."""

    def __init__(self, calls: Callable):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = [Layer() for _ in range(3)]
        self._calls = calls

    def __call__(self, ids: mx.array, cache=None) -> mx.array:
        return self.embed.as_linear(self._calls(self.layers, self.embed(ids)))


def in_order(layers: list, h: mx.array) -> mx.array:
    for layer in layers:
        h = layer(h)
    return h


def glued(layers: list, h: mx.array) -> mx.array:
    return layers[2](layers[1](layers[0](h) * 2))


def test_an_odd_model_called_in_order_is_accepted():
    stack = LayerStack(Odd(in_order))
    assert mx.array_equal(
        by_segments(stack, Stream(mx.array([[1, 2, 3]])), 1), stack.whole(Stream(mx.array([[1, 2, 3]])))
    )


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (lambda layers, h: in_order(layers[::-1], h), "calls layer 2 where layer 0 was due"),
        (lambda layers, h: in_order(layers[:2], h), "calls 2 of its 3 layers"),
        (lambda layers, h: in_order([layers[0], *layers], h), "calls layer 0 where layer 1 was due"),
        (glued, "changes the hidden states between layers 0 and 1"),
    ],
)
def test_models_that_call_their_layers_otherwise_are_refused(calls: Callable, message: str):
    with pytest.raises(UnsupportedModel, match=message):
        LayerStack(Odd(calls))


def test_recurrent_layers_without_a_door_refuse_a_shared_prefix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrences, "RESTARTS", set())
    config = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "intermediate_size": 64, "state_size": 8}
    config |= {"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4}
    stack = LayerStack(tiny.build_module("mamba", config))
    assert not stack.attention_only
    with pytest.raises(UnsupportedModel, match="two streams"):
        stack.begin(shared_prefix([1, 2], [3], [4]).streams[0])


def test_a_rope_that_depends_on_the_rows_length_refuses_a_shared_prefix():
    """Dynamic NTK: a longer row rotates the same prompt otherwise, so the two responses have no prompt in common."""
    model = tiny.build("llama", rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=8)
    stack = LayerStack(model)
    assert stack.attention_only
    assert not stack.shares_prefix
    assert LayerStack(tiny.build("llama")).shares_prefix
    with pytest.raises(UnsupportedModel, match="depends on the row's length"):
        stack.begin(shared_prefix([1, 2], [3], [4]).streams[0])
    assert mx.array_equal(by_segments(stack, stream(), 2), stack.whole(stream()))


@pytest.mark.parametrize(
    ("kind", "name", "missing"),
    [
        ("gemma2", "Attention", "Attention.__call__"),
        ("gemma2", "create_attention_mask", "create_attention_mask"),
        ("deepseek_v3", "DeepseekV3Attention", "DeepseekV3Attention.__call__"),
    ],
)
def test_a_model_file_that_changed_is_refused_where_it_is_used(monkeypatch, kind: str, name: str, missing: str):
    model = tiny.build_module(kind, tiny_configs.CONFIGS[kind])
    monkeypatch.delattr(f"mlx_lm.models.{kind}.{name}")
    with pytest.raises(ValueError, match=rf"models/{kind}.py of mlx-lm \S+ has no {missing}, which segtrain replaces"):
        LayerStack(model)
    LayerStack(tiny.build("llama")).whole(stream())
