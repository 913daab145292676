"""The constants of the estimate are what `benchmarks/fit.py` makes of the kept results."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from segtrain.memory import fitted

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
