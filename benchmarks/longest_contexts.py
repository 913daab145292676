"""The longest row that well-known models can train on, by a Mac's memory: estimated, on no machine measured.

    python benchmarks/longest_contexts.py          writes results/longest_contexts.jsonl and prints a Markdown table

`published_models.json` holds sizes from the models' published configurations. Weights are 4 bits in groups of 64, as
`mlx_lm.convert -q` writes them; LoRA of rank 8 on all linear layers; Metal's rules for attention, and the budget that a
run takes on such a Mac by default. A row as long as the
model's positions is marked with a star: memory would allow more.
"""

import json
from datetime import date
from pathlib import Path

from segtrain.memory import anatomy, choices
from segtrain.memory.backends import BACKENDS
from segtrain.memory.choose import Chooser, longest
from segtrain.memory.device import device

HERE = Path(__file__).parent
OUT = HERE / "results" / "longest_contexts.jsonl"
MACS = (24, 36, 64, 128)  # GB
PACKED = {"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "bfloat16"}


def lines() -> list[dict[str, object]]:
    models = json.loads((HERE / "published_models.json").read_text())
    found: list[dict[str, object]] = []
    for name, entry in models.items():
        model = anatomy.of_config({**entry["config"], **PACKED}, "metal")
        chooser = choices.chooser(model, BACKENDS["metal"], None)
        for mac in MACS:
            budget = device(f"mac-{mac}gb").budget

            def fits(length: int, budget: int = budget, chooser: Chooser = chooser) -> bool:
                return chooser.fits(choices.row_of(length, preference=False, shared=False), budget)

            limit = model.positions or 1 << 20
            line = {"model": name, "mac_gb": mac, "budget_gb": round(budget / 10**9, 1)}
            found.append({**line, "tokens": longest(fits, limit), "limit": limit})
    return found


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
