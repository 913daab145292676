"""Random runs through the command line, each against full backward on one rank (`benchmarks/differential.py`)."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import differential

from segtrain.engine import backward

SEEDS = (1007, 1065, 1069, 1118, 1151, 1155, 1171, 1179)  # all optimisers and models; ranks, a stop, 4 bits, ORPO
FAST = SEEDS[1:2]
ON_CPU = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="its tolerances are those of the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("differential")


@ON_CPU
@pytest.mark.parametrize("seed", FAST)
def test_a_drawn_run_equals_full_backward(folder: Path, seed: int) -> None:
    assert differential.run(differential.draw(seed), folder / f"one-{seed}").get("problems") == []


@ON_CPU
@pytest.mark.slow
def test_drawn_runs_equal_full_backward(folder: Path) -> None:
    results = [differential.run(differential.draw(seed), folder / str(seed)) for seed in SEEDS]
    assert [result.get("problems") for result in results] == [[]] * len(SEEDS)
    assert len({str(result["plan"]) for result in results}) > 4
    assert {"step", "backward", "exchange"} <= {phase for result in results for phase in result["phases"]}


@ON_CPU
@pytest.mark.parametrize("seed", [1065, pytest.param(1179, marks=pytest.mark.slow)])
def test_a_gradient_off_by_a_thousandth_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The control."""
    right = backward.cotangent

    def off(*args: Any) -> mx.array:
        return 1.001 * right(*args)

    monkeypatch.setattr(backward, "cotangent", off)
    assert differential.run(differential.draw(seed), folder / f"off-{seed}")["problems"]


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 120, 20))
def test_more_drawn_runs_equal_full_backward(folder: Path, start: int) -> None:
    for seed in range(start, start + 20):
        assert differential.run(differential.draw(seed), folder / f"more-{seed}").get("problems", []) == []
