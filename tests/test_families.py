"""Every model file of mlx-lm: segmented gradients against mlx-lm's own model under plain `value_and_grad`.

By day each kind of model runs, and the gradients of all recurrent ones; the whole matrix is marked slow. The expected
values come from the model as mlx-lm runs it (its caches, masks, attention and positions), differentiated as a whole;
nothing of segtrain's but LoRA layers.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import median

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
import tiny_configs
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters

from segtrain.engine import groups, objectives
from segtrain.engine.backward import FullBackward, SegmentedBackward, Step
from segtrain.engine.layouts import Layout, Stream, pair, shared_prefix
from segtrain.engine.segments import split
from segtrain.lora.adapters import mlx_config
from segtrain.lora.layers import EXPERTS, Lora
from segtrain.models import exceptions, support
from segtrain.models.capture import arrays
from segtrain.models.plain import PlainForward
from segtrain.models.recurrences import RESTARTS
from segtrain.models.stack import Execution, LayerStack
from segtrain.recipe.schema import LoraRecipe

LOSS, GRADIENT = 2e-6, 1e-5 * tiny.ROUNDING
LENGTH, PROMPT = 18, 6

FAST = {
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gemma3n",
    "gemma4_text",
    "gemma4_text/moe",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "lfm2",
    "llama/mistral",
    "mamba",
    "ministral3",
    "phi",
    "qwen3_5",
    "qwen3_moe",
    "smollm3",
}
BY_LENGTH = ("internlm2/dynamic", "internlm3/dynamic")
RECURRENT = [n for n in tiny_configs.CONFIGS if n.split("/")[0] in RESTARTS and n != "gear"]
SCANS = {"kimi_linear", "mamba2", "nemotron_h", "olmo_hybrid", "recurrent_gemma", "rwkv7"}  # beside those of FAST
SHARING = [n for n in tiny_configs.CONFIGS if support.shares_prefix(n.split("/")[0]) and n not in BY_LENGTH]


def fast_and_slow(names: list[str]) -> list:
    return [pytest.param(name, marks=() if name in FAST | SCANS else pytest.mark.slow) for name in names]


ALL = fast_and_slow(list(tiny_configs.CONFIGS))


@dataclass
class Family:
    """A tiny model with LoRA on every linear layer, and what mlx-lm makes of rows."""

    name: str
    model: nn.Module
    lora: Lora
    stack: LayerStack
    _sft: tuple[float, dict[str, mx.array]] | None = field(default=None)

    def step(self, layout: Layout, loss: objectives.Objective = objectives.sft, size: int = 1) -> Step:
        return SegmentedBackward(self.stack, self.lora, loss, segment_size=size).step(layout)

    @property
    def sft(self) -> tuple[float, dict[str, mx.array]]:
        """Loss and gradients of `tiny.row()` by mlx-lm's own `default_loss`."""
        if self._sft is None:
            self._sft = tiny.mlx_lm_gradients(self.model, self.lora, tiny.tokens(LENGTH), PROMPT)
        return self._sft


@lru_cache(maxsize=48)  # those of the day
def family(name: str) -> Family:
    model = tiny_configs.build(name)
    lora = tiny.attach(model)
    return Family(name, model, lora, LayerStack(model))


def worst(truth: dict[str, mx.array], other: dict[str, mx.array]) -> float:
    """The largest norm-relative error of a tensor; what is exactly zero (an expert that no token chose) must be so."""
    zero = {name for name, grad in truth.items() if not tiny.norm(grad)}
    assert all(not tiny.norm(other[name]) for name in zero)
    assert len(zero) < len(truth) / 2
    return tiny.relative(*({name: grads[name] for name in truth if name not in zero} for grads in (truth, other)))


# A segment's size changes which carries cross its edges: by day each kind of carry runs with all, the others with one.
CARRIES = {"gemma3n", "gemma4_text", "gemma4_text/moe", "llama/mistral", "qwen3_5"}
BY_SIZE = [
    pytest.param(name, size, marks=() if name in CARRIES or (name in quick and size == 2) else pytest.mark.slow)
    for quick in (FAST | {*RECURRENT},)
    for name in tiny_configs.CONFIGS
    for size in (1, 2, 99)
]


@pytest.mark.parametrize(("name", "size"), BY_SIZE)
def test_gradients_are_mlx_lms(name: str, size: int):
    loss, grads = family(name).sft
    step = family(name).step(tiny.row(LENGTH, PROMPT), size=size)
    assert step.loss.total.item() == pytest.approx(loss, rel=LOSS)
    assert worst(grads, step.grads) <= GRADIENT


def preference(shape: Callable[..., Layout]) -> Layout:
    """Windows of 5 end within the prompt, at its edge and within the responses."""
    return shape(tiny.tokens(9, 1), tiny.tokens(7, 2), tiny.tokens(8, 3))


def preference_steps(name: str, size: int = 1) -> tuple[Step, Step]:
    """mlx-lm's model on two streams, segments on one."""
    of = family(name)
    expected = FullBackward(PlainForward(of.stack), of.lora, objectives.orpo()).step(preference(pair))
    return expected, of.step(preference(shared_prefix), objectives.orpo(), size)


@pytest.mark.parametrize("name", fast_and_slow([name for name in SHARING if name not in RECURRENT]))
def test_a_shared_prompt_gives_the_gradients_of_two_streams(name: str):
    expected, step = preference_steps(name, 2 if name in FAST else 1)
    assert step.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=LOSS)
    assert worst(expected.grads, step.grads) <= GRADIENT


@lru_cache(maxsize=16)
def pair_step(name: str) -> Step:
    of = family(name)
    return FullBackward(PlainForward(of.stack), of.lora, objectives.orpo()).step(preference(pair))


def shapes_and_sizes() -> Iterator:
    """By day all of three kinds of recurrence; of the others two streams at size 2 and one at size 1."""
    for name, size, shape in product(RECURRENT, (1, 2, 99), (pair, shared_prefix)):
        other = name in FAST | SCANS and (size, shape) in ((2, pair), (1, shared_prefix))
        quick = name in ("qwen3_5", "mamba2", "lfm2") or other
        yield pytest.param(name, size, shape, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "size", "shape"), list(shapes_and_sizes()))
def test_recurrent_layers_at_every_segment_size(name: str, size: int, shape: Callable[..., Layout]):
    expected, step = pair_step(name), family(name).step(preference(shape), objectives.orpo(), size)
    assert step.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=LOSS)
    assert worst(expected.grads, step.grads) <= GRADIENT


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tiny_configs.CONFIGS if name not in SHARING])
def test_pairs_of_two_streams(name: str):
    of = family(name)
    expected = FullBackward(PlainForward(of.stack), of.lora, objectives.orpo()).step(preference(pair))
    step = of.step(preference(pair), objectives.orpo())
    assert step.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=LOSS)
    assert worst(expected.grads, step.grads) <= GRADIENT


GROUP = ((9, 7), (18, 6), (13, 2))


def in_a_group(name: str) -> Callable[[list[Layout]], Layout]:
    """How a run puts rows of this family together."""
    shares = support.shares_prefix(name.split("/")[0])
    return groups.ragged if family(name).stack.takes_ragged and shares else groups.together


@pytest.mark.parametrize("name", ALL)
def test_rows_together_give_the_gradients_of_each_alone(name: str):
    of = family(name)
    rows = [tiny.row(length, prompt, seed) for seed, (length, prompt) in enumerate(GROUP)]
    alone, joint = [of.step(row) for row in rows], of.step(in_a_group(name)(rows))
    losses = [step.loss.total.item() for step in alone]
    assert joint.loss.total.tolist() == pytest.approx(losses, rel=LOSS)  # type: ignore[union-attr]
    summed = {key: sum((step.grads[key] for step in alone[1:]), grad) for key, grad in alone[0].grads.items()}
    assert worst(summed, joint.grads) <= GRADIENT


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_configs.CONFIGS))
def test_pairs_together_give_the_gradients_of_each_alone(name: str):
    of, shape = family(name), shared_prefix if name in SHARING else pair
    rows = [shape(tiny.tokens(5, 3 * n), tiny.tokens(4 + n, 3 * n + 1), tiny.tokens(7 - n, 3 * n + 2)) for n in (0, 1)]
    alone = [of.step(row, objectives.orpo()) for row in rows]
    joint = of.step(in_a_group(name)(rows), objectives.orpo())
    summed = {key: alone[1].grads[key] + grad for key, grad in alone[0].grads.items()}
    assert worst(summed, joint.grads) <= GRADIENT


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_learnt_positions_can_not_share_a_prompt(name: str):
    """The control of the one above: what the table excludes would be wrong."""
    expected, step = preference_steps(name)
    assert worst(expected.grads, step.grads) > 1e-2


@pytest.mark.parametrize("name", BY_LENGTH)
def test_rotary_embeddings_by_length_do_not_share_a_prompt(name: str):
    assert not family(name).stack.shares_prefix


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_configs.CONFIGS))
def test_compiled_segments_give_the_same_gradients(name: str):
    """Two rows of one length by the same compiled graphs; where that can't be, the table says so."""
    of = family(name)
    engine = SegmentedBackward(of.stack, of.lora, objectives.sft, compiled=True)
    if not support.traceable(name.split("/")[0]):
        with pytest.raises(ValueError, match="compile"):
            engine.step(tiny.row(LENGTH, PROMPT))
        return
    for seed in (0, 5):
        expected, step = of.step(tiny.row(LENGTH, PROMPT, seed)), engine.step(tiny.row(LENGTH, PROMPT, seed))
        assert step.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=LOSS)
        assert worst(expected.grads, step.grads) <= GRADIENT


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_configs.CONFIGS))
def test_chunks_of_tokens_kept_layers_and_leanest_boundaries(name: str):
    of = family(name)
    expected = of.step(tiny.row(LENGTH, PROMPT))
    chunked = replace(of, stack=of.stack.executing(Execution(mlp_rows=5))).step(tiny.row(LENGTH, PROMPT))
    kept = tiny.segmented(of.stack, of.lora, objectives.sft, keep=1, leanest=True).step(tiny.row(LENGTH, PROMPT))
    assert worst(expected.grads, chunked.grads) <= GRADIENT
    assert worst(expected.grads, kept.grads) <= GRADIENT


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_positions_must_reach_the_query_scale(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exceptions, "EXCEPTIONS", [e for e in exceptions.EXCEPTIONS if "llama_4" not in e[1]])
    monkeypatch.setitem(globals(), "family", family.__wrapped__)  # a stack keeps the exceptions that it began with
    expected, step = preference_steps(name)
    assert worst(expected.grads, step.grads) > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_adapters_load_in_mlx_lm(name: str, tmp_path: Path):
    """mlx-lm wraps a fresh model by our configuration, loads our file and computes the same logits."""
    of = family(name)
    config = mlx_config(
        LoraRecipe(rank=of.lora.rank, scale=of.lora.scale),
        model=name,
        layers_total=len(of.stack),
        lowest=of.lora.lowest,
        keys=of.lora.keys,
        rank=of.lora.rank,
        scale=of.lora.scale,
        dropout=0.0,
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), of.lora.values())
    stock = load_adapters(tiny_configs.build(name), str(tmp_path))
    ids = mx.array([tiny.tokens(LENGTH)])
    plain = logits(tiny_configs.build(name), ids)
    assert mx.abs(logits(stock, ids) - plain).max().item() > 1e-3, "the adapter does something"
    assert mx.abs(logits(stock, ids) - of.stack.whole(Stream(ids))).max().item() <= 1e-4


def logits(model: nn.Module, ids: mx.array) -> mx.array:
    return model(ids, cache=make_prompt_cache(model))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe"])
def test_experts_and_router_are_trained(name: str):
    of = family(name)
    experts = [p for layer in of.model.layers for p, m in layer.named_modules() if isinstance(m, EXPERTS)]
    grads = of.step(tiny.row(LENGTH, PROMPT)).grads
    assert len(experts) >= 9
    trained = {key for key in grads if "switch_mlp" in key or "experts" in key}
    assert len(trained) >= 2 * len(experts)
    assert all(tiny.norm(grads[key]) > 0 for key in trained)
    routers = [key for key in grads if key.rsplit(".", 2)[-2] in ("gate", "router")]
    assert all(tiny.norm(grads[key]) > 0 for key in routers)


# Gemma 4: layers 3, 4 (sliding) use layer 1's keys and values, layer 5 (full) uses layer 2's.
CUTS = [(2,), (3,), (2, 3), (2, 4), (2, 3, 4, 5), (3, 5), (1, 2, 3), (3, 4)]


def at_cuts(of: Family, cuts: tuple[int, ...]) -> Step:
    """One step with segments that end at `cuts`."""
    bounds = list(zip((0, *cuts), (*cuts, len(of.stack)), strict=True))
    engine = SegmentedBackward(of.stack, of.lora, objectives.sft)
    engine.frozen, engine.groups = [], [[s] for s in split(len(of.stack), bounds, of.stack.reads, of.stack.writes)]
    return engine.step(tiny.row(LENGTH, PROMPT))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n"])
def test_cuts_between_donor_and_sharers(name: str, cuts: tuple[int, ...]):
    loss, grads = family(name).sft
    step = at_cuts(family(name), cuts)
    assert step.loss.total.item() == pytest.approx(loss, rel=LOSS)
    assert worst(grads, step.grads) <= GRADIENT


@contextmanager
def without_the_donors_cotangent(stack: LayerStack) -> Iterator[None]:
    """Keys and values reach the sharers, their gradient does not come back."""
    run = type(stack).run

    def cut(self, tape, carry, lo, hi):
        return run(self, tape, {k: v if k == "h" else mx.stop_gradient(v) for k, v in carry.items()}, lo, hi)

    try:
        type(stack).run = cut  # type: ignore[method-assign, assignment]
        yield
    finally:
        type(stack).run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("cuts", [(3,), (2, 4), (1, 2, 3)])
@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n"])
def test_without_the_donors_cotangent_the_check_fails(name: str, cuts: tuple[int, ...]):
    loss, grads = family(name).sft
    with without_the_donors_cotangent(family(name).stack):
        step = at_cuts(family(name), cuts)
    assert step.loss.total.item() == pytest.approx(loss, rel=LOSS)
    donor = {key: grad for key, grad in grads.items() if ".2.self_attn.v_proj" in key}
    assert tiny.relative(donor, {key: step.grads[key] for key in donor}) > 0.1


def test_gemma_3n_trains_the_model_that_inference_runs():
    """Without a cache its later layers would compute keys and values of their own."""
    of = family("gemma3n")
    ids = mx.array([tiny.tokens(LENGTH)])
    ours, inference, uncached = of.stack.whole(Stream(ids)), logits(of.model, ids), of.model(ids)
    assert mx.abs(ours - inference).max().item() < 1e-4
    assert mx.abs(uncached - inference).max().item() > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gear",
        "gear/conv",
        "deepseek_v3",
        "kimi_linear",
        "bailing_moe_v3",
        "longcat_flash",
        "recurrent_gemma",
        "baichuan_m1",
    ],
)
def test_exceptions_make_no_square_arrays(name: str):
    """Neither a [T, T] mask in the recorded calls nor an array as mask of an attention call."""
    of, rows = family(name), 37
    masks: list[object] = []
    original = mx.fast.scaled_dot_product_attention

    def watched(*args, mask=None, **kwargs):
        masks.append(mask)
        return original(*args, mask=mask, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segtrain.models.stream_ops._sdpa", watched)
        tape = of.stack.begin(Stream(mx.array([tiny.tokens(rows)])))
        of.stack.run(tape, {"h": tape.embedded}, 0, len(of.stack))
    recorded = [a for call in tape.calls for a in arrays((call.args, call.kwargs))]
    assert not [a.shape for a in recorded if a.shape[-2:] == (rows, rows)]
    assert not [mask for mask in masks if isinstance(mask, mx.array)]


# By day each bits with models of its own kinds, and one mixture of experts, on fewer rows; others in test_gradients.py.
QUICK = {0: {"granite", "qwen3_moe"}, 4: {"gemma3_text", "lfm2"}}
HALF = [
    pytest.param(bits, name, marks=() if name in QUICK[bits] else pytest.mark.slow)
    for bits in (0, 4)
    for name in tiny_configs.CONFIGS
]


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Frozen weights in `dtype`, LoRA masters as they are."""
    for _, module in model.named_modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating) and "lora" not in key:
                module[key] = value.astype(dtype)


def groups_fit(_: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def gathered_matmul(a: mx.array, b: mx.array, *, rhs_indices: mx.array, sorted_indices: bool = False) -> mx.array:
    """What `mx.gather_mm` computes, from a copy of each chosen matrix."""
    return a @ b[rhs_indices]


def test_gathered_matmul_is_gather_mm():
    """With rows of whole 16 bytes: CUDA's kernel needs them, and LoRA's ranks are padded to them."""
    a, b = mx.random.normal((2, 5, 1, 1, 8)), mx.random.normal((4, 8, 16))
    chosen = mx.random.randint(0, 4, (2, 5, 2))
    assert mx.allclose(gathered_matmul(a, b, rhs_indices=chosen), mx.gather_mm(a, b, rhs_indices=chosen))


@pytest.mark.parametrize(("bits", "name"), HALF)
def test_in_low_precision_no_further_from_the_truth_than_mlx_lm(name: str, bits: int, monkeypatch: pytest.MonkeyPatch):
    """The truth is the same (rounded, quantised) weights in float32; the reference is mlx-lm's own pass in bf16.

    On one row either may happen to be two times nearer, so half of the rows must be within the bound; more rows where
    a rounding may send a token to another expert, and at night. On the CPU, MLX's `gather_mm` takes float32 only, so
    there all three passes get it as a plain product.
    """
    model = tiny_configs.build(name)
    if mx.default_device() == mx.Device(mx.cpu):
        monkeypatch.setattr(mx, "gather_mm", gathered_matmul)
    if bits:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=groups_fit)
    cast(model, mx.bfloat16)
    lora = tiny.attach(model)
    engine = SegmentedBackward(LayerStack(model), lora, objectives.sft)
    count = 9 if name in QUICK[bits] else 15
    rows = range(3 * count if any(isinstance(m, EXPERTS) for m in model.modules()) else count)
    reference = [tiny.mlx_lm_gradients(model, lora, tiny.tokens(LENGTH, row), PROMPT)[1] for row in rows]
    ours = [engine.step(tiny.row(LENGTH, PROMPT, row)).grads for row in rows]
    cast(model, mx.float32)
    truth = [tiny.mlx_lm_gradients(model, lora, tiny.tokens(LENGTH, row), PROMPT)[1] for row in rows]
    errors = [(tiny.overall(t, o), tiny.overall(t, r)) for t, o, r in zip(truth, ours, reference, strict=True)]
    assert all(theirs > 1e-4 for _, theirs in errors), "bf16 differs from float32"
    assert median(ours - (1.1 * theirs + 1e-3) for ours, theirs in errors) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_configs.CONFIGS))
def test_every_family_trains_quantised(name: str):
    model = tiny_configs.build(name)
    nn.quantize(model, group_size=32, bits=4, class_predicate=groups_fit)
    lora = tiny.attach(model)
    loss, grads = tiny.mlx_lm_gradients(model, lora, tiny.tokens(LENGTH), PROMPT)
    step = SegmentedBackward(LayerStack(model), lora, objectives.sft).step(tiny.row(LENGTH, PROMPT))
    assert step.loss.total.item() == pytest.approx(loss, rel=LOSS)
    assert worst(grads, step.grads) <= GRADIENT
