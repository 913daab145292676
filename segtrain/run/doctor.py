"""`segtrain doctor`: is what segtrain relies on right on this machine? One finding a line, and what follows from it.

Training does the part that its own model needs by itself (`readiness`).
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from segtrain.attention import dispatch
from segtrain.memory import machine
from segtrain.memory.device import MARGIN
from segtrain.memory.meter import recommended_bytes
from segtrain.models.quantized_check import Quantisation
from segtrain.run import checks
from segtrain.run.base import planned
from segtrain.run.checks import AttentionKind, Finding
from segtrain.run.preview import preview
from segtrain.run.readiness import Subject, checked, device, keep, table

if TYPE_CHECKING:
    from segtrain.recipe.schema import Recipe

GIB = 2**30
SLOW = 50e9  # operations a second of products below which a CPU has no fast ones
REFERENCE_BLAS = (
    "MLX's CPU wheel for Linux carries a reference BLAS: much faster are a GPU, or a float32 model with an MLX that is "
    "built against OpenBLAS"
)


def usual() -> Subject:
    """What most models consist of."""
    dtype = mx.float32 if dispatch.backend().name == "cpu" else mx.bfloat16
    dims = tuple(AttentionKind(2, dim, dim, dtype) for dim in (64, 128, 256))
    window = AttentionKind(2, 128, 128, dtype, window=512)
    quantised = [(64, 4, "affine"), (64, 8, "affine"), (32, 4, "mxfp4"), (16, 4, "nvfp4")]
    return Subject((*dims, window), tuple(Quantisation(*kind) for kind in quantised), tuple(checks.RECURRENCES), dtype)


@dataclass
class Report:
    """`passed`: for everything that is wrong segtrain has another form."""

    device: str
    backend: str
    mlx: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not any(finding.fatal for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "passed": self.passed, "findings": [vars(finding) for finding in self.findings]}


def doctor(recipe: "Recipe | None" = None) -> Report:
    """Every check, for the recipe's model or for what most models consist of; writes what the planner reads."""
    backend = dispatch.backend().name
    report = Report(device(), backend, machine.mlx_version())
    subject = usual()
    if recipe is not None:
        config = planned(recipe).config
        subject = Subject.of(config, _quantised(config))
    found = checked(subject, table(), everything=True)
    keep(subject, found, {})
    found += [checks.memory_limit(), _wired(), _speed()]
    if recipe is not None:
        found.append(_plan(recipe))
    report.findings = found
    return report


def _quantised(config: Mapping[str, Any]) -> set[Quantisation]:
    """The quantisations that a `config.json` names."""
    found = config.get("quantization") or config.get("quantization_config") or {}
    parts = [found, *(part for part in found.values() if isinstance(part, Mapping))] if found else []
    default = found.get("mode", "affine")
    return {
        Quantisation(int(part.get("group_size", 64)), int(part["bits"]), str(part.get("mode", default)))
        for part in parts
        if part.get("bits")
    }


def _wired() -> Finding:
    """Whether the weights can be wired: Metal alone, from macOS 15 on."""
    name, version = "wired limit", platform.mac_ver()[0]
    if dispatch.backend().name != "metal":
        return Finding(name, True, "of Metal alone: nothing to do here")
    if int(version.split(".")[0] or 0) < 15:
        return Finding(name, False, f"macOS {version} has none", "trains with unwired weights", "update to macOS 15")
    before = mx.set_wired_limit(recommended_bytes())
    mx.set_wired_limit(before)
    return Finding(name, True, f"{recommended_bytes() / GIB:.1f} GiB may be wired")


def _speed() -> Finding:
    """Of square products, in float32 and in bfloat16."""
    cpu = dispatch.backend().name == "cpu"
    sizes = {mx.float32: 512, mx.bfloat16: 192} if cpu else {mx.float32: 4096, mx.bfloat16: 4096}
    found = {dtype: checks.speed(dtype, size) for dtype, size in sizes.items()}
    text = ", ".join(f"{speed / 1e9:,.1f} GFLOP/s in {str(dtype).rsplit('.', 1)[-1]}" for dtype, speed in found.items())
    if not cpu or found[mx.float32] > SLOW:
        return Finding("speed of products", True, text)
    return Finding("speed of products", False, text, "nothing: results are right", REFERENCE_BLAS)


def _plan(recipe: "Recipe") -> Finding:
    """The plan against the memory of the device."""
    found = preview(recipe)
    peak = (found.recommended or {}).get("peak_gib", 0.0)
    total = recommended_bytes() / GIB
    device = f"; the device recommends {total:.1f}, of which {MARGIN:.0%} are taken" if total else ""
    text = f"{peak:.2f} GiB planned for {found.seq:,} tokens, of a budget of {found.budget_gib:.2f}{device}"
    return Finding(
        "memory against the plan",
        found.fits,
        text,
        "refuses such a run" * (not found.fits),
        found.advice,
        not found.fits,
    )
