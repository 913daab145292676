"""The adapter that a run begins with (`lora.init_from`): read, held against the recipe, and taken as a whole."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from segtrain.errors import UserError
from segtrain.lora import adapters
from segtrain.lora.layers import Lora
from segtrain.recipe.schema import LoraRecipe

Shapes = dict[str, tuple[int, ...]]
KEY = "lora.init_from"
_NAME = re.compile(r".*?layers\.(?P<layer>\d+)\.(?P<path>.+)\.(lora_[ab]|m)")


def begin(lora: Lora, recipe: LoraRecipe, model: str) -> None:
    """Give `lora` the values of `recipe.init_from`, in float32, if it names an adapter.

    Raises UserError where that adapter can't be read, or has another kind, rank, scale, target, layer or shape.
    """
    if recipe.init_from is None:
        return
    try:
        found = adapters.read(Path(recipe.init_from), model)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from error
    where = f"{KEY}: the adapter in {recipe.init_from}"
    _check_kind(where, found.config.get("fine_tune_type", "lora"), recipe.kind)
    _check_strength(where, found.config["lora_parameters"], lora)
    wanted = _shapes(lora.values())
    _check_places(where, _shapes(found.params), wanted)
    values = {name: found.params[name].astype(mx.float32) for name in wanted}
    mx.eval(values)
    lora.begin_from(values)


def _shapes(values: Mapping[str, mx.array]) -> Shapes:
    return {name: tuple(value.shape) for name, value in values.items()}


def _check_kind(where: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise UserError(f"{where} is of kind {theirs}, the recipe's of kind {ours}; write lora.kind: {theirs}")


def _check_strength(where: str, parameters: Mapping[str, Any], lora: Lora) -> None:
    rank, scale = parameters["rank"], parameters["scale"]
    if rank != lora.rank:
        raise UserError(f"{where} has rank {rank}, the recipe {lora.rank}; write lora.rank: {rank}")
    if not isinstance(scale, int | float) or not math.isclose(scale, lora.scale, rel_tol=1e-6):
        raise UserError(
            f"{where} has scale {scale}, the recipe {lora.scale:g}; write lora.scale: {scale} and neither alpha nor "
            "rslora"
        )


def _check_places(where: str, found: Shapes, wanted: Shapes) -> None:
    """Every array of the adapter has its place, and every place its array."""
    outside = [name for name in found if not _NAME.fullmatch(name)]
    if outside:
        raise UserError(f"{where} has {min(outside)}, which is no LoRA of a layer; give an adapter without it")
    theirs, ours = _targets(found), _targets(wanted)
    if theirs != ours:
        raise UserError(
            f"{where} is on [{', '.join(theirs)}], the recipe's on [{', '.join(ours)}]; "
            f"write lora.targets: [{', '.join(theirs)}]"
        )
    lo, hi = _range(found)
    if (lo, hi) != _range(wanted):
        raise UserError(
            f"{where} is on layers [{lo}, {hi}], the recipe's on {list(_range(wanted))}; "
            f"write lora.layers: [{lo}, {hi}]"
        )
    odd = [name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)]
    if odd:
        name = min(odd)
        raise UserError(
            f"{where} has {name} of shape {found.get(name)}, the model's is {wanted.get(name)} (None: there is none); "
            "give one that was trained on this model"
        )


def _places(names: Iterable[str]) -> list[tuple[int, str]]:
    return [(int(match["layer"]), match["path"]) for name in names if (match := _NAME.fullmatch(name))]


def _targets(names: Iterable[str]) -> list[str]:
    return sorted({path for _, path in _places(names)})


def _range(names: Iterable[str]) -> tuple[int, int]:
    layers = [layer for layer, _ in _places(names)]
    return min(layers, default=0), max(layers, default=-1) + 1
