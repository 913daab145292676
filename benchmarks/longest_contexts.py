"""The longest row that well-known models can train on, by a Mac's memory: estimated, on no machine measured.

    python benchmarks/longest_contexts.py          writes results/longest_contexts.jsonl and prints a Markdown table

`published_models.json` holds sizes from the models' published configurations. Weights are 4 bits in groups of 64, as
`mlx_lm.convert -q` writes them; LoRA of rank 8 on all linear layers, or on an entry's `targets`; Metal's rules for
attention, and the budget that a run takes on such a Mac by default. A row as long as the model's positions is marked
with a star: memory would allow more.

Entries that are `streamed` keep their weights on disk. What a row of 8,192 tokens reads is counted (of the longest row,
where that is shorter); the speed of the disk that the seconds are by is measured where this runs, which is no Mac.
"""

import json
from datetime import date
from pathlib import Path

from segtrain.memory import anatomy, choices
from segtrain.memory.backends import BACKENDS
from segtrain.memory.choose import Chooser, longest
from segtrain.memory.device import device
from segtrain.memory.machine import cache
from segtrain.memory.rows import RowShape
from segtrain.run.disk import read_speed

HERE = Path(__file__).parent
OUT = HERE / "results" / "longest_contexts.jsonl"
MACS = (24, 36, 64, 128)  # GB
ROW = 8192  # tokens of the row whose reads are counted
PACKED = {"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "bfloat16"}


def lines() -> list[dict[str, object]]:
    models = json.loads((HERE / "published_models.json").read_text())
    disk = max(read_speed(cache()) for _ in range(3))
    found: list[dict[str, object]] = []
    for name, entry in models.items():
        adapter = {"rank": 8, "scale": 2.0, **({"targets": entry["targets"]} if "targets" in entry else {})}
        model = anatomy.of_config({**entry["config"], **PACKED}, "metal", lambda _, adapter=adapter: adapter)
        streamed = entry.get("streamed", False)
        chooser = choices.chooser(model, BACKENDS["metal"], None, streamed=streamed)
        for mac in MACS:
            limit, budget = model.positions or 1 << 20, device(f"mac-{mac}gb").budget
            tokens = longest(lambda n, c=chooser, b=budget: c.fits(row(n), b), limit)
            line = {"model": name, "mac_gb": mac, "budget_gb": round(budget / 10**9, 1)}
            line |= {"tokens": tokens, "limit": limit}
            found.append(line | (reads(chooser, min(ROW, tokens), budget, disk) if streamed and tokens else {}))
    return found


def row(length: int) -> RowShape:
    return choices.row_of(length, preference=False, shared=False)


def reads(chooser: Chooser, length: int, budget: int, disk: float) -> dict[str, object]:
    """What the fastest plan for a row of so many tokens reads, and how long that takes at `disk` bytes a second."""
    option = chooser.fastest(row(length), budget)
    assert option is not None
    about = {"disk_gb_a_second": round(disk / 1e9, 2), "seconds": round(option.read / disk, 1)}
    return {"read_tokens": length, "read_gb": round(option.read / 1e9, 1), **about}


def table(found: list[dict[str, object]]) -> str:
    """Models by row, budgets by column."""
    rows: dict[str, list[str]] = {}
    for line in found:
        star = "*" if line["tokens"] == line["limit"] else ""
        rows.setdefault(str(line["model"]), []).append(f"{line['tokens']:,}{star}" if line["tokens"] else "-")
    head = "| model, 4-bit |" + "".join(f" {mac} GB |" for mac in MACS)
    body = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([head, "| --- |" + " ---: |" * len(MACS), *body])


def main() -> None:
    found = lines()
    OUT.write_text("".join(json.dumps({**line, "date": str(date.today())}) + "\n" for line in found))
    print(table(found))


if __name__ == "__main__":
    main()
