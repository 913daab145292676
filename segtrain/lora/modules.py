"""What takes a linear layer's place: the layer, frozen, and its trainable A and B.

y = base(x) + scale * (dropout(x) A) B, with A [in, r] and B [r, out]. A and B are float32 masters and are multiplied in
the activations' dtype. Parameter names, shapes and module nesting are mlx-lm's, so the files load there.

Dropout must be the same in the forward pass and in its recomputation, and different for each row, layer and module:
its mask is drawn from a key made of (seed, row number, stream number, module name) and of nothing else. Each token
has its own key made from that one, so the mask is also the same when a module works on a chunk of tokens at a time
(`first_token`), and when rows are one stream together.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn

from segtrain.lora.frozen import dense_shape

FACTORS = ("lora_a", "lora_b")
# y + z B in one operation: no second [T, out] array, and one rounding less. In float32 on the CPU it has some more.
FUSED_ADD = (mx.bfloat16, mx.float16)
# A product with an inner or outer dimension that isn't a multiple of this has unaligned rows: slow on every GPU, and on
# CUDA some compiled graphs with rank 3 end in "misaligned address". Products take A and B padded with zeros.
RANK_MULTIPLE = 8


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
class Casts:
    """What the products of all LoRA modules take instead of A and B: A and scale * B in the activations' dtype.

    Each module makes its own from its float32 masters, unless one of the right dtype is at hand in `made`.
    """

    made: dict[tuple[int, str], mx.array] = field(default_factory=dict)
    missed: bool = False

    @contextmanager
    def at_hand(self, slots: Sequence[Slot], arrays: Sequence[mx.array]) -> Iterator[None]:
        """While the block runs, modules may take `arrays` in these slots' place; `missed` says if a master was used."""
        before = self.made
        self.made, self.missed = {slot.place: array for slot, array in zip(slots, arrays, strict=True)}, False
        try:
            yield
        finally:
            self.made = before

    def __call__(self, module: nn.Module, dtype: mx.Dtype) -> list[mx.array]:
        """A and scale * B of a LoRA module."""
        found = [self.made.get((id(module), key)) for key in FACTORS]
        ready = [array for array in found if array is not None and array.dtype == dtype]
        if len(ready) == len(FACTORS):
            return ready
        self.missed = True
        scales = (1.0, module.scale)
        return [scaled(module[key], scale).astype(dtype) for key, scale in zip(FACTORS, scales, strict=True)]

    def master(self, module: nn.Module, key: str) -> mx.array:
        """A parameter that is used as it is."""
        self.missed = True
        return module[key]


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

    TRAINED: tuple[str, ...] = FACTORS
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

    def neutral(self) -> dict[str, mx.array]:
        """Values of parameters with which the module is its frozen layer."""
        return {"lora_b": mx.zeros_like(self.lora_b)}

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


def trains(module: nn.Module, key: str) -> bool:
    """Whether this array of a module is a parameter of the adapter."""
    return isinstance(module, LoRAModule) and key in module.TRAINED
