"""`segtrain bench` at its smallest size, and that the planner reads what it wrote."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from segtrain.attention import dispatch
from segtrain.memory import machine, shapes
from segtrain.memory.backends import BACKENDS
from segtrain.memory.timing import DEFAULTS
from segtrain.run import bench, disk
from segtrain.terminal.bench import print_bench


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def wrote(**changes: Any) -> None:
    content = {"machine": machine.device(), "backend": "cpu", "mlx": machine.mlx_version(), "choices": {}} | changes
    machine.path().parent.mkdir(parents=True, exist_ok=True)
    machine.path().write_text(json.dumps(content))


def test_what_another_device_measured_is_as_if_there_were_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory may be shared by machines with one mlx and one backend."""
    assert machine.device()
    machine.write(machine.path(), {"backend": "cpu", "mlx": machine.mlx_version(), "choices": {"packed": 0.5}})
    assert machine.measured(BACKENDS["cpu"]) == {"packed": 0.5}
    monkeypatch.setattr(machine, "device", lambda: "another")
    assert machine.measured(BACKENDS["cpu"]) == {}


def test_every_choice_is_measured_and_read_back() -> None:
    report = bench.bench(size=bench.SMALLEST)
    assert Path(report.path) == machine.path()
    assert {row["name"] for row in report.results} >= {"attention, fused", "step, plain", "4-bit step, dense copies"}
    assert all(row["seconds"] > 0 for row in report.results)
    found = machine.speed(BACKENDS[report.backend])  # type: ignore[index]
    assert found.packed == report.choices["packed"]
    assert list(found.lookahead) == report.choices["lookahead"]
    assert found.mlp_chunks == report.choices["mlp_chunks"]


def test_the_disk_is_timed_and_its_file_goes(tmp_path: Path) -> None:
    assert disk.read_speed(tmp_path / "new", disk.PIECE) > 0
    assert not list((tmp_path / "new").iterdir())
    report = bench.Report("device", "cpu")
    bench._disk(report, bench.SMALLEST)
    bench._write(report, machine.path())
    assert machine.disk(BACKENDS["cpu"]) == report.choices["disk_bytes_a_second"]
    assert machine.disk(BACKENDS["cuda"]) is None


def test_a_disk_that_takes_no_file_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: Any) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "read_speed", full)
    report = bench.Report("device", "cpu")
    bench._disk(report, bench.SMALLEST)
    print_bench(report)
    assert "No space left" in capsys.readouterr().out
    assert "disk_bytes_a_second" not in report.choices


def test_what_no_time_is_left_for_is_said() -> None:
    report = bench.bench(size=bench.SMALLEST, budget=-1)
    assert [row["note"] for row in report.results] == ["not measured in full: out of time"] * 4
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


@pytest.mark.parametrize(
    ("sound", "fused", "blocks", "kind"),
    [(True, 1.0, 2.0, "fused"), (True, 2.0, 1.0, "blocks"), (False, 1.0, 2.0, "blocks"), (True, 1.0, 1.0, "fused")],
)
def test_fused_attention_must_be_sound_and_not_slower(sound: bool, fused: float, blocks: float, kind: str) -> None:
    assert bench.attention_choice(sound, fused, blocks, 64, "float32")["attention"] == kind


def test_a_wrong_fused_kernel_is_not_chosen_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dispatch._sdpa
    monkeypatch.setattr(bench, "_timed", lambda report, name, run: (0.0 if "fused" in name else 1.0, 0))
    for kernel, chosen in ((right, "fused"), (lambda *x, **rule: 0.5 * right(*x, **rule), "blocks")):
        monkeypatch.setattr(dispatch, "_sdpa", kernel)
        report = bench.Report("device", "cpu", results=[{}])
        bench._attention(report, bench.SMALLEST)
        assert report.choices["attention"] == chosen


FUSED = bench.attention_choice(True, 1.0, 2.0, 64, "float32")
BLOCKS = bench.attention_choice(False, 1.0, 2.0, 64, "float32")


@pytest.mark.parametrize("name", ["cpu", "cuda", "metal"])
@pytest.mark.parametrize("choices", [{}, FUSED, BLOCKS, {"attention": "fused"}, {"attention": 3}])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 128])
def test_the_measurement_steers_attention_and_its_estimate(
    name: Any, choices: dict[str, Any], dim: int, dtype: str, window: int | None
) -> None:
    """What was measured as lost is never fused; what won on a backend without a fused kernel in the table is."""
    wrote(backend=name, choices=choices)
    row = dispatch.steered(dispatch.BACKENDS[name], choices)
    call = dispatch.Call(8, 1024, 1024, dim, dim, getattr(mx, dtype), window=window)
    kind, before = dispatch.choose(row, call), dispatch.choose(dispatch.BACKENDS[name], call)
    if choices is BLOCKS:
        assert kind == "blocks"
    elif choices is FUSED and name == "cpu" and window is None:
        assert kind == ("fused" if (dim, dtype) == (64, "float32") else "blocks")
    else:
        assert kind == before
    mine = shapes.Attention(8, 2, dim, dim, window)
    if not (choices is FUSED and name == "cpu" and dtype == "bfloat16"):  # the estimate calls any half precision fused
        assert machine.steered(BACKENDS[name]).attention_kind(mine, 1024, getattr(mx, dtype).size) == kind


def test_the_measurement_is_followed_by_this_device() -> None:
    q, before = mx.random.normal((1, 2, 8, 64)), dispatch.backend().head_dims
    try:
        dispatch.follow(FUSED)
        assert dispatch.backend().head_dims == ({64} if dispatch.backend().name == "cpu" else before)
        fused = dispatch.attend(q, q, q, scale=0.125)
        dispatch.follow({})
        assert dispatch.backend() == dispatch.BACKENDS[dispatch.backend().name]
        assert mx.allclose(fused, dispatch.attend(q, q, q, scale=0.125), atol=1e-5)
    finally:
        dispatch.follow({})
