"""Rows together against the same rows one at a time: tokens, spans, losses and gradients.

Expected values are sums over the rows by themselves, in float32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import mlx.core as mx
import pytest
import tiny
import tiny_configs

from segtrain.engine import objectives
from segtrain.engine.backward import Backward, FullBackward, SegmentedBackward, Step
from segtrain.engine.groups import cut, grouped, together
from segtrain.engine.layouts import CHOSEN, PROMPT, RESPONSE, Layout, padded, pair, shared_prefix, single
from segtrain.models.stack import Execution, LayerStack

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


def check(by: Backward, rows: list[Layout]) -> None:
    alone = [by.step(row) for row in rows]
    joint = by.step(together(rows, 8))
    losses = [step.loss.total.item() for step in alone]
    assert joint.loss.total.tolist() == pytest.approx(losses, rel=2e-6)  # type: ignore[union-attr]
    for name, values in joint.loss.metrics.items():
        assert values.tolist() == pytest.approx([s.loss.metrics[name].item() for s in alone], rel=1e-4, abs=1e-5)
    expected = summed(alone)
    moved = {name: grad for name, grad in expected.items() if tiny.norm(grad)}  # not experts that nobody chose
    assert tiny.relative(moved, {name: joint.grads[name] for name in moved}) <= 1e-5
    assert by.evaluate(together(rows)).total.tolist() == pytest.approx(losses, rel=2e-6)


@pytest.mark.parametrize(("name", "kind"), list(product(FAMILIES, ["segmented", "full"])))
def test_rows_of_each_kind_of_model(name: str, kind: str):
    check(backward(name, kind, objectives.sft), sft_rows())


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
