"""`--set`: changes of a recipe from the command line. Of keys that exclude each other, the one set last wins."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from segtrain.recipe import mlx_lm_keys, yaml_file
from segtrain.recipe.mlx_lm_keys import Translation

ALTERNATIVES = (
    ("train.steps", "train.epochs"),
    ("train.warmup_steps", "train.warmup_ratio"),
    ("lora.alpha", "lora.scale"),
)
Typed: TypeAlias = tuple[tuple[str, ...], Any]  # a key's path and its value
MARK = "--set "  # before a key in messages: it was typed, it doesn't stand in the file


def translated(values: dict[str, Any], typed: Sequence[Typed]) -> Translation:
    """A file's `values` with the changes made, in this recipe's keys. Raises UserError."""
    for name, value in typed:
        if mlx_lm_keys.is_alias(name):
            yaml_file.assign(values, name, value)
    result = mlx_lm_keys.translate(values, frozenset(".".join(name) for name, _ in typed))
    for name, value in typed:
        path = ".".join(name)
        if mlx_lm_keys.is_alias(name):
            paths = [ours for ours, theirs in result.origins.items() if theirs in (path, MARK + path)]
        else:
            yaml_file.assign(result.values, name, value)
            paths = [path]
        for one in paths:
            result.origins[one] = MARK + path
            if value is not None:
                _set_alternative_aside(result, one)
    return result


def _set_alternative_aside(result: Translation, path: str) -> None:
    other = next((a if path == b else b for a, b in ALTERNATIVES if path in (a, b)), None)
    if other is None:
        return
    section, _, key = other.partition(".")
    inner = result.values.get(section)
    if isinstance(inner, dict) and inner.get(key) is not None:
        result.notices.append(f"--set {path} takes the place of {other} ({inner[key]})")
        inner[key] = None
