"""What some model files do by hand, done by `attend` and by the stream's positions instead.

An exception replaces one function or method of a model file for as long as `active` lasts, and computes the same
numbers. There are two kinds:

- attention written out with a `[heads, T, T]` array (soft-caps, latent attention);
- positions taken from the row number, which branches of a stream repeat.

Recurrences are replaced in the same way; they have a table of their own, `recurrences.DOORS`.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from segtrain.engine.layouts import Stream
from segtrain.models.recurrences import DOORS
from segtrain.models.support import MLX_LM

Attend: TypeAlias = Callable[..., mx.array]
"""`attend` with the stream's visibility filled in: (q, k, v, *, scale, window=None, softcap=None) -> output."""
Maker: TypeAlias = Callable[[Stream, Attend, Any], Any]
"""(stream, attend, the original) -> what stands in for it."""


class Replacement(NamedTuple):
    """`owner.attribute`, a model file's function or a class's method, and what makes its stand-in."""

    owner: Any
    attribute: str
    maker: Maker


def exceptions_of(model: nn.Module) -> list[Replacement]:
    """The exceptions and recurrences of `model`'s model files. Raises ValueError where such a file has changed."""
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    return [
        Replacement(*_found(file, name), maker)
        for file, name, maker in [*EXCEPTIONS, *DOORS]
        if f"mlx_lm.models.{file}" in files
    ]


def _found(file: str, name: str) -> tuple[Any, str]:
    """Where `name` (`function` or `Class.method`) stands in a model file: its owner and its own name."""
    owner: Any = sys.modules[f"mlx_lm.models.{file}"]
    *owners, attribute = name.split(".")
    for part in owners:
        owner = getattr(owner, part, None)
    if not hasattr(owner, attribute):
        raise ValueError(
            f"models/{file}.py of mlx-lm {importlib.metadata.version('mlx-lm')} has no {name}, which segtrain "
            f"replaces; install mlx-lm {MLX_LM}"
        )
    return owner, attribute


@contextmanager
def active(exceptions: Sequence[Replacement], stream: Stream, attend: Attend) -> Iterator[None]:
    """Put these exceptions in place while the block runs."""
    with ExitStack() as replacements:
        for owner, attribute, maker in exceptions:
            replacements.enter_context(replaced(owner, attribute, partial(maker, stream, attend)))
        yield


@contextmanager
def replaced(owner: Any, attribute: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.attribute` replaced by `make(original)`."""
    original = getattr(owner, attribute)
    try:
        setattr(owner, attribute, make(original))
        yield
    finally:
        setattr(owner, attribute, original)


def causal_mask(stream: Stream, attend: Attend, original: Any) -> Any:
    """`create_attention_mask` that never makes an array: the attention that gets it is one of the exceptions below."""

    def mask(h: mx.array, cache: Any = None, window_size: int | None = None, return_array: bool = False) -> Any:
        return create_attention_mask(h, cache, window_size=window_size)

    return mask


def gemma2_attention(stream: Stream, attend: Attend, original: Any) -> Any:
    """Gemma 2: scores through a tanh soft-cap. mlx-lm runs it without sliding windows, so all of the row is seen."""

    def call(self: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        q, k, v = (
            _heads(project(x), heads)
            for project, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        q, k = self.rope(q), self.rope(k)
        return self.o_proj(_rows(attend(q, k, v, scale=self.scale, softcap=self.attn_logit_softcapping)))

    return call


def gear_attention(stream: Stream, attend: Attend, original: Any) -> Any:
    """Gear: the same soft-cap in a function of its own, with windows."""

    def call(q: mx.array, k: mx.array, v: mx.array, scale: float, softcap: float, mask: Any) -> mx.array:
        if not isinstance(mask, str):
            return original(q, k, v, scale, softcap, mask)
        return attend(q, k, v, scale=scale, softcap=softcap, window=getattr(mask, "window", None))

    return call


def latent_attention(stream: Stream, attend: Attend, original: Any) -> Any:
    """Multi-head latent attention (DeepSeek V3 and its heirs).

    mlx-lm adds the rotary part's scores as a [heads, T, T] mask. The two products add up to one over concatenated
    features: q k = [q_nope, q_rope] [k_nope, k_rope].
    """

    def call(self: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if "q_a_proj" in self else self.q_proj(x)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        latent = self.kv_a_layernorm(latent)[:, None]
        heads = self.embed_q.weight.shape[0]
        q, k_rope = _heads(q, heads), _heads(k_rope, 1)
        if getattr(self, "mla_scale_q_lora", None) is not None:  # LongCat
            q, latent = q * self.mla_scale_q_lora, latent * self.mla_scale_kv_lora
        q_nope, q_rope = mx.split(q, [self.qk_nope_head_dim], axis=-1)
        if "rope" in self:
            q_rope, k_rope = self.rope(q_rope), self.rope(k_rope)
        k_rope = mx.broadcast_to(k_rope, q_rope.shape)
        q = mx.concatenate([q_nope, q_rope], axis=-1)
        k = mx.concatenate([self.embed_q(latent, transpose=False), k_rope], axis=-1)
        out = attend(q, k, self.unembed_out(latent), scale=self.scale)
        if "g_proj" in self:  # Bailing V3: a gate per head; Kimi K3: per feature
            gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(out.dtype)
            out = out * _heads(gate, heads)
        project = self.o_proj if "o_proj" in self else self.dense
        return project(_rows(out))

    return call


def scale_by_position(stream: Stream, attend: Attend, original: Any) -> Any:
    """Mistral's query scale grows with the position, [T, 1]."""

    def scale(size: int, offset: Any, beta: float, max_position_embeddings: int) -> mx.array:
        if size != len(stream) or not (stream.branches or stream.ragged):
            return original(size, offset, beta, max_position_embeddings)
        if stream.ragged:
            every = original(stream.ragged.tokens.shape[1], 0, beta, max_position_embeddings)
            return mx.take(every, stream.ragged.positions, axis=0)
        runs = [original(length, first, beta, max_position_embeddings) for first, length in stream.runs]
        return mx.concatenate(runs, axis=0)

    return scale


def _heads(x: mx.array, heads: int) -> mx.array:
    """[B, T, heads * D] as [B, heads, T, D]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _rows(x: mx.array) -> mx.array:
    """[B, heads, T, D] as [B, T, heads * D]."""
    return x.swapaxes(1, 2).flatten(2)


_LATENT = {
    "deepseek_v3": "DeepseekV3Attention",
    "glm4_moe_lite": "Glm4MoeLiteAttention",
    "longcat_flash": "LongcatFlashMLA",
    "bailing_hybrid": "MultiLatentAttention",
    "bailing_moe_v3": "BailingMLA",
    "kimi_linear": "KimiMLAAttention",
    "kimi_k3": "KimiK3MLAAttention",
}

EXCEPTIONS: list[tuple[str, str, Maker]] = [
    ("gemma2", "create_attention_mask", causal_mask),
    ("gemma2", "Attention.__call__", gemma2_attention),
    ("gear", "_softcap_attention", gear_attention),
    *((file, "create_attention_mask", causal_mask) for file in (*_LATENT, "longcat_flash_ngram")),
    *((file, f"{kind}.__call__", latent_attention) for file, kind in _LATENT.items()),
    ("ministral3", "_get_llama_4_attn_scale", scale_by_position),
    ("mistral4", "_get_llama_4_attn_scale", scale_by_position),
]
"""(model file, what is replaced, by what)."""
