"""What each of mlx-lm's model files supports, as data; the proof of every entry is in `tests/test_families.py`.

A `model_type` (from `config.json`) names a model file, or is another name for one. This module answers before
anything is loaded, so it imports neither mlx nor mlx-lm.
"""

import difflib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segtrain.errors import UserError

MLX_LM = "0.32.2"
"""The version of mlx-lm that this was tested with."""

LEARNT = "positions are learnt, one for each row"
SPARSE = "its sparse attention works on [T, T] arrays"
CHUNKED = "its chunked attention works on [T, T] arrays"
DYNAMIC = "with dynamic rope scaling, pairs run as two streams"
TEXT = "only its text part is trained"
QUADRATIC = "attention memory grows with the square of the row"


@dataclass(frozen=True)
class Family:
    """A model file that trains.

    `two_streams`: why a prompt can't be shared by two responses; empty where it can. `traceable`: whether its forward
    pass can be compiled (not if it looks at values).
    """

    two_streams: str = ""
    experts: bool = False
    note: str = ""
    traceable: bool = True


FAMILIES: dict[str, Family] = {
    "afmoe": Family(experts=True),
    "apertus": Family(),
    "baichuan_m1": Family(),
    "bailing_hybrid": Family(experts=True),
    "bailing_moe": Family(experts=True),
    "bailing_moe_linear": Family(experts=True),
    "bailing_moe_v3": Family(experts=True),
    "cohere": Family(),
    "cohere2": Family(),
    "dbrx": Family(experts=True, traceable=False),
    "deepseek": Family(experts=True),
    "deepseek_v2": Family(experts=True),
    "deepseek_v3": Family(experts=True),
    "deepseek_v32": Family(SPARSE, experts=True, note=QUADRATIC),
    "dots1": Family(experts=True),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family(experts=True),
    "exaone": Family(),
    "exaone4": Family(),
    "exaone_moe": Family(experts=True),
    "falcon_h1": Family(),
    "gear": Family(),
    "gemma": Family(),
    "gemma2": Family(note="mlx-lm runs it without its sliding window, and so does training"),
    "gemma3": Family(note=TEXT),
    "gemma3_text": Family(),
    "gemma3n": Family(),
    "gemma4": Family(experts=True, note=TEXT),
    "gemma4_text": Family(experts=True),
    "glm": Family(),
    "glm4": Family(),
    "glm4_moe": Family(experts=True),
    "glm4_moe_lite": Family(experts=True),
    "glm_moe_dsa": Family(SPARSE, experts=True, note=QUADRATIC),
    "gpt2": Family(LEARNT),
    "gpt_bigcode": Family(LEARNT),
    "gpt_neox": Family(),
    "gpt_oss": Family(experts=True),
    "gptj": Family(),
    "granite": Family(),
    "granitemoe": Family(experts=True),
    "granitemoehybrid": Family(experts=True),
    "helium": Family(),
    "hunyuan": Family(experts=True),
    "hunyuan_v1_dense": Family(),
    "internlm2": Family(note=DYNAMIC),
    "internlm3": Family(note=DYNAMIC),
    "jamba": Family(experts=True),
    "kimi_k25": Family(experts=True, note=TEXT),
    "kimi_linear": Family(experts=True),
    "kimi_vl": Family(experts=True, note=TEXT),
    "Klear": Family(experts=True),
    "laguna": Family(experts=True),
    "lfm2": Family(),
    "lfm2-vl": Family(note=TEXT),
    "lfm2_moe": Family(experts=True),
    "lille-130m": Family(),
    "llama": Family(),
    "llama4": Family(CHUNKED, experts=True, note=f"{TEXT}; {QUADRATIC}"),
    "llama4_text": Family(),
    "longcat_flash": Family(experts=True),
    "longcat_flash_ngram": Family(experts=True),
    "mamba": Family(),
    "mamba2": Family(),
    "mellum": Family(experts=True),
    "mimo": Family(),
    "mimo_v2_flash": Family(experts=True),
    "minicpm": Family(),
    "minicpm3": Family(),
    "minimax": Family(experts=True),
    "minimax_m3_vl": Family(SPARSE, experts=True, note=f"{TEXT}; {QUADRATIC}"),
    "ministral3": Family(),
    "mistral3": Family(note=TEXT),
    "mistral4": Family(experts=True),
    "mixtral": Family(experts=True),
    "muse_glimmer": Family(),
    "nanbeige": Family(note="with num_loops 1"),
    "nanochat": Family(),
    "nemotron": Family(),
    "nemotron-nas": Family(),
    "nemotron_h": Family(experts=True),
    "olmo2": Family(),
    "olmo3": Family(),
    "olmo_hybrid": Family(),
    "olmoe": Family(experts=True),
    "openelm": Family(),
    "phi": Family(),
    "phi3": Family(),
    "phimoe": Family(experts=True),
    "phixtral": Family(experts=True),
    "pixtral": Family(note=TEXT),
    "plamo": Family(),
    "plamo2": Family(),
    "plamo3": Family(),
    "qwen": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(experts=True),
    "qwen2_vl": Family(note=TEXT),
    "qwen3": Family(),
    "qwen3_5": Family(),
    "qwen3_5_moe": Family(experts=True),
    "qwen3_moe": Family(experts=True),
    "qwen3_next": Family(experts=True),
    "qwen3_vl": Family(note=TEXT),
    "qwen3_vl_moe": Family(experts=True, note=TEXT),
    "recurrent_gemma": Family(),
    "rwkv7": Family(),
    "seed_oss": Family(),
    "smollm3": Family(),
    "solar_open": Family(experts=True),
    "spark2_5": Family(),
    "stablelm": Family(),
    "starcoder2": Family(),
    "step3p5": Family(experts=True),
    "talkie": Family(),
    "telechat3": Family(),
    "youtu_llm": Family(),
}

REFUSED: dict[str, str] = {
    "afm7": "its fused projections need several LoRA pairs each, which only mlx-lm's own trainer writes",
    "bitnet": "its linear layers hold packed ternary weights, which LoRA does not wrap",
    "deepseek_v41": "mlx-lm's own forward pass has no gradient (indices) and mixes rows in its head",
    "iquestloopcoder": "it runs its layers twice, with glue between them",
    "kimi_k3": "every layer reads all earlier residual blocks, through weights that LoRA would wrap",
    "muse_spark": "it is written in Metal kernels without a gradient",
    "olmo": "mlx-lm's file ends the process unless another package is installed; OLMo 2 and 3 work",
    "phi3small": "mlx crashes in its block-sparse attention",
    "prism_hadamard_qwen35": "its rotated 2-bit layers are not wrapped by LoRA",
}

# model_type -> model file, as in mlx-lm (`tests/test_support.py` compares).
ALIASES = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}


@dataclass(frozen=True)
class Row:
    """What one `model_type` supports. `moe_lora` is None for a model without experts."""

    model_type: str
    sft: bool
    pairs: bool
    shared_prefix: bool
    quantised: bool
    moe_lora: bool | None
    notes: str = ""


def table() -> list[Row]:
    """A row for every model file known here and for every other name of one, by name."""
    names = {*FAMILIES, *REFUSED, *ALIASES}
    return [_row(name) for name in sorted(names, key=str.lower)]


def model_file(model_type: str) -> str:
    """The file in mlx-lm's `models` that runs `model_type`."""
    return ALIASES.get(model_type, model_type)


def shares_prefix(model_type: str) -> bool:
    """Whether a prompt shared by two responses can be computed once, proven by test."""
    family = FAMILIES.get(model_file(model_type))
    return family is not None and not family.two_streams


def traceable(model_type: str) -> bool:
    """Whether this model's layers can be compiled."""
    family = FAMILIES.get(model_file(model_type))
    return family is None or family.traceable


def why_unproven(config: Mapping[str, Any]) -> str:
    """Why no test holds this model's gradients, so that a short row is checked first; empty where tests do."""
    if "model_file" in config or model_file(str(config.get("model_type"))) not in FAMILIES:
        return f"no test of segtrain covers {config.get('model_type')}"
    if (version := importlib.metadata.version("mlx-lm")) != MLX_LM:
        return f"segtrain was tested with mlx-lm {MLX_LM}, and this is mlx-lm {version}"
    return ""


def refuse(config: Mapping[str, Any]) -> None:
    """Raise UserError for a model that can't be trained, by name and with the reason. Reads nothing but `config`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError("config.json names no model_type, so mlx-lm can't tell which model this is")
    name = model_file(model_type)
    if name in REFUSED:
        raise UserError(
            f"model_type {model_type} can't be trained: {REFUSED[name]}; `segtrain models` lists those that can"
        )
    if "model_file" not in config and not _exists(name):
        raise UserError(
            f"mlx-lm knows no model_type {model_type}{_near(model_type)}; `segtrain models` lists those that train"
        )


def as_markdown() -> str:
    """The table of `docs/models.md`."""
    cells = [_cells(row) for row in table()]
    head = ["model_type", "SFT", "pairs", "shared prefix", "quantised", "LoRA on experts", "notes"]
    lines = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """`docs/models.md`."""
    rows = table()
    supported, sharing = sum(row.sft for row in rows), sum(row.shared_prefix for row in rows)
    return (
        "# Supported models\n\n"
        "Written by `python -m segtrain.models.support` from the code; "
        f"tested with mlx-lm {MLX_LM}, each on a small random configuration.\n\n"
        f"{supported} of {len(rows)} model types train; {sharing} of them compute a prompt once for both responses of "
        "a preference pair (shared prefix). Others run a pair as two streams, with the same gradients. A model type "
        "that mlx-lm runs and this table lacks is checked on a short row first, and refused if its gradients differ. "
        "`-`: does not apply.\n\n"
    ) + as_markdown()


def _row(model_type: str) -> Row:
    name = model_file(model_type)
    notes = [f"runs as {name}"] if name != model_type else []
    if name in REFUSED:
        return Row(model_type, False, False, False, False, None, "; ".join([*notes, REFUSED[name]]))
    family = FAMILIES[name]
    if family.two_streams:
        notes.append(f"pairs run as two streams: {family.two_streams}")
    if family.note:
        notes.append(family.note)
    experts = True if family.experts else None
    return Row(model_type, True, True, not family.two_streams, True, experts, "; ".join(notes))


def _cells(row: Row) -> list[str]:
    marks = [row.sft, row.pairs, row.shared_prefix, row.quantised, row.moe_lora]
    return [f"`{row.model_type}`", *("-" if mark is None else "yes" if mark else "no" for mark in marks), row.notes]


def _near(model_type: str) -> str:
    near = difflib.get_close_matches(model_type, [row.model_type for row in table() if row.sft], n=1)
    return f" (the nearest is {near[0]})" if near else ""


def _exists(name: str) -> bool:
    """Whether mlx-lm has the model file, looked up without importing it."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name):
        return False
    return any((Path(place) / "models" / f"{name}.py").exists() for place in spec.submodule_search_locations or ())


if __name__ == "__main__":
    Path("docs/models.md").write_text(page())
