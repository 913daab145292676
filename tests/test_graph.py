"""What a graph is said to hold against what MLX holds when it is evaluated on a CPU."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from segtrain.memory.graph import QUEUES, trace, trace_vjp

Function = Callable[[mx.array], list[mx.array]]
TIMES = 40  # operations are many more than MLX's queue takes
WITHIN = 0.06


def of_one_operand(x: mx.array) -> list[mx.array]:
    for _ in range(TIMES):
        x = mx.exp(-(x * x))
    return [x]


def through_views(x: mx.array) -> list[mx.array]:
    """A view holds nothing itself: the next result takes the buffer over."""
    y = x
    for _ in range(TIMES):
        y = mx.sin(y.reshape(2, -1)).reshape(-1) + x
    return [y]


def needed_by_others(x: mx.array) -> list[mx.array]:
    """Whose buffer nobody can take over: others that need it still wait in the queue."""
    y = z = x
    for _ in range(TIMES):
        a = mx.sin(y)
        z = z + a
        y = a * z
    return [y, z]


def of_sums(x: mx.array) -> list[mx.array]:
    rows = y = x.reshape(512, -1)
    for _ in range(TIMES):
        y = mx.exp(rows - y.sum(axis=-1, keepdims=True))
    return [y]


def measured(function: Callable[[], list[mx.array]]) -> int:
    """Bytes that evaluating the results holds at its highest."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function())
    return mx.get_peak_memory() - before


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the CPU's queue")
@pytest.mark.parametrize(
    "function", [of_one_operand, through_views, needed_by_others, of_sums], ids=lambda f: f.__name__
)
def test_the_peak_of_a_forward_pass(function: Function) -> None:
    x = mx.random.normal((1 << 18,))
    mx.eval(x)
    real = measured(lambda: function(x))
    assert trace(function, x).peak(QUEUES["cpu"]) == pytest.approx(real, rel=WITHIN)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the CPU's queue")
@pytest.mark.parametrize(
    "layer",
    [
        nn.gelu_approx,
        nn.silu,
        lambda x: mx.softmax(x, axis=-1),
        lambda x: mx.fast.rms_norm(x, mx.ones(x.shape[-1]), 1e-5),
        lambda x: 30 * mx.tanh(x / 30),
    ],
    ids=["gelu", "silu", "softmax", "norm", "soft-cap"],
)
def test_the_peak_of_a_backward_pass(layer: Callable[[mx.array], mx.array]) -> None:
    def chain(x: mx.array) -> list[mx.array]:
        for _ in range(12):
            x = layer(x)
        return [x]

    x, cotangent = mx.random.normal((512, 512)), mx.random.normal((512, 512))
    mx.eval(x, cotangent)

    def both() -> list[mx.array]:
        outputs, gradients = mx.vjp(chain, [x], [cotangent])
        return [*outputs, *gradients]

    real = measured(both)
    assert trace_vjp(chain, [x], [cotangent]).peak(QUEUES["cpu"]) == pytest.approx(real, rel=WITHIN)
