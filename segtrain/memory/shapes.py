"""A model's shape from its `config.json`: every linear layer, attention and expert, without weights. Pure; no mlx.

`read` understands the keys that mlx-lm's model files use, under their various names. Parameters follow from the linear
layers (`tests/test_shapes.py` compares them with models that are built); what one family has beyond that, such as
norms and convolutions, is small and left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from segtrain.errors import UserError

Mixer: TypeAlias = Literal["attention", "recurrent", "none"]

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNGATED = {
    *("apertus", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nanochat", "nemotron", "nemotron_h", "phi", "phixtral"),
    "starcoder2",
}
# Files that size experts by intermediate_size; files whose MLP is four hidden sizes wide, whatever the config says.
EXPERTS_BY_WIDTH = {
    *("gpt_oss", "granitemoe", "granitemoehybrid", "jamba", "llama4_text", "minimax", "mixtral", "olmoe", "phimoe"),
    "hunyuan",
}
FOUR_HIDDEN = {"gpt2", "gpt_neox", "gptj", "phixtral"}
WITHOUT_SHARED = {"gpt_oss", "granitemoe", "jamba", "mixtral", "olmoe", "phimoe", "phixtral", "qwen3_moe", "lfm2_moe"}
TIED = {"lfm2", "lfm2_moe", "cohere", "cohere2", "gemma", "gemma2", "gemma3n_text", "openelm", "gpt2"}
TIED_UNLESS_SAID = {"gemma3_text", "gemma4_text"}
POST_NORMS = {"gemma2", "gemma3_text", "gemma3n", "gemma4_text", "glm4", "olmo2", "olmo3", "exaone4"}
QK_NORMS = {
    *("qwen3", "qwen3_moe", "gemma3_text", "gemma3n", "gemma4_text", "olmo2", "olmo3", "olmoe", "exaone4", "lfm2"),
    *("lfm2_moe", "hunyuan_v1_dense", "qwen3_next", "apertus", "qwen3_5", "qwen3_5_moe"),
}
NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_attention_groups", "num_kv_heads"),
    "head_dim": ("head_dim", "kv_channels", "hidden_size_per_head"),
    "width": ("intermediate_size", "n_inner", "ffn_hidden_size", "block_ff_dim", "dense_intermediate_size"),
    "vocabulary": ("vocab_size", "num_vocab"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "block_size", "max_seq_len"),
}


@dataclass(frozen=True)
class Linear:
    """One linear layer by the last part of its path; `experts` > 0: so many of them stacked."""

    name: str
    inputs: int
    outputs: int
    experts: int = 0

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * max(self.experts, 1)

    def lora_parameters(self, rank: int) -> int:
        return rank * (self.inputs + self.outputs) * max(self.experts, 1)


@dataclass(frozen=True)
class Attention:
    """What one layer's attention looks like; `keys_shared`: it reuses an earlier layer's keys and values."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    keys_shared: bool = False

    @property
    def queries(self) -> int:
        return self.heads * self.dim

    @property
    def keys(self) -> int:
        return self.kv_heads * (self.dim + self.value_dim)


@dataclass(frozen=True)
class Layer:
    """A layer's parts. `width`: MLP intermediates a token, over its experts; `mixer_width`: those of a recurrence."""

    linears: tuple[Linear, ...]
    attention: Attention | None = None
    width: int = 0
    activation: str = "silu"  # or "gelu", "geglu", all gated; "plain": not gated
    routed: int = 0  # experts a token goes to
    mixer_width: int = 0
    post_norms: bool = False
    qk_norms: bool = False
    layer_inputs: int = 0  # per-layer embedding width (Gemma 3n, 4)
    streams: int = 1  # copies of the hidden states that cross layers (AltUp)

    @property
    def parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears)


@dataclass(frozen=True)
class Quantization:
    bits: int = 0
    group: int = 64
    mode: str = "affine"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def bytes_per_weight(self, name: str, inputs: int, dtype_bytes: int) -> float:
        """Packed weight, scales and (affine) biases; the dtype's own where it isn't quantised."""
        own = next((v for path, v in self.overrides.items() if path.endswith(name)), None)
        bits, group = (
            (own.get("bits", self.bits), own.get("group_size", self.group)) if own else (self.bits, self.group)
        )
        if own is False or not bits or inputs % group:
            return dtype_bytes
        return bits / 8 + (2 * dtype_bytes if self.mode == "affine" else 1) / group


@dataclass(frozen=True)
class Model:
    """A whole model. `extra_rows` x `extra_width`: a second embedding table (per-layer inputs)."""

    model_type: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool
    dtype_bytes: int
    positions: int | None
    quantization: Quantization = Quantization()
    capped: bool = False  # logits are soft-capped
    extra_rows: int = 0
    extra_width: int = 0

    @cached_property
    def parameters(self) -> int:
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.extra_rows * self.extra_width
        return tables + sum(layer.parameters for layer in self.layers)

    @cached_property
    def bytes(self) -> int:
        """Of all weights, as they lie in memory."""

        def size(name: str, inputs: int, count: int) -> float:
            return count * self.quantization.bytes_per_weight(name, inputs, self.dtype_bytes)

        total = size("embed_tokens", self.hidden, self.vocabulary * self.hidden)
        if not self.tied:
            total += size("lm_head", self.hidden, self.vocabulary * self.hidden)
        total += size("embed_tokens_per_layer", self.extra_width, self.extra_rows * self.extra_width)
        total += sum(size(x.name, x.inputs, x.parameters) for layer in self.layers for x in layer.linears)
        return round(total)


class Keys:
    """A config's values under any of their names; what must be there and isn't is an error that says so."""

    def __init__(self, config: Mapping[str, Any]):
        text = config.get("text_config") or config.get("llm_config") or {}
        self.values = {**config, **(text if isinstance(text, Mapping) else {})}
        self.model_type = str(self.values.get("model_type", config.get("model_type", "unknown")))
        self.file = str(config.get("model_type", self.model_type))

    def get(self, what: str, default: Any = None) -> Any:
        for name in NAMES.get(what, (what,)):
            if self.values.get(name) is not None:
                return self.values[name]
        return default

    def number(self, what: str, default: int | None = None) -> int:
        value = self.get(what, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            value = max(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < 0
            or (default is None and value < 1)
        ):
            problem = "has no" if value is None else f"says {value!r} for"
            raise UserError(
                f"config.json {problem} {' or '.join(NAMES.get(what, (what,))[:3])}, which the estimate needs"
            )
        return int(value)


def read(config: Mapping[str, Any]) -> Model:
    """The shape that a `config.json` describes. Raises UserError where a key that it needs is missing or absurd."""
    keys = Keys(config)
    hidden, count = keys.number("hidden"), keys.number("layers")
    layers = tuple(_layer(keys, i, count) for i in range(count))
    extra = keys.number("hidden_size_per_layer_input", 0)
    return Model(
        keys.model_type,
        hidden,
        keys.number("vocabulary"),
        layers,
        bool(keys.get("tie_word_embeddings", keys.model_type in TIED_UNLESS_SAID)) or keys.model_type in TIED,
        BYTES.get(str(keys.get("torch_dtype") or keys.get("dtype") or "bfloat16").removeprefix("torch."), 2),
        keys.get("positions"),
        _quantization(config),
        bool(keys.get("final_logit_softcapping", 30.0 if keys.model_type.startswith(("gemma2", "gemma4")) else None)),
        keys.number("vocab_size_per_layer_input", keys.number("vocabulary")) if extra else 0,
        extra * count,
    )


def _quantization(config: Mapping[str, Any]) -> Quantization:
    found = config.get("quantization") or config.get("quantization_config") or {}
    if not isinstance(found, Mapping) or not found.get("bits"):
        return Quantization()
    overrides = {key: value for key, value in found.items() if isinstance(value, Mapping) or value is False}
    return Quantization(
        int(found["bits"]), int(found.get("group_size", 64)), str(found.get("mode", "affine")), overrides
    )


def _layer(keys: Keys, i: int, count: int) -> Layer:
    mixer = _mixer(keys, i, count)
    if mixer == "recurrent":
        linears, width = _recurrence(keys)
        layer = Layer(linears, mixer_width=width)
    elif mixer == "attention":
        linears, attention = _attention(keys, i, count)
        layer = Layer(linears, attention)
        if keys.model_type == "falcon_h1":
            more, width = _mamba(keys)
            layer = replace(layer, linears=linears + more, mixer_width=width)
    else:
        layer = Layer(())
    layer = _with_mlp(layer, keys, i)
    extra, streams = keys.number("hidden_size_per_layer_input", 0), keys.number("altup_num_inputs", 1)
    if extra:
        H = keys.number("hidden")
        more = (Linear("per_layer_input_gate", H, extra), Linear("per_layer_projection", extra, H))
        layer = replace(layer, linears=layer.linears + more, layer_inputs=extra, streams=streams)
    return replace(layer, post_norms=keys.model_type in POST_NORMS, qk_norms=keys.model_type in QK_NORMS)


def _mixer(keys: Keys, i: int, count: int) -> Mixer:
    """What mixes tokens in layer `i`."""
    if keys.model_type in ("mamba", "mamba2", "falcon_mamba", "rwkv7"):
        return "recurrent"
    pattern = keys.get("hybrid_override_pattern")
    if pattern:
        return {"*": "attention", "M": "recurrent"}.get(pattern[i], "none")  # type: ignore[return-value]
    types = keys.get("layer_types") or keys.get("layers_block_type")
    if types:
        return "attention" if "attention" in types[i] and types[i] != "linear_attention" else _other(types[i])
    if (indices := keys.get("full_attn_idxs")) is not None:
        return "attention" if i in indices else "recurrent"
    if interval := keys.get("full_attention_interval"):
        return "attention" if (i + 1) % interval == 0 else "recurrent"
    if (interval := keys.get("layer_group_size")) and keys.model_type.startswith(("bailing_hybrid", "bailing_moe_")):
        return "attention" if (i + 1) % interval == 0 else "recurrent"
    if kda := (keys.get("linear_attn_config") or {}).get("kda_layers"):
        return "recurrent" if i + 1 in kda else "attention"
    if keys.get("attn_layer_period"):
        return (
            "attention" if i % keys.number("attn_layer_period") == keys.number("attn_layer_offset", 0) else "recurrent"
        )
    if keys.model_type == "plamo2" and keys.get("mamba_enabled"):
        return "attention" if i % keys.number("mamba_step", 2) else "recurrent"
    return "attention"


def _other(kind: str) -> Mixer:
    return "recurrent" if kind in ("linear_attention", "conv", "mamba", "recurrent") else "attention"


def _attention(keys: Keys, i: int, count: int) -> tuple[tuple[Linear, ...], Attention]:
    H, heads = keys.number("hidden"), keys.number("heads")
    if keys.get("kv_lora_rank"):
        return _latent(keys)
    windowed = _window(keys, i)
    dim = keys.number("head_dim", H // heads)
    kv = keys.number("kv_heads", (keys.get("attn_config") or {}).get("kv_n_heads", heads))
    if keys.get("multi_query"):
        kv = 1
    if windowed is None and keys.get("global_head_dim"):
        dim = keys.number("global_head_dim")
        kv = keys.number("num_global_key_value_heads", kv) if keys.get("attention_k_eq_v") else kv
    shared = i >= count - keys.number("num_kv_shared_layers", 0)
    softcap = bool(keys.get("attn_logit_softcapping"))
    attention = Attention(heads, kv, dim, dim, windowed, softcap, keys.model_type == "gpt_oss", shared)
    out = 2 if keys.model_type in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text") else 1
    found = [Linear("q_proj", H, heads * dim * out)]
    if not shared:
        found.append(Linear("k_proj", H, kv * dim))
        if not (keys.get("attention_k_eq_v") and windowed is None):
            found.append(Linear("v_proj", H, kv * dim))
    return (*found, Linear("o_proj", heads * dim, H)), attention


def _window(keys: Keys, i: int) -> int | None:
    """Layer `i`'s sliding window, if it has one."""
    window = keys.get("sliding_window") or keys.get("sliding_window_size")
    if not window or keys.get("use_sliding_window") is False or keys.model_type == "gemma2":
        return None
    types, pattern = keys.get("layer_types"), keys.get("sliding_window_pattern")
    if types:
        return window if "sliding" in types[i] else None
    if isinstance(pattern, str):
        return window if pattern[i % len(pattern)] == "L" else None
    if pattern:
        return None if (i + 1) % pattern == 0 else window
    if keys.model_type == "gemma3_text":
        return None if (i + 1) % 6 == 0 else window
    if keys.model_type == "gpt_oss":
        return None if i % 2 else window
    return None


def _latent(keys: Keys) -> tuple[tuple[Linear, ...], Attention]:
    """Multi-head latent attention: keys and values from a narrow latent."""
    H, heads = keys.number("hidden"), keys.number("heads")
    rope, nope = keys.number("qk_rope_head_dim"), keys.number("qk_nope_head_dim")
    value, rank = keys.number("v_head_dim", H // heads), keys.number("kv_lora_rank")
    dim, query_rank = rope + nope, keys.number("q_lora_rank", 0)
    queries = (
        (Linear("q_a_proj", H, query_rank), Linear("q_b_proj", query_rank, heads * dim))
        if query_rank
        else (Linear("q_proj", H, heads * dim),)
    )
    linears = (
        *queries,
        Linear("kv_a_proj_with_mqa", H, rank + rope),
        Linear("kv_b_proj", rank, heads * (nope + value)),
        Linear("o_proj", heads * value, H),
    )
    return linears, Attention(heads, heads, dim, value)


def _recurrence(keys: Keys) -> tuple[tuple[Linear, ...], int]:
    """A recurrent or convolutional mixer's linear layers, and the elements a token that it holds."""
    H = keys.number("hidden")
    if keys.get("conv_L_cache"):
        return (Linear("in_proj", H, 3 * H), Linear("out_proj", H, H)), 3 * H
    if keys.get("linear_num_value_heads"):
        k = keys.number("linear_num_key_heads") * keys.number("linear_key_head_dim")
        v = keys.number("linear_num_value_heads") * keys.number("linear_value_head_dim")
        heads = keys.number("linear_num_value_heads")
        return (
            Linear("in_proj_qkvz", H, 2 * k + 2 * v),
            Linear("in_proj_ba", H, 2 * heads),
            Linear("out_proj", v, H),
        ), 2 * k + 2 * v
    if keys.get("mamba_d_state") or keys.get("state_size") or keys.get("ssm_state_size"):
        return _mamba(keys)
    return (Linear("qkv_proj", H, 4 * H), Linear("out_proj", H, H)), 4 * H


def _mamba(keys: Keys) -> tuple[tuple[Linear, ...], int]:
    H = keys.number("hidden")
    state = keys.get("ssm_state_size") or keys.get("mamba_d_state") or keys.get("state_size")
    heads = keys.get("mamba_num_heads") or keys.get("mamba_n_heads") or keys.get("num_heads")
    dim = keys.get("mamba_head_dim") or keys.get("mamba_d_head") or keys.get("head_dim")
    groups = keys.get("n_groups") or keys.get("mamba_n_groups") or 1
    if heads and dim:
        inner = heads * dim
        wide = 2 * inner + 2 * groups * state + heads
        return (Linear("in_proj", H, wide), Linear("out_proj", inner, H)), wide
    inner = keys.get("mamba_expand") or keys.get("expand") or 2
    inner = keys.number("d_inner", inner * H) if keys.model_type != "mamba" else keys.number("width", inner * H)
    rank = keys.get("mamba_dt_rank") or keys.get("time_step_rank") or math.ceil(H / 16)
    rank = rank if isinstance(rank, int) else math.ceil(H / 16)
    return (
        Linear("in_proj", H, 2 * inner),
        Linear("x_proj", inner, rank + 2 * state),
        Linear("dt_proj", rank, inner),
        Linear("out_proj", inner, H),
    ), 4 * inner


def _with_mlp(layer: Layer, keys: Keys, i: int) -> Layer:
    """`layer` and its MLP: dense, or routed experts with shared ones beside them."""
    if keys.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return layer
    pattern = keys.get("hybrid_override_pattern")
    if pattern and pattern[i] in "M*":
        return layer
    H, gated = keys.number("hidden"), keys.model_type not in UNGATED
    if not _routes(keys, i):
        width = _dense_width(keys, i)
        return replace(
            layer, linears=layer.linears + _mlp(H, width, gated), width=width, activation=_activation(keys, gated)
        )
    experts, chosen = keys.number("experts"), keys.number("chosen", 2)
    width = keys.number("width", 4 * H)
    if keys.model_type in FOUR_HIDDEN:
        width = 4 * H
    elif keys.model_type not in EXPERTS_BY_WIDTH:
        width = keys.number("expert_width", width)
    shared = _shared_width(keys, width)
    linears = (*layer.linears, Linear("gate", H, experts), *_mlp(H, width, gated, experts))
    if shared:
        linears += _mlp(H, shared, gated)
    if keys.get("enable_moe_block"):  # Gemma 4: a dense MLP beside the experts
        linears, shared = (*linears, *_mlp(H, keys.number("width"), gated)), keys.number("width")
    return replace(
        layer, linears=linears, width=chosen * width + shared, activation=_activation(keys, gated), routed=chosen
    )


def _dense_width(keys: Keys, i: int) -> int:
    H = keys.number("hidden")
    if keys.model_type in FOUR_HIDDEN:
        return 4 * H
    if blocks := keys.get("block_configs"):
        return -(-int(2 * (blocks[i]["ffn"].get("ffn_mult") or 0) * H / 3) // 256) * 256
    multipliers = keys.get("ffn_multipliers")
    if multipliers and len(multipliers) > i:
        return -(-int(multipliers[i] * H) // keys.number("ffn_dim_divisor", 1)) * keys.number("ffn_dim_divisor", 1)
    if keys.model_type in ("lfm2", "lfm2_moe") and keys.get("block_auto_adjust_ff_dim"):
        width = int(2 * keys.number("block_ff_dim") / 3 * (keys.get("block_ffn_dim_multiplier") or 1.0))
        multiple = keys.number("block_multiple_of", 256)
        return multiple * math.ceil(width / multiple)
    if keys.model_type == "llama4_text" and keys.get("intermediate_size_mlp"):
        return keys.number("intermediate_size_mlp")
    if keys.model_type == "qwen":
        return keys.number("width") // 2
    width = keys.number("width", keys.number("shared_intermediate_size", 4 * H))
    values = keys.get("width")
    if isinstance(values, Sequence) and len(values) > i:
        width = int(values[i])
    wide = keys.get("use_double_wide_mlp", keys.model_type == "gemma4_text") and keys.get("num_kv_shared_layers")
    doubled = wide and i >= keys.number("layers") - keys.number("num_kv_shared_layers", 0)
    return 2 * width if doubled else width


def _routes(keys: Keys, i: int) -> bool:
    """Whether layer `i` routes its tokens to experts."""
    experts = keys.get("experts") or (keys.get("ffn_config") or {}).get("moe_num_experts")
    if not experts or (keys.model_type == "gemma4_text" and not keys.get("enable_moe_block")):
        return False
    if experts and not keys.get("experts"):
        keys.values |= {"num_experts": experts, "intermediate_size": keys.values["ffn_config"]["ffn_hidden_size"]}
        keys.values["num_experts_per_tok"] = keys.values["ffn_config"]["moe_top_k"]
    pattern = keys.get("hybrid_override_pattern")
    rules: list[Callable[[], bool]] = [
        lambda: not pattern or pattern[i] == "E",
        lambda: i >= keys.number("first_k_dense_replace", 0),
        lambda: i >= keys.number("num_dense_layers", 0),
        lambda: i >= keys.number("moe_layer_start_index", 0),
        lambda: i not in (keys.get("mlp_only_layers") or ()),
        lambda: (i + 1) % max(1, keys.number("decoder_sparse_step", 1)) == 0,
        lambda: (i + 1) % max(1, keys.number("interleave_moe_layer_step", 1)) == 0,
        lambda: _listed(keys.get("moe_layer_freq"), i) and _listed(keys.get("is_moe_layer"), i),
        lambda: (keys.get("mlp_layer_types") or {}) == {} or keys.get("mlp_layer_types")[i] != "dense",
    ]
    if keys.get("expert_layer_period"):
        rules.append(lambda: i % keys.number("expert_layer_period") == keys.number("expert_layer_offset", 0))
    return all(rule() for rule in rules)


def _listed(flags: Any, i: int) -> bool:
    return bool(flags[i]) if isinstance(flags, Sequence) else True


def _shared_width(keys: Keys, width: int) -> int:
    if keys.model_type in WITHOUT_SHARED:
        return 0
    if keys.model_type == "llama4_text":
        return width
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"):
        if keys.get(name):
            return keys.number(name)
    for name in ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"):
        if keys.get(name):
            return keys.number(name) * width
    return 0


def _activation(keys: Keys, gated: bool) -> str:
    if not gated:
        return "plain"
    if keys.model_type.startswith("gemma4"):
        return "geglu"
    name = str(keys.get("hidden_activation") or keys.get("hidden_act") or keys.get("activation_function") or "silu")
    return "gelu" if "gelu" in name or keys.model_type.startswith("gemma") else "silu"


def _mlp(hidden: int, width: int, gated: bool, experts: int = 0) -> tuple[Linear, ...]:
    down, up = Linear("down_proj", width, hidden, experts), Linear("up_proj", hidden, width, experts)
    return (Linear("gate_proj", hidden, width, experts), up, down) if gated else (up, down)
