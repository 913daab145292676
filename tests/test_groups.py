"""Rows together against the same rows one at a time: tokens, spans, losses and gradients.

Expected values are sums over the rows by themselves, in float32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import tiny
import tiny_configs

from segtrain.engine import objectives
from segtrain.engine.backward import Backward, FullBackward, SegmentedBackward, Step
from segtrain.engine.groups import alike, cut, grouped, ragged, together
from segtrain.engine.layouts import CHOSEN, PROMPT, RESPONSE, Layout, padded, pair, shared_prefix, single
from segtrain.engine.ragged import batch_length, up
from segtrain.models.stack import Execution, LayerStack
from segtrain.run.passes import Passes

FAMILIES = ["llama", "gemma3_text", "gemma3n", "qwen3_moe", "qwen3_5", "mamba", "gpt_oss", "deepseek_v3", "lfm2"]
LENGTHS = (7, 19, 12)


def sft_rows() -> list[Layout]:
    return [
        single(tiny.tokens(n, seed), [i >= 2 for i in range(n)], [0.5] * n if seed == 2 else None)
        for seed, n in enumerate(LENGTHS)
    ]


def pair_rows(build: Callable[..., Layout] = pair, prompts: tuple[int, ...] = (1, 6, 4)) -> list[Layout]:
    return [
        build(tiny.tokens(n, 3 * i), tiny.tokens(4 + 3 * i, 3 * i + 1), tiny.tokens(9 - i, 3 * i + 2))
        for i, n in enumerate(prompts)
    ]


@lru_cache(maxsize=1)
def family(name: str) -> tuple[LayerStack, object]:
    model = tiny_configs.build(name)
    lora = tiny.attach(model)
    return LayerStack(model), lora


def backward(name: str, kind: str, objective: objectives.Objective) -> Backward:
    stack, lora = family(name)
    compiled = "compiled" in kind
    if "full" in kind:
        return FullBackward(stack, lora, objective, compiled=compiled)  # type: ignore[arg-type]
    rows = Execution(mlp_rows=4 if "chunks" in kind else None)
    return SegmentedBackward(stack.executing(rows), lora, objective, head_chunk=5, keep=1, compiled=compiled)  # type: ignore[arg-type]


def summed(steps: list[Step]) -> dict[str, mx.array]:
    return {name: sum((step.grads[name] for step in steps[1:]), steps[0].grads[name]) for name in steps[0].grads}


def check(by: Backward, rows: list[Layout], join: Callable[..., Layout] = together) -> None:
    alone = [by.step(row) for row in rows]
    joint = by.step(join(rows, 8))
    losses = [step.loss.total.item() for step in alone]
    assert joint.loss.total.tolist() == pytest.approx(losses, rel=2e-6)  # type: ignore[union-attr]
    for name, values in joint.loss.metrics.items():
        assert values.tolist() == pytest.approx([s.loss.metrics[name].item() for s in alone], rel=1e-4, abs=1e-5)
    expected = summed(alone)
    moved = {name: grad for name, grad in expected.items() if tiny.norm(grad)}  # not experts that nobody chose
    assert tiny.relative(moved, {name: joint.grads[name] for name in moved}) <= 1e-5
    assert by.evaluate(join(rows)).total.tolist() == pytest.approx(losses, rel=2e-6)


@pytest.mark.parametrize(("name", "kind"), list(product(FAMILIES, ["segmented", "full"])))
def test_rows_of_each_kind_of_model(name: str, kind: str):
    check(backward(name, kind, objectives.sft), sft_rows())


OTHERS = ["gemma3_text", "gemma3n", "qwen3_moe"]
ONE_AFTER_THE_OTHER = [
    *product(["llama"], ["segmented", "segmented, compiled", "full", "full, compiled", "segmented, chunks"]),
    *product(OTHERS, ["segmented"]),
    *(pytest.param(name, "full", marks=pytest.mark.slow) for name in OTHERS),  # mlx-lm's own attention sees no groups
    *(pytest.param("llama", f"{kind}, twice", marks=pytest.mark.slow) for kind in ("segmented", "full")),
]


@pytest.mark.parametrize(("name", "kind"), ONE_AFTER_THE_OTHER)
def test_one_after_the_other(name: str, kind: str):
    """Prompts of three lengths, shared ones and one that isn't; a second group of other lengths by the same graphs.

    Where nothing is compiled no graph is used twice, so the second group runs at night.
    """
    check(backward(name, kind, objectives.sft), sft_rows(), ragged)
    pairs = [*pair_rows(shared_prefix, (3, 6, 4)), pair_rows()[1]]
    by = backward(name, kind, objectives.orpo())
    for rows in (pairs, pairs[1:][::-1]) if "compiled" in kind or "twice" in kind else (pairs,):
        check(by, rows, ragged)


def test_only_what_shares_a_stream_with_attention_alone_runs_one_after_the_other():
    assert family("llama")[0].takes_ragged
    assert not family("qwen3_5")[0].takes_ragged


def test_groups_of_one_size_share_their_graphs():
    """Rows of other lengths, but as many tokens rounded up, add no graph."""
    by = backward("llama", "segmented, compiled", objectives.sft)
    by.step(ragged(sft_rows(), 8))
    before = len(by.traces)  # type: ignore[attr-defined]
    by.step(ragged([single(tiny.tokens(n), [True] * n) for n in (9, 18, 12)], 8))
    assert len(by.traces) == before  # type: ignore[attr-defined]


def test_a_shared_prompt_is_computed_once_and_seen_twice():
    joint = ragged([shared_prefix([1, 2], [3], [4, 5]), single([6, 7, 8], [True] * 3)])
    (stream,) = joint.streams
    assert stream.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert stream.ragged is not None
    assert stream.ragged.tokens.tolist() == [[0, 1, 2, 0], [0, 1, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0]]
    assert stream.ragged.positions.tolist() == [0, 1, 2, 2, 3, 0, 1, 0]
    assert (joint.tokens, joint.padding, joint.rows) == (7, 1, 2)


@pytest.mark.parametrize("kind", ["segmented", "full", "segmented, chunks"])
@pytest.mark.parametrize("objective", [objectives.sft, objectives.orpo()], ids=lambda o: o.name)
def test_dropout_is_the_rows_own(objective: objectives.Objective, kind: str):
    """Masks are those of each row by itself, so the gradients are too; without the rows' numbers they are others."""
    model = tiny_configs.build("llama")
    stack, lora = LayerStack(model), tiny.attach(model, dropout=0.3)
    rows = sft_rows() if objective is objectives.sft else [*pair_rows(shared_prefix, (3, 6, 4)), pair_rows()[1]]
    by: Backward = FullBackward(stack, lora, objective)  # type: ignore[arg-type]
    if kind != "full":
        running = stack.executing(Execution(mlp_rows=4 if "chunks" in kind else None))
        by = SegmentedBackward(running, lora, objective)  # type: ignore[arg-type]
    alone = []
    for number, row in enumerate(rows):
        lora.dropout_keys.row = 7 + number
        alone.append(by.step(row))
    lora.dropout_keys.rows = range(7, 7 + len(rows))
    joint = by.step(ragged(rows, 8))
    assert tiny.relative(summed(alone), dict(joint.grads)) <= 1e-5
    lora.dropout_keys.rows = range(8, 8 + len(rows))
    assert tiny.relative(summed(alone), dict(by.step(ragged(rows, 8)).grads)) > 0.1


@pytest.mark.parametrize("kind", ["segmented, compiled", "full, compiled", "segmented, chunks"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_compiled_and_in_chunks(name: str, kind: str):
    check(backward(name, kind, objectives.sft), sft_rows())


@pytest.mark.parametrize("kind", ["segmented", "full", "segmented, compiled"])
@pytest.mark.parametrize("objective", [objectives.orpo(), objectives.dpo(), objectives.simpo()], ids=lambda o: o.name)
def test_pairs(objective: objectives.Objective, kind: str):
    rows = pair_rows() if objective.scores_prompt else [without_prompt(row) for row in pair_rows()]
    check(backward("llama", kind, objective), rows)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_shared_prompts_of_one_length(name: str):
    check(backward(name, "segmented", objectives.orpo()), pair_rows(shared_prefix, (5, 5, 5)))


def without_prompt(layout: Layout) -> Layout:
    return replace(layout, spans={name: span for name, span in layout.spans.items() if name != PROMPT})


def test_only_rows_of_a_kind_are_grouped():
    layouts = [*pair_rows(shared_prefix, (5, 3, 5)), *pair_rows()]
    groups = grouped(layouts, lambda lengths: [len(lengths)])
    assert sorted(map(sorted, groups)) == [[0, 2], [1], [3, 4, 5]]


def test_tokens_are_counted_without_filler():
    rows = [padded(row, 8) for row in sft_rows()]  # streams of 6, 18 and 11
    assert [row.padding for row in rows] == [2, 6, 5]
    joint = together(rows, 8)
    assert (joint.tokens, joint.padding, joint.rows) == (35, 3 * 24 - 35, 3)
    assert joint.scored == sum(row.scored for row in rows)


def test_rows_of_branches_move_behind_the_longer_ones():
    joint = together([shared_prefix([1, 2], [3], [4, 5]), shared_prefix([1, 2], [3, 4, 5], [6])])
    assert joint.streams[0].tokens.tolist() == [[1, 2, 3, 0, 0, 4, 5], [1, 2, 3, 4, 5, 6, 0]]
    assert joint.streams[0].branches == (3, 2)
    assert joint.spans["rejected"].rows.tolist() == [1, 5, 7 + 1]
    assert joint.spans[CHOSEN].sizes == (1, 3)


@pytest.mark.parametrize(
    ("lengths", "multiple", "expected"), [((17, 17, 17), 1, True), ((17, 5, 9), 1, False), ((17, 13, 16), 16, True)]
)
def test_rows_of_one_length_need_no_folding(lengths: tuple[int, ...], multiple: int, expected: bool):
    rows = [single(tiny.tokens(n), [True] * n) for n in lengths]
    assert alike(rows, multiple) == expected
    assert not alike([*rows, *pair_rows(shared_prefix, (5, 5))], multiple)


def test_a_loss_that_is_not_finite_stays_its_rows():
    rows = sft_rows()
    spans = {RESPONSE: replace(rows[1].spans[RESPONSE], weights=mx.full((len(rows[1].spans[RESPONSE]),), float("nan")))}
    value = backward("llama", "segmented", objectives.sft).step(together([rows[0], replace(rows[1], spans=spans)])).loss
    assert mx.isnan(value.total).tolist() == [False, True]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "fixed", "rows", "tokens", "expected"),
    [
        ([10, 10, 10, 10], 5, 99, 99, [4]),
        ([10, 10, 10, 10], 0, 1, 99, [1, 1, 1, 1]),
        ([10, 10, 100], 50, 99, 999, [2, 1]),  # 20 + 100 + 2 * 50 against 300 + 50
        ([90, 100], 50, 99, 999, [2]),
        ([10, 10, 10, 10], 5, 99, 20, [2, 2]),
        ([50], 5, 99, 20, [1]),
        ([10] * 7, 5, 99, 999, [4, 2, 1]),  # sizes are powers of two
        ([10] * 7, 5, 7, 999, [7]),  # or the most that there may be
    ],
)
def test_groups_of_least_cost(lengths: list[int], fixed: int, rows: int, tokens: int, expected: list[int]):
    assert cut(lengths, fixed, rows, tokens) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10, 10, 100], [3]),  # 120 tokens and an eighth of 180 of filler
        ([10] * 7, [7]),
        ([10, 10, 4000], [2, 1]),
        ([400, 500, 600], [2, 1]),  # no more than 1,000 tokens
    ],
)
def test_groups_of_a_ragged_batch(lengths: list[int], expected: list[int]):
    assert cut(lengths, 50, 99, 1000, 1 / 8, any_size=True) == expected


def test_sizes_are_few():
    assert {up(n) for n in range(1025, 2049)} == {1280, 1536, 1792, 2048}
    assert all(n <= up(n) <= max(n * 1.25, n + 8) for n in range(1, 20000))
    assert [batch_length(n, 128) for n in (1, 128, 129, 300, 400, 700, 1000)] == [128, 128, 256, 384, 512, 768, 1024]


@pytest.mark.parametrize(("groups", "order"), [([[0], [2], [1]], [[0], [1], [2]]), ([[0, 2], [1]], [[0, 2], [1]])])
def test_rows_that_run_alone_keep_their_order(groups: list[list[int]], order: list[list[int]]):
    """Gradients are added up in that order, so a run whose rows never run together has the bytes of one by one."""
    session: Any = SimpleNamespace(why_alone="", grouped=lambda rows, cut: groups)
    rows: list[Any] = [None] * 3
    assert Passes(session, lambda layout: backward("llama", "full", objectives.sft), list).groups(rows) == order
