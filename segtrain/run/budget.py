"""The memory that a run may take, on the backend that it runs on."""

import os

from segtrain.attention import dispatch
from segtrain.memory import machine
from segtrain.memory.backends import BACKENDS, Backend, with_buffers
from segtrain.memory.device import MARGIN, default_budget
from segtrain.memory.meter import recommended_bytes
from segtrain.recipe.schema import Recipe


def own_backend() -> Backend:
    """That of the default device, with the environment's command buffers and attention as measured."""
    row = BACKENDS[dispatch.backend().name]  # type: ignore[index]
    return machine.steered(with_buffers(row, os.environ))


def budget_of(recipe: Recipe, backend: Backend, sharing: int = 1) -> int:
    """Bytes that a run may take: what the recipe says, else what the device recommends."""
    return recipe.engine.budget_bytes or device_budget(backend, sharing)


def device_budget(backend: Backend, sharing: int = 1) -> int:
    """What the device recommends, for each of the ranks that share it. On CUDA each has a GPU of its own."""
    recommended = recommended_bytes()
    whole = int(MARGIN * recommended) if recommended else default_budget(backend)
    return whole if backend.name == "cuda" else whole // sharing
