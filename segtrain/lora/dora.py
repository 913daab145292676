"""DoRA (Liu et al. 2024, arXiv:2402.09353): a weight's magnitude is trained apart from its direction.

With W [out, in] frozen and V = W + scale * (A B)^T, row by row

    y = m / |V| * (x W^T + scale * dropout(x) A B) + bias

where m [out] is trained and begins as |W|, and |V| has no gradient (the paper's section 4.3; mlx-lm and PEFT do the
same). V is never made. The norm of its rows, with every sum over `in` or the rank,

    |V|^2 = |W|^2 + scale * B . (2 (W A)^T + scale * (A^T A) B)          "." sums over the rank, [out]

needs all of W once (|W|^2, kept) and its product with as many rows as the rank, which a quantised weight gives as it
is. The product is in the activations' dtype, as all of LoRA's are, and what is made of it in float32: its rounding is
small beside |W|^2, as the update is. At the start |V| is |W| to the bit, and m / |V| is 1.
"""

import mlx.core as mx
import mlx.nn as nn

from segtrain.lora.frozen import dense_shape, product, squared_norms, without_bias
from segtrain.lora.modules import Casts, Dropout, LoRALinear

TINY = 1e-30  # a row of zeros stays one


class DoRALinear(LoRALinear):
    """DoRA on a dense or quantised linear layer: A [in, r], B [r, out], m [out]."""

    TRAINED = (*LoRALinear.TRAINED, "m")

    def __init__(
        self,
        linear: nn.Module,
        rank: int,
        scale: float,
        dropout: Dropout | None = None,
        casts: Casts | None = None,
    ):
        super().__init__(linear, rank, scale, dropout, casts)
        self.m = self.squares = mx.zeros(dense_shape(linear)[0])
        self.freeze(recurse=False, keys="squares")

    def measure(self) -> None:
        """Begin with the weights' own norms. Reads all of them."""
        self.squares = squared_norms(self.linear)
        self.m = mx.sqrt(self.squares)

    def neutral(self) -> dict[str, mx.array]:
        return super().neutral() | {"m": mx.sqrt(self.squares)}

    def norms(self, dtype: mx.Dtype) -> mx.array:
        """[out]: the norm of each row of the adapted weights, for activations in `dtype`; without a gradient."""
        a, b = self.factors(dtype)  # [in, r], [r, out] with the scale in it
        across = product(self.linear, a.T)  # [r, out]
        a, b, across = (array.astype(self.squares.dtype) for array in (a, b, across))
        squares = self.squares + mx.sum(b * (2 * across + a.T @ a @ b), axis=0)
        return mx.stop_gradient(mx.sqrt(mx.maximum(squares, TINY)))

    def __call__(self, x: mx.array) -> mx.array:
        with without_bias(self.linear):
            y = super().__call__(x)
        y = (self._casts.master(self, "m") / self.norms(x.dtype)).astype(y.dtype) * y
        return y + self.linear["bias"] if "bias" in self.linear else y
