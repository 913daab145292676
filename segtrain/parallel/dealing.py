"""Which rank computes which rows of an update, so that none waits long for the others. Pure.

An update's gradient is a sum over the rows of all ranks, so any rank may compute any of them.
"""

from collections.abc import Sequence


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Numbers of the rows that each rank takes, in order: the dearest first, each to whoever has the least to do.

    Every rank gets a row where there are as many. On all ranks alike, since it depends on nothing else.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        load, rank = min(loads)
        loads[rank] = load + costs[number], rank
        hands[rank].append(number)
    return [sorted(hand) for hand in hands]
