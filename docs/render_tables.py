"""Writes the measured tables of README.md and docs/ from the result files in benchmarks/results.

    python docs/render_tables.py            rewrite the text between `<!-- NAME table -->` and its end mark
    python docs/render_tables.py --check    exit code 1 where a table and its result file differ

No figure in a table is written by hand. A result file that is missing leaves its table as it is.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
Lines = list[dict[str, Any]]

CPU_ROWS = {
    "mlx-lm": "mlx-lm 0.32.2",
    "checkpoint": "mlx-lm 0.32.2, `--grad-checkpoint`",
    "full": "segtrain, `backward: full`",
    "size-4": "segtrain, `segment_size: 4`",
    "size-1": "segtrain, `segment_size: 1`",
    "lean": "the same, smaller chunks of loss and MLP",
}
ENGINES = {"size-1": "", "lean": "; smaller chunks"}
SYSTEMS = {"mlx-lm": "mlx-lm, `--grad-checkpoint`", "control": "the same, improved by hand", "segtrain": "segtrain"}


def read(*paths: Path) -> Lines:
    """The lines of JSON files; later lines replace none."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line]


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, marks, *rows])


def cpu_table() -> str | None:
    """Peak above the model and processor time of one step, on the CPU: the newest line of each variant."""
    path = RESULTS / "cpu_memory.jsonl"
    if not path.exists():
        return None
    newest = {line["variant"]: line for line in read(path) if "peak_mb" in line}
    rows = [
        [label, f"{newest[name]['peak_mb']:,.0f}", f"{newest[name]['cpu_seconds']:.1f}"]
        for name, label in CPU_ROWS.items()
        if name in newest
    ]
    return markdown(["one step, CPU", "MiB above the model", "processor seconds"], rows)


def prefix_table() -> str | None:
    path = RESULTS / "shared_prefix.jsonl"
    if not path.exists():
        return None
    newest = {(line["engine"], *line["sizes"]): line for line in read(path) if "pair" in line}
    rows = [
        [
            f"prompt {prompt:,}, answers {chosen:,} and {rejected:,}{ENGINES[engine]}",
            *(f"{line[kind]['peak_mb']:,.0f}" for kind in ("pair", "shared")),
            *(f"{line[kind]['cpu_seconds']:.1f}" for kind in ("pair", "shared")),
        ]
        for (engine, prompt, chosen, rejected), line in newest.items()
    ]
    head = ["one pair, CPU", "MiB, two rows", "shared", "processor seconds, two rows", "shared"]
    return markdown(head, rows)


def floor_label(line: dict[str, Any]) -> str:
    if "label" in line:
        return str(line["label"])
    system = line.get("system", "segtrain")
    options = [f"`{name}: {line[name]}`" for name in ("segment_size", "keep", "mlp_rows") if line.get(name)]
    if line.get("full"):
        options.append("`backward: full`")
    return ", ".join([SYSTEMS.get(system, system), *options])


def floor_table() -> str | None:
    """Peak above the model and time of one step on a GPU, by row length and weights."""
    lines = [line for path in sorted(RESULTS.glob("floor*.jsonl")) for line in read(path) if "T" in line]
    if not lines:
        return None
    lines.sort(key=lambda line: (line.get("bits", 0), line["T"]))
    rows = []
    for line in lines:
        weights = f"{line['bits']}-bit" if line.get("bits") else str(line.get("dtype", "bfloat16"))
        result = [f"{line['above_gib']:.1f}", f"{line['seconds']:.2f}"] if "seconds" in line else ["failed", "-"]
        rows.append([floor_label(line), weights, f"{line['T']:,}", *result])
    return markdown(["one step, 8B shape", "weights", "tokens", "GiB above the model", "seconds"], rows)


TABLES: dict[str, Callable[[], str | None]] = {"cpu": cpu_table, "prefix": prefix_table, "floor": floor_table}


def rendered(text: str) -> str:
    """`text` with every marked table rewritten."""
    for name, table in TABLES.items():
        content = table()
        if content is not None:
            pattern = rf"(<!-- {name} table -->\n).*?(<!-- end of {name} table -->)"
            text = re.sub(pattern, lambda m, content=content: f"{m[1]}\n{content}\n{m[2]}", text, flags=re.DOTALL)
    return text


def main() -> int:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if (new := rendered(text)) != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'differ from their results' if '--check' in sys.argv else 'rewritten'}: {', '.join(stale)}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
