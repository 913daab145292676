"""LoRA on a model's layers: attach, list the trainable parameters by layer, swap them for a transform.

y = base(x) + scale * (dropout(x) A) B, with A [in, r] uniform in +-1/sqrt(in) and B [r, out] zero. A and B are
float32 masters and are multiplied in the activations' dtype. Parameter names, shapes and module nesting are mlx-lm's,
so the files load there.

Dropout must be the same in the forward pass and in its recomputation, and different for each row, layer and module:
its mask is drawn from a key made of (seed, row number, stream number, module name) and of nothing else. Each token
has its own key made from that one, so the mask is also the same when a module works on a chunk of tokens at a time
(`first_token`), and when rows are one stream together.
"""

import fnmatch
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from segtrain.lora.flat import FlatArrays, FlatLayout

ALL_LINEAR = "all-linear"
LINEAR = (nn.Linear, nn.QuantizedLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
TRAINABLE = ("lora_a", "lora_b")
# y + z B in one operation: no second [T, out] array, and one rounding less. In float32 on the CPU it has some more.
FUSED_ADD = (mx.bfloat16, mx.float16)
# A product with an inner or outer dimension that isn't a multiple of this has unaligned rows: slow on every GPU, and on
# CUDA some compiled graphs with rank 3 end in "misaligned address". Products take A and B padded with zeros.
RANK_MULTIPLE = 8
# Gemma 3n's AltUp rewrites the weight of these linear layers before each call, which a wrapped one does not have.
NOT_WRAPPABLE = ("prediction_coefs", "correction_coefs")


Parts: TypeAlias = Sequence[tuple[int, int, int]]
"""A stream of several training rows: (number among these rows, stream of that row, tokens), one after the other."""


@dataclass
class DropoutKeys:
    """The random state of every dropout in a model, set by the engine for the row and stream at hand.

    `rows`: the numbers of rows that are one stream together; its `parts` say which tokens are whose.
    """

    seed: int = 0
    row: int = 0
    stream: int = 0
    active: bool = True
    rows: Sequence[int] = ()
    parts: Parts = ()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """No dropout while the block runs (evaluation)."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def enter(self, stream: int, parts: Parts = ()) -> None:
        """The stream whose tokens come next."""
        self.stream, self.parts = stream, parts

    def key(self, module: str) -> mx.array:
        return mx.random.key(self._number(module, self.row, self.stream))

    def of_tokens(self, module: str, first: int, count: int) -> mx.array:
        """A key for each of `count` tokens from the stream's token `first` on, [count, 2]."""
        if not self.parts:
            return _following(self.key(module), first, count)
        found, at = [], 0
        for row, stream, length in self.parts:
            lo, hi = max(first, at), min(first + count, at + length)
            if lo < hi:
                key = mx.random.key(self._number(module, self.rows[row], stream))
                found.append(_following(key, lo - at, hi - lo))
            at += length
        filler = first + count - max(first, at)
        return mx.concatenate([*found, mx.zeros((max(0, filler), 2), mx.uint32)])

    def _number(self, module: str, row: int, stream: int) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{row}/{stream}/{module}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _following(key: mx.array, first: int, count: int) -> mx.array:
    """A key for each of `count` tokens from number `first` on, [count, 2]."""
    high, low = key
    return mx.stack([mx.broadcast_to(high, (count,)), low + mx.arange(first, first + count, dtype=mx.uint32)], axis=-1)


@dataclass
class Casts:
    """What the products of all LoRA modules take instead of A and B: A and scale * B in the activations' dtype.

    Each module makes its own from its float32 masters, unless one of the right dtype is at hand in `made`.
    """

    made: dict[tuple[int, str], mx.array] = field(default_factory=dict)
    missed: bool = False

    @contextmanager
    def at_hand(self, slots: "Sequence[Slot]", arrays: Sequence[mx.array]) -> Iterator[None]:
        """While the block runs, modules may take `arrays` in these slots' place; `missed` says if one couldn't."""
        before = self.made
        self.made, self.missed = {slot.place: array for slot, array in zip(slots, arrays, strict=True)}, False
        try:
            yield
        finally:
            self.made = before

    def __call__(self, module: nn.Module, dtype: mx.Dtype) -> list[mx.array]:
        """A and scale * B of a LoRA module."""
        found = [self.made.get((id(module), key)) for key in TRAINABLE]
        ready = [array for array in found if array is not None and array.dtype == dtype]
        if len(ready) == len(TRAINABLE):
            return ready
        self.missed = True
        scales = (1.0, module.scale)
        return [scaled(module[key], scale).astype(dtype) for key, scale in zip(TRAINABLE, scales, strict=True)]


def scaled(value: mx.array, scale: float) -> mx.array:
    return value if scale == 1 else scale * value


def pads(dtype: mx.Dtype) -> bool:
    """Whether ranks are padded for products in `dtype`; a CPU's float32 products have no alignment to gain."""
    return dtype in FUSED_ADD or mx.default_device() != mx.Device(mx.cpu)


def padded_to(array: mx.array, multiple: int, axis: int) -> mx.array:
    """`array` with zeros at the end of `axis`, up to a multiple; its cotangent is cut back."""
    extra = -array.shape[axis] % multiple
    if not extra:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, extra)
    return mx.pad(array, widths)


@dataclass(frozen=True)
class Dropout:
    """Inverted dropout of probability `p`, keyed by module name."""

    p: float
    module: str
    keys: DropoutKeys

    def __call__(self, x: mx.array, first_token: int = 0) -> mx.array:
        """Drop elements of `x` [..., T, in], whose first row is token `first_token` of the stream."""
        if not self.keys.active:
            return x
        *outer, T, inputs = x.shape
        keys = self.keys.of_tokens(self.module, first_token, T)
        kept = mx.vmap(lambda key: mx.random.bernoulli(1 - self.p, (*outer, inputs), key=key), out_axes=-2)(keys)
        return mx.where(kept, x * (1 / (1 - self.p)), mx.zeros((), x.dtype)).astype(x.dtype)


class LoRAModule(nn.Module):
    """A frozen linear layer and its trainable A and B, zeros at first. `RANK_AXES`: of A and of B."""

    RANK_AXES: tuple[int, int]

    def __init__(
        self,
        linear: nn.Module,
        rank: int,
        scale: float,
        dropout: Dropout | None = None,
        casts: Casts | None = None,
    ):
        super().__init__()
        self.linear = linear
        self.scale = scale
        self.first_token = 0  # the stream's token in its first row: set by who calls it with a chunk of them
        self._dropout, self._casts = dropout, casts or Casts()
        self.lora_a, self.lora_b = map(mx.zeros, self.shapes(rank))

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of A and B."""
        raise NotImplementedError

    def factors(self, dtype: mx.Dtype) -> list[mx.array]:
        """What products in `dtype` take: A and scale * B, their rank padded with zeros where that pays."""
        found = self._casts(self, dtype)
        if not pads(dtype):
            return found
        return [padded_to(array, RANK_MULTIPLE, axis) for array, axis in zip(found, self.RANK_AXES, strict=True)]


class LoRALinear(LoRAModule):
    """LoRA on a dense or quantised linear layer: A [in, r], B [r, out]."""

    RANK_AXES = (-1, -2)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        outputs, inputs = dense_shape(self.linear)
        return (inputs, rank), (rank, outputs)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        z = self._dropout(x, self.first_token) if self._dropout else x
        a, b = self.factors(x.dtype)
        z = z @ a
        if y.dtype == x.dtype and x.dtype in FUSED_ADD:
            return mx.addmm(y, z, b)
        return y + (z @ b).astype(y.dtype)


class LoRASwitchLinear(LoRAModule):
    """LoRA on stacked experts: A [E, r, in], B [E, out, r]; `indices` name each row's expert."""

    RANK_AXES = (-2, -1)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        experts, outputs, inputs = dense_shape(self.linear)
        return (experts, rank, inputs), (experts, outputs, rank)

    @property
    def num_experts(self) -> int:
        return int(self.lora_a.shape[0])

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        z = self._dropout(x) if self._dropout else x
        dtype = mx.float32 if mx.default_device().type == mx.cpu else x.dtype  # all that the CPU's gather_mm takes
        z = z.astype(dtype)
        for factor in self.factors(dtype):
            z = mx.gather_mm(z, factor.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)
        return y + z.astype(y.dtype)


@dataclass(frozen=True)
class Slot:
    """One trainable array: its name in adapter files and where it sits in the model."""

    name: str
    module: nn.Module
    key: str

    @property
    def value(self) -> mx.array:
        return self.module[self.key]

    @property
    def place(self) -> tuple[int, str]:
        return id(self.module), self.key


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
        zeros = {slot.name: mx.zeros_like(slot.value) for slot in self.slots() if slot.key == TRAINABLE[1]}
        with self.dropout_keys.disabled(), self.with_values(self.values() | zeros):
            yield

    @cached_property
    def flat_layout(self) -> FlatLayout:
        """The order in which the parameters lie in the flat vector: every A, then every B."""
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
        """A and scale * B in `dtype`, flat, of flat parameters."""
        a, b = self._halves(params)
        return mx.concatenate([a.astype(dtype), scaled(b, self.scale).astype(dtype)])

    def cast_back(self, grads: Sequence[mx.array]) -> mx.array:
        """Flat gradients with respect to the parameters, float32, of those with respect to the arrays in `cast`."""
        a, b = (half.astype(mx.float32) for half in self._halves(self.flat_layout.join(grads)))
        return mx.concatenate([a, scaled(b, self.scale)])

    def _halves(self, flat: mx.array) -> tuple[mx.array, mx.array]:
        split = next(self.flat_layout.spans[slot.name][0] for slot in self.flat_slots if slot.key == TRAINABLE[1])
        return flat[:split], flat[split:]


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
    evaluate: bool = True,
) -> Lora:
    """Freeze `model` and put LoRA on the targeted linear layers of `model.layers[lo:hi]`.

    A target is a module name (`q_proj`), a path within a layer (`self_attn.q_proj`), or a glob over either. Raises
    ValueError for a target that matches nothing (naming those that exist) and for a layer range outside the model.
    Without `evaluate` the parameters are only described, for a model that nothing is computed with.
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
                kind = LoRASwitchLinear if isinstance(linear, EXPERTS) else LoRALinear
                dropped = Dropout(dropout, name, lora.dropout_keys) if dropout else None
                module = kind(linear, rank, scale, dropped, lora.casts)
                module.linear.freeze()
                module.lora_a = _initial_a(module.lora_a.shape, linear, name, seed)
                model.layers[i].update_modules(tree_unflatten([(path, module)]))
                lora.layers[i] += [Slot(f"{name}.{key}", module, key) for key in TRAINABLE]
    model.train()
    if evaluate:
        mx.eval([slot.value for slot in lora.slots()])
    return lora


def _layer_range(total: int, layers: tuple[int, int] | None) -> tuple[int, int]:
    lo, hi = layers or (0, total)
    if not 0 <= lo < hi <= total:
        raise ValueError(f"lora.layers [{lo}, {hi}] is outside the model's {total} layers")
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


def dense_shape(linear: nn.Module) -> tuple[int, ...]:
    *outer, inputs = linear.weight.shape
    return (*outer, inputs * 32 // linear.bits if "scales" in linear else inputs)


def _initial_a(shape: tuple[int, ...], linear: nn.Module, name: str, seed: int) -> mx.array:
    bound = 1 / math.sqrt(dense_shape(linear)[-1])
    return mx.random.uniform(-bound, bound, shape, key=DropoutKeys(seed).key(f"init/{name}"))
