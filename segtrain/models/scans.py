"""Doors of the state space models, RWKV-7 and lightning attention: mlx-lm's loops by `segtrain.recurrence`.

A door takes the place of the smallest function of a model file that holds the loop, and computes the same numbers.
What the file does beside it (projections, norms, gates) stays the file's, but for Mamba, which calls its projections
once a token. No door keeps a state: a training row begins without one.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.ssm import compute_dt

from segtrain.engine.layouts import Stream
from segtrain.models.branches import Run, by_branches, padded_runs
from segtrain.models.causal import Causal
from segtrain.recurrence.diagonal import linear_recurrence
from segtrain.recurrence.rwkv7 import rwkv7
from segtrain.recurrence.selective_scan import selective_scan
from segtrain.recurrence.ssd import ssd


def mamba2(stream: Stream, attend: Any, original: Any) -> Any:
    """`ssm_update` of Mamba-2 and its heirs: hidden states [B, T, H, P], dt [B, T, H], B and C [B, T, G, N]."""

    def update(
        x: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: None = None,
        lengths: None = None,
    ) -> tuple[mx.array, None]:
        dt = compute_dt(dt, dt_bias, time_step_limit)
        y, _ = by_branches(stream, _of_rows(ssd, _rates(A_log)), [x, dt, B, C])
        return y + x * D[:, None], None

    return update


def mamba(stream: Stream, attend: Any, original: Any) -> Any:
    """`MambaBlock._process_sequence`; x [B, T, H]."""

    def process(self: nn.Module, x: mx.array, conv_cache: None, state_cache: None) -> tuple[mx.array, tuple]:
        x, z = mx.split(self.in_proj(x), 2, axis=-1)
        x = nn.silu(self.conv1d(_after_zeros(x, self.conv_kernel_size - 1)))
        dt, B, C = _dt_and_matrices(self, x)
        if self.use_bcdt_rms:
            dt, B, C = (mx.fast.rms_norm(part, None, self.args.mixer_rms_eps) for part in (dt, B, C))
        return self.out_proj(swiglu(z, _selective(stream, self, x, dt, B, C))), (None, None)

    return process


def jamba(stream: Stream, attend: Any, original: Any) -> Any:
    """`JambaMambaMixer.ssm_step`, Mamba's rule with learnt norms of dt, B and C; x [B, T, D]."""

    def step(self: nn.Module, x: mx.array, A: mx.array, state: None = None) -> tuple[mx.array, None]:
        dt, B, C = _dt_and_matrices(self, x)
        dt, B, C = self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
        return _selective(stream, self, x, dt, B, C), None

    return step


def _dt_and_matrices(mixer: nn.Module, x: mx.array) -> Any:
    """dt before its projection [B, T, rank]; B and C [B, T, N]."""
    rank = mixer.time_step_rank
    return mx.split(mixer.x_proj(x), [rank, rank + mixer.ssm_state_size], axis=-1)


def _selective(stream: Stream, mixer: nn.Module, x: mx.array, dt: mx.array, B: mx.array, C: mx.array) -> mx.array:
    dt = nn.softplus(mixer.dt_proj(dt))
    y, _ = by_branches(stream, _of_rows(selective_scan, _rates(mixer.A_log)), [x, dt, B, C])
    return y + mixer.D * x


def _of_rows(rule: Callable[..., Any], *fixed: mx.array) -> Run:
    """`rule` as a function of the rows and the state before them."""
    return lambda rows, before: rule(*rows, *fixed, before)


def _rates(A_log: mx.array) -> mx.array:
    return -mx.exp(A_log.astype(mx.float32))


def lightning(stream: Stream, attend: Any, original: Any) -> Any:
    """`recurrent_gla`: linear attention with a constant log decay g [H]; q, k and v [B, H, T, D]."""

    def attention(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float, h: None = None, mask: None = None
    ) -> tuple[mx.array, None]:
        C, B, x = (part.swapaxes(1, 2) for part in (q * scale, k, v))
        dt = mx.ones(x.shape[:3], x.dtype)
        y, _ = by_branches(stream, _of_rows(ssd, g), [x, dt, B, C])
        return y.astype(q.dtype).swapaxes(1, 2), None

    return attention


def rwkv(stream: Stream, attend: Any, original: Any) -> Any:
    """`Rwkv7TimeMixing._wkv7`, whose Metal kernel has no gradient; arrays [B, T, H, D]."""

    def mix(self: nn.Module, *arrays: Any) -> tuple[mx.array, None]:
        *sequences, _ = arrays
        y, _ = by_branches(stream, _of_rows(rwkv7), sequences)
        return y, None

    return mix


def token_shift(stream: Stream, attend: Any, original: Any) -> Any:
    """RWKV-7's `TokenShift`: the row before each row of x [B, T, D], zeros before the first."""

    def shift(self: nn.Module, x: mx.array, state: None) -> mx.array:
        runs = padded_runs(stream, _after_zeros(x, 1), 1)
        return mx.concatenate([rows[:, :-1] for rows in runs], axis=1)

    return shift


def ngram_shift(stream: Stream, attend: Any, original: Any) -> Any:
    """LongCat's embedding of n-grams: the token ids [B, T] of `n` rows before, zeros before the first."""

    def shift(self: nn.Module, ids: mx.array, n: int) -> mx.array:
        runs = padded_runs(stream, mx.pad(ids, [(0, 0), (n, 0)]), n)
        return mx.concatenate([rows[:, :-n] for rows in runs], axis=1)

    return shift


def rg_lru(stream: Stream, attend: Any, original: Any) -> Any:
    """Recurrent Gemma's `rnn_scan`; x and its decays a [B, T, D]."""

    def scan(x: mx.array, a: mx.array, h0: None) -> tuple[mx.array, None]:
        y, _ = by_branches(stream, _of_rows(linear_recurrence), [x, a])
        return y, None

    return scan


def recurrent_gemma_convolution(stream: Stream, attend: Any, original: Any) -> Any:
    """Its own `Conv1d`, which goes past `mx.conv1d`; x [B, T, C]."""

    def convolve(self: nn.Module, x: mx.array, cache: None = None) -> tuple[mx.array, None]:
        width = self.weight.shape[1]
        return mx.conv1d(_after_zeros(x, width - 1), self.weight, groups=x.shape[-1]) + self.bias, None

    return convolve


def baichuan_convolution(stream: Stream, attend: Any, original: Any) -> Any:
    """Baichuan M1's convolution of two keys or two values, u [B, H, T, D], with weights for each head."""

    def convolve(self: nn.Module, u: mx.array, weights: mx.array, state: None = None) -> mx.array:
        first, second = mx.split(weights.reshape(1, -1, 2, 1), 2, axis=2)
        runs = padded_runs(stream, _after_zeros(u.swapaxes(1, 2).flatten(2), 1), 1)
        before = mx.concatenate([rows[:, :-1] for rows in runs], axis=1)
        before = mx.unflatten(before, 2, (u.shape[1], -1)).swapaxes(1, 2)
        return before * first + u * second

    return convolve


def windowed_mask(stream: Stream, attend: Any, original: Any) -> Any:
    """`create_attention_mask` with its window by name, where mlx-lm makes a [T, T] array without a cache."""

    def mask(h: mx.array, cache: Any = None, window_size: int | None = None, return_array: bool = False) -> Causal:
        return Causal(window_size if window_size and window_size < h.shape[1] else None)

    return mask


def _after_zeros(x: mx.array, count: int) -> mx.array:
    """x [B, T, D] behind `count` rows of zeros."""
    return mx.pad(x, [(0, 0), (count, 0), (0, 0)])


DOORS: list[tuple[str, str, Callable[..., Any]]] = [
    *((file, "ssm_update", mamba2) for file in ("mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h", "plamo2")),
    ("mamba", "MambaBlock._process_sequence", mamba),
    ("jamba", "JambaMambaMixer.ssm_step", jamba),
    *((file, "recurrent_gla", lightning) for file in ("bailing_moe_linear", "bailing_hybrid")),
    ("rwkv7", "Rwkv7TimeMixing._wkv7", rwkv),
    ("rwkv7", "TokenShift.__call__", token_shift),
    ("longcat_flash_ngram", "NgramEmbedding._shift_right", ngram_shift),
    ("recurrent_gemma", "rnn_scan", rg_lru),
    ("recurrent_gemma", "Conv1d.__call__", recurrent_gemma_convolution),
    ("recurrent_gemma", "create_attention_mask", windowed_mask),
    ("baichuan_m1", "Attention._custom_convolution", baichuan_convolution),
    ("baichuan_m1", "create_attention_mask", windowed_mask),
    ("gear", "create_attention_mask", windowed_mask),
]
"""(model file, what is replaced, by what)."""
