"""Token-wise modules (a layer's MLP) differentiated in chunks of tokens.

At segment size 1 the MLP's intermediates, each [T, intermediate], are most of what is live. The module maps each
token by itself, so its vjp is the sum (for parameters) and concatenation (for inputs) of its chunks' vjps. The chunks
are chained: a chunk's inputs depend on the previous chunk's gradient, so that MLX's scheduler, which runs ahead
breadth first, can't hold several at once. A module's intermediates are recomputed in its backward; its forward is not
run there when nothing needs its output.

The forward pass holds fewer intermediates than the backward pass and takes chunks `FORWARD` times as long.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from segtrain.engine.segments import cuts
from segtrain.lora.layers import EXPERTS
from segtrain.models.alike import as_function
from segtrain.models.capture import intercept

NAMES = ("mlp", "feed_forward", "ffn")
FORWARD = 4


def tokenwise_modules(layer: nn.Module) -> list[nn.Module]:
    """A layer's dense MLP, by the names that mlx-lm's models give it; none where experts are routed."""
    named = (layer.get(name) for name in NAMES)
    return [module for module in named if isinstance(module, nn.Module) and not _routes(module)]


def _routes(module: nn.Module) -> bool:
    """Whether `module` has experts: their dropout masks are drawn for all tokens of a call at once."""
    return any(isinstance(m, EXPERTS) or "experts" in path.split(".") for path, m in module.named_modules())


@contextmanager
def chunked(modules: Sequence[nn.Module], rows: int) -> Iterator[None]:
    """While the block runs, `modules` work on at most `rows` tokens at a time. Exact; x is [B, T, H]."""
    originals = [type(module).__call__ for module in modules]

    def handler(i: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
        x, *rest = args
        each = max(1, rows // x.shape[0]) if x.ndim > 2 else rows  # B rows take theirs at the same time
        if rest or kwargs or x.shape[-2] <= each:
            return originals[i](modules[i], *args, **kwargs)
        return _chunked_call(modules[i], originals[i], x, each)

    with intercept(modules, handler):
        yield


def _chunked_call(module: nn.Module, original: Any, x: mx.array, rows: int) -> mx.array:
    function, trainable = as_function(module, original)
    tokens = x.shape[-2]

    def call(first_token: int, x: mx.array, *values: mx.array) -> mx.array:
        with _counting_from(module, first_token):
            return function(x, *values)

    @mx.custom_function
    def whole(x: mx.array, *values: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for lo, hi in cuts(0, tokens, FORWARD * rows):
            part = x[..., lo:hi, :]
            if parts:
                (part,) = mx.depends([part], parts[-1:])
            parts.append(call(lo, part, *values))
        return mx.concatenate(parts, axis=-2) if len(parts) > 1 else parts[0]

    @whole.vjp
    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        x, *values = primals if trainable else (primals,)
        dxs: list[mx.array] = []
        sums: list[mx.array] = []
        for lo, hi in cuts(0, tokens, rows):
            part, dy = x[..., lo:hi, :], cotangent[..., lo:hi, :]
            if dxs:
                part, dy = mx.depends([part, dy], [dxs[-1], *sums])
            _, (dx, *grads) = mx.vjp(lambda *inputs, lo=lo: [call(lo, *inputs)], [part, *values], [dy])
            dxs.append(dx)
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        dx = mx.concatenate(dxs, axis=-2)
        return (dx, *sums) if trainable else dx

    result: Any = whole(x, *trainable)
    return result


@contextmanager
def _counting_from(module: nn.Module, first_token: int) -> Iterator[None]:
    """Tell the parts of `module` that draw a mask by token (dropout) which tokens they get."""
    parts = [m for _, m in module.named_modules() if hasattr(m, "first_token")]
    try:
        for part in parts:
            part.first_token = first_token
        yield
    finally:
        for part in parts:
            part.first_token = 0
