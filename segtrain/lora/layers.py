"""LoRA on a model's layers: attach, list the trainable parameters by layer, swap them for a transform.

A begins uniform in +-1/sqrt(in), B zero, DoRA's magnitudes with the weights' own: the model is as it was.
"""

import fnmatch
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from segtrain.errors import counted
from segtrain.lora.dora import DoRALinear
from segtrain.lora.flat import FlatArrays, FlatLayout
from segtrain.lora.frozen import dense_shape
from segtrain.lora.modules import (
    Casts,
    Dropout,
    DropoutKeys,
    LoRALinear,
    LoRAModule,
    LoRASwitchLinear,
    Slot,
    scaled,
)

ALL_LINEAR = "all-linear"
LINEAR = (nn.Linear, nn.QuantizedLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
# Gemma 3n's AltUp rewrites the weight of these linear layers before each call, which a wrapped one does not have.
NOT_WRAPPABLE = ("prediction_coefs", "correction_coefs")


@dataclass
class Lora:
    """The trainable parameters of a model, by layer."""

    layers: list[list[Slot]]
    keys: list[str]
    rank: int
    scale: float
    dropout: float
    dropout_keys: DropoutKeys = field(default_factory=DropoutKeys)
    casts: Casts = field(default_factory=Casts)
    start: dict[str, mx.array] | None = None  # the values that it began with; None: a new adapter, which does nothing
    _flat: FlatArrays | None = None

    @property
    def lowest(self) -> int:
        """The lowest layer with a trainable parameter: nothing below it needs a backward pass."""
        return next(i for i, slots in enumerate(self.layers) if slots)

    @property
    def adapts_experts(self) -> bool:
        return any(isinstance(slot.module, LoRASwitchLinear) for slot in self.slots())

    def slots(self, lo: int = 0, hi: int | None = None) -> list[Slot]:
        return [slot for layer in self.layers[lo:hi] for slot in layer]

    def values(self) -> dict[str, mx.array]:
        return {slot.name: slot.value for slot in self.slots()}

    def set(self, values: Mapping[str, mx.array]) -> None:
        for slot in self.slots():
            slot.module[slot.key] = values[slot.name]
        self._flat = values if isinstance(values, FlatArrays) and values.layout == self.flat_layout else None

    def begin_from(self, values: Mapping[str, mx.array]) -> None:
        """Take the values of another adapter, by parameter name, as those that this one begins with."""
        self.set(values)
        self.start = self.values()

    @contextmanager
    def as_at_start(self) -> Iterator[None]:
        """The model as it was before the first update while the block runs, wherever training or a resume has got."""
        with self.disabled() if self.start is None else self.with_values(self.start):
            yield

    @property
    def start_fingerprint(self) -> str:
        """SHA-256 of the values that it began with; empty for a new adapter."""
        digest = hashlib.sha256()
        for name, value in sorted((self.start or {}).items()):
            digest.update(f"{name}\0{value.dtype}\0{value.shape}\0".encode())
            digest.update(memoryview(value))  # type: ignore[arg-type]
        return digest.hexdigest() if self.start is not None else ""

    @contextmanager
    def with_values(self, values: Mapping[str, mx.array]) -> Iterator[None]:
        """The adapter with these values, by parameter name, while the block runs."""
        before, flat = self.values(), self._flat
        self.set(values)
        try:
            yield
        finally:
            self.set(before)
            self._flat = flat

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model without its adapter while the block runs: B is zero, so that y = base(x) + 0.

        Values are inputs of every compiled graph, so those made with the adapter serve here too.
        """
        neutral = {s.name: values[s.key] for s in self.slots() if s.key in (values := s.module.neutral())}
        with self.dropout_keys.disabled(), self.with_values(self.values() | neutral):
            yield

    @cached_property
    def flat_layout(self) -> FlatLayout:
        """The order in which the parameters lie in the flat vector: every A, every B, then every magnitude."""
        return FlatLayout.of({slot.name: slot.value for slot in self.flat_slots})

    @cached_property
    def flat_slots(self) -> list[Slot]:
        return sorted(self.slots(), key=lambda slot: slot.key)

    @cached_property
    def dtype(self) -> mx.Dtype:
        """Of the activations, as the first adapted layer's weights tell it."""
        arrays = [array for array in self.flat_slots[0].module.linear.values() if isinstance(array, mx.array)]
        return next((array.dtype for array in arrays if mx.issubdtype(array.dtype, mx.floating)), mx.bfloat16)

    def flat(self) -> FlatArrays:
        """The parameters as one array."""
        known = self._flat
        if known is None or any(slot.value is not known[slot.name] for slot in self.slots()):
            known = self.flat_layout.flatten(self.values())
            self.set(known)
        return known

    def cast(self, params: mx.array, dtype: mx.Dtype) -> mx.array:
        """A and scale * B in `dtype`, flat, of flat parameters; magnitudes too, which no product takes."""
        a, b, *rest = self._parts(params)
        return mx.concatenate([part.astype(dtype) for part in (a, scaled(b, self.scale), *rest)])

    def cast_back(self, grads: Sequence[mx.array]) -> mx.array:
        """Flat gradients with respect to the parameters, float32, of those with respect to the arrays in `cast`."""
        a, b, *rest = (part.astype(mx.float32) for part in self._parts(self.flat_layout.join(grads)))
        return mx.concatenate([a, scaled(b, self.scale), *rest])

    def _parts(self, flat: mx.array) -> list[mx.array]:
        """Every A, every B, and for DoRA every magnitude, of a flat vector."""
        starts: dict[str, int] = {}
        for slot in self.flat_slots:
            starts.setdefault(slot.key, self.flat_layout.spans[slot.name][0])
        return list(mx.split(flat, list(starts.values())[1:]))


@contextmanager
def swapped(slots: Sequence[Slot], values: Sequence[mx.array]) -> Iterator[None]:
    """Put `values` (a transform's tracers) in the slots, and the old arrays back whatever happens."""
    old = [slot.value for slot in slots]
    try:
        for slot, value in zip(slots, values, strict=True):
            slot.module[slot.key] = value
        yield
    finally:
        for slot, value in zip(slots, old, strict=True):
            slot.module[slot.key] = value


def attach(
    model: nn.Module,
    *,
    rank: int,
    scale: float,
    dropout: float = 0.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    layers: tuple[int, int] | None = None,
    seed: int = 0,
    kind: str = "lora",
    evaluate: bool = True,
    holding: Callable[[int, int], AbstractContextManager[None]] = lambda lo, hi: nullcontext(),
) -> Lora:
    """Freeze `model` and put LoRA (or `kind` dora) on the targeted linear layers of `model.layers[lo:hi]`.

    A target is a module name (`q_proj`), a path within a layer (`self_attn.q_proj`), or a glob over either. Raises
    ValueError for a target that matches nothing (naming those that exist), for one that DoRA isn't defined on, and for
    a layer range outside the model. Without `evaluate` the parameters are only described, for a model that nothing is
    computed with. `holding`: around reading the weights of layers lo..hi-1.
    """
    lo, hi = _layer_range(len(model.layers), layers)
    if not hasattr(model, "_no_grad"):  # Recurrent Gemma's class leaves this out, and can't be frozen without it
        nn.Module.__init__(model)
    model.freeze()
    paths = _layer_paths(model)
    keys = _targeted([paths[i] for i in range(lo, hi)], targets)
    lora = Lora([[] for _ in paths], sorted(keys), rank, scale, dropout, DropoutKeys(seed))
    for i in range(lo, hi):
        for path, (name, linear) in paths[i].items():
            if path in keys:
                dropped = Dropout(dropout, name, lora.dropout_keys) if dropout else None
                module = _kind(linear, name, kind)(linear, rank, scale, dropped, lora.casts)
                module.linear.freeze()
                module.lora_a = _initial_a(module.lora_a.shape, linear, name, seed)
                model.layers[i].update_modules(tree_unflatten([(path, module)]))
                lora.layers[i] += [Slot(f"{name}.{key}", module, key) for key in module.TRAINED]
        if evaluate and kind == "dora":
            with holding(i, i + 1):
                _measure(lora.layers[i])
    model.train()
    if evaluate:
        mx.eval([slot.value for slot in lora.slots()])
    return lora


def _kind(linear: nn.Module, name: str, kind: str) -> type[LoRAModule]:
    """What takes the place of a linear layer."""
    if kind == "dora" and isinstance(linear, EXPERTS):
        raise ValueError(
            f"lora.kind: dora isn't defined on the stacked experts {name}; leave them out of lora.targets, or write "
            "lora.kind: lora"
        )
    if kind == "dora":
        return DoRALinear
    return LoRASwitchLinear if isinstance(linear, EXPERTS) else LoRALinear


def _measure(slots: Sequence[Slot]) -> None:
    for slot in slots:
        if slot.key == "m":
            slot.module.measure()


def _layer_range(total: int, layers: tuple[int, int] | None) -> tuple[int, int]:
    lo, hi = layers or (0, total)
    if not 0 <= lo < hi <= total:
        raise ValueError(f"lora.layers [{lo}, {hi}] is outside the model's {counted(total, 'layer')}")
    return lo, hi


def _layer_paths(model: nn.Module) -> list[dict[str, tuple[str, nn.Module]]]:
    """Per layer: path within the layer -> (full name, linear module)."""
    names = {id(module): name for name, module in model.named_modules()}
    paths: list[dict[str, tuple[str, nn.Module]]] = []
    for layer in model.layers:
        linears = {p: m for p, m in layer.named_modules() if isinstance(m, (*LINEAR, *EXPERTS)) and _wrappable(p)}
        paths.append({path: (names[id(module)], module) for path, module in sorted(linears.items())})
    return paths


def _wrappable(path: str) -> bool:
    return path.rsplit(".", 1)[-1] not in NOT_WRAPPABLE


def _targeted(layers: Sequence[dict[str, Any]], targets: str | Sequence[str]) -> set[str]:
    available = {path for layer in layers for path in layer}
    keys: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        hits = available if target == ALL_LINEAR else {path for path in available if _matches(path, target)}
        if not hits:
            choices = ", ".join(sorted({path.rsplit(".", 1)[-1] for path in available}))
            raise ValueError(f"lora.targets: {target!r} matches no linear layer of this model; it has {choices}")
        keys |= hits
    return keys


def _matches(path: str, target: str) -> bool:
    """Whether a name or glob means the module at `path` of a layer: its path, its tail, or one over what is above."""
    tail = path.rsplit(".", 1)[-1]
    return path.endswith("." + target) or any(fnmatch.fnmatchcase(p, target) for p in (path, tail, f".{path}"))


def _initial_a(shape: tuple[int, ...], linear: nn.Module, name: str, seed: int) -> mx.array:
    bound = 1 / math.sqrt(dense_shape(linear)[-1])
    return mx.random.uniform(-bound, bound, shape, key=DropoutKeys(seed).key(f"init/{name}"))
