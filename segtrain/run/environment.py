"""Variables that must be in the environment before mlx is imported, each unless the user has set it."""

import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from segtrain.cache import cache
from segtrain.memory import machine
from segtrain.memory.backends import here, set_buffers

# Undocumented: how long Metal lets a kernel run while the display waits for it. Others who train on Macs set it too.
PATIENCE = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"


def prepare(environment: MutableMapping[str, str], *, longest: int = 0, exact: bool = False) -> None:
    """For rows of up to `longest` tokens; `exact`: float32 products are not rounded to TF32.

    On CUDA, kernels that mlx compiles at run time are kept in segtrain's cache; mlx's own default is the temporary
    directory, which is emptied when the machine starts.
    """
    set_buffers(environment, longest)
    if exact:
        environment.setdefault("MLX_ENABLE_TF32", "0")
    if sys.platform == "darwin":
        environment.setdefault(PATIENCE, "1")
    if here().name == "cuda":
        environment.setdefault("MLX_PTX_CACHE_DIR", str(cache() / "kernels" / machine.mlx_version()))


def compiles_kernels(environment: Mapping[str, str]) -> bool:
    """Whether the first update will have to compile kernels: on CUDA, where none are kept yet."""
    kept = Path(environment.get("MLX_PTX_CACHE_DIR", ""))
    return here().name == "cuda" and not (kept.is_dir() and any(kept.iterdir()))
