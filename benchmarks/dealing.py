"""How long ranks wait for one another, by arithmetic on rows' lengths: rows in the data's order against dealt ones.

    python benchmarks/dealing.py

Costs are those that a model 4,096 wide would have; a rank's time is the sum of its rows'. Mean over 200 updates.
"""

import random

from segtrain.parallel.dealing import deal

UPDATES, WIDTH = 200, 4096
LENGTHS = {"512 to 8,192": [512, 1024, 1536, 2048, 4096, 8192], "40 to 300": list(range(40, 301))}


def waiting(hands: list[list[int]], costs: list[float]) -> float:
    """The share of an update that a rank waits, on average."""
    sums = [sum(costs[number] for number in hand) for hand in hands]
    return 1 - sum(sums) / len(sums) / max(sums)


def shares(lengths: list[int], rows: int, ranks: int) -> tuple[float, float]:
    """Mean waiting in the data's order, and dealt."""
    draw, in_order = random.Random(0), [list(range(rank, rows, ranks)) for rank in range(ranks)]
    ordered, dealt = 0.0, 0.0
    for _ in range(UPDATES):
        costs = [n * (1 + n / (13 * WIDTH)) for n in (draw.choice(lengths) for _ in range(rows))]
        ordered += waiting(in_order, costs) / UPDATES
        dealt += waiting(deal(costs, ranks), costs) / UPDATES
    return ordered, dealt


def main() -> None:
    print("| tokens of a row | rows an update | ranks | in order | dealt |\n|---|---|---|---|---|")
    for name, lengths in LENGTHS.items():
        for rows, ranks in ((2, 2), (4, 2), (8, 2), (16, 2), (32, 8)):
            ordered, dealt = shares(lengths, rows, ranks)
            print(f"| {name} | {rows} | {ranks} | {ordered:.0%} | {dealt:.0%} |")


if __name__ == "__main__":
    main()
