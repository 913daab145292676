"""What may differ between a checkpoint and the run that goes on from it.

A run may be made longer or shorter (by `train.patience` too), and the limit on its rows may change: neither makes what
was learnt worthless, and messages advise both. Anything else needs `--force`, which takes what still fits and begins
anew with what doesn't.
"""

from collections.abc import Iterable
from typing import Any

from segtrain.errors import counted
from segtrain.recipe.schema import Recipe, differences

LENGTH = ("train.steps", "train.epochs")
PATIENCE = "train.patience"  # nothing to tell: the run says when it ends by it
LIMIT = ("data.max_seq_length", "data.on_long")


def changes(saved: Any, recipe: Recipe) -> tuple[list[str], list[str]]:
    """From a checkpoint's recipe to this one, as `path: old → new`: those that any run may make, and the others."""
    found = differences(Recipe.from_mapping(saved), recipe, training_only=True)
    found = [text for text in found if text.partition(":")[0] != PATIENCE]
    free = [text for text in found if text.partition(":")[0] in (*LENGTH, *LIMIT)]
    return free, [text for text in found if text not in free]


def told(free: Iterable[str], step: int, steps: int) -> list[str]:
    """What to say of changes that any run may make."""
    free = list(free)
    length = [text for text in free if text.partition(":")[0] in LENGTH]
    limit = [text for text in free if text not in length]
    found = [f"{', '.join(limit)} for the rows after step {step:,}"] if limit else []
    if length and steps <= step:
        found.append(f"{', '.join(length)}: the run has made {counted(step, 'update')} already")
    elif length:
        found.append(
            f"{', '.join(length)}: after step {step:,} the learning rate is that of a run of {counted(steps, 'update')}"
        )
    return found
