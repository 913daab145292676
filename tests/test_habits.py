"""How a run treats the machine it is on: variables for mlx, wired memory, the watchdog, kernels that are compiled once.

Backends that aren't here are stood in for by their names.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import tiny

from segtrain.data.rows import Origin, SupervisedRow
from segtrain.errors import RunFailed
from segtrain.memory import backends, machine
from segtrain.memory.backends import BACKENDS
from segtrain.memory.choose import Option
from segtrain.memory.plan import Plan
from segtrain.memory.rows import sft
from segtrain.run import budget, environment, planning, updates, verify
from segtrain.run import wired as wired_module
from segtrain.run.passes import Passes, is_watchdog
from segtrain.run.wired import wired


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that makes this machine one of that backend's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def become(name: str) -> None:
        monkeypatch.setattr(sys, "platform", "darwin" if name == "metal" else "linux")
        monkeypatch.setattr(backends, "_here", lambda: BACKENDS[name])  # type: ignore[index]

    return become


def prepared(**options: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    environment.prepare(found, **options)
    return found


def test_what_each_backend_gets(on: Any, tmp_path: Path) -> None:
    on("cpu")
    assert prepared(longest=8192) == {}
    on("metal")
    assert prepared(longest=8192) == {"AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1"}
    on("cuda")
    kernels = {"MLX_PTX_CACHE_DIR": str(tmp_path / "segtrain" / "kernels" / machine.mlx_version())}
    assert prepared() == kernels
    assert prepared(longest=8192) == kernels | backends.CUDA_BUFFERS
    assert prepared(exact=True) == kernels | {"MLX_ENABLE_TF32": "0"}


def test_what_the_user_has_set_stays(on: Any) -> None:
    on("cuda")
    mine = {"MLX_PTX_CACHE_DIR": "/mine", "MLX_ENABLE_TF32": "1"}
    environment.prepare(mine, exact=True)
    assert mine == {"MLX_PTX_CACHE_DIR": "/mine", "MLX_ENABLE_TF32": "1"}


def test_kernels_are_compiled_while_none_are_kept(on: Any, tmp_path: Path) -> None:
    on("cpu")
    assert not environment.compiles_kernels({})
    on("cuda")
    kept = {"MLX_PTX_CACHE_DIR": str(tmp_path / "kernels")}
    assert environment.compiles_kernels(kept)
    (tmp_path / "kernels").mkdir()
    assert environment.compiles_kernels(kept)
    (tmp_path / "kernels/a.ptx").write_text("")
    assert not environment.compiles_kernels(kept)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The wired limits that are set, on a Mac that recommends 100 bytes and has 7 set."""
    found = [7]

    def set_limit(limit: int) -> int:
        found.append(limit)
        return found[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(wired_module, "recommended_bytes", lambda: 100)
    return found


@pytest.mark.parametrize(("budget", "limit"), [(60, 60), (130, 100)])
def test_memory_is_wired_up_to_what_is_recommended_and_given_back(limits: list[int], budget: int, limit: int) -> None:
    with suppress(ValueError), wired(budget):
        assert limits == [7, limit]
        raise ValueError
    assert limits == [7, limit, 7]


def test_nothing_is_wired_where_it_is_not_wanted_or_not_metal(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with wired(60, wanted=False):
        pass
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with wired(60):
        pass
    assert limits == [7]


WATCHDOG = [
    "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackError...)",
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackError...)",
]


@pytest.mark.parametrize("text", WATCHDOG)
def test_the_watchdog_is_explained(text: str) -> None:
    def fails(layout: Any) -> Any:
        raise RuntimeError(text)

    session = SimpleNamespace(
        lora=SimpleNamespace(dropout_keys=SimpleNamespace(row=0)),
        layout=lambda row: tiny.row(9),
        referenced=lambda rows, layout, backward: layout,
    )
    choose: Any = lambda layout: SimpleNamespace(step=fails)  # noqa: E731
    running: Any = SimpleNamespace(session=session, passes=Passes(session, choose))  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"kept the display waiting, on rows.jsonl:3.*caffeinate.*--resume"):
        updates.Updates._step(running, 1, SupervisedRow([1, 2], [True, True], Origin("rows.jsonl", 3)))


def test_other_errors_are_not_the_watchdog() -> None:
    assert not is_watchdog(RuntimeError("[metal::malloc] Attempting to allocate 9 bytes"))


def test_the_reference_of_verify_grads_takes_composed_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MLX_SDPA_VJP_FALLBACK"
    for before in (None, "0"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        with suppress(ValueError), verify.composed_attention():
            assert os.environ[name] == "1"
            raise ValueError
        assert os.environ.get(name) == before


@pytest.mark.parametrize(
    ("name", "tokens", "planned", "chosen"),
    [
        ("metal", 8192, None, None),
        ("metal", 8320, None, 2048),
        ("metal", 32768, 4096, 2048),
        ("metal", 32768, 512, 512),
        ("cuda", 32768, None, None),
    ],
)
def test_products_over_long_rows_are_cut_on_metal(
    name: Any, tokens: int, planned: int | None, chosen: int | None
) -> None:
    option = Option(Plan("segmented", mlp_rows=planned), "backward", {}, 1.0)
    assert planning.in_short_kernels(option, sft(tokens), BACKENDS[name]).plan.mlp_rows == chosen


@pytest.mark.parametrize(("name", "share"), [("metal", 3), ("cpu", 3), ("cuda", 1)])
def test_ranks_of_a_host_share_its_memory_but_not_a_gpu_each(
    name: Any, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "recommended_bytes", lambda: 90 << 30)
    assert budget.device_budget(BACKENDS[name], 3) == budget.device_budget(BACKENDS[name]) // share
