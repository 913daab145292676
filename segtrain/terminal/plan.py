"""A plan in words: only what it sets, by the recipe's keys where there are such."""

from collections.abc import Mapping
from typing import Any

from segtrain.errors import counted
from segtrain.terminal.format import count, gib, value

_SETTINGS = {"keep": "keep_layers", "boundaries": "boundaries kept", "mlp_rows": "MLP rows at a time"}
_SWITCHES = {"dequantize": "dense copies of packed weights", "compiled": "compiled", "tight": "tight limit"}
_PLAIN = {"keep": 0, "boundaries": None, "lookahead": 0, "mlp_rows": None}


def settings(plan: Mapping[str, Any]) -> list[str]:
    """How `plan` runs, without what is off or as it would be anyway."""
    if plan.get("backward") == "full":
        return ["full backward", *_switches(plan)]
    pieces = [f"segment_size {value(plan['segment_size'])}"]
    for key, plain in _PLAIN.items():
        if (set_to := plan.get(key, plain)) != plain:
            pieces.append(f"{_SETTINGS.get(key, key)} {value(set_to)}")
    return pieces + _switches(plan)


def plan_pieces(plan: Mapping[str, Any]) -> list[str]:
    """The plan of a run, its predicted peak, the budget and the row that it is for."""
    pieces = settings(plan)
    if plan.get("backward") != "full" and (chunk := plan.get("head_chunk")) is not None:
        pieces.insert(1, f"head_chunk {value(chunk)}")
    if (peak := plan.get("peak_gib")) is not None:
        pieces.append(f"predicted peak {gib(float(peak))}")
    if (budget := plan.get("budget_gib")) is not None:
        pieces.append(f"budget {gib(float(budget))}")
    if (tokens := plan.get("row_tokens")) is not None:
        pieces.append(f"longest row {counted(tokens, 'token')}")
    if (together := plan.get("rows_together", 1)) > 1:
        pieces.append(f"{count(together)} rows together")
    return pieces


def _switches(plan: Mapping[str, Any]) -> list[str]:
    return [text for key, text in _SWITCHES.items() if plan.get(key)]
