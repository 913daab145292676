"""The model that a run trains on: the recipe's own, or with `quantize` its quantised copy.

The copy is made once, by mlx-lm's quantisation, and kept in segtrain's cache under the model's fingerprint. It is an
ordinary mlx-lm model directory: adapters name it as their base. Planning needs no copy, only its `config.json`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segtrain.errors import UserError
from segtrain.memory import machine
from segtrain.memory.source import Source, described, find
from segtrain.recipe.schema import Recipe
from segtrain.storage.fingerprint import model_fingerprint
from segtrain.storage.fresh import made_once

if TYPE_CHECKING:
    from segtrain.models.load import Loaded


def base(recipe: Recipe) -> str:
    """The hub id or directory to load; a quantised copy is made if it isn't there. Raises UserError, RunFailed."""
    if recipe.quantize is None:
        return recipe.model
    source = _source(recipe)
    place = _place(recipe, source)
    with made_once(place) as inside:
        if inside is not None:
            from segtrain.models.convert import convert

            convert(source, inside, recipe.quantize, trust_remote_code=recipe.trust_remote_code)
    return str(place)


def pending(recipe: Recipe) -> str:
    """What to say before `base` makes a copy; empty where it has nothing to make. Raises UserError."""
    if recipe.quantize is None or (place := _place(recipe, _source(recipe))).is_dir():
        return ""
    return f"quantising {recipe.model} ({recipe.quantize}), once: the copy is kept in {place}"


def load_base(recipe: Recipe, stream: Callable[[Path], bool] = lambda path: False) -> "Loaded":
    """`models.load.load` of `base`."""
    from segtrain.models.load import load

    return load(base(recipe), trust_remote_code=recipe.trust_remote_code, stream=stream)


def planned(recipe: Recipe) -> Source:
    """`config.json` and size of what `base` would be; nothing is fetched or made for it. Raises UserError."""
    found = find(recipe.model)
    if recipe.quantize is None:
        return found
    from segtrain.memory.anatomy import quantised

    refuse_quantised(recipe, found.config)
    local = Path(recipe.model).expanduser()
    if local.is_dir() and (place := _place(recipe, local)).is_dir():
        return find(str(place))
    config, size = quantised(found.config, recipe.quantize)
    return Source(recipe.model, config, size)


def _source(recipe: Recipe) -> Path:
    """The directory of the model to quantise, with its files. Raises UserError."""
    from segtrain.models.load import located

    refuse_quantised(recipe, find(recipe.model).config)
    path, _ = located(recipe.model, trust_remote_code=recipe.trust_remote_code)
    return path


def refuse_quantised(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Raise UserError where the recipe would quantise a model, of this `config.json`, that is quantised already."""
    if recipe.quantize is not None and (how := described(config)):
        raise UserError(
            f"quantize: {recipe.model} is quantised already ({how}); leave quantize out, or give the model that it was "
            "made of"
        )


def _place(recipe: Recipe, source: Path) -> Path:
    """Where the copy is, or would be."""
    name = f"{Path(recipe.model).name}-{recipe.quantize}-{model_fingerprint(source)[:16]}"
    return (machine.cache() / "models" / name).absolute()
