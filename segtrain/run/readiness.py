"""What a run makes sure of before it trains: that the fast forms which its model needs are right on this machine.

It is done once for each machine, mlx version and model shape; what is found is kept in the cache directory. Where a
fast form is wrong and there is a safe one (attention in blocks), that one is taken from then on, by the planner too.
"""

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from segtrain.attention import dispatch
from segtrain.errors import RunFailed
from segtrain.memory import anatomy, machine, shapes
from segtrain.memory.backends import BACKENDS
from segtrain.models.quantized_check import Quantisation, quantisations
from segtrain.recurrence import gated_delta
from segtrain.recurrence.gated_delta import FUSED_HEADS
from segtrain.run import checks
from segtrain.run.apart import apart
from segtrain.run.checks import AttentionKind, Finding

if TYPE_CHECKING:
    from segtrain.models.load import Loaded

MOST_APART = 8  # checks at a time on CUDA: each process holds half a GiB of the GPU


@dataclass(frozen=True)
class Subject:
    """What of a model the checks depend on."""

    attention: tuple[AttentionKind, ...] = ()
    quantised: tuple[Quantisation, ...] = ()
    recurrences: tuple[str, ...] = ()
    dtype: mx.Dtype = mx.bfloat16

    @classmethod
    def of(cls, config: Mapping[str, Any], quantised: Iterable[Quantisation]) -> "Subject":
        """Of a model with this `config.json`. Raises UserError where a key that it needs is missing or absurd."""
        shape = _shape(json.dumps(config, sort_keys=True), dispatch.backend().name)
        dtype = mx.float32 if shape.dtype_bytes == 4 else mx.bfloat16
        kinds = {_kind(attention, dtype) for layer in shape.layers for attention in layer.attention}
        rules = {scan.rule for layer in shape.layers for scan in layer.scans}
        recurrences = tuple(name for name in checks.RECURRENCES if name in rules)
        return cls(tuple(sorted(kinds, key=str)), tuple(sorted(quantised)), recurrences, dtype)


@lru_cache(maxsize=8)
def _shape(config: str, backend: str) -> shapes.Model:
    """Once in a process that runs a model several times: to read it takes a tenth of a second."""
    return anatomy.of_config(json.loads(config), backend)


def _kind(attention: shapes.Attention, dtype: mx.Dtype) -> AttentionKind:
    a = attention
    return AttentionKind(a.heads // a.kv_heads, a.dim, a.value_dim, dtype, a.window, bool(a.softcap), a.sinks)


def ready(loaded: "Loaded") -> list[str]:
    """Check what this model needs, unless that was done; what to tell. Raises RunFailed for what has no safe form.

    Attention is steered as found (and as `bench` measured).
    """
    try:
        subject = Subject.of(loaded.config, quantisations(loaded.model))
    except ValueError:  # a config that can't be planned from: its gradients are verified instead
        subject = Subject(quantised=tuple(sorted(quantisations(loaded.model))))
    kept: Mapping[str, Any] = machine.read(machine.findings_path(), dispatch.backend().name)
    if _key(subject) not in kept.get("checked", []) and (found := checked(subject, table())):
        fatal = next((finding for finding in found if finding.fatal), None)
        if fatal:
            raise RunFailed(f"mlx {machine.mlx_version()} on this machine: {fatal.name}: {fatal.found}; {fatal.can}")
        kept = keep(subject, found, kept)
    measured = machine.measured(BACKENDS[dispatch.backend().name])  # type: ignore[index]
    choices = {**measured, **kept.get("choices", {})}
    dispatch.follow(choices)
    gated_delta.follow(choices)
    fused = any(kind.form(table()) != "blocks" for kind in subject.attention)
    if not (fused and kept.get("wrong")):
        return []
    return [
        f"MLX's fused attention is wrong here ({kept['wrong']}), so segtrain {checks.IN_BLOCKS}; see `segtrain doctor`"
    ]


def checked(subject: Subject, rows: dispatch.Backend, *, everything: bool = False) -> list[Finding]:
    """The findings. Attention in blocks is the safe form, which only `everything` checks too."""
    kinds = [kind for kind in subject.attention if everything or kind.form(rows) != "blocks"]
    tasks: list[Callable[[], Finding]] = []
    for kind in kinds:
        tasks.append(partial(checks.with_safe_form, checks.attention_is_right, kind, rows))
        if not (kind.softcap or kind.sinks):
            tasks.append(partial(checks.with_safe_form, checks.attention_is_linear, kind, rows))
    tasks += [partial(checks.quantised_products, kind, subject.dtype) for kind in subject.quantised]
    tasks += [partial(checks.recurrence, name) for name in subject.recurrences]
    if gated_delta.RULE in subject.recurrences and dispatch.backend().name in FUSED_HEADS:
        tasks.append(checks.delta_kernel)
    if dispatch.backend().name == "cuda":
        return apart(tasks, min(MOST_APART, os.cpu_count() or 1))
    return [task() for task in tasks]


def table() -> dispatch.Backend:
    """The table's row, whatever was found before."""
    return dispatch.BACKENDS[dispatch.backend().name]


def device() -> str:
    return str(mx.device_info().get("device_name", platform.machine()))


def _key(subject: Subject) -> str:
    return repr((device(), subject))


def keep(subject: Subject, found: Sequence[Finding], kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Note what was found beside what was `kept`, for later runs and the planner; nothing fatal: it is found again."""
    if any(finding.fatal for finding in found):
        return kept
    in_blocks = (f"{finding.name}: {finding.found}" for finding in found if finding.does == checks.IN_BLOCKS)
    wrong = next(in_blocks, kept.get("wrong", ""))
    chosen = {**kept.get("choices", {}), **dict(f.choice.split("=") for f in found if f.choice)}
    content: dict[str, Any] = {
        "backend": dispatch.backend().name,
        "mlx": machine.mlx_version(),
        "checked": sorted({*kept.get("checked", []), _key(subject)}),
        "wrong": wrong,
        "choices": {**chosen, **({"attention": "blocks"} if wrong else {})},
    }
    with suppress(OSError):  # a cache that can't be written: checked again next time
        machine.write(machine.findings_path(), content)
    return content
