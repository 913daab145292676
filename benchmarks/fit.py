"""Fit the estimate's constants to the kept measurements, and write them to segtrain/memory/fitted.py.

    python benchmarks/fit.py                 fit, write, print the residuals
    python benchmarks/fit.py --check         write nothing; exit code 1 if the committed table isn't what is fitted

It measures nothing. What is fitted is the peak above the model's weights, in logarithms, of all lines in the results of
`plan_accuracy.py` (CPU), of its GPU set and of `as_a_user.py` (one row an update); an estimate that is too low counts
twice. One constant at a time is moved, from the values in `CONSTANTS`, as long as that helps: so the same results
always give the same table.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import as_a_user
import plan_accuracy
import plan_accuracy_gpu

from segtrain.memory import backends, fitted

RESULTS = Path(__file__).parent / "results"
TABLE = Path(__file__).parents[1] / "segtrain" / "memory" / "fitted.py"
FACTORS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
ROUNDS = 4
ENOUGH = 1e-4  # a smaller gain, of the mean square, moves nothing
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
}


def lines(results: str) -> list[dict]:
    if results == "cpu":
        files = sorted(RESULTS.glob("plan_accuracy*.jsonl"))
        return [line for file in files if "gpu" not in file.name for line in plan_accuracy.read(file)]
    text = (RESULTS / "plan_accuracy_gpu.jsonl").read_text()
    found = [line for line in map(json.loads, text.splitlines()) if "measured_gib" in line]
    return found + as_a_user.planned_lines(RESULTS / "as_a_user.jsonl")


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


def loss(results: str, found: list[dict]) -> float:
    """The mean square of log(estimated / measured) above the model, an estimate too low counted twice."""
    total = 0.0
    for line in found:
        guess, real, base = pair(results, line)
        error = math.log(max(guess - base, 1e-3) / (real - base))
        total += error * error * (2 if error < 0 else 1)
    return total / len(found)


def fit() -> dict[str, float]:
    values = {name: constant.start for name, constant in CONSTANTS.items()}
    for results in ("cpu", "gpu"):
        found, own = lines(results), [name for name, constant in CONSTANTS.items() if constant.results == results]
        use(values)
        best = loss(results, found)
        for _ in range(ROUNDS):
            before = best
            for name in own:
                for candidate in _around(values[name]):
                    use({**values, name: candidate})
                    if (now := loss(results, found)) < best - ENOUGH:
                        best, values[name] = now, candidate
            if best > before - ENOUGH:
                break
    use(values)
    return values


def _around(value: float) -> Iterator[float]:
    for factor in FACTORS:
        yield float(f"{value * factor:.3g}")


def table(values: dict[str, float]) -> str:
    """The module that the estimate imports, with the residuals in its docstring."""
    parts = [*TABLE.read_text().split('"""')[1].split("\n\n")[:1], *(residuals(results) for results in ("cpu", "gpu"))]
    body = "".join(f"{name} = {values[name]}  # {CONSTANTS[name].meaning}\n" for name in CONSTANTS)
    return '"""' + "\n\n".join(parts) + f'\n"""\n\n{body}'


def residuals(results: str) -> str:
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
