"""Tiny random mlx-lm models, and how to compare gradients: used by the core's tests."""

import importlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.trainer import default_loss

from segtrain.engine.backward import SegmentedBackward
from segtrain.engine.layouts import Layout, single
from segtrain.engine.objectives import Objective
from segtrain.engine.segments import layer_cuts, leanest_boundaries
from segtrain.lora import layers as lora_module
from segtrain.lora.layers import Lora, swapped
from segtrain.memory.backends import here
from segtrain.models.stack import Execution, LayerStack

VOCAB = 97
ON_CUDA = here().name == "cuda"
ROUNDING = 5 if ON_CUDA else 1
"""Times what two exact ways may differ by on a CPU: there products of any number of rows sum alike, and exponentials
round to one unit in the last place, not two."""
frees_at_once = pytest.mark.skipif(
    ON_CUDA, reason="on CUDA a command buffer holds what its operations are done with: as much as these small arrays"
)

_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_MISTRAL_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA3 = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "rope_local_base_freq": 1000.0,
}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_theta": None,
}
_GEMMA3N = {
    **_COMMON,
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "sliding_window": 5,
    "rope_local_base_freq": 1000.0,
    "final_logit_softcapping": 10.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
    "altup_num_inputs": 3,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}

# family -> (module of mlx_lm.models, its configuration). mlx-lm runs mistral by its llama file.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "mistral": ("llama", {**_COMMON, "sliding_window": 5, "layer_types": _MISTRAL_LAYERS, "head_dim": 8}),
    "qwen2": ("qwen2", {**_COMMON, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma3_text": ("gemma3_text", {**_COMMON, **_GEMMA3}),
    "gemma4_text": ("gemma4_text", {**_COMMON, **_GEMMA4}),
    "gemma3n": ("gemma3n", {"text_config": _GEMMA3N}),
}


def build(family: str, *, bits: int = 0, seed: int = 0, **changes: Any) -> nn.Module:
    """A random float32 model of a family in `FAMILIES`; `bits` quantises every layer that groups of 32 divide."""
    module, config = FAMILIES[family]
    return build_module(module, {**config, **changes}, bits=bits, seed=seed)


def build_module(name: str, config: Mapping[str, Any], *, bits: int = 0, seed: int = 0) -> nn.Module:
    """A random model of the file `mlx_lm.models.<name>`, with weights large enough that every part matters."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **config}))
    if bits:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, m: _divisible(m))
    _vary_norms(model)
    mx.eval(model.parameters())
    return model


def _vary_norms(model: nn.Module) -> None:
    """Norm weights as in a trained model: not all equal. Gemma 3 adds 1 to its own."""
    for name, module in model.named_modules():
        if "norm" in name.rsplit(".", 1)[-1] and "weight" in module:
            noise = 0.1 * mx.random.normal(module.weight.shape)
            module.weight = noise if type(module).__module__.endswith("gemma3_text") else 1 + noise


def _divisible(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def attach(model: nn.Module, **options: Any) -> Lora:
    """LoRA of rank 3 with a random B, so that no gradient is zero by construction."""
    lora = lora_module.attach(model, **{"rank": 3, "scale": 2.0, **options})
    mx.random.seed(7)
    for slot in lora.slots():
        if slot.key == "lora_b":
            slot.module["lora_b"] = mx.random.normal(slot.value.shape) * 0.1
    mx.eval(lora.values())
    return lora


def segmented(
    stack: LayerStack,
    lora: Lora,
    objective: Objective,
    *,
    leanest: bool = False,
    execution: Execution | None = None,
    **options: Any,
) -> SegmentedBackward:
    """The engine; `leanest`: with the fewest boundaries with which backward holds the fewest edges."""
    if leanest:
        size, keep = options.get("segment_size", 1), options.get("keep", 0)
        _, trained = layer_cuts(len(stack), size, lowest=lora.lowest, keep=keep)
        options["boundaries"], _ = leanest_boundaries(len(trained))
    return SegmentedBackward(stack.executing(execution or stack.execution), lora, objective, **options)


def tokens(count: int, seed: int = 0) -> list[int]:
    return mx.random.randint(0, VOCAB, (count,), key=mx.random.key(seed)).tolist()


def row(count: int = 18, prompt: int = 6, seed: int = 0) -> Layout:
    """A supervised row: everything from token `prompt` on is a target."""
    return single(tokens(count, seed), [i >= prompt for i in range(count)])


def mlx_lm_gradients(model: nn.Module, lora: Lora, ids: list[int], prompt: int) -> tuple[float, dict[str, mx.array]]:
    """Sum of the cross-entropies of tokens `prompt`.. and its gradients, by mlx-lm's own `default_loss`.

    The model gets mlx-lm's own caches: without them Gemma 3n's later layers do not share keys and values.
    """
    slots = lora.slots()

    def forward(inputs: mx.array) -> mx.array:
        return model(inputs, cache=make_prompt_cache(model))

    def loss(values: list[mx.array]) -> mx.array:
        with swapped(slots, values):
            mean, count = default_loss(forward, mx.array([ids]), mx.array([[prompt, len(ids) - 1]]))
        return mean * count

    value, grads = mx.value_and_grad(loss)([slot.value for slot in slots])
    mx.eval(value, grads)
    return value.item(), {slot.name: grad for slot, grad in zip(slots, grads, strict=True)}


def as_float32(model: nn.Module) -> None:
    """The same weights in float32: the truth that lower precisions are held to."""
    model.update(
        tree_map(lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w, model.parameters())
    )


def relative(truth: Mapping[str, mx.array], other: Mapping[str, mx.array]) -> float:
    """The largest norm-relative error of any tensor: max over names of |a - b| / |a|."""
    assert truth.keys() == other.keys()
    return max(norm(truth[name] - other[name]) / (norm(truth[name]) + 1e-30) for name in truth)


def overall(truth: Mapping[str, mx.array], other: Mapping[str, mx.array]) -> float:
    """The norm-relative error of all tensors taken as one vector."""
    assert truth.keys() == other.keys()
    error = sum(norm(truth[name] - other[name]) ** 2 for name in truth)
    return (error / sum(norm(array) ** 2 for array in truth.values())) ** 0.5


def norm(array: mx.array) -> float:
    return mx.linalg.norm(array.astype(mx.float32).reshape(-1)).item()
