"""How long a row a model can take, by its `config.json`. Pure.

A learnt table of positions ends: a row beyond it would read memory that isn't the table's. Computed positions don't,
but a model has seen no others than those it was trained on.
"""

from collections.abc import Mapping
from typing import Any

from segtrain.errors import UserError
from segtrain.models.support import FAMILIES, LEARNT

DYNAMIC = "DynamicNTKScalingRoPE"  # the class's name in each model file that has one
KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_seq_len")


def positions(config: Mapping[str, Any]) -> int | None:
    """The positions that a model was trained on, where its configuration says."""
    inner = config.get("text_config")
    levels = [inner, config] if isinstance(inner, Mapping) else [config]
    found = [level[key] for level in levels for key in KEYS if type(level.get(key)) is int]
    return found[0] if found else None


def learnt(config: Mapping[str, Any]) -> int | None:
    """The length of a model's table of learnt positions; None where positions are computed."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.two_streams != LEARNT:
        return None
    return config["n_positions"] if type(config.get("n_positions")) is int else positions(config)


def pads(model: Any, config: Mapping[str, Any]) -> bool:
    """Whether tokens at a row's end leave what stands before them as it is.

    Not where the rotary embedding follows the row's length (dynamic NTK scaling), nor beyond a learnt table's end.
    """
    dynamic = any(type(module).__name__ == DYNAMIC for _, module in model.named_modules())
    return not dynamic and learnt(config) is None


def check_positions(config: Mapping[str, Any], longest: int) -> list[str]:
    """What to say of rows of up to `longest` tokens. Raises UserError where they don't fit a learnt table."""
    table, known = learnt(config), positions(config)
    if table is not None and longest > table:
        raise UserError(
            f"rows of up to {longest:,} tokens don't fit the {table:,} positions that this {config.get('model_type')} "
            f"model has learnt; set data.max_seq_length to {table} or less"
        )
    if known is not None and longest > known:
        return [
            f"rows of up to {longest:,} tokens go beyond the {known:,} positions that the model was trained on "
            "(max_position_embeddings of its config.json): it may do badly there"
        ]
    return []
