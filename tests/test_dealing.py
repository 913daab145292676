"""Rows of an update dealt over ranks: all of them, each once, and none waits long."""

import random

import pytest

from segtrain.parallel.dealing import deal


def waiting(hands: list[list[int]], costs: list[float]) -> float:
    """The share of an update that a rank waits, on average."""
    sums = [sum(costs[number] for number in hand) for hand in hands]
    return 1 - sum(sums) / len(sums) / max(sums)


def drawn(seed: int, rows: int, least: int, most: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.randint(least, most) for _ in range(rows)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [8, 13])
def test_every_row_once_and_every_rank_some(ranks: int, rows: int):
    hands = deal(drawn(0, rows, 1, 99), ranks)
    assert sorted(number for hand in hands for number in hand) == list(range(rows))
    assert all(hand == sorted(hand) and hand for hand in hands)


@pytest.mark.parametrize(("rows", "ranks", "least", "most"), [(8, 2, 40, 300), (8, 2, 512, 8192), (32, 4, 40, 300)])
def test_ranks_wait_less_than_a_tenth(rows: int, ranks: int, least: int, most: int):
    """In the order of the data they wait longer: the control."""
    updates = [drawn(seed, rows, least, most) for seed in range(50)]
    in_order = [list(range(rank, rows, ranks)) for rank in range(ranks)]
    dealt = sum(waiting(deal(costs, ranks), costs) for costs in updates) / len(updates)
    assert dealt < 0.02 < 0.1 < sum(waiting(in_order, costs) for costs in updates) / len(updates)
