"""Segments: expected carries come from simulating the data flow by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segtrain.engine.segments import HIDDEN, Segment, cuts, grouped, layer_cuts, leanest_boundaries, most_held, split


def test_cuts_leave_the_last_run_shorter():
    assert cuts(0, 7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert cuts(2, 6, 2) == [(2, 4), (4, 6)]
    assert cuts(3, 3, 2) == []
    assert cuts(0, 4, 99) == [(0, 4)]


@pytest.mark.parametrize("size", [0, -1])
def test_cuts_refuse_a_size_below_one(size: int):
    with pytest.raises(ValueError, match=f"segment_size must be at least 1, not {size}"):
        cuts(0, 4, size)


def test_layers_are_cut_at_the_lowest_trainable_and_at_the_first_kept():
    assert layer_cuts(7, 2) == ([], [(0, 2), (2, 4), (4, 6), (6, 7)])
    assert layer_cuts(7, 2, lowest=3, keep=1) == ([(0, 2), (2, 3)], [(3, 5), (5, 6), (6, 7)])
    assert layer_cuts(7, 2, lowest=5, keep=4) == ([(0, 2), (2, 4), (4, 5)], [(5, 7)])


def held(groups: list) -> list[int]:
    """Edges in memory when backward reaches each group: where it and those below start, and its own inner ones."""
    return [k + len(group) for k, group in enumerate(groups)]


@given(st.integers(0, 300), st.integers(1, 300))
def test_as_many_groups_as_boundaries_and_backward_holds_the_fewest_edges(count: int, boundaries: int):
    groups = grouped(range(count), boundaries)
    assert [i for group in groups for i in group] == list(range(count))
    assert len(groups) == min(boundaries, count)
    most = max(held(groups), default=0)
    assert all(groups)
    assert sum(range(most, most - len(groups), -1)) >= count  # k-th group of at most `most` - k
    assert most == len(groups) or sum(range(most - 1, most - 1 - len(groups), -1)) < count


@given(st.integers(0, 60))
def test_the_leanest_boundaries_are_those_whose_backward_holds_fewest_edges(count: int):
    most = {number: max(held(grouped(range(count), number))) for number in range(1, count + 1)}
    assert all(most_held(count, number) == edges for number, edges in most.items())
    leanest = [number for number, edges in most.items() if edges == min(most.values())]
    assert leanest_boundaries(count) == (min(leanest, default=0), max(leanest, default=0))


@pytest.mark.parametrize("boundaries", [0, -1])
def test_less_than_one_boundary_is_refused(boundaries: int):
    with pytest.raises(ValueError, match=f"boundaries must be at least 1, not {boundaries}"):
        grouped(range(5), boundaries)


def test_all_edges_are_kept_unless_asked_otherwise():
    assert grouped(range(3)) == [range(0, 1), range(1, 2), range(2, 3)]
    assert [len(group) for group in grouped(range(32), 28)] == [5, *[1] * 27]
    assert [len(group) for group in grouped(range(32), 8)] == [8, 7, 6, 5, 3, 1, 1, 1]
    assert [len(group) for group in grouped(range(32), 4)] == [10, 9, 8, 5]


def test_segment_prints_as_a_range():
    assert str(Segment(2, 5)) == "[2:5]"
    assert len(Segment(2, 5)) == 3


def donor_at_1(i: int) -> tuple[str, ...]:
    return ("k1", "v1") if i in (3, 4) else ()


def made_by_1(i: int) -> tuple[str, ...]:
    return ("k1", "v1") if i == 1 else ()


def test_a_name_shared_inside_one_segment_crosses_nothing():
    (whole,) = split(5, [(0, 5)], donor_at_1, made_by_1)
    assert whole.reads == whole.writes == (HIDDEN,)


def test_donor_writes_and_every_later_segment_that_uses_it_reads():
    segments = split(5, [(0, 2), (2, 4), (4, 5)], donor_at_1, made_by_1)
    assert [s.reads for s in segments] == [(HIDDEN,), (HIDDEN, "k1", "v1"), (HIDDEN, "k1", "v1")]
    assert [s.writes for s in segments] == [(HIDDEN, "k1", "v1"), (HIDDEN,), (HIDDEN,)]


@st.composite
def flows(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[set[str]], list[set[str]]]:
    layers = draw(st.integers(1, 9))
    edges = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    bounds = list(zip([0, *edges], [*edges, layers], strict=True))
    writers = draw(st.dictionaries(st.sampled_from("abcd"), st.integers(0, layers - 1)))
    writes = [{name for name, i in writers.items() if i == layer} for layer in range(layers)]
    reads = [{name for name, i in writers.items() if i < layer and draw(st.booleans())} for layer in range(layers)]
    return layers, bounds, reads, writes


def simulate(segments: list[Segment], reads: list[set[str]], writes: list[set[str]]) -> bool:
    """Run the data flow with nothing but the declared carries: does every layer find what it reads?"""
    carry: set[str] = {HIDDEN}
    for segment in segments:
        if not set(segment.reads) <= carry:
            return False
        known = set(segment.reads)
        for i in range(segment.lo, segment.hi):
            if not reads[i] <= known:
                return False
            known |= writes[i]
        carry |= known & set(segment.writes)
    return True


@given(flows())
def test_split_carries_what_is_needed_and_nothing_else(flow: tuple):
    layers, bounds, reads, writes = flow
    segments = split(layers, bounds, reads.__getitem__, writes.__getitem__)
    assert [(s.lo, s.hi) for s in segments] == bounds
    assert simulate(segments, reads, writes)
    for n, s in enumerate(segments):
        assert s.reads[0] == s.writes[0] == HIDDEN
        for name in s.reads[1:]:
            poorer = Segment(s.lo, s.hi, tuple(r for r in s.reads if r != name), s.writes)
            assert not simulate([*segments[:n], poorer, *segments[n + 1 :]], reads, writes)
        for name in s.writes[1:]:
            poorer = Segment(s.lo, s.hi, s.reads, tuple(w for w in s.writes if w != name))
            assert not simulate([*segments[:n], poorer, *segments[n + 1 :]], reads, writes)
