"""Compiled graphs: one a key and shape, a bounded number, and freed when dropped."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import mlx.core as mx
import pytest
import tiny

from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward
from segtrain.engine.traces import Traces
from segtrain.models.stack import Execution, LayerStack


def test_a_function_is_traced_once_a_key_and_shape() -> None:
    traces, traced = Traces(), []

    def doubled(x: mx.array) -> mx.array:
        traced.append(x.shape)
        return 2 * x

    for size in (3, 4, 3, 4):
        assert traces(("doubled",), doubled, mx.ones((size,))).tolist() == [2.0] * size
    assert traces(("tripled",), lambda x: 3 * x, mx.ones((3,))).tolist() == [3.0] * 3
    assert traced == [(3,), (4,)]


FLAT = """
import sys
import mlx.core as mx
import psutil
import tiny
from segtrain.engine import objectives
from segtrain.engine.backward import SegmentedBackward
from segtrain.lora.layers import attach
from segtrain.models.stack import LayerStack

model = tiny.build("llama")
lora = attach(model, rank=2, scale=1.0)
backward = SegmentedBackward(LayerStack(model), lora, objectives.sft, segment_size=1, compiled=True)
mx.set_cache_limit(1 << 20)
for number in range(600):
    backward.step(tiny.row(20 + 7 * number % 600))
    if number in (149, 599):
        print(psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.slow
def test_memory_stays_flat_over_600_lengths() -> None:
    """Compiled on a CPU, with no length twice: after the graphs that are kept, within 20 MiB."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    command = [sys.executable, "-c", FLAT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    before, after = map(int, done.stdout.split())
    assert after - before < 20


def test_the_function_used_longest_ago_is_freed() -> None:
    traces, alive = Traces(limit=2), {}
    for size in (1, 2, 1, 3):

        def function(x: mx.array) -> mx.array:
            return x + 1

        alive.setdefault(size, weakref.ref(function))
        mx.eval(traces((), function, mx.ones((size,))))
        del function
    gc.collect()
    assert {size: ref() is not None for size, ref in alive.items()} == {1: True, 2: False, 3: True}


@pytest.mark.parametrize("engine", [SegmentedBackward, FullBackward])
def test_rows_of_many_lengths_leave_a_bounded_number_of_graphs(engine: type) -> None:
    model = tiny.build("llama")
    lora, traces = tiny.attach(model), Traces(limit=6)
    backward = engine(LayerStack(model), lora, objectives.sft, compiled=True, traces=traces)
    for length in (*range(12, 20), 12):
        step = backward.step(tiny.row(length))
    assert len(traces) == 6
    expected = FullBackward(LayerStack(model), lora, objectives.sft).step(tiny.row(12))
    assert tiny.relative(expected.grads, step.grads) < 1e-5


def test_engines_that_share_graphs_run_as_each_says() -> None:
    model = tiny.build("llama", bits=4)
    stack, lora, traces = LayerStack(model), tiny.attach(model), Traces()
    expected = FullBackward(stack, lora, objectives.sft).step(tiny.row())
    sizes = []
    for execution in (Execution(), Execution(mlp_rows=5), Execution(dequantize=True), Execution()):
        running = stack.executing(execution)
        step = SegmentedBackward(running, lora, objectives.sft, compiled=True, traces=traces).step(tiny.row())
        sizes.append(len(traces))
        assert tiny.relative(expected.grads, step.grads) < 1e-5
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]
    assert stack.execution == Execution()
