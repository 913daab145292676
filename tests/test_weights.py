"""Weights read from disk while their layers run: the same numbers to the bit as from memory, and little of it held."""

import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_configs
import tiny_run
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model as Llama
from mlx_lm.utils import load_model
from test_families import FAST

from segtrain.engine import objectives, vocabulary
from segtrain.engine.backward import SegmentedBackward, Step
from segtrain.engine.layouts import Layout, pair, single
from segtrain.errors import RunFailed, UserError
from segtrain.event import Event, Notice, PlanChosen, Sampled, TrainStep
from segtrain.lora.layers import attach
from segtrain.memory import anatomy, choices
from segtrain.memory.backends import BACKENDS
from segtrain.models import ends, exceptions
from segtrain.models.stack import Execution, LayerStack
from segtrain.models.weights import Loads, Streamed, streamed
from segtrain.recipe.schema import load_recipe
from segtrain.run.planning import Planner
from segtrain.run.preview import preview
from segtrain.run.trainer import Trainer

TOKENS = [3 + (7 * i * i) % 50 for i in range(21)]
AS_IT_IS = Execution()
ROW = single(TOKENS, [True] * len(TOKENS))


def stack_of(path: Path, *, stream: bool) -> LayerStack:
    """As a run does it, in training mode: PLaMo 3's norms keep a weight of their own otherwise."""
    if not stream:
        return LayerStack(load_model(path)[0].train())
    loads = Loads()
    with exceptions.replaced(mx, "load", lambda load: loads):
        model, _ = load_model(path, lazy=True)
    model.train()
    return LayerStack(model, streamed(model, loads, str(path)))


def backward(
    path: Path, *, stream: bool, objective: objectives.Objective = objectives.sft, execution: Execution = AS_IT_IS,
    **options: Any,
) -> SegmentedBackward:  # fmt: skip
    stack = stack_of(path, stream=stream)
    lora = attach(stack.model, rank=2, scale=2.0)
    for slot in lora.slots():
        if slot.key == "lora_b":
            slot.module[slot.key] = 0.1 * mx.random.normal(slot.value.shape, key=mx.random.key(len(slot.name)))
    return SegmentedBackward(stack.executing(execution), lora, objective, **options)


def source(engine: SegmentedBackward) -> Streamed:
    assert engine.stack.source is not None  # type: ignore[attr-defined]
    return engine.stack.source  # type: ignore[attr-defined]


def same(one: Step, other: Step) -> bool:
    grads = mx.array_equal(one.grads.array, other.grads.array).item()
    return bool(grads) and one.loss.total.item() == other.loss.total.item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return tiny_configs.save("llama", folder / "llama")


ALIKE = {"gemma2", "gemma3_text", "gemma4_text/moe", "glm4_moe", "granite", "llama/mistral", "phi", "smollm3"}
DAILY = FAST - ALIKE | {"llama"}  # one of each kind
CASES = [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in tiny_configs.CONFIGS]


@pytest.mark.parametrize("name", CASES)
def test_every_family_streamed_equals_resident_to_the_bit(name: str, tmp_path: Path) -> None:
    path = tiny_configs.save(name, tmp_path / "model")
    held, read = (backward(path, stream=stream).step(ROW) for stream in (False, True))
    assert same(held, read)
    assert mx.abs(held.grads.array).max().item() > 0


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of any size stay on disk, and the tiny models' vocabulary is cut into several blocks."""
    monkeypatch.setattr(ends, "SMALL", 0)
    monkeypatch.setattr(ends, "BLOCK_BYTES", 2000)


BLOCKS = Execution(blocks=True)


def relative(one: Step, other: Step) -> float:
    return float((mx.linalg.norm(one.grads.array - other.grads.array) / mx.linalg.norm(other.grads.array)).item())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", CASES)
def test_every_family_with_its_ends_on_disk(name: str, tmp_path: Path) -> None:
    """By blocks in memory and from disk the same bits; against the head as a whole, rounding.

    Baichuan M1's loader normalises the projection, so that no file holds it: it stays in memory, as a whole.
    """
    path = tiny_configs.save(name, tmp_path / "model")
    whole = backward(path, stream=False).step(ROW)
    engine = backward(path, stream=True, head_chunk=8)
    read = engine.step(ROW)
    in_blocks = engine.stack.vocabulary is not None  # type: ignore[attr-defined]
    held = backward(path, stream=False, execution=BLOCKS if in_blocks else AS_IT_IS, head_chunk=8).step(ROW)
    assert same(held, read)
    assert in_blocks or name != "llama"
    assert relative(read, whole) < 1e-5
    assert abs(read.loss.total.item() / whole.loss.total.item() - 1) < 1e-5


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["row", "weights", "pair"])
@pytest.mark.parametrize("options", [{}, {"compiled": True}, {"lookahead": 2}], ids=str)
def test_ends_on_disk_every_way_to_run(options: dict[str, Any], layout: str, llama: Path) -> None:
    given = {"row": ROW, "pair": PAIR, "weights": single(TOKENS, [True] * 21, [0.1 * k for k in range(21)])}[layout]
    objective = objectives.orpo() if layout == "pair" else objectives.sft
    whole, read = (backward(llama, stream=s, objective=objective, head_chunk=8, **options) for s in (False, True))
    assert source(read).ends
    for _ in range(2):
        assert relative(read.step(given), whole.step(given)) < 1e-5
    assert read.evaluate(given).total.item() == pytest.approx(whole.evaluate(given).total.item(), rel=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dense", [False, True])
def test_packed_ends_on_disk(dense: bool, folder: Path) -> None:
    path = packed(folder / f"packed-ends-{dense}")
    held, read = (
        backward(path, stream=s, execution=Execution(dequantize=dense, blocks=True)).step(ROW) for s in (False, True)
    )
    whole = backward(path, stream=False, execution=Execution(dequantize=dense)).step(ROW)
    assert same(held, read)
    assert relative(read, whole) < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_a_sure_target_has_an_exact_gradient(llama: Path) -> None:
    """In bfloat16 too: (1 - p) W is no difference of two large numbers."""
    x = mx.array([[[1.0, 0.5]]])
    weights = mx.array([[0.01, 0.03], [40.0, 0.0], [0.02, -0.01], [0.0, 0.0]])
    z = x @ weights.T
    p = mx.softmax(z - mx.array([0.0, 34.0, 0.0, 0.0]))  # a target with probability 0.99 or so

    class Fixed:
        blocks = (ends.Block(0, 2), ends.Block(2, 4))

        def read(self, block: ends.Block) -> dict[str, mx.array]:
            return {"weight": weights[block.lo : block.hi].astype(mx.bfloat16), "lo": mx.array(block.lo)}

        def before(self, h: mx.array) -> mx.array:
            return h

        def project(self, x: mx.array, arrays: dict[str, mx.array]) -> mx.array:
            y = x @ arrays["weight"].T
            return y - mx.where(arrays["lo"] == 0, mx.array([0.0, 34.0]), mx.array([0.0, 0.0])).astype(y.dtype)

        def after(self, h: mx.array, y: mx.array) -> mx.array:
            return y

        def rows(self, arrays: dict[str, mx.array], numbers: mx.array, dtype: mx.Dtype) -> mx.array:
            return arrays["weight"][numbers]

    span = single([0, 1], [True, True]).spans["response"]
    fixed: Any = Fixed()
    found = vocabulary.score(
        fixed, [(x.astype(mx.bfloat16), span)], 4, gradient=True, run=lambda name, function, *given: function(*given)
    )
    wanted = (1 - p[0, 0, 1]) * weights[1] - sum(p[0, 0, v] * weights[v] for v in (0, 2, 3))
    (unit,) = found[0].units
    assert mx.allclose(unit[0, 0].astype(mx.float32), wanted, rtol=0.02, atol=1e-3)


@pytest.mark.usefixtures("small_blocks")
def test_of_the_ends_rows_and_blocks_are_read(llama: Path) -> None:
    engine = backward(llama, stream=True)
    weights = source(engine)
    embedding, head = weights.ends
    before = weights.bytes_read
    engine.step(ROW)
    rows = len(set(TOKENS[:-1])) * embedding["weight"].nbytes // tiny_configs.VOCAB
    assert weights.bytes_read - before == 2 * weights.bytes(0, 4) + head["weight"].nbytes + rows
    with pytest.raises(ValueError, match="token 97 has no row in an embedding of 97"):
        engine.step(single([3, 97, 4], [True] * 3))


@pytest.mark.usefixtures("small_blocks")
def test_a_head_that_is_not_told_apart_stays_in_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose logits are not the projection element by element."""
    monkeypatch.setattr("mlx_lm.models.llama.Model.__call__", shifted(Llama.__call__))
    weights = source(backward(llama, stream=True))
    assert not weights.ends
    assert not weights.ends_bytes
    held, read = (backward(llama, stream=stream).step(ROW) for stream in (False, True))
    assert same(held, read)


def shifted(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    return lambda self, *args, **kwargs: (z := call(self, *args, **kwargs)) - z.mean(axis=-1, keepdims=True)


PAIR = pair(TOKENS[:8], TOKENS[8:14], TOKENS[14:])
WAYS: dict[str, dict[str, Any]] = {
    "segments of two": {"segment_size": 2},
    "compiled": {"compiled": True},
    "compiled, far ahead": {"compiled": True, "lookahead": 2},
    "products kept": {"keep": 2, "lookahead": 1},
    "one edge kept": {"boundaries": 1},
    "chunks": {"execution": Execution(mlp_rows=5)},
}


@pytest.mark.parametrize("layout", [ROW, PAIR], ids=["row", "pair"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_every_way_to_run_gives_the_same_bits(options: dict[str, Any], layout: Layout, llama: Path) -> None:
    objective = objectives.sft if layout is ROW else objectives.orpo()
    held, read = (backward(llama, stream=stream, objective=objective, **options) for stream in (False, True))
    for _ in range(2):
        assert same(held.step(layout), read.step(layout))
    assert held.evaluate(layout).total.item() == read.evaluate(layout).total.item()


def packed(path: Path) -> Path:
    tiny_run.model(path, hidden_size=64, intermediate_size=64)
    model, _ = load_model(path)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {**json.loads((path / "config.json").read_text()), "quantization": {"group_size": 32, "bits": 4}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_packed_weights_and_their_dense_copies(folder: Path) -> None:
    path = packed(folder / "packed")
    for dense in (False, True):
        held, read = (backward(path, stream=s, execution=Execution(dequantize=dense)) for s in (False, True))
        assert same(held.step(ROW), read.step(ROW))


def test_each_segment_is_read_once_forward_and_once_backward(llama: Path) -> None:
    engine = backward(llama, stream=True)
    weights = source(engine)
    engine.step(ROW)
    assert weights.bytes_read == 2 * weights.bytes(0, 4)
    before = weights.bytes_read
    engine.evaluate(ROW)
    assert weights.bytes_read - before == weights.bytes(0, 4)


def test_dropped_edges_read_their_segments_again(llama: Path) -> None:
    engine = backward(llama, stream=True, boundaries=1)
    weights = source(engine)
    engine.step(ROW)
    assert weights.bytes_read == 2 * weights.bytes(0, 4) + weights.bytes(0, 3)


def test_the_next_range_is_read_while_one_runs(llama: Path) -> None:
    weights = source(backward(llama, stream=True))
    weights.expect([(0, 1), (1, 2), None, (1, 2)])
    one = weights.bytes(0, 1)
    with weights.held(0, 1):
        assert weights.bytes_read == 2 * one
    with weights.held(1, 2):
        assert weights.bytes_read == 2 * one  # it was there, and the head comes next
    with weights.held(1, 2):
        assert weights.bytes_read == 3 * one
    with weights.held(3, 4):  # not announced: read all the same
        assert weights.bytes_read == 4 * one


def test_memory_is_that_of_two_layers(tmp_path: Path) -> None:
    """From the start of loading on; and between steps no layer's weights are held."""
    layers = 12
    path = tiny_run.model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=layers)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    engine = backward(path, stream=True)
    weights = source(engine)
    one = weights.bytes(0, 1)
    engine.step(ROW)
    assert weights.ends_bytes == 0  # too small to be read by blocks
    outside = 64 * 256 * 4 + 256 * 4
    grads = 2 * sum(slot.value.nbytes for slot in engine.lora.slots())
    activations = 1 << 21  # of 20 tokens
    assert mx.get_peak_memory() - before < 2 * one + outside + 3 * grads + activations < layers * one / 2
    assert mx.get_active_memory() - before < one + outside + 3 * grads


def test_ends_on_disk_take_the_memory_of_two_blocks(tmp_path: Path) -> None:
    path = tiny_run.model(tmp_path / "model", hidden_size=256, intermediate_size=512, vocab_size=16384)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    engine = backward(path, stream=True, head_chunk=8)
    weights = source(engine)
    engine.step(ROW)
    assert weights.ends_bytes >= 16384 * 256 * 4
    assert mx.get_peak_memory() - before < 3 * weights.bytes(0, 1) + (1 << 22) < weights.ends_bytes


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"lookahead": 2}, {"compiled": True}], ids=str
)
def test_nothing_keeps_weights_between_steps(options: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_run.model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    engine = backward(path, stream=True, **options)
    engine.step(ROW)
    mx.clear_cache()
    first = mx.get_active_memory()
    engine.step(ROW)
    mx.clear_cache()
    assert mx.get_active_memory() - first < source(engine).bytes(0, 1) / 2


def vanish(path: Path) -> None:
    path.unlink()


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\0")
    os.utime(path, ns=(0, 0))


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS = {
    vanish: "can't be read any more",
    shrink: "changed while",
    change: "changed while",
    unreadable: "changed|read",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_file_that_changes_under_a_run_ends_it(fault: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = tiny_configs.save("llama", tmp_path / "model")
    engine = backward(path, stream=True)
    engine.step(ROW)
    fault(path / "model.safetensors")
    with pytest.raises(RunFailed, match=f"model.safetensors .*({message}).*--resume|{message}"):
        engine.step(ROW)


def test_a_read_that_ends_early_is_no_result(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that gives less than it said."""
    engine = backward(llama, stream=True)
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    with pytest.raises(RunFailed, match="ends before its tensors do"):
        engine.step(ROW)


def test_short_reads_are_gone_on_with(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = backward(llama, stream=False).step(ROW)
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: original(fd, [views[0][:1000]], at))
    assert same(whole, backward(llama, stream=True).step(ROW))


def test_arrays_that_mlx_lm_makes_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_configs.save("llama", tmp_path / "model")
    monkeypatch.setattr("segtrain.models.weights.SMALL", 0)
    monkeypatch.setattr(
        "mlx_lm.models.llama.Model.sanitize",
        lambda self, weights: {k: v.T.T if k.endswith("1.mlp.up_proj.weight") else v for k, v in weights.items()},
    )
    with pytest.raises(UserError, match=r"makes model\.layers\.1\.mlp\.up_proj\.weight of .*mlx_lm\.convert"):
        stack_of(path, stream=True)


def trained(path: Path, resume: bool = False) -> list[Event]:
    return list(Trainer(load_recipe(path), "sft", resume=resume).events())


def recipe_file(folder: Path, name: str, **changes: Any) -> Path:
    path = tiny_run.recipe_file(folder, output__dir=str(folder / name), **changes)
    return path.rename(folder / f"{name}.yaml")


def texts(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Notice))


def adapter(folder: Path, name: str) -> bytes:
    return (folder / name / "adapters.safetensors").read_bytes()


def test_a_run_writes_the_same_adapter_and_samples(folder: Path) -> None:
    options = {"eval__prompts": ["w1 w2"], "eval__max_tokens": 4, "output__eval_every": 3, "lora__dropout": 0.1}
    valid = {"data__valid": str(folder / "sft-valid.jsonl")}
    held = trained(recipe_file(folder, "held", **options, **valid))
    read = trained(recipe_file(folder, "read", engine__weights="streamed", **options, **valid))
    assert adapter(folder, "held") == adapter(folder, "read")
    sampled = [[event.text for event in events if isinstance(event, Sampled)] for events in (held, read)]
    assert sampled[0]
    assert sampled[0] == sampled[1]
    assert "as the recipe says" in texts(read)
    assert "stay on disk" not in texts(held)


@pytest.mark.parametrize("options", [{}, {"boundaries": 1}, {"keep": 2}, {"compiled": True, "lookahead": 2}], ids=str)
@pytest.mark.parametrize("layout", ["rows", "pairs"])
def test_rows_that_share_each_reading_give_the_same_bits(options: dict[str, Any], layout: str, llama: Path) -> None:
    """Against one row after the other; and the update reads the layers as often as one row does."""
    one, two = (TOKENS[:11], TOKENS[5:]) if layout == "rows" else (PAIR, pair(TOKENS[:6], TOKENS[6:9], TOKENS[9:13]))
    rows: Any = [single(x, [True] * len(x)) for x in (one, two)] if layout == "rows" else [one, two]  # type: ignore[arg-type]
    objective = objectives.sft if layout == "rows" else objectives.orpo()
    engine = backward(llama, stream=True, objective=objective, **options)
    alone = [engine.step(row) for row in rows]
    before, entered = source(engine).bytes_read, []
    values, grads = engine.steps(rows, entered.append)
    read = source(engine).bytes_read - before
    engine.step(rows[0])
    assert read == source(engine).bytes_read - before - read
    assert mx.array_equal(grads.array, alone[0].grads.array + alone[1].grads.array)
    assert [value.total.item() for value in values] == [step.loss.total.item() for step in alone]
    assert set(entered) == {0, 1}


@pytest.mark.parametrize("loss", ["sft", "orpo"])
def test_an_update_of_many_rows_reads_the_model_twice(loss: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, and where only some of the rows fit together; the adapter is that of rows one by one."""
    options = {"engine__weights": "streamed", "engine__rows_together": 1, "lora__dropout": 0.1, "train__steps": 2}
    options |= {"train__grad_accumulation_steps": 4, "engine__prefix_sharing": False}
    seen: list[int] = []
    steps = SegmentedBackward.steps

    def counted(self: Any, layouts: Any, *args: Any) -> Any:
        seen.append(len(layouts))
        return steps(self, layouts, *args)

    monkeypatch.setattr(SegmentedBackward, "steps", counted)
    made = []
    for name, most in (("all", 4), ("some", 2), ("none", 1)):
        monkeypatch.setattr(Planner, "joined", at_most(most, JOINED))
        path = tiny_run.recipe_file(folder, loss, output__dir=str(folder / f"{loss}-{name}"), **options)
        list(Trainer(load_recipe(path), loss).events())
        made.append(adapter(folder, f"{loss}-{name}"))
    assert made[0] == made[1] == made[2]
    assert seen == [4] * 2 + [2] * 4 + [1] * 8


def test_the_announced_plan_is_that_of_the_rows_that_are_joined(folder: Path) -> None:
    """Where all rows of an update go through a segment before the next one, all of them are held."""
    peaks, data = {}, tiny_run.completions(folder / "long.jsonl", rows=4, longest=900)
    for rows in (1, 4):
        path = tiny_run.recipe_file(
            folder, output__dir=str(folder / f"joined-{rows}"), engine__weights="streamed", engine__rows_together=1,
            train__grad_accumulation_steps=rows, train__steps=1, data__train=str(data), data__max_seq_length=1024,
        )  # fmt: skip
        events = Trainer(load_recipe(path), "sft").events()
        (plan,) = [event.plan for event in events if isinstance(event, PlanChosen)]
        assert plan["rows_together"] == rows
        peaks[rows] = plan["peak_gib"]
    assert peaks[4] > 1.05 * peaks[1]


JOINED = Planner.joined


def at_most(most: int, joined: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, layouts: joined(self, layouts) if len(layouts) <= most else None


@pytest.mark.usefixtures("small_blocks")
def test_a_run_with_its_ends_on_disk_samples_the_same(folder: Path) -> None:
    options = {"eval__prompts": ["w1 w2"], "eval__max_tokens": 4, "output__eval_every": 3}
    held = trained(recipe_file(folder, "held-ends", **options))
    read = trained(recipe_file(folder, "read-ends", engine__weights="streamed", **options))
    sampled = [[event.text for event in events if isinstance(event, Sampled)] for events in (held, read)]
    assert sampled[0]
    assert sampled[0] == sampled[1]
    losses = [[event.loss for event in events if isinstance(event, TrainStep)] for events in (held, read)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_auto_streams_where_the_model_does_not_fit(tmp_path: Path) -> None:
    tiny_run.model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=16)
    options = {"engine__memory_budget": "30MB", "train__steps": 1}
    events = trained(recipe_file(tmp_path, "auto", engine__segment_size="auto", **options))
    assert "as the model doesn't fit" in texts(events)
    with pytest.raises(RunFailed, match=r"engine\.weights: streamed"):
        trained(recipe_file(tmp_path, "resident", engine__weights="resident", **options))


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_read_off_a_streamed_model_as_off_a_resident_one(name: str, tmp_path: Path) -> None:
    """Weights that are still on disk can't be handed out with a graph, and a run would plan by a cruder estimate."""
    config = json.loads((tiny_configs.save(name, tmp_path / "model") / "config.json").read_text())
    held, read = (
        anatomy.read(anatomy.Subject(engine.stack.model, engine.stack, engine.lora), "cpu", config)
        for engine in (backward(tmp_path / "model", stream=stream) for stream in (False, True))
    )
    assert held == read
    assert name != "llama" or all(layer.whole.residual.fixed for layer in read.layers)  # not the cruder one


def test_a_plan_counts_two_segments_and_what_a_row_reads() -> None:
    config = {**tiny_run.CONFIG, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
    shape = anatomy.of_config(config, "cpu")
    held, read = (choices.chooser(shape, BACKENDS["cpu"], None, streamed=streamed) for streamed in (False, True))
    row = choices.row_of(64, preference=False, shared=False)
    one, everything = shape.layer_bytes[0], sum(shape.layer_bytes)
    plan = read.leanest(row).plan
    ahead = replace(plan, lookahead=2)
    for each, ranges in ((plan, 2), (ahead, 4)):
        most = [chooser.estimator.peak(row, each).moments["backward"] for chooser in (held, read)]
        assert most[0] - most[1] == everything - ranges * one
    assert read.estimator.read(row, replace(plan, boundaries=None)) == 2 * everything
    assert read.estimator.read(row, replace(plan, boundaries=1)) == 3 * everything - one
    assert held.estimator.read(row, plan) == 0
    assert not any(plan.backward == "full" for plan in read.plans(row))


def test_a_plan_counts_the_ends_that_stay_on_disk() -> None:
    config = {**tiny_run.CONFIG, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 16384, "dtype": "float32"}
    shape = anatomy.of_config(config, "cpu")
    held, read = (choices.chooser(shape, BACKENDS["cpu"], None, streamed=streamed) for streamed in (False, True))
    row = choices.row_of(64, preference=False, shared=False)
    plan = read.leanest(row).plan
    assert shape.ends == 16384 * 256 * 4
    assert held.estimator.resident - read.estimator.resident == shape.ends + sum(shape.layer_bytes)
    rows, size = shape.block
    assert size == rows * 256 * 4 <= shape.layer_bytes[0]
    head = [chooser.estimator.peak(row, plan).moments["head"] for chooser in (held, read)]
    assert head[1] < head[0] - shape.ends
    whole = replace(plan, boundaries=None)
    assert shape.ends <= read.estimator.read(row, whole) - 2 * sum(shape.layer_bytes) < 1.01 * shape.ends


def test_the_preview_says_what_is_read(tmp_path: Path) -> None:
    tiny_run.model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=16)
    found = preview(None, model=str(tmp_path / "model"), seq=64, budget="30MB", device="cpu")
    assert found.fits
    assert any("read from disk" in note for note in found.notes)
    assert all(option["read_gib"] > 0 for option in found.options)


def test_full_backward_is_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.weights: streamed reads a segment at a time"):
        tiny_run.Recipe.from_mapping(
            {"model": "m", "data": {"train": "a"}, "engine": {"weights": "streamed", "backward": "full"}}
        )


def test_a_measured_step_streams_too(tmp_path: Path) -> None:
    """`plan-segments --measure` where the model doesn't fit."""
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
    path = tiny_run.model(tmp_path / "model", **size)
    gc.collect()
    before = mx.get_active_memory()  # what other tests of the process left
    found = preview(None, model=str(path), seq=64, budget="30MB", measure=True)
    assert found.measured is not None
    assert found.measured["peak_gib"] * 2**30 - before < 0.75 * (path / "model.safetensors").stat().st_size
