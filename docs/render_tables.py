"""Writes the measured tables of README.md and docs/ from the result files in benchmarks/results.

    python docs/render_tables.py            rewrite the text between `<!-- NAME table -->` and its end mark
    python docs/render_tables.py --check    exit code 1 where a table and its result file differ

No figure in a table is written by hand. A result file that is missing leaves its table as it is. (`docs/models.md` is
written from the code: `python -m segtrain.models.support`.)
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
LEAN = "segtrain, `segment_size: 1`, smaller chunks of loss and MLP"
ENGINES = {"size-1": "", "lean": "; smaller chunks"}
FLOOR_ROWS = {
    "mlx-lm": "mlx-lm 0.32.2, `--grad-checkpoint`, bfloat16",
    "control": "mlx-lm's layers with chunked loss, bfloat16 LoRA, checkpointing",
    "memory": "segtrain, bfloat16, little memory",
    "speed": "segtrain, bfloat16, fastest",
    "mlx-lm-packed": "mlx-lm 0.32.2, `--grad-checkpoint`, 4-bit",
    "packed": "segtrain, 4-bit, little memory",
    "longest": "segtrain, 4-bit, little memory",
    "16k": "segtrain, bfloat16, little memory",
    "shared": "segtrain, ORPO, prompt computed once",
    "pair": "segtrain, ORPO, two rows",
    "short": "segtrain, bfloat16, full backward",
    "mlx-lm-short": "mlx-lm 0.32.2, bfloat16",
}
FASTEST = ("speed", "short", "mlx-lm-short")
LEAN_TIME = 1.1


def read(*paths: Path) -> Lines:
    """The lines of JSON files; later lines replace none."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line]


def markdown(head: list[str], rows: Iterable[list[str]], words: int = 1) -> str:
    """A table; all columns but the first `words` hold numbers."""
    marks = [*["---"] * words, *["---:"] * (len(head) - words)]
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


def shown(lines: Lines) -> Lines:
    """Of one benchmark job's runs, the fastest where speed is the point.

    Of others the one of least memory within `LEAN_TIME` times the fastest one's time, and that of least memory at all.
    """
    fastest = min(lines, key=lambda line: line["seconds"])
    if lines[0]["job"] in FASTEST:
        return [fastest]
    least = [
        min(some, key=lambda line: line["above_gib"])
        for some in ([line for line in lines if line["seconds"] <= LEAN_TIME * fastest["seconds"]], lines)
    ]
    return least if least[0] is not least[1] else least[:1]


def floor_table() -> str | None:
    """Peak memory and time of one step on a GPU: one or two variants of each job."""
    path = RESULTS / "floor.jsonl"
    if not path.exists():
        return None
    jobs: dict[str, Lines] = {}
    for line in read(path):
        if "seconds" in line:
            jobs.setdefault(line["job"], []).append(line)
    rows = [
        [
            FLOOR_ROWS[job].replace("little", "least" if number else "little"),
            f"{line['T']:,}",
            f"{line['seconds']:.{2 if line['seconds'] >= 0.1 else 3}f}",
            f"{line['above_gib']:.1f}",
            f"{line['peak_gib']:.1f}",
        ]
        for job in FLOOR_ROWS
        if job in jobs
        for number, line in enumerate(shown(jobs[job]))
    ]
    return markdown(["one step, one H200", "tokens", "seconds", "GiB above the model", "GiB in all"], rows)


def floor_lines(job: str) -> Lines:
    return [line for line in read(RESULTS / "floor.jsonl") if line.get("job") == job and "seconds" in line]


CASES = {
    "8b-4bit": "Llama 8B, 4-bit, a row of 8,192 tokens",
    "8b": "Llama 8B, bfloat16, a row of 8,192 tokens",
    "short-8": "Llama 8B, bfloat16, 8 rows of 40 to 300 tokens",
    "short-32": "the same, 32 rows",
    "short-8-4bit": "Llama 8B, 4-bit, 8 rows of 40 to 300 tokens",
    "512-8": "Llama 8B, bfloat16, 8 rows of 512 tokens",
    "8b-streamed": "Llama 8B, bfloat16, weights read from disk",
    "8b-streamed-8": "the same, 8 rows an update",
    "8b-4bit-streamed": "Llama 8B, 4-bit, weights read from disk, a row of 32,768 tokens",
    "orpo-shared": "Llama 8B, ORPO, a pair of 8,192 tokens in all",
    "orpo-pair": "the same, the prompt computed twice",
    "dpo-shared": "Llama 8B, DPO, the same pair",
    "gemma3": "12 layers of Gemma 3's shape, 8,192 tokens",
    "moe": "6 layers of a Qwen3 mixture of experts, 4,096 tokens",
    "gpt-oss": "6 layers of gpt-oss, 4,096 tokens",
    "delta-2048": "8 layers of Qwen3.5's shape, 2,048 tokens",
    "delta": "8 layers of Qwen3.5's shape, 8,192 tokens",
    "delta-32768": "the same, 32,768 tokens",
}
"""Cases of `as_a_user.py` in the order of the table."""
FIRST, SHOWN = "8b", ("batch 1", "auto", "lean")
ALONE = "mlx-lm's step on all 8,192 tokens"
FIGURES = ("seconds an update", "tokens a second", "GiB in all")


def runs_of(names: Iterable[str]) -> Iterable[dict[str, Any]]:
    """The newest line of each command and setting of these cases, mlx-lm's first."""
    newest = {
        (line["case"], line["system"], line["setting"]): line
        for line in read(RESULTS / "as_a_user.jsonl")
        if "case" in line
    }
    for name in names:
        yield from sorted((line for key, line in newest.items() if key[0] == name), key=lambda line: line["system"])


def typed(line: dict[str, Any]) -> str:
    """The command of a run, without its files."""
    if line["system"] == "mlx-lm":
        checkpoint = " --grad-checkpoint" if "--grad-checkpoint" in line["command"] else ""
        return f"`mlx_lm.lora --batch-size {line['setting'].removeprefix('batch ')}{checkpoint}`"
    command = re.sub(r" \S*recipe\.yaml", "", line["command"])
    return f"`{command}`"


def figures(line: dict[str, Any]) -> list[str]:
    if "seconds" not in line:
        return [line["ended"][:40], "", ""]
    seconds = f"{line['seconds']:.2f}"
    return [seconds, f"{line['tokens_per_second']:,}", f"{line['peak_gib']:.1f}"]


def user_table() -> str:
    """The README's: both commands on one case, and mlx-lm's step measured by itself."""
    rows = [[typed(line), *figures(line)] for line in runs_of([FIRST]) if line["setting"] in SHOWN]
    step = min(floor_lines("mlx-lm"), key=lambda line: line["seconds"])
    per_second = f"{step['T'] / step['seconds']:,.0f}"
    rows.insert(1, [ALONE, f"{step['seconds']:.2f}", per_second, f"{step['peak_gib']:.1f}"])
    return markdown([f"{CASES[FIRST]}, one H200", *FIGURES], rows)


def users_table() -> str:
    """All cases of both commands, with what the plan had said."""
    rows = []
    for line in runs_of(CASES):
        predicted = line.get("plan", {}).get("peak_gib")
        first = line.get("first_seconds")
        more = [f"{predicted:.1f}" if predicted else "", f"{first:.0f}" if first else ""]
        rows.append([CASES[line["case"]], typed(line), *figures(line), *more])
    return markdown(["an update", "command", *FIGURES, "predicted", "seconds of the first update"], rows, 2)


def contexts_table() -> str | None:
    """The longest row that the planner expects to fit, by model and memory; a star: all of the model's positions."""
    path = RESULTS / "longest_contexts.jsonl"
    if not path.exists():
        return None
    models: dict[str, dict[int, str]] = {}
    for line in (line for line in read(path) if line["model"] not in streamed_models(path)):
        tokens = f"{line['tokens']:,}{'*' if line['tokens'] == line['limit'] else ''}" if line["tokens"] else "none"
        models.setdefault(line["model"], {})[line["mac_gb"]] = tokens
    budgets = sorted({budget for row in models.values() for budget in row})
    head = ["4-bit model, tokens", *(f"{budget} GB" for budget in budgets)]
    return markdown(head, ([name, *(row.get(budget, "-") for budget in budgets)] for name, row in models.items()))


def streamed_models(path: Path) -> set[str]:
    """Models of the longest rows whose weights stay on disk."""
    return {line["model"] for line in read(path) if "read_gb" in line}


def streamed_table() -> str | None:
    """The longest rows with weights on disk, and what a row reads."""
    path = RESULTS / "longest_contexts.jsonl"
    if not path.exists():
        return None
    lines = [line for line in read(path) if line["model"] in streamed_models(path)]
    rows = []
    for line in lines:
        tokens = f"{line['tokens']:,}{'*' if line['tokens'] == line['limit'] else ''}" if line["tokens"] else "none"
        read_gb, seconds = (f"{line[key]:,.0f}" if key in line else "-" for key in ("read_gb", "seconds"))
        rows.append(
            [line["model"], f"{line['mac_gb']} GB", tokens, f"{line.get('read_tokens', 0):,}", read_gb, seconds]
        )
    speed = next(line["disk_gb_a_second"] for line in lines if "disk_gb_a_second" in line)
    head = ["4-bit model on disk", "Mac", "longest row", "a row of", "reads, GB", f"seconds at {speed:.2g} GB/s"]
    return markdown(head, rows, 2)


def rows_table() -> str | None:
    """The longest rows that were run within a bound, and what they took."""
    path = RESULTS / "cpu_rows.jsonl"
    if not path.exists():
        return None
    labels = CPU_ROWS | {"lean": LEAN}
    rows = [
        [labels[line["variant"]], f"{line['rows']:,}", f"{line['peak_mb']:,.0f}", f"{line['cpu_seconds']:.0f}"]
        for line in sorted(read(path), key=lambda line: line["rows"])
    ]
    return markdown(["one step, CPU", "tokens", "MiB above the model", "processor seconds"], rows)


def gpus_table() -> str | None:
    """What two GPUs of one host did: the newest line of each kind."""
    path = RESULTS / "two_gpus.jsonl"
    if not path.exists():
        return None
    lines = read(path)
    scaling = next(line for line in reversed(lines) if line.get("part") == "scaling")
    one, two = scaling["one"], scaling["two"]
    update = two[0]["update"]
    slower = max(rank["rows"] + rank["exchange"] for rank in two)
    rows = [
        ["rows a second, one GPU", f"{scaling['rows_per_second_one']:.2f}"],
        ["rows a second, two GPUs", f"{scaling['rows_per_second_two']:.2f} ({scaling['factor']:.2f} times one)"],
        ["the same without the optimiser", f"{2 * one['rows'] / slower:.2f} times one"],
        [
            "exchange of the gradients, with its waiting",
            f"{max(rank['exchange'] for rank in two):.3f} s of {update:.2f} s",
        ],
        ["the same, both ready", f"{scaling['exchange_alone_seconds']:.3f} s"],
        ["GiB above the model, each GPU", " and ".join(f"{rank['above_gib']:.1f}" for rank in two)],
        ["the same, one GPU alone", f"{one['above_gib']:.1f}"],
    ]
    for line in lines:
        if line.get("part") == "unequal":
            share = f"{line['update_seconds']:.2f} s an update, {line['share_waiting']:.0%} of it waiting"
            rows.append([f"rows of 512 to 8,192 tokens, {line['order']}", share])
    parity = [line for line in lines if line.get("part") == "parity"]
    for dtype in ("float32", "bfloat16"):
        worst = max(line["adapter_difference"] for line in parity if line["dtype"] == dtype)
        what = f"adapters after {parity[0]['steps']} updates, {dtype}, against one GPU with two rows an update"
        rows.append([what, "equal" if worst == 0 else f"{worst:.0e} apart (relative)"])
    lost = max(line["seconds"] for line in lines if line.get("part") == "lost")
    rows.append(["one rank killed: the other has ended, and `--resume` goes on", f"after {lost:.1f} s"])
    return markdown(["two H200 of one host, NCCL", "measured"], rows)


def few_table() -> str:
    """Held-out loss by epoch of a training on few rows, a line a rate: the newest of each."""
    newest = {line["rate"]: line["losses"] for line in read(RESULTS / "few_rows.jsonl")}
    epochs = sorted({int(epoch) for losses in newest.values() for epoch in losses})
    rows = [[rate, *(f"{losses.get(str(epoch), 0):.2f}" for epoch in epochs)] for rate, losses in newest.items()]
    return markdown(["rate", *(f"epoch {epoch}" if epoch else "before" for epoch in epochs)], rows)


RECURRENCES = {
    "gated_delta": "gated delta rule",
    "kimi": "the same, a decay a channel (Kimi)",
    "selective_scan": "selective scan (Mamba)",
    "ssd": "SSD (Mamba-2)",
    "rwkv7": "RWKV-7",
    "rg_lru": "RG-LRU (Recurrent Gemma)",
}


def recurrences_table() -> str:
    """Time and memory of each recurrence's value and gradient, the newest line of each kind."""
    cells: dict[tuple[str, int, str], dict[str, str]] = {}
    for line in read(RESULTS / "recurrences.jsonl"):
        on_cpu = "cpu" in line["device"]
        seconds = line["cpu_seconds" if on_cpu else "seconds"]
        device = "CPU" if on_cpu else f"GPU, {line['dtype']}"
        kinds = cells.setdefault((device, line["tokens"], line["recurrence"]), {})
        kinds[line["kind"]] = f"{seconds:.2g} s, {line['peak_mib']:,.0f} MiB"
    rows = [
        [device, label, f"{tokens:,}", *(kinds.get(kind, "-") for kind in ("steps", "mlx-lm", "chunks"))]
        for recurrence, label in RECURRENCES.items()
        for (device, tokens, name), kinds in sorted(cells.items())
        if name == recurrence
    ]
    return markdown(["", "recurrence", "tokens", "a token at a time", "mlx-lm's chunks", "segtrain"], rows)


TABLES: dict[str, Callable[[], str | None]] = {
    "cpu": cpu_table,
    "rows": rows_table,
    "prefix": prefix_table,
    "few": few_table,
    "user": user_table,
    "users": users_table,
    "floor": floor_table,
    "contexts": contexts_table,
    "streamed": streamed_table,
    "gpus": gpus_table,
    "recurrences": recurrences_table,
}


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
