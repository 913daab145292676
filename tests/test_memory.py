"""What the claims on memory rest on, in bytes of MLX's allocator: each bound breaks if what it names is undone.

The bounds are counts of arrays, worked out beside each test. Sizes are chosen so that what is undone weighs far more
than what MLX's scheduler makes of the same work from run to run.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
import tiny_run
from mlx_lm.models.llama import MLP, ModelArgs

from segtrain.attention.blocks import Blocks
from segtrain.data import open_data
from segtrain.engine import objectives
from segtrain.engine.backward import SegmentedBackward
from segtrain.models.load import load
from segtrain.models.stack import LayerStack
from segtrain.models.tokenwise import chunked
from segtrain.parallel.ranks import join
from segtrain.run.optimizer import Optimizer
from segtrain.run.session import open_session
from segtrain.run.state import RunState
from segtrain.run.updates import Updates

MIB = 2**20
LAYERS, HIDDEN, TOKENS = 24, 256, 256
CARRY = TOKENS * HIDDEN * 4  # bytes: float32


def active() -> int:
    """Bytes in use once all that was begun is done."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def peak(run: Callable[[], object]) -> int:
    """Bytes above what is in use before, and in MLX's cache nothing."""
    before = active()
    mx.reset_peak_memory()
    kept = run()
    mx.synchronize()
    del kept
    return mx.get_peak_memory() - before


def test_attention_s_blocks_wait_for_one_another() -> None:
    """Tiles of 1 MiB: one block's few, q-sized arrays of a part, and the cotangents (32 parts' tiles at once: 149)."""
    shapes = [(1, heads, 1024, 64) for heads in (8, 2, 2)]
    q, k, v = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    cotangent = mx.random.normal(q.shape, key=mx.random.key(3))
    mx.eval(q, k, v, cotangent)
    blocks = Blocks(0.125, None, None, tile_bytes=MIB)
    found = peak(lambda: mx.eval(mx.vjp(blocks, [q, k, v], [cotangent])))
    print("attention", found / MIB)
    assert found < 40 * MIB


def test_an_mlp_s_chunks_wait_for_one_another() -> None:
    mlp = MLP(ModelArgs("llama", 128, 1, 512, 4, 1e-5, 8, num_key_value_heads=1))
    x, cotangent = (mx.random.normal((1, 2048, 128), key=mx.random.key(i)) for i in range(2))
    mx.eval(mlp.parameters(), x, cotangent)

    def run() -> None:
        with chunked([mlp], 64):
            mx.eval(mx.vjp(lambda x: mlp(x), [x], [cotangent]))

    found = peak(run)
    print("mlp", found / MIB)
    assert found < 40 * MIB


def backward(**options: Any) -> SegmentedBackward:
    """Of a llama whose carries are large and whose layers' own arrays are few."""
    model = tiny.build(
        "llama", hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=64, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    return SegmentedBackward(LayerStack(model), tiny.attach(model), objectives.sft, head_chunk=128, **options)


@pytest.mark.parametrize("boundaries", [None, 5])
def test_backward_begins_with_the_boundaries_and_one_cotangent(boundaries: int | None) -> None:
    """The last hidden states, which only the head needs, are gone by then."""
    seen: list[int] = []
    before = 0

    @contextmanager
    def meter(phase: str, stream: int) -> Iterator[None]:
        if phase.startswith("backward") and not seen:
            seen.append(active() - before)
        yield

    passes = backward(boundaries=boundaries, meter=meter)
    row = tiny.row(TOKENS + 1)
    passes.step(row)
    seen.clear()
    before = active()
    passes.step(row)
    carries = seen[0] / CARRY
    print("head", carries)
    if boundaries is None:
        assert carries < LAYERS + 1 + 0.5


def test_evaluation_holds_one_edge() -> None:
    passes, row = backward(), tiny.row(TOKENS + 1)
    passes.evaluate(row)
    found = peak(lambda: passes.evaluate(row)) / CARRY
    print("evaluate", found)
    assert found < LAYERS


def test_an_update_leaves_no_gradient_behind(tmp_path: Path) -> None:
    recipe = tiny_run.recipe(tmp_path, lora__rank=64, train__optimizer="sgd")
    loaded = load(recipe.model)
    session = open_session(recipe, objectives.of_recipe("sft", recipe), loaded)
    rows = open_data(recipe, loaded.tokenizer, pairs=False).train
    passes = SegmentedBackward(session.stack, session.lora, session.objective)
    updates = Updates(session, rows, lambda layout: passes, Optimizer(recipe.train, 10), join())
    state = RunState()
    adapter = session.lora.packed().array.nbytes
    updates.next(state, lambda: False)
    before = active()
    update = updates.next(state, lambda: False)
    print("update", (active() - before) / adapter)
    assert update.applied
    assert active() - before < 0.5 * adapter
