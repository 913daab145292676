"""The constants of the estimate are what `benchmarks/fit.py` makes of the kept results."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from segtrain.memory import fitted
from segtrain.memory.backends import BACKENDS
from segtrain.memory.estimate import Estimator

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fit")


def committed(fit: ModuleType) -> dict[str, float]:
    return {name: getattr(fitted, name) for name in fit.CONSTANTS}


def test_each_constant_is_fitted_and_each_fitted_one_is_used(fit: ModuleType) -> None:
    assert {name for name in vars(fitted) if name.isupper()} == set(fit.CONSTANTS)
    memory = ROOT / "segtrain" / "memory"
    code = "".join((memory / f"{name}.py").read_text() for name in ("estimate", "backends", "timing"))
    assert all(f"fitted.{name}" in code for name in fit.CONSTANTS)


@pytest.mark.slow
def test_the_committed_table_is_better_than_where_the_fit_starts(fit: ModuleType) -> None:
    kept = committed(fit)
    try:
        for results in fit.ENOUGH:
            found = fit.lines(results)
            after = fit.loss(results, found)
            fit.use({name: constant.start for name, constant in fit.CONSTANTS.items()})
            assert after < fit.loss(results, found)
            fit.use(kept)
    finally:
        fit.use(kept)


@pytest.mark.slow
def test_a_new_fit_gives_the_committed_table(fit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit.py", "--check"])
    kept = committed(fit)
    try:
        assert fit.main() == 0
    finally:
        fit.use(kept)


def test_a_step_corrects_the_estimate_for_a_longer_row(fit: ModuleType) -> None:
    """Both rows take 1.5 times of what is estimated above the model, as a step on the shorter one shows."""
    accuracy = fit.plan_accuracy
    case = {"family": "llama", "dtype": "float32", "engine": {"segment_size": 1}}
    shorter, short, long = ({**case, "row": accuracy.sft(length)} for length in (128, 256, 512))
    other = {**short, "engine": {"segment_size": 2}}
    fixed = Estimator(accuracy.shapes_of("llama", "float32"), BACKENDS["cpu"]).fixed / accuracy.MIB
    for line in (short, long):
        line["measured_mb"] = fixed + 1.5 * (accuracy.predicted(line) - fixed)
    assert accuracy.step_before(long, [shorter, short, long, other]) == short
    assert accuracy.step_before(shorter, [shorter, short, long, other]) is None
    assert accuracy.predicted(long, short) == pytest.approx(long["measured_mb"], rel=0.02)
    assert accuracy.predicted(long) < 0.9 * long["measured_mb"]  # the control
