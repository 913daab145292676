"""A model larger than the memory that its process may take: a run, one that is stopped and resumed, and their bytes.

    python benchmarks/streamed_run.py DIR --out benchmarks/results/streamed_run.jsonl      3.2 GB within 1 GB
    python benchmarks/streamed_run.py DIR --shape tiny --limit-mb 1000

DIR gets the model (bfloat16, random weights), rows of a few tokens and the runs. Each command is a process of its own
that may hold no more private memory than `--limit-mb` (RLIMIT_DATA, where the system has it). For 1 row an update and
for 4: three updates; then the same, stopped by SIGINT once its first checkpoint is there, and resumed.

`peak_mb`: the highest resident set of each command, from its start (libraries count; the page cache, which the system
takes back, doesn't). `read_gb`: bytes that the uninterrupted run read, of all files (Linux), `update_gb` those of
weights by its first update. `seconds`: of that whole command. `same`: whether both runs wrote the same adapter.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import user_models  # noqa: E402

MB, STEPS, ROWS, WORDS = 10**6, 3, 16, 6
READ = re.compile(r"the first update read ([\d.]+) GiB")


def limited(limit: int, report: Path, arguments: list[str]) -> int:
    """In this process: `segtrain ARGUMENTS` within `limit` bytes; what it took goes to the file `report`."""
    import resource

    if sys.platform == "linux":  # elsewhere the limit isn't kept
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from segtrain.cli import run

    code = run(arguments)
    report.write_text(json.dumps({"peak_mb": round(_peak() / MB, 1), "read_gb": round(_read() / 1e9, 3)}))
    return code


def _peak() -> int:
    """The highest resident set, bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac


def _read() -> int:
    counts = Path("/proc/self/io")
    return int(counts.read_text().partition("rchar:")[2].split()[0]) if counts.exists() else 0


class Runs:
    """Commands over one recipe of `rows` rows an update."""

    def __init__(self, folder: Path, model: Path, data: Path, rows: int, limit: int):
        self.folder, self.limit, self.rows = folder, limit, rows
        self.recipe = folder / f"{rows}.yaml"
        values: dict[str, Any] = {
            "model": str(model),
            "data": {"train": str(data), "max_seq_length": 64},
            "lora": {"rank": 4},
            "engine": {"weights": "streamed", "memory_budget": f"{limit // MB}MB", "rows_together": 1},
            "train": {"steps": STEPS, "learning_rate": 1e-3, "grad_accumulation_steps": rows},
            "output": {"save_every": 1, "eval_every": 0},
        }
        self.recipe.write_text(json.dumps(values))  # JSON is YAML

    def run(self, name: str) -> Path:
        return self.folder / f"run-{self.rows}-{name}"

    def start(self, name: str, *options: str) -> "subprocess.Popen[str]":
        arguments = ["sft", str(self.recipe), "--set", f"output.dir={self.run(name)}", *options]
        command = [sys.executable, __file__, "--limited", json.dumps([self.limit, str(self._report(name)), arguments])]
        log = self.folder / f"{self.rows}-{name}.log"
        with log.open("a", encoding="utf-8") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, text=True)

    def taken(self, name: str, process: "subprocess.Popen[str]", code: int = 0) -> dict[str, Any]:
        """What the command took, once it has ended."""
        if process.wait() != code:
            raise SystemExit(f"exit code {process.returncode}: see {self.folder / f'{self.rows}-{name}.log'}")
        return dict(json.loads(self._report(name).read_text()))

    def _report(self, name: str) -> Path:
        return self.folder / f"{self.rows}-{name}.json"

    def compared(self) -> dict[str, Any]:
        """The uninterrupted run beside one that is stopped after its first checkpoint and resumed."""
        for name in ("whole", "stopped"):
            shutil.rmtree(self.run(name), ignore_errors=True)
        begun = time.perf_counter()
        whole = self.taken("whole", self.start("whole"))
        seconds = time.perf_counter() - begun
        process = self.start("stopped")
        while process.poll() is None and not (self.run("stopped") / "checkpoints" / "step-0000001").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stopped = self.taken("stopped", process, code=130)
        resumed = self.taken("stopped", self.start("stopped", "--resume"))
        adapters = [(self.run(name) / "adapters.safetensors").read_bytes() for name in ("whole", "stopped")]
        said = READ.search((self.folder / f"{self.rows}-whole.log").read_text(encoding="utf-8").replace("\n", " "))
        return {
            "rows": self.rows,
            "peak_mb": [one["peak_mb"] for one in (whole, stopped, resumed)],
            "read_gb": whole["read_gb"],
            "update_gb": round(float(said[1]) * 2**30 / 1e9, 2) if said else None,
            "seconds": round(seconds, 1),
            "same": adapters[0] == adapters[1],
        }


def measured(folder: Path, shape: str, limit: int, rows: tuple[int, ...] = (1, 4)) -> dict[str, Any]:
    model = user_models.make_model(shape, folder / shape)
    texts = [{"text": text} for text in user_models.texts(ROWS, WORDS, WORDS + 2)]
    data = user_models.write_rows(folder / "rows", texts) / "train.jsonl"
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return {
        "shape": shape,
        "model_mb": round(weights / MB),
        "limit_mb": limit // MB,
        "runs": [Runs(folder, model, data, count, limit).compared() for count in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--shape", choices=user_models.SHAPES, default="llama-1.6b")
    parser.add_argument("--limit-mb", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limited", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.limited:
        limit, report, arguments = json.loads(given.limited)
        sys.exit(limited(limit, Path(report), arguments))
    given.folder.mkdir(parents=True, exist_ok=True)
    line = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.platform(), "cores": os.cpu_count()}
    line |= {"mlx": version("mlx"), "command": " ".join(["python benchmarks/streamed_run.py DIR", *sys.argv[2:]])}
    line |= measured(given.folder, given.shape, given.limit_mb * MB)
    print(json.dumps(line, indent=1))
    if given.out:
        with given.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
