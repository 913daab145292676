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
from segtrain.run.passes import Passes
from segtrain.run.session import open_session
from segtrain.run.state import RunState
from segtrain.run.updates import Updates

MIB = 2**20
LAYERS, HIDDEN, TOKENS = 6, 128, 128
CARRY = TOKENS * HIDDEN * 4  # bytes: float32


def active() -> int:
    """Bytes in use once all that was begun is done."""
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def peak(run: Callable[[], object]) -> int:
    """Bytes above what is in use before, and in MLX's cache nothing."""
    gc.collect()
    before = active()
    mx.reset_peak_memory()
    kept = run()
    mx.synchronize()
    del kept
    return mx.get_peak_memory() - before


def test_attention_s_blocks_wait_for_one_another() -> None:
    """Tiles of 1 MiB: 17 MiB, of which 9 are arrays of q's size and of the keys'; 40 with all blocks at once."""
    shapes = [(1, heads, 1024, 64) for heads in (8, 2, 2)]
    q, k, v = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    cotangent = mx.random.normal(q.shape, key=mx.random.key(3))
    mx.eval(q, k, v, cotangent)
    blocks = Blocks(0.125, None, None, tile_bytes=MIB)
    assert peak(lambda: mx.eval(mx.vjp(blocks, [q, k, v], [cotangent]))) < 28 * MIB


def test_an_mlp_s_chunks_wait_for_one_another() -> None:
    """Chunks of 64 tokens of 2,048: 6 MiB, of which 3 are x and what it became; 14 with all chunks at once in forward,
    16 in backward.
    """
    mlp = MLP(ModelArgs("llama", 64, 1, 512, 4, 1e-5, 8, num_key_value_heads=1))
    x, cotangent = (mx.random.normal((1, 2048, 64), key=mx.random.key(i)) for i in range(2))
    mx.eval(mlp.parameters(), x, cotangent)

    def run() -> None:
        with chunked([mlp], 64):
            mx.eval(mx.vjp(lambda x: mlp(x), [x], [cotangent]))

    assert peak(run) < 10 * MIB


def engine(**options: Any) -> SegmentedBackward:
    """Of a llama whose carries are large beside its layers' own arrays and adapter."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = tiny.build("llama", num_hidden_layers=LAYERS, **sizes)
    lora = tiny.attach(model, rank=1, targets=["*.q_proj"])
    return SegmentedBackward(LayerStack(model), lora, objectives.sft, head_chunk=64, **options)


def held(run: Callable[[SegmentedBackward], object], phase: str, **options: Any) -> list[int]:
    """Carries in memory at the beginning of each phase of that kind."""
    seen: list[float] = []
    before = 0

    @contextmanager
    def meter(name: str, stream: int) -> Iterator[None]:
        if name.startswith(phase):
            seen.append((active() - before) / CARRY)
        yield

    passes = engine(meter=meter, **options)
    gc.collect()
    before = active()
    run(passes)
    return [round(carries) for carries in seen]


def step(passes: SegmentedBackward) -> object:
    return passes.step(tiny.row(TOKENS + 1))


@tiny.frees_at_once
def test_each_segment_s_boundary_goes_as_backward_passes_it() -> None:
    """All boundaries and one cotangent; the last hidden states, which only the head needs, are gone by then."""
    assert held(step, "backward") == [boundaries + 1 for boundaries in range(LAYERS, 0, -1)]


@pytest.mark.parametrize(("boundaries", "most"), [(4, 4), (3, 3), (2, 4), (1, LAYERS)])
def test_backward_holds_no_more_boundaries_than_its_groups_need(boundaries: int, most: int) -> None:
    """With one cotangent. Groups of segments: what is not kept of a group is made again when backward reaches it."""
    assert max(held(step, "backward", boundaries=boundaries)) == most + 1


def test_evaluation_holds_one_edge() -> None:
    """Where the head begins: the embeddings, of which the row's record is made, and the last hidden states."""
    assert held(lambda passes: passes.evaluate(tiny.row(TOKENS + 1)), "head") == [2]


def test_an_update_leaves_no_gradient_behind(tmp_path: Path) -> None:
    recipe = tiny_run.recipe(tmp_path, lora__rank=64, train__optimizer="sgd")
    loaded = load(recipe.model)
    session = open_session(recipe, objectives.of_recipe("sft", recipe), loaded)
    rows = open_data(recipe, loaded.tokenizer, pairs=False).train
    passes = SegmentedBackward(session.stack, session.lora, session.objective)
    updates = Updates(session, rows, Passes(session, lambda layout: passes), Optimizer(recipe.train, 10), join())
    state = RunState()
    adapter = session.lora.flat().array.nbytes
    updates.next(state, lambda: False)
    before = active()
    update = updates.next(state, lambda: False)
    assert update.applied
    assert active() - before < 0.5 * adapter
