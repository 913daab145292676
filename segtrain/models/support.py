"""What each of mlx-lm's model files supports, as data; the proof of every entry is in `tests/test_families.py`.

A `model_type` (from `config.json`) names a model file, or is another name for one. This module answers before anything is loaded,
so it imports neither mlx nor mlx-lm.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segtrain.errors import UserError

# Attention reads positions and masks through mlx-lm's own functions: a prompt can be computed once for several responses.
SHARED_PREFIX = frozenset(
    """
    Klear afmoe apertus bailing_moe cohere cohere2 gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text llama mixtral
    gpt_oss qwen2 qwen3 qwen3_moe
    """.split()
)

# The rest of what trains: why a preference pair runs as two streams.
RECURRENT = "recurrent layers"
TWO_STREAMS: dict[str, str] = {
    "mamba": RECURRENT,
    "qwen3_next": RECURRENT,
}

REFUSED: dict[str, str] = {
    "bitnet": "its linear layers have ternary weights, which LoRA layers do not wrap",
}

EXPERTS = frozenset("Klear afmoe bailing_moe gpt_oss mixtral qwen3_moe qwen3_next".split())
"""Have layers of routed experts."""

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

NOTES: dict[str, str] = {}


@dataclass(frozen=True)
class Row:
    """What one `model_type` supports. `moe_lora` is None for a model without experts."""

    model_type: str
    sft: bool
    orpo: bool
    shared_prefix: bool
    quantised: bool
    moe_lora: bool | None
    notes: str = ""


def table() -> list[Row]:
    """A row for every model file known here and for every other name of one, by name."""
    names = {*SHARED_PREFIX, *TWO_STREAMS, *REFUSED, *ALIASES}
    return [_row(name) for name in sorted(names, key=str.lower)]


def model_file(model_type: str) -> str:
    """The file in mlx-lm's `models` that runs `model_type`."""
    return ALIASES.get(model_type, model_type)


def shares_prefix(model_type: str) -> bool:
    """Whether a prompt shared by two responses can be computed once, proven by test."""
    return model_file(model_type) in SHARED_PREFIX


def is_proven(config: Mapping[str, Any]) -> bool:
    """Whether tests hold this model's gradients; if not, check a short row first (`segtrain.verify.check`)."""
    name = model_file(str(config.get("model_type")))
    return "model_file" not in config and (name in SHARED_PREFIX or name in TWO_STREAMS)


def refuse(config: Mapping[str, Any]) -> None:
    """Raise UserError for a model that can't be trained, by name and with the reason. Reads nothing but `config`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError("config.json names no model_type, so mlx-lm can't tell which model this is")
    name = model_file(model_type)
    if name in REFUSED:
        raise UserError(f"model_type {model_type} can't be trained: {REFUSED[name]}. {_choices()}")
    if "model_file" not in config and not _exists(name):
        raise UserError(f"mlx-lm knows no model_type {model_type}. {_choices()}")


def as_markdown() -> str:
    """The table in `docs/models.md`."""
    cells = [_cells(row) for row in table()]
    head = ["model_type", "SFT", "ORPO", "shared prefix", "quantised", "LoRA on experts", "notes"]
    lines = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(model_type: str) -> Row:
    name = model_file(model_type)
    notes = [f"runs as {name}"] if name != model_type else []
    if name in REFUSED:
        return Row(model_type, False, False, False, False, None, "; ".join([*notes, REFUSED[name]]))
    if name in TWO_STREAMS:
        notes.append(f"pairs run as two streams: {TWO_STREAMS[name]}")
    if name in NOTES:
        notes.append(NOTES[name])
    return Row(model_type, True, True, name in SHARED_PREFIX, True, True if name in EXPERTS else None, "; ".join(notes))


def _cells(row: Row) -> list[str]:
    marks = [row.sft, row.orpo, row.shared_prefix, row.quantised, row.moe_lora]
    return [f"`{row.model_type}`", *("-" if mark is None else "yes" if mark else "no" for mark in marks), row.notes]


def _choices() -> str:
    return "Supported: " + ", ".join(row.model_type for row in table() if row.sft)


def _exists(name: str) -> bool:
    """Whether mlx-lm has the model file, looked up without importing it."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name):
        return False
    return any((Path(place) / "models" / f"{name}.py").exists() for place in spec.submodule_search_locations or ())
