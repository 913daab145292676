"""The projection to the vocabulary by blocks of its rows, so that it needn't be in memory as a whole.

The model's own head is split in three: what comes before the projection (norm, scaling), the projection, and what
comes after it (soft-cap, scale), which must work element by element. `projection_of` looks for it in a model and
returns None where that can't be told; then the head runs as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from segtrain.models.alike import holding
from segtrain.models.capture import intercept
from segtrain.models.dense import dense_weight
from segtrain.models.ends import EMBEDDINGS, LINEAR, Block

Logits: TypeAlias = Callable[[mx.array], mx.array]
Project: TypeAlias = Callable[[nn.Module, mx.array], mx.array]
Arrays: TypeAlias = Mapping[str, mx.array]

ORIGINALS: dict[type, Callable[[Any, mx.array], Any]] = {
    **{kind: kind.__call__ for kind in LINEAR},
    **{kind: kind.as_linear for kind in EMBEDDINGS},
}
"""How each kind projects, whatever stands in for it meanwhile."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's head by blocks of the vocabulary. `read`: a block's arrays by key, for as long as they are used.

    `dense`: quantised blocks are expanded for dense products. Shapes: hidden states [..., M, H], what the projection
    takes X [1, M, H'], logits [1, M, B] for the B rows of a block.
    """

    module: nn.Module
    blocks: Sequence[Block]
    read: Callable[[Block], Arrays]
    logits: Logits
    dense: bool = False

    def before(self, h: mx.array) -> mx.array:
        """From the hidden states that leave the last layer to what the projection takes."""
        found: list[mx.array] = []

        def handler(module: nn.Module, x: mx.array) -> mx.array:
            found.append(x)
            return mx.zeros((*x.shape[:-1], 1), x.dtype)

        with projecting([self.module], handler):
            self.logits(h)
        return found[0]

    def project(self, x: mx.array, arrays: Arrays) -> mx.array:
        """The projection of `x` by a block."""
        with self._holding(arrays):
            if self.dense and "scales" in arrays:
                y = x @ dense_weight(self.module, x.dtype).T
                return y + arrays["bias"] if "bias" in arrays else y
            return _project(self.module, x)

    def after(self, h: mx.array, y: mx.array) -> mx.array:
        """From a block's projection to its logits; of `h`, the hidden states, only the shape counts."""
        with projecting([self.module], lambda module, x: y):
            return self.logits(h)

    def rows(self, arrays: Arrays, numbers: mx.array, dtype: mx.Dtype) -> mx.array:
        """Rows [M, H'] of a block's weights."""
        picked = {key: array[numbers] for key, array in arrays.items()}
        with self._holding(picked):
            return dense_weight(self.module, dtype) if "scales" in picked else picked["weight"].astype(dtype)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While the block runs, the model's own calls of the projection go block by block, for a token's logits.

        Those of several tokens stay lazy: of a prompt, nothing is wanted but what the layers remember.
        """

        def handler(module: nn.Module, x: mx.array) -> mx.array:
            if x.shape[-2] > 1:
                return _project(module, x)
            parts = []
            for block in self.blocks:
                parts.append(self.project(x, self.read(block)))
                mx.eval(parts[-1])
            return mx.concatenate(parts, axis=-1)

        with projecting([self.module], handler):
            yield

    def _holding(self, arrays: Arrays) -> AbstractContextManager[None]:
        return holding([(self.module, key) for key in arrays], list(arrays.values()))


def projection_of(ends: Sequence[nn.Module], logits: Logits, h: mx.array) -> nn.Module | None:
    """The one of `ends` that a head projects by, if what follows is element by element. `h`: hidden states, any."""
    calls: list[tuple[nn.Module, mx.array]] = []

    def handler(module: nn.Module, x: mx.array) -> mx.array:
        calls.append((module, x))
        return mx.zeros((*x.shape[:-1], module["weight"].shape[0]), x.dtype)

    with projecting(ends, handler):
        shape = logits(h).shape
    if len(calls) != 1:
        return None
    module, x = calls[0]
    count = module["weight"].shape[0]
    return module if shape[-1] == count and _by_element(module, logits, h, (*x.shape[:-1], count), x.dtype) else None


def _by_element(module: nn.Module, logits: Logits, h: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> bool:
    head = Vocabulary(module, [], held(module), logits)
    y = mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)
    half = shape[-1] // 2
    parts = [head.after(h, part) for part in (y[..., :half], y[..., half:])]
    return bool(mx.array_equal(head.after(h, y), mx.concatenate(parts, axis=-1)).item())


def held(module: nn.Module) -> Callable[[Block], Arrays]:
    """How blocks of a projection in memory are read."""
    return lambda block: {k: v[block.lo : block.hi] for k, v in module.items() if isinstance(v, mx.array)}


def _project(module: nn.Module, x: mx.array) -> mx.array:
    y: mx.array = ORIGINALS[type(module)](module, x)
    return y


@contextmanager
def projecting(modules: Sequence[nn.Module], handler: Project) -> Iterator[None]:
    """While the block runs, projections by these modules (an embedding's `as_linear`) go to `handler`."""
    known = {id(module) for module in modules}
    originals = {kind: kind.as_linear for kind in EMBEDDINGS}  # as they are now

    def replacement(original: Callable) -> Callable:
        return lambda self, x: handler(self, x) if id(self) in known else original(self, x)

    linear = [module for module in modules if type(module) not in EMBEDDINGS]
    try:
        for kind, original in originals.items():
            setattr(kind, "as_linear", replacement(original))  # noqa: B010, mypy refuses the plain form
        with intercept(linear, lambda i, args, kwargs: handler(linear[i], *args)):
            yield
    finally:
        for kind, original in originals.items():
            setattr(kind, "as_linear", original)  # noqa: B010
