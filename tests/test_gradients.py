"""Gradients: segmented equals full backward equals mlx-lm's own, over families, segment sizes, options and precisions.

Errors are norm-relative, per tensor, in float32 unless said otherwise. Controls at the end must fail.
"""

from functools import cache
from itertools import product
from statistics import median

import mlx.core as mx
import pytest
import tiny
import tiny_configs

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward, Step
from segtrain.engine.layouts import RESPONSE, Layout, pair, single
from segtrain.lora.layers import Lora
from segtrain.lora.modules import DropoutKeys
from segtrain.models.stack import Execution, LayerStack

FAMILIES = list(tiny.FAMILIES)
IDS = tiny.tokens(18)
PROMPT = 6
SLOW = pytest.mark.slow
TOLERANCE = 1e-5
# The order of sums matters more there: 0.8e-5 with the C library of Debian 12, 1.3e-5 with that of Debian 13.
NOISIER = {"gemma4_text": 2e-5}
MAX_LAYERS = 99


def row() -> Layout:
    return tiny.row(len(IDS), PROMPT)


@cache
def setup(family: str, bits: int = 0, tied: bool | None = None, **lora) -> tuple[LayerStack, Lora]:
    changes = {} if tied is None else {"tie_word_embeddings": tied}
    model = tiny.build(family, bits=bits, **changes)
    attached = tiny.attach(model, **lora)
    return LayerStack(model), attached


@cache
def full(family: str, **options) -> Step:
    stack, lora = setup(family, **options)
    return FullBackward(stack, lora, objectives.sft).step(row())


def segmented(family: str, options: dict | None = None, **engine) -> Step:
    stack, lora = setup(family, **(options or {}))
    return tiny.segmented(stack, lora, objectives.sft, **engine).step(row())


def check(expected: Step, actual: Step, tolerance: float = TOLERANCE) -> None:
    assert actual.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=2e-6)
    assert tiny.relative(expected.grads, actual.grads) < tolerance


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [3, 64])
def test_weights_of_targets_scale_their_part_of_loss_and_gradient(compiled: bool, chunk: int):
    """The loss is linear in them: 0.5 on some targets and 2 on the others, against two rows with those alone."""
    stack, lora = setup("llama")
    early, late = ([i in part for i in range(len(IDS))] for part in (range(6, 11), range(11, 18)))
    weights = [0.5 * a + 2.0 * b for a, b in zip(early, late, strict=True)]
    weighted = single(IDS, [a or b for a, b in zip(early, late, strict=True)], weights)
    engines = [
        FullBackward(stack, lora, objectives.sft, compiled=compiled),
        tiny.segmented(stack, lora, objectives.sft, segment_size=1, head_chunk=chunk, compiled=compiled),
    ]
    for engine in engines:
        a, b, step = (engine.step(layout) for layout in (single(IDS, early), single(IDS, late), weighted))
        expected = {name: 0.5 * grad + 2.0 * b.grads[name] for name, grad in a.grads.items()}
        assert step.loss.total.item() == pytest.approx(0.5 * a.loss.total.item() + 2.0 * b.loss.total.item(), rel=2e-6)
        assert float(step.loss.weight) == 0.5 * 5 + 2.0 * 7
        assert tiny.relative(expected, step.grads) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [0, 4])
def test_full_and_segmented_are_mlx_lms_gradients(family: str, bits: int):
    stack, lora = setup(family, bits=bits)
    loss, grads = tiny.mlx_lm_gradients(stack.model, lora, IDS, PROMPT)
    for step in (full(family, bits=bits), segmented(family, {"bits": bits})):
        assert step.loss.total.item() == pytest.approx(loss, rel=2e-6)
        assert tiny.relative(grads, step.grads) < NOISIER.get(family, TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3, MAX_LAYERS])
def test_every_segment_size(family: str, size: int):
    check(full(family), segmented(family, segment_size=size, head_chunk=5))


# By day a third of them, with every pair of values.
COMBINATIONS = [
    pytest.param(family, *values, marks=() if sum(values) % 3 == (family == "llama") else SLOW)
    for family in ("llama", "gemma4_text")
    for values in product((1, 2, 3), (0, 2), (False, True), (0, 1, 2))
]


@pytest.mark.parametrize(("family", "size", "keep", "leanest", "lookahead"), COMBINATIONS)
def test_every_combination_of_options(family: str, size: int, keep: int, leanest: bool, lookahead: int):
    check(full(family), segmented(family, segment_size=size, keep=keep, leanest=leanest, lookahead=lookahead))


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"llama", "gemma4_text"}))
@pytest.mark.parametrize("options", [{"keep": 2}, {"leanest": True, "lookahead": 1}, {"keep": MAX_LAYERS}], ids=str)
def test_options_in_other_families(family: str, options: dict):
    check(full(family), segmented(family, **options))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_heads_in_chunks_of_few_rows(tied: bool, bits: int, chunk: int):
    options = {"tied": tied, "bits": bits}
    check(full("qwen2", **options), segmented("qwen2", options, head_chunk=chunk))


@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
@pytest.mark.parametrize("layers", [(3, 5), (4, 5), (1, 3), (2, 5)])
@pytest.mark.parametrize("engine", [{"segment_size": 1}, {"segment_size": 2}, {"segment_size": 2, "keep": 2}], ids=str)
def test_lora_on_some_layers(family: str, layers: tuple[int, int], engine: dict):
    """On gemma4 the trainable readers 3, 4 have donors 1, 2 below them, inside and outside the range."""
    check(full(family, layers=layers), segmented(family, {"layers": layers}, **engine))


@pytest.mark.parametrize("targets", ["q_proj", "down_proj", ("k_proj", "v_proj")])
def test_lora_on_some_modules(targets):
    """On gemma4 only donors and earlier layers have key and value projections in use."""
    for family in ("llama", "gemma4_text"):
        check(full(family, targets=targets), segmented(family, {"targets": targets}, segment_size=2))


@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
@pytest.mark.parametrize("size", [1, 2, 3, MAX_LAYERS])
@pytest.mark.parametrize("engine", [{}, {"keep": 2}, {"leanest": True}], ids=str)
def test_dropout_is_the_same_in_the_recomputation(family: str, size: int, engine: dict):
    check(full(family, dropout=0.3), segmented(family, {"dropout": 0.3}, segment_size=size, **engine))


def test_dropout_is_the_same_in_both_streams_of_a_pair():
    stack, lora = setup("llama", dropout=0.3)
    layout, loss = pair(IDS[:5], IDS[5:11], IDS[11:15]), objectives.orpo(0.5)
    expected = FullBackward(stack, lora, loss).step(layout)
    for engine in ({}, {"segment_size": 2}, {"keep": 3}):
        check(expected, SegmentedBackward(stack, lora, loss, **engine).step(layout))


@pytest.mark.parametrize("rows", [1, 4, 16, 17])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bits", [0, 4])
def test_mlp_in_chunks_of_tokens(rows: int, dropout: float, bits: int):
    options = {"dropout": dropout, "bits": bits}
    step = segmented("llama", options, segment_size=2, execution=Execution(mlp_rows=rows))
    check(full("llama", **options), step)


@pytest.mark.parametrize("engine", [{}, {"segment_size": 2, "keep": 2}], ids=str)
def test_dense_copies_of_quantised_weights(engine: dict):
    step = segmented("llama", {"bits": 4}, execution=Execution(dequantize=True), **engine)
    check(full("llama", bits=4), step)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=SLOW) for f in FAMILIES if f != "llama")])
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=SLOW)])
def test_compiled_segments(family: str, size: int):
    """Twice: the second step reuses the traced graphs."""
    stack, lora = setup(family)
    backward = SegmentedBackward(stack, lora, objectives.sft, segment_size=size, compiled=True)
    for _ in range(2):
        check(full(family), backward.step(row()))


@pytest.mark.parametrize("kind", [SegmentedBackward, FullBackward])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_graphs_serve_other_rows_and_parameters(kind: type, dropout: float):
    """Nothing of the first row may be baked in: tokens, targets, lengths, parameters, dropout keys, streams."""
    model = tiny.build("llama")
    lora = tiny.attach(model, dropout=dropout)
    stack = LayerStack(model)
    for loss, layouts in (
        (objectives.sft, [tiny.row(18, 6, 0), tiny.row(18, 6, 1), tiny.row(18, 9, 2), tiny.row(15, 3, 3)]),
        (objectives.orpo(0.5), [pair(IDS[:5], IDS[5:11], IDS[11:17]), pair(IDS[7:12], IDS[:6], IDS[1:7])]),
    ):
        compiled = kind(stack, lora, loss, compiled=True)
        for number, layout in enumerate(layouts):
            lora.dropout_keys.row = number
            expected = FullBackward(stack, lora, loss)
            check(expected.step(layout), compiled.step(layout))
            quiet = expected.evaluate(layout).total.item()
            assert compiled.evaluate(layout).total.item() == pytest.approx(quiet, rel=2e-6)
            lora.set({name: value * 1.1 for name, value in lora.values().items()})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"mlp_rows": 5}, {"dequantize": True}, {"mlp_rows": 5, "dequantize": True}], ids=str
)
def test_compiled_with_other_options(options: dict):
    stack, lora = setup("llama", bits=4)
    backward = SegmentedBackward(stack.executing(Execution(**options)), lora, objectives.sft, compiled=True)
    steps = [backward.step(row()) for _ in range(2)]
    for step in steps:
        check(full("llama", bits=4), step)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen2_moe", "llama"])
def test_a_kept_lowest_layer_compiled(name: str):
    """Nothing below it needs a cotangent; mlx's compiler raises IndexError on some graphs of this kind."""
    model = tiny_configs.build(name)
    last = len(model.layers)
    lora = tiny.attach(model, layers=(last - 1, last))
    stack, layout = LayerStack(model), tiny.row(24)
    step = SegmentedBackward(stack, lora, objectives.sft, keep=1, compiled=True).step(layout)
    check(FullBackward(stack, lora, objectives.sft).step(layout), step)


@pytest.mark.parametrize("prompt", [1, 2, 6])
@pytest.mark.parametrize("compiled", [False, True])
def test_full_backward_with_every_row_scored_and_with_some(prompt: int, compiled: bool):
    stack, lora = setup("llama")
    layout = tiny.row(len(IDS), prompt)
    assert layout.scores_most(RESPONSE) == (prompt < 3)
    loss, grads = tiny.mlx_lm_gradients(stack.model, lora, IDS, prompt)
    backward = FullBackward(stack, lora, objectives.sft, compiled=compiled)
    for other in (layout, tiny.row(len(IDS), 7 - prompt), layout):  # the other kind in between
        step = backward.step(other)
    assert step.loss.total.item() == pytest.approx(loss, rel=2e-6)
    assert tiny.relative(grads, step.grads) < TOLERANCE


# By day one of each bits, one with donors, on fewer rows; test_families.py has others.
BF16 = [
    *(("gemma4_text", 0, 7), ("llama", 4, 7)),
    *(
        pytest.param(family, bits, 15, marks=SLOW)
        for family in ("llama", "gemma3_text", "gemma4_text")
        for bits in (0, 4)
    ),
]


@pytest.mark.parametrize(("family", "bits", "count"), BF16)
def test_bf16_is_as_near_to_the_float32_truth_as_full_backward(family: str, bits: int, count: int):
    """err_ours <= 1.1 err_reference + 1e-3; the truth has the very same weights, widened.

    On one row either may happen to be nearer, so half of the rows must be within the bound.
    """
    model = tiny.build(family, bits=bits)
    model.set_dtype(mx.bfloat16)
    lora = tiny.attach(model)
    stack = LayerStack(model)
    rows = [tiny.row(len(IDS), PROMPT, seed) for seed in range(count)]
    ids = [tiny.tokens(len(IDS), seed) for seed in range(count)]
    segments = SegmentedBackward(stack, lora, objectives.sft, segment_size=2, head_chunk=4)
    whole = FullBackward(stack, lora, objectives.sft)
    ours, reference = ([backward.step(layout).grads for layout in rows] for backward in (segments, whole))
    theirs = [tiny.mlx_lm_gradients(model, lora, tokens, PROMPT)[1] for tokens in ids]
    tiny.as_float32(model)
    truth = [tiny.mlx_lm_gradients(model, lora, tokens, PROMPT)[1] for tokens in ids]
    errors = [tiny.overall(t, grads) for t, grads in zip(truth, ours, strict=True)]
    for other in (reference, theirs):
        bounds = [1.1 * tiny.overall(t, grads) + 1e-3 for t, grads in zip(truth, other, strict=True)]
        assert median(error - bound for error, bound in zip(errors, bounds, strict=True)) < 0
    assert min(errors) > 1e-4  # bf16 was really used


# Controls: each breaks one thing, and must be seen.


def test_control_a_dropped_donor_cotangent_is_seen(monkeypatch):
    original = SegmentedBackward._segment_vjp

    def dropping(self, tape, segment, carry, cotangents, grads, evaluator, products):
        original(self, tape, segment, carry, cotangents, grads, evaluator, products)
        for name in [n for n in cotangents if n != "h"]:
            cotangents[name] = mx.zeros_like(cotangents[name])

    monkeypatch.setattr(SegmentedBackward, "_segment_vjp", dropping)
    assert tiny.relative(full("gemma4_text").grads, segmented("gemma4_text").grads) > 0.1


def test_control_dropout_keyed_by_a_call_counter_is_seen(monkeypatch):
    calls: list[str] = []

    def counting(self: DropoutKeys, module: str) -> mx.array:
        calls.append(module)
        return mx.random.key(len(calls))

    stack, lora = setup("llama", dropout=0.3)
    monkeypatch.setattr(DropoutKeys, "key", counting)
    expected = FullBackward(stack, lora, objectives.sft).step(row())
    calls.clear()
    step = SegmentedBackward(stack, lora, objectives.sft).step(row())
    assert step.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=1e-5)  # the forward pass agrees
    assert tiny.relative(expected.grads, step.grads) > 0.1


def test_control_a_skipped_segment_is_seen(monkeypatch):
    original = LayerStack.run
    monkeypatch.setattr(
        LayerStack, "run", lambda self, tape, carry, lo, hi: original(self, tape, carry, lo, max(hi - 1, lo + 1))
    )
    assert tiny.relative(full("llama").grads, segmented("llama", segment_size=2).grads) > 0.1
