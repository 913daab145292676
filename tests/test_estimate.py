"""Shapes against models that mlx-lm builds; bytes against a count by hand, properties, and a step that is measured."""

import importlib.util
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_configs
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes_of import shapes_of

from segtrain.attention import dispatch
from segtrain.engine import layouts
from segtrain.errors import UserError
from segtrain.lora import layers
from segtrain.memory import backends, estimate, fitted, rows, shapes
from segtrain.memory.backends import BACKENDS
from segtrain.memory.estimate import Estimator
from segtrain.memory.meter import frozen_bytes
from segtrain.memory.plan import Plan
from segtrain.models import dense
from segtrain.recurrence import grouped

CPU = BACKENDS["cpu"]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
}
LAYER_KINDS = {"llama": 1, "qwen3_5": 2, "gemma4_text": 5, "qwen3_moe": 2, "deepseek_v3": 2}


@pytest.mark.parametrize("name", LAYER_KINDS)
def test_what_is_read_is_what_mlx_lm_builds(name: str) -> None:
    """Bytes, layers, linear layers and the adapter against the model with weights."""
    built, config = tiny_configs.build(name), {**tiny_configs.CONFIGS[name], "torch_dtype": "float32"}
    weights = frozen_bytes(built)
    lora = layers.attach(built, rank=8, scale=2.0)
    model = shapes_of(config)
    assert model.bytes == weights
    assert len(model.layers) == len(built.layers)
    assert [layer.adapter for layer in model.layers] == [sum(s.value.size for s in slots) for slots in lora.layers]
    assert len(set(model.layers)) == LAYER_KINDS[name]
    assert model.vocabulary == tiny_configs.VOCAB


def test_calls_are_read_off_the_model() -> None:
    """Windows, shared keys, soft-caps, sinks, latent heads, experts and scans, by each file's configuration."""
    gemma = shapes_of(tiny_configs.CONFIGS["gemma4_text"])
    windows = {a.window for layer in gemma.layers for a in layer.attention}
    assert windows == {None, tiny_configs.WINDOW}
    assert any(layer.shares for layer in gemma.layers)
    assert sum(layer.carried > 0 for layer in gemma.layers) == 2
    assert all(layer.constants > 0 for layer in gemma.layers)  # its per-layer inputs
    assert all(a.sinks for layer in shapes_of(tiny_configs.CONFIGS["gpt_oss"]).layers for a in layer.attention)
    capped = shapes_of({**tiny_configs.CONFIGS["gemma2"], "attn_logit_softcapping": 50.0})
    assert capped.capped
    assert all(a.softcap for layer in capped.layers for a in layer.attention)
    latent = shapes_of(tiny_configs.CONFIGS["deepseek_v3"]).layers[0].attention
    assert [(a.heads, a.kv_heads) for a in latent] == [(4, 4)]
    experts = {x.chosen for layer in shapes_of(tiny_configs.CONFIGS["qwen3_moe"]).layers for x in layer.linears}
    assert experts == {0, tiny_configs.CONFIGS["qwen3_moe"]["num_experts_per_tok"]}
    mixed = shapes_of(tiny_configs.CONFIGS["qwen3_5"])
    assert {(len(layer.attention), len(layer.scans)) for layer in mixed.layers} == {(1, 0), (0, 1)}
    assert all(x.held > 0 and x.state > 0 for layer in mixed.layers for x in layer.scans)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(tiny_configs.CONFIGS))
def test_every_family_is_read(name: str) -> None:
    model = shapes_of({**tiny_configs.CONFIGS[name], "torch_dtype": "float32"})
    assert model.bytes == frozen_bytes(tiny_configs.build(name))
    assert all(layer.whole.residual.at(100) > 0 and layer.whole.made.at(100) > 0 for layer in model.layers)


def test_scores_of_a_whole_row_grow_with_its_square_and_nothing_else_does() -> None:
    """Also where the model's own sizes are round numbers."""
    plain = shapes_of({**LLAMA, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 256})
    assert {layer.whole.made.pairs for layer in plain.layers} == {0.0}
    dense = shapes_of(tiny_configs.CONFIGS["llama4"])
    assert any(layer.whole.residual.pairs > 0 for layer in dense.layers)


def test_an_adapter_of_some_layers_is_read() -> None:
    model = shapes_of(LLAMA, rank=4, targets=["q_proj"], layers=[2, 4])
    assert model.lowest == 2
    assert [layer.adapter for layer in model.layers] == [0, 0, 4 * (64 + 64), 4 * (64 + 64)]


def test_a_model_of_thirty_billion_is_read_without_its_weights() -> None:
    """In seconds of processor time and MiB that no weights would fit into."""
    models = json.loads((Path(__file__).parents[1] / "benchmarks" / "published_models.json").read_text())
    mx.reset_peak_memory()
    begun, before = time.process_time(), mx.get_active_memory()
    model = shapes_of({**models["Qwen3 30B-A3B"]["config"], "quantization": {"bits": 4, "group_size": 64}})
    assert model.bytes > 15 << 30
    assert mx.get_peak_memory() - before < 100 << 20
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("published", "billions"),
    [
        # Llama 3.1 8B, Qwen3 30B A3B, Gemma 3 27B (text): published configurations and parameter counts.
        ({"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
          "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama"}, 8.03),
        ({"hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32,
          "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3_moe",
          "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
          "mlp_only_layers": [], "moe_intermediate_size": 768, "decoder_sparse_step": 1}, 30.5),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 5376, "num_hidden_layers": 62, "head_dim": 128,
          "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16, "vocab_size": 262208,
          "model_type": "gemma3_text"}}, 27.0),
    ],
)  # fmt: skip
def test_published_sizes(published: dict[str, Any], billions: float) -> None:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": "bfloat16", "max_position_embeddings": 4096}
    published = {**common, "tie_word_embeddings": "text_config" in published, **published}
    assert shapes_of(published).bytes / 2e9 == pytest.approx(billions, rel=0.01)


def test_quantised_bytes_are_packed_weights_scales_and_biases() -> None:
    plain = shapes_of({**LLAMA, "torch_dtype": "bfloat16"})
    packed = shapes_of({**LLAMA, "torch_dtype": "bfloat16", "quantization": {"bits": 4, "group_size": 64}})
    norms = 2 * 64 * (2 * 4 + 1)
    assert packed.bytes - norms == round((plain.bytes - norms) / 2 * (4 / 8 + 2 * 2 / 64))
    assert packed.packed
    assert not plain.packed


def test_a_layer_more_costs_its_weights_its_adapter_and_one_boundary() -> None:
    """What segmented backward promises: beyond weights and adapter, depth costs one carry [T, H] a layer."""
    T, plan = 100, Plan("segmented", head_chunk=1)
    few, many = (Estimator(shapes_of({**LLAMA, "num_hidden_layers": n}, rank=2), CPU) for n in (4, 7))
    less, more = (estimator.peak(rows.RowShape((T,), ((1,),)), plan).bytes for estimator in (few, many))
    adapters = many.state - few.state
    assert more - less == pytest.approx(many.model.bytes - few.model.bytes + adapters + 3 * T * 64 * 4, rel=0.02)


def test_a_larger_segment_costs_what_its_layers_compute() -> None:
    """In float32, of each token at least four arrays of the MLP's width, less the boundary that is no longer kept."""
    estimator, T = Estimator(shapes_of(LLAMA), CPU), 100
    one, two = (estimator.peak(rows.sft(T), Plan("segmented", segment_size=n, head_chunk=1)).bytes for n in (1, 2))
    assert two - one > T * 4 * (4 * 192 - 64)


def test_full_backward_holds_all_logits_and_those_that_are_scored() -> None:
    """Where some rows are scored, both: of all rows in the activations' dtype, and what the scored ones take."""
    estimator, T, V = Estimator(shapes_of({**LLAMA, "vocab_size": 50000}), CPU), 100, 50000
    every, half = (estimator.peak(rows.RowShape((T,), ((n,),)), Plan("full")).bytes for n in (T, T // 2))
    assert every - half == pytest.approx(V * T / 2 * fitted.FULL_FLOAT32 - V * T * 4)


def test_parts_add_up_and_the_adapter_holds_adam_s_moments() -> None:
    estimator = Estimator(shapes_of(LLAMA), CPU)
    peak = estimator.peak(rows.sft(64), Plan("segmented"))
    assert sum(peak.parts.values()) == pytest.approx(peak.bytes, abs=1)
    assert peak.bytes == round(peak.moments[peak.moment])
    lora = sum(8 * (x.inputs + x.outputs) for layer in estimator.model.layers for x in layer.linears)
    assert estimator.state == 3 * 4 * lora
    assert Estimator(shapes_of(LLAMA), CPU, optimizer="sgd").state == 2 * 4 * lora


PLANS = st.builds(
    Plan,
    st.just("segmented"),
    segment_size=st.integers(1, 4),
    head_chunk=st.sampled_from([16, 64, 256]),
    mlp_rows=st.sampled_from([None, 64]),
    boundaries=st.sampled_from([None, 1, 2, 3, 5]),
    lookahead=st.sampled_from([0, 2]),
)


@given(PLANS, st.integers(16, 600), st.integers(1, 400), st.sampled_from(["llama", "gemma4_text", "qwen3_moe", "lfm2"]))
@settings(deadline=None, max_examples=60)
def test_more_tokens_never_need_less(plan: Plan, length: int, more: int, family: str) -> None:
    estimator = Estimator(shapes_of(tiny_configs.CONFIGS[family]), CPU)
    assert estimator.peak(rows.sft(length + more), plan).bytes >= estimator.peak(rows.sft(length), plan).bytes


@given(PLANS, st.integers(64, 600))
@settings(deadline=None, max_examples=40)
def test_leaner_settings_never_need_more(plan: Plan, length: int) -> None:
    estimator, row = Estimator(shapes_of(LLAMA), CPU), rows.sft(length)
    peak = estimator.peak(row, plan).bytes
    assert estimator.peak(row, replace(plan, lookahead=0)).bytes <= peak
    assert estimator.peak(row, replace(plan, head_chunk=8)).bytes <= peak
    single = replace(plan, segment_size=1, boundaries=None)
    assert estimator.peak(row, single).bytes <= peak + 8 * estimator.boundary(length)
    assert estimator.peak(row, Plan("full")).bytes > peak or plan.segment_size > 1 or plan.lookahead


def test_rows_are_those_of_the_layouts() -> None:
    """`rows` against the layouts that it stands for."""
    ids = list(range(40))
    assert rows.of_layout(layouts.single(ids, [True] * 40)) == rows.sft(40)
    assert rows.of_layout(layouts.pair(ids[:10], ids[:7], ids[:5])) == rows.pair(10, 7, 5)
    assert rows.of_layout(layouts.shared_prefix(ids[:10], ids[:7], ids[:5])) == rows.shared(10, 7, 5)
    assert rows.of_layout(layouts.pair(ids[:10], ids[:7], ids[:5], score_prompt=False)) == rows.pair(
        10, 7, 5, score_prompt=False
    )


def test_a_pair_holds_two_streams_boundaries_and_a_shared_prefix_one() -> None:
    estimator, plan = Estimator(shapes_of(LLAMA), CPU), Plan("segmented", head_chunk=8)
    pair, shared = (estimator.peak(build(500, 50, 50), plan).parts["boundaries"] for build in (rows.pair, rows.shared))
    assert pair / shared == pytest.approx(2 * 549 / 600, rel=0.02)


@pytest.mark.parametrize("name", ["cpu", "cuda", "metal"])
@pytest.mark.parametrize("dim", [32, 64, 100, 128, 256])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_kinds_are_those_that_run(name: backends.Name, dim: int, window: int | None, dtype: str) -> None:
    """The estimate's own table against `dispatch.choose`, which imports mlx."""
    mine = shapes.Attention(8, 2, dim, dim, window)
    call = dispatch.Call(8, 1024, 1024, dim, dim, getattr(mx, dtype), window=window)
    kind = BACKENDS[name].attention_kind(mine, 1024, getattr(mx, dtype).size)
    assert kind == dispatch.choose(dispatch.BACKENDS[name], call)
    assert BACKENDS[name].query_multiple == dispatch.align(dispatch.BACKENDS[name])
    assert BACKENDS[name].tile_bytes == dispatch.BACKENDS[name].tile_bytes


@pytest.mark.parametrize("tokens", [1, 64, 64 * 128, 64 * 128 + 1, 64 * 1000])
def test_groups_of_a_scan_are_those_that_run(tokens: int) -> None:
    scan, group = shapes.Scan(8, 8, 100, 64, held=1.0), grouped.group_of(tokens, 64)
    assert scan.states(tokens) == 100 * math.ceil(tokens / group)
    assert scan.held_at(tokens) == group / 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "llama model: .*hidden_size"),
        ({"vocab_size": None}, "llama model: .*vocab_size"),
        ({"hidden_size": "wide"}, "llama model: "),
        ({"num_hidden_layers": -3}, "llama model: "),
    ],
)
def test_missing_or_absurd_keys_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shapes_of({key: value for key, value in {**LLAMA, **change}.items() if value is not None})


MEASURE = """
import json, sys
sys.path.insert(0, "tests")
import mlx.core as mx
mx.set_default_device(mx.cpu)
import tiny
from segtrain.engine import layouts, objectives
from segtrain.engine.backward import SegmentedBackward
from segtrain.models.stack import LayerStack
config, size, tokens = json.loads(sys.argv[1])
model = tiny.build_module("llama", config)
lora = tiny.attach(model, rank=8)
engine = SegmentedBackward(LayerStack(model), lora, objectives.sft, segment_size=size, head_chunk=64)
engine.step(layouts.single([1] * 9, [True] * 9))
mx.clear_cache(); mx.reset_peak_memory()
engine.step(layouts.single([1] * (tokens + 1), [True] * (tokens + 1)))
print(mx.get_peak_memory())
"""


@pytest.mark.parametrize(
    ("size", "tokens"), [(4, 256), *(pytest.param(size, 512, marks=pytest.mark.slow) for size in (1, 4))]
)
def test_a_measured_step(size: int, tokens: int) -> None:
    """One real step on CPU; the full comparison is `benchmarks/plan_accuracy.py`."""
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 2000, "rms_norm_eps": 1e-5}
    command = [sys.executable, "-c", MEASURE, json.dumps([config, size, tokens])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    estimator = Estimator(shapes_of(config), CPU, optimizer="adafactor")  # no optimiser has run
    predicted = estimator.peak(rows.sft(tokens + 1), Plan("segmented", segment_size=size, head_chunk=64)).bytes
    assert predicted == pytest.approx(int(done.stdout.splitlines()[-1]), rel=0.05)
    assert predicted > 2 * estimator.fixed  # the control: it is not the model that was compared


def test_the_gpu_set_was_held_within_ten_percent() -> None:
    """The kept H200 measurements: what each run predicted for itself, and today's estimate of the same plans."""
    place = Path(__file__).parents[1] / "benchmarks"
    spec = importlib.util.spec_from_file_location("plan_accuracy_gpu", place / "plan_accuracy_gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (place / "results" / "plan_accuracy_gpu.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if "measured_gib" in line]
    assert len(lines) > 15
    assert {line["dtype"] for line in lines} == {"bfloat16", "4bit"}
    assert max(line["tokens"] for line in lines) == 32768
    for line in lines:
        measured = module.measured(line)
        assert line["predicted_gib"] == pytest.approx(measured, rel=0.1)
        assert module.predicted(line).bytes / 2**30 == pytest.approx(measured, rel=0.1)


def test_the_heads_slices_are_those_of_the_model() -> None:
    assert estimate.HEAD_SLICE_BYTES == dense.SLICE_BYTES


def test_in_full_backward_each_span_of_a_stream_has_a_gradient_of_its_own() -> None:
    """All rows' logits, once for each span that is picked from them: of a shared prefix three, as was measured."""
    estimator = Estimator(shapes_of(LLAMA), BACKENDS["cpu"])
    whole, shared = rows.RowShape((512,), ((512,),)), rows.RowShape((512,), ((128, 128, 256),))
    heads = [next(estimator._full(row, Plan("full")))[1]["head"] for row in (whole, shared)]
    model = estimator.model
    assert heads[1] - heads[0] == 3 * 512 * model.vocabulary * model.dtype_bytes
