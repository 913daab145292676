"""What `segtrain bench` measured and `segtrain doctor` found on this machine: two JSON files in the user's cache. Pure.

A file is for the versions and the device that it names; with others it is as if there were none. Where both choose, it
goes by what doctor found.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from segtrain.cache import cache
from segtrain.memory.backends import Backend
from segtrain.memory.timing import DEFAULTS, Speed


def path() -> Path:
    """The file of `segtrain bench`."""
    return cache() / "bench.json"


def findings_path() -> Path:
    """The file of `segtrain doctor`."""
    return cache() / "doctor.json"


def mlx_version() -> str:
    try:
        return version("mlx")
    except PackageNotFoundError:
        return "none"


@functools.cache
def device() -> str:
    """What computes here, as the system names it: a home directory may be shared by several machines."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip()
    names = [_field(path, "Model") for path in gpus] or [_field(Path("/proc/cpuinfo"), "model name")]
    return ", ".join(names)


def _field(path: Path, name: str) -> str:
    """The first value of a `name : value` line; empty where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def measured(backend: Backend) -> Mapping[str, Any]:
    """The choices for this backend and mlx version; empty where there are none."""
    return {**_choices(path(), backend), **_choices(findings_path(), backend)}


def _choices(file: Path, backend: Backend) -> Mapping[str, Any]:
    choices = read(file, backend.name).get("choices")
    return choices if isinstance(choices, dict) else {}


def read(file: Path, backend: str) -> dict[str, Any]:
    """A file's content; empty where it can't be read, or is of another device, backend or mlx version."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    wanted = {"machine": device(), "backend": backend, "mlx": mlx_version()}
    if not isinstance(found, dict) or any(found.get(key) != value for key, value in wanted.items()):
        return {}
    return found


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Put `content`, marked with this device, in the file's place, whole. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"machine": device(), **content}, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)


def steered(backend: Backend) -> Backend:
    """`backend` with attention as measured here: by the rule of `attention.dispatch.steered` (a test compares)."""
    choices = measured(backend)
    match choices.get("attention"):
        case "blocks":
            return replace(backend, head_dims=frozenset())
        case "fused" if isinstance(dim := choices.get("attention_dim"), int) and not backend.head_dims:
            return replace(backend, head_dims=frozenset({dim}), dtypes=(str(choices.get("attention_dtype")),))
    return backend


def speed(backend: Backend) -> Speed:
    """The time model's factors: measured ones where there are, the table's otherwise."""
    choices, default = measured(backend), DEFAULTS[backend.name]
    known: dict[str, Any] = {}
    for name in ("packed", "compiled", "mlp_chunks"):
        if isinstance(value := choices.get(name), int | float) and 0.05 < value < 20:
            known[name] = float(value)
    looks = choices.get("lookahead")
    if isinstance(looks, list) and len(looks) == 3 and all(isinstance(x, int | float) and 0.05 < x < 20 for x in looks):
        known["lookahead"] = tuple(map(float, looks))
    return replace(default, **known)


def disk(backend: Backend) -> float | None:
    """Bytes that the disk gives a second; None where it wasn't measured."""
    value = measured(backend).get("disk_bytes_a_second")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 1 else None


def compiles(backend: Backend) -> bool:
    """Whether compiled segments pay here."""
    value = measured(backend).get("compiled")
    return value < 0.98 if isinstance(value, int | float) else backend.compiles
