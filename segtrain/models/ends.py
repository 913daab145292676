"""The ends of a model: the token embeddings and the projection to the vocabulary, outside its layers.

Their arrays have a row for each token of the vocabulary. A stream looks up some rows of an embedding; the projection
can take a block of rows at a time (`models.vocabulary`). So neither has to be in memory as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from segtrain.engine.segments import cuts
from segtrain.models.alike import holding, places
from segtrain.models.capture import intercept

SMALL = 1 << 20  # bytes up to which an array stays in memory
BLOCK_BYTES = 128 << 20  # of a block, at most
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
LINEAR = (nn.Linear, nn.QuantizedLinear)

Rows: TypeAlias = Callable[[nn.Module, Sequence[int]], Mapping[str, mx.array]]
"""(module, ascending row numbers) to these rows of its arrays, by key."""


@dataclass(frozen=True)
class Block:
    """Rows lo..hi-1 of the vocabulary."""

    lo: int
    hi: int


def ends_of(model: nn.Module) -> list[nn.Module]:
    """The large embeddings outside the layers, and linear layers with as many rows as one of them."""
    inside = {id(m) for layer in model.layers for m in layer.modules()}
    outside = [m for _, m in model.named_modules() if id(m) not in inside and array_bytes(m) > SMALL]
    embeddings = [m for m in outside if type(m) in EMBEDDINGS]
    counts = {m["weight"].shape[0] for m in embeddings}
    return [*embeddings, *(m for m in outside if type(m) in LINEAR and m["weight"].shape[0] in counts)]


def array_bytes(module: nn.Module) -> int:
    """Of the module's own arrays."""
    return sum(array.nbytes for array in module.values() if isinstance(array, mx.array))


def blocks_of(module: nn.Module, layers: Sequence[nn.Module]) -> list[Block]:
    """The rows of `module` in blocks of about the same size, at most as large as the largest of `layers`."""
    rows, most = module["weight"].shape[0], max(sum(m[key].nbytes for m, key in places([layer])) for layer in layers)
    count = min(rows, -(-array_bytes(module) // min(most, BLOCK_BYTES)))
    return [Block(lo, hi) for lo, hi in cuts(0, rows, -(-rows // count))]


@contextmanager
def embedding(modules: Sequence[nn.Module], rows: Rows) -> Iterator[None]:
    """While the block runs, these embeddings look tokens up among the `rows` that they need alone."""
    originals = [type(module).__call__ for module in modules]

    def handler(i: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
        (ids,) = args
        numbers = sorted({*_listed(ids)})
        if numbers and not 0 <= numbers[0] <= numbers[-1] < modules[i]["weight"].shape[0]:
            raise ValueError(f"token {numbers[-1]} has no row in an embedding of {modules[i]['weight'].shape[0]}")
        place = {number: at for at, number in enumerate(numbers)}
        found = rows(modules[i], numbers)
        among = mx.array([place[number] for number in _listed(ids)], dtype=mx.int32).reshape(ids.shape)
        with holding([(modules[i], key) for key in found], list(found.values())):
            return originals[i](modules[i], among)

    with intercept(modules, handler):
        yield


def _listed(ids: mx.array) -> list[int]:
    found: Any = ids.reshape(-1).tolist()
    return list(found)
