"""segtrain: LoRA fine-tuning on MLX with segmented backward.

From Python (docs/python.md): `segtrain.train(segtrain.Recipe.from_yaml("recipe.yaml"))`. Names are imported when they
are used, so that `import segtrain` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segtrain import event
    from segtrain.api import Run, check, evaluate, events, plan, train
    from segtrain.errors import RunFailed, UserError
    from segtrain.recipe.schema import Recipe

__version__ = "0.1.0"

__all__ = ["Recipe", "Run", "RunFailed", "UserError", "check", "evaluate", "event", "events", "plan", "train"]

_HOMES = {"Recipe": "recipe.schema", "RunFailed": "errors", "UserError": "errors"}  # all else: api


def __getattr__(name: str) -> Any:
    if name == "event":
        return import_module("segtrain.event")
    if name not in __all__:
        raise AttributeError(f"module 'segtrain' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"segtrain.{_HOMES.get(name, 'api')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
