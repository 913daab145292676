"""A small random configuration for every model file of mlx-lm, keeping what is peculiar to the family.

`CONFIGS` maps a name to its `config.json`. A name is a model file, or `file/variant`. Keys that a model file's
`ModelArgs` does not know are ignored by mlx-lm, so `COMMON` holds what most share; windows and chunks are smaller than
the tests' rows.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

VOCAB = 97
WINDOW = 5

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MOE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
MLA: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {"layer_types": [SLIDING, FULL, SLIDING, FULL]}
ROPES = {FULL: {"rope_theta": 10000.0, "rope_type": "default"}, SLIDING: {"rope_theta": 1000.0, "rope_type": "default"}}
BAILING = {
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "norm_softmax": False,
    "score_function": "sigmoid",
    "use_qk_norm": True,
    "group_norm_size": 2,
    "layer_group_size": 2,
    "moe_router_enable_expert_bias": True,
}
GEMMA3 = {
    "query_pre_attn_scalar": 8,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 1000.0,
}
GEMMA3N = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "rope_local_base_freq": 1000.0,
    "final_logit_softcapping": 10.0,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
    "altup_num_inputs": 3,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "rope_theta": None,
    "use_double_wide_mlp": True,
    "tie_word_embeddings": True,
}
GEMMA4_DENSE = {
    **GEMMA4,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
} | WINDOWED
MISTRAL3 = {
    "model_type": "ministral3",
    "rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8, "rope_theta": 10000.0},
    **WINDOWED,
}
LLAMA4 = {
    **MOE,
    "model_type": "llama4_text",
    "attention_chunk_size": 8,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "floor_scale": 8,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64,
    "num_experts_per_tok": 1,
    "use_qk_norm": True,
    "no_rope_layers": [1, 1, 1, 0],
    "rope_scaling": None,
}
LONGCAT = {
    **MOE,
    **MLA,
    "attention_method": "MLA",
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "num_layers": 3,
    "router_bias": False,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
}
MAMBA: dict[str, Any] = {
    "conv_kernel": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "use_bcdt_rms": False,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
}
MAMBA2 = {
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_d_conv": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "mamba_d_ssm": 32,
    "mamba_chunk_size": 8,
    "time_step_limit": [0.001, 100.0],
}
NAS_BLOCK = {
    "attention": {
        "n_heads_in_group": 2,
        "no_op": False,
        "num_sink_tokens": None,
        "replace_with_linear": False,
        "sparsify": None,
        "unshifted_sink": False,
        "use_prefill_window_in_sink_attention": False,
        "window_length": None,
    },
    "ffn": {"ffn_mult": 1.3125, "no_op": False, "replace_with_linear": False, "sparsify": None},
}
YARN = {
    "type": "yarn",
    "factor": 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "type": "longrope",
    "long_factor": [2.0] * 4,
    "short_factor": [1.0] * 4,
    "long_mscale": 1.24,
    "short_mscale": 1.24,
    "original_max_position_embeddings": 128,
}
LFM2 = {
    "model_type": "lfm2",
    "block_dim": 32,
    "block_ff_dim": 64,
    "block_ffn_dim_multiplier": 1.5,
    "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": True,
    "conv_L_cache": 3,
    "conv_bias": True,
    "full_attn_idxs": [1, 3],
}
DEEPSEEK = {**MOE, **MLA, "rope_scaling": YARN}
INDEXER = {"index_head_dim": 8, "index_n_heads": 4, "index_topk": 6, "indexer_rope_interleave": False}


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": {**COMMON, **config}, **COMMON}


_OWN: dict[str, dict[str, Any]] = {
    "Klear": MOE,
    "afmoe": {
        **MOE,
        **WINDOWED,
        "n_group": 1,
        "mup_enabled": True,
        "num_dense_layers": 1,
        "rope_scaling": None,
        "route_norm": True,
        "route_scale": 2.8,
        "score_func": "sigmoid",
    },
    "apertus": {"post_norm": True, "qk_norm": True, "mlp_bias": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2, "num_swa_attention_heads": 4},
    "bailing_hybrid": {**MOE, **MLA, **BAILING},
    "bailing_moe": {**MOE, **BAILING},
    "bailing_moe_linear": {**MOE, **BAILING, "num_key_value_heads": 4, "use_rmsnorm": True},
    "bailing_moe_v3": {**MOE, **MLA, **BAILING, "moe_shared_expert_intermediate_size": 32, "short_conv_kernel_size": 3},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window_pattern": 2},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000},
        "d_model": 32,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "n_heads": 4,
        "n_layers": 4,
    },
    "deepseek": MOE,
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": {**DEEPSEEK, **INDEXER},
    "dots1": {**MOE, "n_group": 1, "scoring_func": "noaux_tc"},
    "ernie4_5": {"use_bias": False, "tie_word_embeddings": True},
    "ernie4_5_moe": {
        **MOE,
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 1,
        "moe_capacity": [],
        "moe_k": 2,
        "moe_use_aux_free": False,
    },
    "exaone": {"num_layers": 4, "tie_word_embeddings": True},
    "exaone4": {"sliding_window_pattern": "LLGL", "rope_scaling": None},
    "exaone_moe": {
        **MOE,
        "n_group": 1,
        "is_moe_layer": [False, True, True, True],
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    },
    "falcon_h1": {
        **MAMBA2,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.93,
        "embedding_multiplier": 5.6,
        "key_multiplier": 0.39,
        "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.88, 0.58],
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
        "ssm_out_multiplier": 0.23,
        "tie_word_embeddings": True,
    },
    "gear": {**WINDOWED, "final_logit_softcapping": 20.0, "tie_word_embeddings": True},
    "gear/conv": {"layer_types": ["conv_mixer", SLIDING, "conv_mixer", FULL], "tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 8.0},
    "gemma3": _text({**GEMMA3, "model_type": "gemma3_text"}),
    "gemma3_text": GEMMA3,
    "gemma3n": _text(GEMMA3N),
    "gemma4": _text(GEMMA4),
    "gemma4_text": GEMMA4,
    "gemma4_text/dense": GEMMA4_DENSE,
    "gemma4_text/k_eq_v": {**GEMMA4_DENSE, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text/moe": {**GEMMA4_DENSE, **MOE, "enable_moe_block": True, "top_k_experts": 2},
    "glm": {"tie_word_embeddings": True},
    "glm4": {"partial_rotary_factor": 0.5, "rope_traditional": True},
    "glm4_moe": {**MOE, "partial_rotary_factor": 0.5, "use_qk_norm": True, "rope_scaling": None},
    "glm4_moe_lite": {**MOE, **MLA, "n_group": 1},
    "glm_moe_dsa": {**MOE, **MLA, **INDEXER, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt2": {"n_ctx": 128, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 128, "num_key_value_heads": 4},
    "gpt_bigcode": {
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 64,
        "n_layer": 4,
        "n_positions": 128,
        "num_key_value_heads": 1,
        "multi_query": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "use_parallel_residual": True},
    "gpt_oss": {**MOE, **WINDOWED, "rope_scaling": None},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 128, "rotary_dim": 4},
    "granite": {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "tie_word_embeddings": True,
    },
    "granitemoe": {
        **MOE,
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        **MOE,
        **MAMBA2,
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "helium": {},
    "hunyuan": {
        **MOE,
        "cla_share_factor": 2,
        "use_cla": True,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "num_shared_expert": 1,
        "moe_intermediate_size": None,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "hunyuan_v1_dense": {
        "use_qk_norm": True,
        "rope_scaling": {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        },
    },
    "internlm2": {"bias": True},
    "internlm2/dynamic": {"bias": True, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "internlm3": {"bias": False, "qkv_bias": True},
    "internlm3/dynamic": {"bias": False, "qkv_bias": True, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "jamba": {
        **MOE,
        **MAMBA2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "layers_block_type": ["mamba", "attention", "mamba", "attention"],
        "tie_word_embeddings": True,
    },
    "kimi_k25": _text({**DEEPSEEK, "model_type": "kimi_k2"}),
    "kimi_linear": {
        **MOE,
        **MLA,
        "linear_attn_config": {"head_dim": 8, "kda_layers": [1, 3], "num_heads": 4, "short_conv_kernel_size": 3},
        "mla_use_nope": True,
        "model_max_length": 512,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "use_grouped_topk": True,
        "q_lora_rank": None,
        "rope_scaling": None,
    },
    "kimi_vl": _text({**MOE, **MLA}),
    "laguna": {
        **MOE,
        "gating": True,
        "layer_types": [FULL, SLIDING, SLIDING, FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0,
        "moe_router_score_func": "sqrtsoftplus",
        "num_attention_heads_per_layer": [4] * 4,
        "partial_rotary_factor": 0.5,
        "qkv_bias": False,
        "rope_parameters": {
            FULL: {**YARN, "rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
        },
    },
    "lfm2": LFM2,
    "lfm2-vl": {"text_config": {**COMMON, **LFM2, "layer_types": ["conv", FULL, "conv", FULL]}},
    "lfm2_moe": {**MOE, **LFM2, "num_dense_layers": 1, "use_expert_bias": True},
    "lille-130m": {"block_size": 128, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "llama": {},
    "llama/mistral": WINDOWED,
    "llama/llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "llama4": {"text_config": {**COMMON, **LLAMA4}},
    "llama4_text": LLAMA4,
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": {**LONGCAT, "emb_neighbor_num": 3, "emb_split_num": 2, "ngram_vocab_size_ratio": 4},
    "mamba": MAMBA,
    "mamba/falcon": {**MAMBA, "use_bcdt_rms": True},
    "mamba2": {
        "conv_kernel": 3,
        "head_dim": 16,
        "num_heads": 4,
        "n_groups": 2,
        "state_size": 8,
        "ssm_state_size": 8,
        "time_step_rank": 4,
        "time_step_limit": [0.01, 10.0],
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
    },
    "mellum": {**MOE, **WINDOWED, "rope_parameters": ROPES},
    "mimo": {"num_nextn_predict_layers": 2},
    "mimo_v2_flash": {
        **MOE,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_value_scale": 0.7,
        "sliding_window_size": WINDOW,
        "swa_head_dim": 8,
        "v_head_dim": 4,
        "swa_v_head_dim": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {
        **MLA,
        "dim_model_base": 16,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {**LONGROPE, "long_factor": [2.0] * 2, "short_factor": [1.0] * 2},
    },
    "minimax": {**MOE, "rotary_dim": 4, "shared_intermediate_size": 32, "use_qk_norm": True},
    "minimax_m3_vl": {
        "text_config": {
            **COMMON,
            **MOE,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "moe_layer_freq": [0, 1, 1, 1],
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": [FULL, "sparse", FULL, "sparse"],
        }
    },
    "ministral3": MISTRAL3,
    "mistral3": _text(MISTRAL3),
    "mistral4": {
        **MOE,
        **MLA,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **MISTRAL3["rope_parameters"]},
    },
    "mixtral": MOE,
    "muse_glimmer": {},
    "nanbeige": {},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "nemotron-nas": {"block_configs": [NAS_BLOCK] * 4, "hidden_act": "silu", "num_key_value_heads": None},
    "nemotron_h": {
        "conv_kernel": 3,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
        "mamba_head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_proj_bias": False,
        "n_groups": 2,
        "ssm_state_size": 8,
        "time_step_limit": [0.001, 10.0],
        "use_bias": False,
        "use_conv_bias": True,
    },
    "nemotron_h/moe": {
        **MOE,
        "conv_kernel": 3,
        "hybrid_override_pattern": ["M", "*", "M", "E"],
        "moe_shared_expert_intermediate_size": 32,
        "mamba_head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_proj_bias": False,
        "n_groups": 2,
        "ssm_state_size": 8,
        "time_step_limit": [0.001, 10.0],
        "use_bias": False,
        "use_conv_bias": True,
    },
    "olmo2": {"tie_word_embeddings": True},
    "olmo3": WINDOWED,
    "olmo_hybrid": {**DELTA, "linear_allow_neg_eigval": True, "layer_types": ["linear_attention", FULL] * 2},
    "olmoe": {**MOE},
    "openelm": {
        "ffn_dim_divisor": 32,
        "ffn_multipliers": [1.0, 2.0, 3.0],
        "ffn_with_glu": True,
        "model_dim": 32,
        "normalize_qk_projections": True,
        "num_kv_heads": [1, 1, 2],
        "num_query_heads": [2, 3, 4],
        "num_transformer_layers": 3,
        "rope_freq_constant": 10000,
        "share_input_output_layers": True,
    },
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "phi3": {"original_max_position_embeddings": 512},
    "phi3/longrope": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 128, "partial_rotary_factor": 1.0},
    "phimoe": {**MOE, "original_max_position_embeddings": 128, "rope_scaling": LONGROPE},
    "phixtral": {"num_vocab": VOCAB, "model_dim": 32, "num_heads": 4, "num_layers": 4, "rotary_dim": 4, **MOE},
    "pixtral": {"text_config": {**COMMON, "model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 8,
        "attention_window_size": WINDOW,
        "full_attention_idx": [],
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "mamba_chunk_size": 8,
        "mamba_enabled": True,
        "tie_word_embeddings": True,
    },
    "plamo3": {"sliding_window_pattern": 2, "rope_local_theta": 1000, "tie_word_embeddings": True},
    "qwen": {"kv_channels": 8, "intermediate_size": 128, "no_bias": True, "num_key_value_heads": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {**MOE},
    "qwen2_vl": _text({"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_5": _text(
        {
            **DELTA,
            "model_type": "qwen3_5",
            "rope_parameters": {
                "type": "default",
                "mrope_section": [1, 1, 0],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        }
    ),
    "qwen3_5_moe": _text({**MOE, **DELTA, "model_type": "qwen3_5_moe", "rope_parameters": None}),
    "qwen3_moe": MOE,
    "qwen3_next": {**MOE, **DELTA},
    "qwen3_vl": _text({"model_type": "qwen3"}),
    "qwen3_vl_moe": _text({**MOE, "model_type": "qwen3_moe"}),
    "recurrent_gemma": {
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    "rwkv7": {
        "a_low_rank_dim": 4,
        "decay_low_rank_dim": 4,
        "gate_low_rank_dim": 4,
        "v_low_rank_dim": 4,
    },
    "seed_oss": {"attention_out_bias": False},
    "smollm3": {
        "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0, 1, 0],
        "tie_word_embeddings": True,
        "layer_types": None,
    },
    "solar_open": {**MOE, "partial_rotary_factor": 1.0},
    "spark2_5": {"rope_parameters": ROPES, **WINDOWED, "tie_word_embeddings": True},
    "stablelm": {
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": False,
    },
    "stablelm/parallel": {
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": True,
    },
    "starcoder2": {"tie_word_embeddings": True},
    "step3p5": {
        **WINDOWED,
        "attention_other_setting": {"num_attention_groups": 2, "num_attention_heads": 4},
        "moe_intermediate_size": 32,
        "moe_layers_enum": "1,2,3",
        "moe_num_experts": 4,
        "moe_router_scaling_factor": 3.0,
        "moe_top_k": 2,
        "norm_expert_weight": True,
        "num_attention_groups": 2,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        "rope_theta": [10000.0] * 4,
        "share_expert_dim": 32,
        "use_head_wise_attn_gate": True,
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {**MLA, "tie_word_embeddings": True},
}

CONFIGS: dict[str, dict[str, Any]] = {
    name: {**COMMON, **own, "model_type": name.split("/")[0]} for name, own in _OWN.items()
}


ADD_ONE = ("gemma", "gemma2", "gemma3_text")
"""Files whose norms multiply by one more than their weight, which starts at one."""


def build(name: str, *, seed: int = 1) -> nn.Module:
    """A random float32 model for `CONFIGS[name]`, with no weight left at the zero or one it starts from."""
    return build_config(CONFIGS[name], seed)


def build_config(config: dict[str, Any], seed: int = 1) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    for path, part in model.named_modules():
        _vary(part)
        if path.endswith(("q_norm", "k_norm")) and "weight" in part:
            part.weight = 0.5 * part.weight  # scores as soft as trained ones; sharp ones amplify rounding
    mx.eval(model.parameters())
    return model


def _vary(part: nn.Module) -> None:
    for key, value in part.items():
        if isinstance(value, mx.array) and not key.startswith("_") and mx.issubdtype(value.dtype, mx.floating):
            if mx.all(value == value.reshape(-1)[0]).item():
                start = 0 if type(part).__module__.endswith(ADD_ONE) else value
                part[key] = start + 0.1 * mx.random.normal(value.shape)
            part[key] = part[key].astype(mx.float32)


def save(name: str, directory: Path, **changes: Any) -> Path:
    """`directory` as a model that mlx-lm loads, without a tokenizer: `config.json` with `changes`, and weights.

    `changes` go into the text part too.
    """
    config = {**CONFIGS[name], **changes}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **changes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    parameters = dict(tree_flatten(build_config(config).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), parameters)
    return directory
