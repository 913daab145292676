"""Named arrays end to end in one.

A model has hundreds of small trainable arrays. Handed to a GPU one by one, what is done to each of them (a cast, a
square, an optimiser's update) costs more than the arithmetic; in one array it is one operation. The named arrays are
views of it. Each begins at a multiple of `ALIGN` elements; what is between them is zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx

ALIGN = 64


@dataclass(frozen=True)
class FlatLayout:
    """Where each named array lies: `shapes` in order."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array]) -> "FlatLayout":
        return cls(tuple((name, tuple(array.shape)) for name, array in arrays.items()))

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """name -> (first element, element after the last one)."""
        spans, at = {}, 0
        for name, shape in self.shapes:
            spans[name] = (at, at + prod(shape))
            at = -(-spans[name][1] // ALIGN) * ALIGN
        return spans

    def flatten(self, arrays: Mapping[str, mx.array]) -> "FlatArrays":
        """`arrays`, which have these names, as one; they are that already if they were made so."""
        if isinstance(arrays, FlatArrays) and arrays.layout == self:
            return arrays
        return FlatArrays(self, self.join([arrays[name] for name, _ in self.shapes]))

    def join(self, arrays: Sequence[mx.array]) -> mx.array:
        """Arrays of these shapes, in this order, as one."""
        parts = []
        for array in arrays:
            parts.append(array.reshape(-1))
            if extra := -array.size % ALIGN:
                parts.append(mx.zeros((extra,), array.dtype))
        return mx.concatenate(parts)

    def views(self, array: mx.array) -> list[mx.array]:
        """The named arrays in `array`, in order."""
        spans = self.spans
        return [array[slice(*spans[name])].reshape(shape) for name, shape in self.shapes]


@dataclass(frozen=True, eq=False)
class FlatArrays(Mapping[str, mx.array]):
    """Named arrays that are views of one `array`."""

    layout: FlatLayout
    array: mx.array

    @cached_property
    def _views(self) -> dict[str, mx.array]:
        return dict(zip(self.layout.spans, self.layout.views(self.array), strict=True))

    def __getitem__(self, name: str) -> mx.array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.spans)

    def __len__(self) -> int:
        return len(self.layout.spans)

    def with_array(self, array: mx.array) -> "FlatArrays":
        return FlatArrays(self.layout, array)
