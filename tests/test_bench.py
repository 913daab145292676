"""`segtrain bench` at its smallest size, and that the planner reads what it wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from segtrain import bench
from segtrain.memory import machine
from segtrain.memory.backends import BACKENDS
from segtrain.memory.timing import DEFAULTS


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def wrote(**changes: Any) -> None:
    content = {"backend": "cpu", "mlx": machine.mlx_version(), "choices": {}} | changes
    machine.path().parent.mkdir(parents=True, exist_ok=True)
    machine.path().write_text(json.dumps(content))


def test_every_choice_is_measured_and_read_back() -> None:
    report = bench.bench(size=bench.SMALLEST)
    assert Path(report.path) == machine.path()
    assert {row["name"] for row in report.results} >= {"attention, fused", "step, plain", "4-bit step, dense copies"}
    assert all(row["seconds"] > 0 for row in report.results)
    found = machine.speed(BACKENDS[report.backend])  # type: ignore[index]
    assert found.packed == report.choices["packed"]
    assert list(found.lookahead) == report.choices["lookahead"]
    assert found.mlp_chunks == report.choices["mlp_chunks"]


def test_what_no_time_is_left_for_is_said() -> None:
    report = bench.bench(size=bench.SMALLEST, budget=-1)
    assert [row["note"] for row in report.results] == ["not measured in full: out of time"] * 3
    assert machine.speed(BACKENDS["cpu"]) == DEFAULTS["cpu"]


def test_a_file_of_another_backend_or_version_is_ignored() -> None:
    wrote(choices={"packed": 4.0})
    assert machine.speed(BACKENDS["cpu"]).packed == 4.0
    assert machine.speed(BACKENDS["cuda"]) == DEFAULTS["cuda"]
    wrote(choices={"packed": 4.0}, mlx="0.0.1")
    assert machine.speed(BACKENDS["cpu"]) == DEFAULTS["cpu"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"backend": "cpu", "choices": 3}'])
def test_a_broken_file_is_as_if_there_were_none(text: str) -> None:
    wrote()
    machine.path().write_text(text)
    assert machine.speed(BACKENDS["cpu"]) == DEFAULTS["cpu"]


@pytest.mark.parametrize("value", ["fast", None, -1, 1e9, True])
def test_absurd_values_are_ignored(value: Any) -> None:
    wrote(choices={"packed": value, "lookahead": [1, value, 1]})
    found = machine.speed(BACKENDS["cpu"])
    assert found.lookahead == DEFAULTS["cpu"].lookahead or value is True
    assert found.packed == DEFAULTS["cpu"].packed or value is True


def test_compiled_segments_follow_the_table_unless_measured() -> None:
    assert machine.compiles(BACKENDS["cuda"])
    assert not machine.compiles(BACKENDS["metal"])
    assert not machine.compiles(BACKENDS["cpu"])
    wrote(choices={"compiled": 0.9})
    assert machine.compiles(BACKENDS["cpu"])
