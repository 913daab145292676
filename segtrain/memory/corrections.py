"""What runs measured of a model on this machine, against what was estimated. Pure but for one file in the cache.

The estimate is of what a step holds above model and adapter. The first update and each longest row so far measure it:
measured over estimated, for plans of the same kind, corrects what is estimated from then on. The file keeps it for the
next run and for `plan-segments`; a run that is resumed goes by its checkpoint instead, so that it plans as before.
"""

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from segtrain.cache import cache
from segtrain.memory import machine
from segtrain.memory.plan import Plan
from segtrain.memory.shapes import Model

STEP = 0.02  # ratios are rounded up to a multiple, so that a little noise changes no plan
LEAST, MOST = 0.5, 4.0
FILE = "measured.json"


def kind(plan: Plan) -> str:
    """Plans of a kind err alike."""
    return "full" if plan.backward == "full" else "tight" if plan.tight else "segmented"


@dataclass
class Corrections:
    """`ratios`: measured over estimated, by kind of plan. `longest`: tokens of the longest row that was measured.

    `rates`: seconds for each operation that `timing` counts, by kind of plan.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    longest: int = 0
    rates: dict[str, float] = field(default_factory=dict)

    def ratio(self, plan: Plan) -> float:
        return self.ratios.get(kind(plan), 1.0)

    def learn(self, plan: Plan, estimated: float, measured: float) -> bool:
        """Take a measurement in, both in bytes above model and adapter; whether it changes anything."""
        if estimated <= 0 or measured <= 0:
            return False
        ratio = min(MOST, max(LEAST, math.ceil(round(measured / estimated / STEP, 6)) * STEP))
        before = self.ratio(plan)
        self.ratios[kind(plan)] = round(ratio, 2)
        return abs(ratio - before) > STEP / 2

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def kept(model: Model, backend: str) -> Corrections:
    """What earlier runs of `model` measured here; nothing where there were none."""
    found = machine.read(_path(), backend).get("models", {}).get(_key(model), {})
    return Corrections(_numbers(found, "ratios"), 0, _numbers(found, "rates"))


def keep(model: Model, backend: str, corrections: Corrections) -> None:
    """For the next run. A cache that can't be written is no reason to stop."""
    before = machine.read(_path(), backend).get("models", {})
    own = {"ratios": corrections.ratios, "rates": corrections.rates}
    content = {"backend": backend, "mlx": machine.mlx_version(), "models": {**before, _key(model): own}}
    with suppress(OSError):
        machine.write(_path(), content)


def _path() -> Path:
    return cache() / FILE


def _key(model: Model) -> str:
    """A name for models of the same shapes and adapter."""
    return hashlib.blake2b(repr(model).encode(), digest_size=8).hexdigest()


def _numbers(found: Mapping[str, Any], name: str) -> dict[str, float]:
    values = found.get(name)
    pairs = values.items() if isinstance(values, dict) else ()
    return {str(key): float(value) for key, value in pairs if isinstance(value, int | float) and 0 < value < 1e6}
