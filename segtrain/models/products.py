"""Linear products remembered from the forward pass, so that the backward pass need not compute them again.

Recomputing a layer costs mostly its matrix products. The vjp of y = x W needs x and W but not y: y is wanted only by
what follows. So a layer whose products were remembered is recomputed without them: norms, rotary embedding,
attention and activations run again, each linear layer's output is looked up, and its vjp is its own. That frees more
time for a byte than holding all of a layer's activations: y [T, out] takes 2 T out bytes and 2 T in out operations.

The last product of a range is not wanted by its backward pass where it ends in a residual sum, and is not remembered.
DoRA's magnitudes are differentiated by what they multiply: there the frozen layer's product is remembered.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from segtrain.lora.modules import LoRALinear
from segtrain.models.alike import as_function
from segtrain.models.capture import intercept

LINEAR = (LoRALinear, nn.Linear, nn.QuantizedLinear)


def linear_modules(layers: Sequence[nn.Module], without: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """The linear layers in `layers`, those with LoRA as one; none inside the modules `without`."""
    inner = {id(m) for outer in without for _, m in outer.named_modules()}
    found: list[nn.Module] = []
    for layer in layers:
        for _, module in layer.named_modules():
            if type(module) in LINEAR and id(module) not in inner:
                found.append(module)
            inner |= {id(m) for _, m in module.named_modules()} if type(module) is LoRALinear else set()
    return found


@contextmanager
def remembering(modules: Sequence[nn.Module]) -> Iterator[list[mx.array]]:
    """A list that fills with the outputs of `modules`, in the order of their calls."""
    originals = [type(module).__call__ for module in modules]
    products: list[mx.array] = []

    def handler(i: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
        products.append(originals[i](modules[i], *args, **kwargs))
        return products[-1]

    with intercept(modules, handler):
        yield products
    del products[-1:]


@contextmanager
def recalling(modules: Sequence[nn.Module], products: Sequence[mx.array]) -> Iterator[None]:
    """While the block runs, calls of `modules` return these `products` in order; once they run out, their own."""
    originals = [type(module).__call__ for module in modules]
    known = iter(products)

    def handler(i: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
        product = next(known, None)
        if product is None:
            return originals[i](modules[i], *args, **kwargs)
        return _recalled(modules[i], originals[i], product, *args)

    with intercept(modules, handler):
        yield


def _recalled(module: nn.Module, original: Any, product: mx.array, x: mx.array) -> mx.array:
    """`product` for original(module, x), with the derivatives of that."""
    function, trainable = as_function(module, original)

    @mx.custom_function
    def known(*inputs: mx.array) -> mx.array:
        return product

    @known.vjp
    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        inputs = primals if trainable else (primals,)
        _, grads = mx.vjp(lambda *given: [function(*given)], list(inputs), [cotangent])
        return tuple(grads) if trainable else grads[0]

    result: Any = known(x, *trainable)
    return result
