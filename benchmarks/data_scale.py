"""Start-up time, memory and throughput of the data side on generated files of any size.

    python benchmarks/data_scale.py --model DIR_OR_HUB_ID                    10 million rows, and check on 100,000
    python benchmarks/data_scale.py --model M --rows 1000000 --only indexed streaming
    python benchmarks/data_scale.py --model M --only check --check-rows 100000 --workers 2

Only the model's tokenizer is read. Each case runs in a process of its own. `seconds` is from the call of `open_data`
(or `check_data`) to its end, `cpu_seconds` those of all its processes, imports included, `first_row` to the first
training row, `rss_mb` the process's highest resident set (in `check` the parent's; `worker_mb` is the largest
worker's), `above_mb` what of that came after tokenizer and imports were loaded, `rows_per_second` of encoding in one
process, shuffled reads included. Rows are chats of about 60 to 260 tokens. One JSON line a case goes to `--out`.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

MB = 2**20
TAKEN = 2_000
CASES = ("indexed", "gzip", "streaming", "check")
TEXT = (
    "the river runs below a town whose people keep count of its floods in a book that nobody lends and every child "
    "has seen once before it could read what the years had cost and who had paid"
)
WORDS = TEXT.split(" ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokenizer to use")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--check-rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, help="processes of check (default: one for each CPU)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=["indexed", "streaming", "check"])
    parser.add_argument("--dir", type=Path, help="where to put the generated files (default: a temporary directory)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "data_scale.jsonl")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(given.case, given.model, given.file, given.workers)))
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as home:
        results = [run(case, given, Path(home)) for case in given.only]
    table(results)


def run(case: str, given: argparse.Namespace, home: Path) -> dict[str, Any]:
    """One case in a process of its own; its line is appended to the results."""
    count = given.check_rows if case == "check" else given.rows
    path = generated(home, count, case == "gzip")
    command = [sys.executable, __file__, "--model", given.model, "--case", case, "--file", str(path)]
    command += ["--workers", str(given.workers)] if given.workers is not None else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {"case": case, "rows": count, "file_mb": round(path.stat().st_size / MB, 1)}
    found |= json.loads(done.stdout.splitlines()[-1])
    record(given.out, found)
    return found


def generated(home: Path, count: int, packed: bool) -> Path:
    """A JSONL file of `count` chats, written in blocks; the same for the same count."""
    path = home / f"{count}.jsonl"
    if not path.exists():
        block = [answer(i) for i in range(1009)]
        with open(path, "w") as file:
            for lo in range(0, count, 10_000):
                file.writelines(line(i, block[i % 1009]) for i in range(lo, min(count, lo + 10_000)))
    if packed:
        subprocess.run(["gzip", "-1", "-k", "-f", str(path)], check=True)
        return path.with_suffix(".jsonl.gz")
    return path


def answer(number: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (1 + number % 5)) % len(WORDS)] for i in range(30 + number % 200))


def line(number: int, text: str) -> str:
    return (
        f'{{"messages": [{{"role": "user", "content": "Tell me of day {number}."}}, '
        f'{{"role": "assistant", "content": "{text}"}}]}}\n'
    )


def measure(case: str, model: str, path: str, workers: int | None) -> dict[str, Any]:
    """Runs inside the case's process."""
    from segtrain.data import open_data
    from segtrain.data.check import check_data
    from segtrain.data.tokenizer import load_tokenizer
    from segtrain.recipe.schema import Recipe

    data = {"train": path, "max_seq_length": 2048, "streaming": case == "streaming"}
    recipe = Recipe.model_validate({"model": model, "data": data})
    tokenizer = load_tokenizer(model)
    tokenizer.encode("warm up")
    base, started = highest(), time.perf_counter()
    if case == "check":
        report = check_data(recipe, tokenizer=tokenizer, workers=workers)
        return figures(base, started) | {"tokens": report.counts["tokens"], "workers": workers or os.cpu_count()}
    opened = open_data(recipe, tokenizer)
    found = figures(base, started)
    next(opened.train)
    found["first_row"] = round(time.perf_counter() - started, 2)
    started = time.perf_counter()
    for _ in range(TAKEN):
        next(opened.train)
    found["rows_per_second"] = round(TAKEN / (time.perf_counter() - started))
    return found | {"rss_mb": round(highest()), "above_mb": round(highest() - base)}


def figures(base: float, started: float) -> dict[str, Any]:
    seconds, rss = time.perf_counter() - started, highest()
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / _UNIT
    found = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu(), 1)}
    found |= {"rss_mb": round(rss), "above_mb": round(rss - base)}
    return found | ({"worker_mb": round(workers)} if workers else {})


def cpu() -> float:
    """CPU seconds of this process and of its ended children, from their start: imports included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


_UNIT = MB if sys.platform == "darwin" else 1024


def highest() -> float:
    """The highest resident set of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _UNIT


def record(out: Path, found: dict[str, Any]) -> None:
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load": round(os.getloadavg()[0], 1),
        "versions": {name: version(name) for name in ("transformers", "tokenizers", "datasets", "numpy")},
        "command": " ".join(["python benchmarks/data_scale.py", *(word.split("/")[-1] for word in sys.argv[1:])]),
    }
    out.parent.mkdir(exist_ok=True)
    with open(out, "a") as file:
        file.write(json.dumps(found | about) + "\n")


def table(results: list[dict[str, Any]]) -> None:
    names = [
        "case",
        "rows",
        "file_mb",
        "seconds",
        "cpu_seconds",
        "first_row",
        "rows_per_second",
        "rss_mb",
        "above_mb",
        "worker_mb",
    ]
    print("  ".join(f"{name:>15}" for name in names))
    for found in results:
        print("  ".join(f"{found.get(name, '-'):>15}" for name in names))


if __name__ == "__main__":
    main()
