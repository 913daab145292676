"""Fit the estimate's constants to the kept measurements, and write them to segtrain/memory/fitted.py.

    python benchmarks/fit.py                 fit, write, print the residuals
    python benchmarks/fit.py --check         write nothing; exit code 1 if the committed table isn't what is fitted

It measures nothing. What is fitted is the peak above the model's weights, in logarithms, of all lines in the results of
`plan_accuracy.py` (CPU), of its GPU set and of `as_a_user.py` (one row an update); an estimate that is too low counts
twice. Two constants of the time model are fitted to the seconds in these results, of bfloat16 at the 8B shape: plans
for the same row are compared. One constant at a time is moved, from the values in `CONSTANTS`, as long as that helps:
so the same results always give the same table.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import as_a_user
import plan_accuracy
import plan_accuracy_gpu

from segtrain.memory import backends, fitted
from segtrain.memory.plan import Plan
from segtrain.memory.rows import sft
from segtrain.memory.timing import DEFAULTS, Timer

RESULTS = Path(__file__).parent / "results"
TABLE = Path(__file__).parents[1] / "segtrain" / "memory" / "fitted.py"
FACTORS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
ROUNDS = 4
ENOUGH = {"cpu": 1e-4, "gpu": 1e-4, "time": 1e-6}  # a smaller gain, of the mean square, moves nothing
LONG = 4096  # tokens: shorter rows are bound by launching operations
GIB, MIB = 2**30, 2**20


class Constant(NamedTuple):
    """Where it starts, the results that it is fitted to, and what it is."""

    start: float
    results: str
    meaning: str


CONSTANTS: dict[str, Constant] = {
    "CPU_RUN_AHEAD": Constant(1.0, "cpu", "of what the graph says comes and goes in a backward pass"),
    "CPU_FUSED": Constant(0.65, "cpu", "of that, in compiled segments"),
    "CPU_UNPACKING": Constant(11.0, "cpu", "bytes for each packed weight being expanded, beside its dense copy"),
    "TILES": Constant(8.0, "cpu", "tiles of scores at work at a time, in attention by blocks"),
    "LOGIT_FLOAT32": Constant(8.0, "cpu", "bytes a logit of a chunk of the head"),
    "LOGIT_HALF": Constant(13.0, "cpu", "the same in half precision"),
    "CAPPED_FLOAT32": Constant(16.5, "cpu", "bytes a logit with a soft-cap"),
    "CAPPED_HALF": Constant(15.0, "cpu", "the same in half precision"),
    "FULL_FLOAT32": Constant(22.0, "cpu", "bytes a logit in full backward, differentiated through the softmax"),
    "FULL_HALF": Constant(20.0, "gpu", "the same in half precision"),
    "CUDA_RUN_AHEAD": Constant(1.4, "gpu", "of what comes and goes, with MLX's own command buffers"),
    "CUDA_WORKSPACE": Constant(400.0, "gpu", "MiB that matrix products in flight hold for themselves"),
    "SMALL_RUN_AHEAD": Constant(0.65, "gpu", "of what comes and goes, with small command buffers"),
    "SMALL_HELD": Constant(
        6.0, "gpu", "hidden-sized arrays of a layer that small command buffers hold though done with"
    ),
    "KEPT_RUN_AHEAD": Constant(0.65, "gpu", "of what comes and goes in a segment whose products are kept"),
    "TIGHT_WORKSPACE": Constant(0.4, "gpu", "of the workspace, where the device waits for memory"),
    "TIGHT_DENSE": Constant(0.4, "gpu", "of a layer's dense copies, there"),
    "TIGHT_UNCOMPILED": Constant(2.0, "gpu", "of temporaries there, where the segment isn't compiled"),
    "AGAIN": Constant(1.0, "time", "of a layer's products in forward: the time of computing it again"),
    "AGAIN_KEPT": Constant(0.2, "time", "the same where its products are kept, for its elementwise operations"),
}


def lines(results: str) -> list[dict]:
    if results == "cpu":
        files = sorted(RESULTS.glob("plan_accuracy*.jsonl"))
        return [line for file in files if "gpu" not in file.name for line in plan_accuracy.read(file)]
    text = (RESULTS / "plan_accuracy_gpu.jsonl").read_text()
    found = [line for line in map(json.loads, text.splitlines()) if "measured_gib" in line]
    found += as_a_user.planned_lines(RESULTS / "as_a_user.jsonl")
    return found if results == "gpu" else [line for line in found if is_timed(line)]


def is_timed(line: dict) -> bool:
    """Whether its seconds are those of products: dense ones, with plain LoRA, of a long row."""
    dense = line["case"] == "8b" if "case" in line else line["dtype"] == "bfloat16"
    return dense and line.get("layout", "sft") == "sft" and length(line) >= LONG


def length(line: dict) -> int:
    return int(line["tokens"][1] if "case" in line else line["tokens"])


def pair(results: str, line: dict) -> tuple[float, float, float]:
    """Estimated and measured peak and the model's bytes, in one unit."""
    if results == "cpu":
        return plan_accuracy.predicted(line), line["measured_mb"], line["resident_mb"]
    if "case" in line:
        peak, resident = as_a_user.predicted(line)
        return peak.bytes / GIB, line["peak_gib"], resident / GIB
    guess = plan_accuracy_gpu.predicted(line).bytes / GIB
    return guess, plan_accuracy_gpu.measured(line), line["resident_gib"]


def use(values: dict[str, float]) -> None:
    """Let the estimate compute with these."""
    for name, value in values.items():
        setattr(fitted, name, value)
    backends.BACKENDS.update(backends.table())


def errors(results: str, found: list[dict]) -> list[float]:
    """log(estimated / measured): of the bytes above the model, or of the seconds."""
    if results == "time":
        return slowness(found)
    pairs = (pair(results, line) for line in found)
    return [math.log(max(guess - base, 1e-3) / (real - base)) for guess, real, base in pairs]


def slowness(found: list[dict]) -> list[float]:
    """log(estimated / measured) of each plan's time, by the rate that suits all plans for a row of its length best."""
    speed = replace(DEFAULTS["cuda"], again=(fitted.AGAIN, fitted.AGAIN_KEPT))
    timer = Timer(plan_accuracy_gpu.shapes_of("8b", "bfloat16"), backends.BACKENDS["cuda"], speed=speed)
    alike = defaultdict(list)
    for line in found:
        plan = Plan(**{key: value for key, value in line["plan"].items() if key in as_a_user.PLAN})
        alike[length(line)].append(math.log(timer.cost(sft(length(line) + 1), plan) / line["seconds"]))
    return [value - fmean(values) for values in alike.values() for value in values]


def loss(results: str, found: list[dict]) -> float:
    """The mean square of `errors`; bytes estimated too low count twice."""
    return fmean(x * x * (2 if x < 0 and results != "time" else 1) for x in errors(results, found))


def fit() -> dict[str, float]:
    values = {name: constant.start for name, constant in CONSTANTS.items()}
    for results in ENOUGH:
        found, own = lines(results), [name for name, constant in CONSTANTS.items() if constant.results == results]
        use(values)
        best = loss(results, found)
        for _ in range(ROUNDS):
            before = best
            for name in own:
                for candidate in _around(values[name]):
                    use({**values, name: candidate})
                    if (now := loss(results, found)) < best - ENOUGH[results]:
                        best, values[name] = now, candidate
            if best > before - ENOUGH[results]:
                break
    use(values)
    return values


def _around(value: float) -> Iterator[float]:
    for factor in FACTORS:
        yield float(f"{value * factor:.3g}")


def table(values: dict[str, float]) -> str:
    """The module that the estimate imports, with the residuals in its docstring."""
    parts = [*TABLE.read_text().split('"""')[1].split("\n\n")[:1], *map(residuals, ENOUGH)]
    body = "".join(f"{name} = {values[name]}  # {CONSTANTS[name].meaning}\n" for name in CONSTANTS)
    return '"""' + "\n\n".join(parts) + f'\n"""\n\n{body}'


def residuals(results: str) -> str:
    if results == "time":
        sizes = [abs(math.expm1(x)) for x in slowness(lines(results))]
        return f"Time, {len(sizes)} plans: error {median(sizes):.1%} in the median, {max(sizes):.1%} at worst."
    whole, above = [], []
    for line in lines(results):
        guess, real, base = pair(results, line)
        whole.append(abs(guess / real - 1))
        above.append(abs((guess - base) / (real - base) - 1))
    return (
        f"{results.upper()}, {len(whole)} settings: error of the whole peak {median(whole):.1%} in the median, "
        f"{max(whole):.1%} at worst;\nof what is above the model {median(above):.1%} and {max(above):.1%}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = table(fit())
    print(text)
    if args.check:
        return int(text != TABLE.read_text())
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
