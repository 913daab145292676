"""The engine's work: how often layers run, which phases there are, what a failing step leaves behind."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest
import tiny
from test_stack import failing, same, state

from segtrain.engine import objectives
from segtrain.engine.backward import Evaluator, FullBackward, SegmentedBackward
from segtrain.engine.layouts import pair
from segtrain.models.stack import LayerStack

LAYERS = 5


def engine(
    family: str = "llama", loss=objectives.sft, *, layers: tuple[int, int] | None = None, **options
) -> SegmentedBackward:
    model = tiny.build(family)
    lora = tiny.attach(model, layers=layers)
    return SegmentedBackward(LayerStack(model), lora, loss, **options)


@contextmanager
def counted(stack: LayerStack) -> Iterator[Counter]:
    """Counts how often each layer's own forward pass runs."""
    counts: Counter = Counter()
    numbers = {id(layer): i for i, layer in enumerate(stack.layers)}
    kind = type(stack.layers[0])
    original = kind.__call__

    def call(self, *args, **kwargs):
        counts[numbers[id(self)]] += 1
        return original(self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield counts
    finally:
        kind.__call__ = original


def work(backward, layout=None) -> list[int]:
    with counted(backward.stack) as counts:
        backward.step(layout or tiny.row())
    return [counts[i] for i in range(len(backward.stack))]


@pytest.mark.parametrize(
    ("family", "size"), [*((family, 2) for family in tiny.FAMILIES), ("llama", 1), ("llama", 3), ("gemma4_text", 99)]
)
def test_each_layer_runs_twice(family: str, size: int):
    backward = engine(family, segment_size=size)
    assert work(backward) == [2] * len(backward.stack)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("layers", "expected"), [((3, 5), [1, 1, 1, 2, 2]), ((1, 3), [1, 2, 2, 2, 2]), ((4, 5), [1] * 4 + [2])]
)
def test_layers_below_the_lowest_trainable_run_once(size: int, layers: tuple[int, int], expected: list[int]):
    assert work(engine(layers=layers, segment_size=size)) == expected


@pytest.mark.parametrize(
    ("keep", "layers", "expected"),
    [(0, None, []), (1, None, [4]), (2, None, [3, 4]), (5, None, [0, 1, 2, 3, 4]), (9, (3, 5), [3, 4])],
)
def test_products_are_kept_of_the_last_trainable_layers(
    keep: int, layers: tuple | None, expected: list[int], monkeypatch
):
    """All linear layers' but the last one's, which ends in a residual sum."""
    backward, seen = engine(keep=keep, layers=layers, segment_size=1), {}
    original = SegmentedBackward._segment_vjp

    def watching(self, tape, segment, carry, cotangents, grads, evaluator, products):
        seen[segment.lo] = products
        original(self, tape, segment, carry, cotangents, grads, evaluator, products)

    monkeypatch.setattr(SegmentedBackward, "_segment_vjp", watching)
    backward.step(tiny.row())
    assert {i: len(products) for i, products in seen.items() if products} == dict.fromkeys(expected, 6)


@pytest.mark.parametrize(
    ("size", "boundaries", "expected"),
    [
        (1, 3, [3, 3, 2, 2, 2]),  # groups [0 1 2] [3] [4]: all but a group's last segment run a third time
        (1, 4, [3, 2, 2, 2, 2]),
        (1, 2, [3, 3, 2, 3, 2]),  # [0 1 2] [3 4]
        (1, 1, [3, 3, 3, 3, 2]),
        (1, 99, [2, 2, 2, 2, 2]),
        (2, 2, [3, 3, 2, 2, 2]),  # segments [0 1] [2 3] [4], of which two make the first group
    ],
)
def test_fewer_boundaries_make_the_edges_within_a_group_again(size: int, boundaries: int, expected: list[int]):
    assert work(engine(segment_size=size, boundaries=boundaries)) == expected


def test_evaluation_runs_each_layer_once():
    backward = engine(keep=2, boundaries=4)
    with counted(backward.stack) as counts:
        backward.evaluate(tiny.row())
    assert [counts[i] for i in range(LAYERS)] == [1] * LAYERS


def test_two_streams_are_twice_the_work():
    layout = pair([1, 2, 3], [4, 5], [6])
    assert work(engine(loss=objectives.orpo()), layout) == [4] * LAYERS


def test_full_backward_runs_each_layer_once():
    model = tiny.build("llama")
    lora = tiny.attach(model)
    assert work(FullBackward(LayerStack(model), lora, objectives.sft)) == [1] * LAYERS


def phases(**options) -> list[str]:
    seen: list[str] = []

    @contextmanager
    def meter(phase: str, stream: int) -> Iterator[None]:
        seen.append(f"{phase}@{stream}")
        yield

    engine(meter=meter, **options).step(tiny.row())
    return seen


def test_phases_name_their_layers_in_order():
    assert phases(segment_size=2) == [
        *(f"forward{s}@0" for s in ("[0:2]", "[2:4]", "[4:5]")),
        "head@0",
        *(f"backward{s}@0" for s in ("[4:5]", "[2:4]", "[0:2]")),
    ]


def test_frozen_layers_have_no_backward_phase():
    seen = phases(segment_size=2, layers=(3, 5))
    assert [p for p in seen if p.startswith("backward")] == ["backward[3:5]@0"]
    assert [p for p in seen if p.startswith("forward")] == [f"forward{s}@0" for s in ("[0:2]", "[2:3]", "[3:5]")]


def test_gradients_come_by_parameter_name_and_shape():
    backward = engine(layers=(2, 4))
    step = backward.step(tiny.row())
    assert {n: g.shape for n, g in step.grads.items()} == {n: v.shape for n, v in backward.lora.values().items()}


def test_evaluation_is_the_steps_loss_without_dropout():
    model = tiny.build("llama")
    lora = tiny.attach(model, dropout=0.5)
    backward = SegmentedBackward(LayerStack(model), lora, objectives.sft)
    quiet = backward.evaluate(tiny.row()).total.item()
    assert quiet != pytest.approx(backward.step(tiny.row()).loss.total.item(), rel=1e-3)
    assert FullBackward(backward.stack, lora, objectives.sft).evaluate(tiny.row()).total.item() == pytest.approx(
        quiet, rel=1e-6
    )
    with lora.dropout_keys.disabled():
        assert backward.step(tiny.row()).loss.total.item() == quiet


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma4_text"])
@pytest.mark.parametrize("options", [{}, {"keep": 3}, {"boundaries": 3}], ids=str)
@pytest.mark.parametrize("after", [0, 4, 6])
def test_a_failing_step_leaves_nothing_behind(family: str, options: dict, after: int, monkeypatch):
    """The exception comes from inside a layer, in the forward pass or in the recomputation inside `mx.vjp`."""
    backward = engine(family, **options)
    before, model = state(backward.stack.model), backward.stack.model
    calls, original = [], type(model.layers[0]).__call__

    def call(self, *args, **kwargs):
        calls.append(self)
        if len(calls) > after:
            raise RuntimeError("boom")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.layers[0]), "__call__", call)
        with pytest.raises(RuntimeError, match="boom"):
            backward.step(tiny.row())
    assert same(before, state(model))
    assert backward.lora.dropout_keys.active
    expected = engine(family, **options).step(tiny.row()).grads
    assert tiny.relative(expected, backward.step(tiny.row()).grads) == 0.0


def test_a_failing_full_step_leaves_nothing_behind():
    model = tiny.build("llama")
    backward = FullBackward(LayerStack(model), tiny.attach(model), objectives.sft)
    backward.lora.flat()  # its parameters are views of one array from the first step on
    before = state(model)
    with failing(model.layers[3].mlp), pytest.raises(RuntimeError, match="boom"):
        backward.step(tiny.row())
    assert same(before, state(model))


@pytest.mark.parametrize("option", ["segment_size", "head_chunk"])
def test_sizes_below_one_are_refused(option: str):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, not 0"):
        engine(**{option: 0})


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_evaluator_evaluates_everything(lookahead: int):
    evaluator = Evaluator(lookahead)
    arrays = [mx.ones((4,)) * i for i in range(5)]
    for array in arrays:
        evaluator([array, {"x": array + 1}])
    evaluator.drain()
    assert [a[0].item() for a in arrays] == [0, 1, 2, 3, 4]
