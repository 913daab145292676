"""Layouts: expected rows and targets are written out by hand or follow from next-token prediction done naively."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segtrain.engine.layouts import CHOSEN, PROMPT, REJECTED, RESPONSE, Layout, padded, pair, shared_prefix, single

IDS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def scored(layout: Layout, name: str) -> list[tuple[list[int], int]]:
    """Per scored row: the tokens that it sees, and its target. The definition of what a span asks the model."""
    span = layout.spans[name]
    stream = layout.streams[span.stream]
    ids = stream.tokens[0].tolist()
    questions = []
    for at, target in zip(span.rows.tolist(), span.targets.tolist(), strict=True):
        second = stream.prefix + stream.branches[0] if stream.branches else len(ids)
        seen = ids[: at + 1] if at < second else ids[: stream.prefix] + ids[second : at + 1]
        questions.append((seen, target))
    return questions


def naive(prompt: list[int], response: list[int]) -> list[tuple[list[int], int]]:
    return [(prompt + response[:k], response[k]) for k in range(len(response))]


def test_ten_tokens_have_nine_targets():
    layout = single(list(range(10)), [True] * 10)
    assert (layout.tokens, layout.scored) == (9, 9)
    assert layout.spans[RESPONSE].rows.tolist() == list(range(9))
    assert layout.spans[RESPONSE].targets.tolist() == list(range(1, 10))


def test_single_scores_the_rows_before_supervised_tokens():
    layout = single([5, 6, 7, 8, 9], [True, False, True, False, True])
    assert layout.streams[0].tokens.tolist() == [[5, 6, 7, 8]]
    assert layout.spans[RESPONSE].rows.tolist() == [1, 3]
    assert layout.spans[RESPONSE].targets.tolist() == [7, 9]
    assert layout.streams[0].tokens.dtype == mx.int32


@pytest.mark.parametrize("supervised", [[False] * 4, [True, False, False, False]])
def test_single_refuses_a_row_without_targets(supervised: list[bool]):
    with pytest.raises(ValueError, match="no supervised token"):
        single([1, 2, 3, 4], supervised)


@given(IDS, IDS, IDS)
def test_both_preference_layouts_ask_the_same_questions(prompt: list[int], chosen: list[int], rejected: list[int]):
    for layout in (pair(prompt, chosen, rejected), shared_prefix(prompt, chosen, rejected)):
        assert scored(layout, CHOSEN) == naive(prompt, chosen)
        assert scored(layout, REJECTED) == naive(prompt, rejected)
        assert layout.scored == len(chosen) + len(rejected)
        if len(prompt) > 1:
            assert scored(layout, PROMPT) == naive(prompt[:1], prompt[1:])
        else:
            assert PROMPT not in layout.spans


def test_shared_prefix_restarts_positions_at_the_prompts_end():
    (stream,) = shared_prefix([1, 2, 3], [4, 5], [6, 7, 8, 9]).streams
    assert stream.runs == ((0, 5), (3, 4))
    assert len(stream) == 9


def test_pair_keeps_differing_prompts_apart():
    layout = pair([1, 2], [3], [4, 5], rejected_prompt=[7, 8, 9], score_prompt=False)
    assert [s.tokens.tolist() for s in layout.streams] == [[[1, 2]], [[7, 8, 9, 4]]]
    assert scored(layout, REJECTED) == naive([7, 8, 9], [4, 5])
    assert PROMPT not in layout.spans


@pytest.mark.parametrize("build", [pair, shared_prefix])
@pytest.mark.parametrize(
    ("parts", "name"), [(([], [1], [2]), "prompt"), (([1], [], [2]), "chosen"), (([1], [2], []), "rejected")]
)
def test_empty_parts_are_refused_by_name(build, parts: tuple, name: str):
    with pytest.raises(ValueError, match=f"empty {name}"):
        build(*parts)


def test_padding_adds_rows_that_no_span_scores():
    before = shared_prefix([1, 2, 3], [4, 5], [6, 7])
    after = padded(before, 8)
    assert len(after.streams[0]) == 8
    assert after.streams[0].branches == (2, 3)
    assert after.spans == before.spans
    assert padded(after, 8).streams[0] is after.streams[0]
    assert [len(s) for s in padded(pair([1], [2, 3], [4, 5, 6]), 4).streams] == [4, 4]
