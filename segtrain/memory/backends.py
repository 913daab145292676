"""What the estimate must know of a backend, as data. Pure.

The attention part is `segtrain.attention.kernels`, by which attention is computed too. The allocator's and scheduler's
constants were fitted to measured peaks (`fitted`): on CPU, and on an H200 for CUDA. Metal's row was not measured on a
Mac: its command buffers end after 2^20 elements of distinct inputs times 40 (50 on the largest chips), which with long
rows is one or two operations, so it has the constants of CUDA's small buffers; the scratch of its fused attention is
read from the binary.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from typing import Literal, TypeAlias

from segtrain.attention.kernels import HALF, KERNELS, Kind, form
from segtrain.memory import fitted
from segtrain.memory.shapes import Attention

Name: TypeAlias = Literal["cpu", "cuda", "metal"]


@dataclass(frozen=True)
class Backend:
    """`run_ahead`: a layer's temporaries in flight, as a share of what its backward makes.

    - `fused`: the share of it that is left in compiled segments;
    - `fuses`: what a compiled MLP keeps for backward is gate, up and their product alone;
    - `held`: hidden-sized arrays of a layer whose MLP works in chunks that a command buffer holds though done with;
    - `chunks_help`: an MLP in chunks frees memory; a large command buffer holds all chunks' temporaries until its end;
    - `overlaps`: with look-ahead 2 the next segment is at work before the last one is done;
    - `workspace`: bytes that matrix products in flight hold for themselves;
    - `scratch`: elements a query head that fused attention's backward takes for itself;
    - `unpacking`: bytes for each weight that is being expanded from a packed one, beside its dense copy;
    - `compiles`: compiled segments pay.
    """

    name: Name
    run_ahead: float = 1.0
    fused: float = 1.0
    fuses: bool = False
    held: float = 0.0
    chunks_help: bool = True
    overlaps: bool = True
    workspace: int = 0
    scratch: int = 0
    unpacking: float = 0.0
    compiles: bool = False
    head_dims: frozenset[int] = frozenset()
    dtypes: tuple[str, ...] = ()
    query_multiple: int = 1
    array_mask: bool = False
    unequal_dims: bool = False
    widens_values: bool = False
    tile_bytes: int = 4 << 20

    def attention_kind(self, attention: Attention, length: int, dtype_bytes: int) -> Kind:
        """How `segtrain.attention.dispatch.choose` computes a call of `length` rows over as many keys."""
        fits = "float32" in self.dtypes if dtype_bytes == 4 else bool({*HALF} & {*self.dtypes})
        windowed = attention.window is not None and attention.window < length
        return form(self, attention, dtype=fits, windowed=windowed)


SMALL_BUFFERS = 10  # operations a command buffer: with so few, little is held that is done with


def table() -> dict[Name, Backend]:
    """The rows, with the constants of `fitted`."""
    return {
        "cpu": Backend(
            "cpu",
            run_ahead=fitted.CPU_RUN_AHEAD,
            fused=fitted.CPU_FUSED,
            overlaps=False,
            unpacking=fitted.CPU_UNPACKING,
            **KERNELS["cpu"],
        ),
        "cuda": Backend(
            "cuda",
            run_ahead=fitted.CUDA_RUN_AHEAD,
            fuses=True,
            chunks_help=False,
            workspace=round(fitted.CUDA_WORKSPACE * 2**20),
            compiles=True,
            **KERNELS["cuda"],
        ),
        "metal": Backend(
            "metal",
            run_ahead=fitted.SMALL_RUN_AHEAD,
            fuses=True,
            held=fitted.SMALL_HELD,
            overlaps=False,
            scratch=3 * 1024**2,
            **KERNELS["metal"],
        ),
    }


BACKENDS = table()


def with_buffers(backend: Backend, environment: Mapping[str, str]) -> Backend:
    """`backend` with the command buffers that the environment asks for (`MLX_MAX_OPS_PER_BUFFER`)."""
    asked = environment.get("MLX_MAX_OPS_PER_BUFFER", "")
    if backend.name == "cpu" or not asked.isdigit() or int(asked) > SMALL_BUFFERS:
        return backend
    return replace(backend, run_ahead=fitted.SMALL_RUN_AHEAD, held=fitted.SMALL_HELD, chunks_help=True, overlaps=False)


# On an H200 these cost no time at 8,192 tokens and save 1 to 2 GiB; at 512 tokens, where the GPU waits for the next
# operation to be handed to it, they cost up to a tenth and save 0.5 GiB (`benchmarks/floor.py`). Not measured on Metal.
CUDA_BUFFERS = {"MLX_MAX_MB_PER_BUFFER": "100", "MLX_MAX_OPS_PER_BUFFER": "8"}
SHORT_ROWS = 1024
LONG = 1 << 20  # tokens of a row that surely is not short


def set_buffers(environment: MutableMapping[str, str], longest: int) -> None:
    """Ask for small command buffers on CUDA, unless all rows are short or the user has chosen.

    `longest`: tokens of the longest row. MLX reads these variables when it is imported.
    """
    if _here().name == "cuda" and longest > SHORT_ROWS:
        for name, value in CUDA_BUFFERS.items():
            environment.setdefault(name, value)


def here() -> Backend:
    """The backend that mlx would use on this machine, found without importing it."""
    return with_buffers(_here(), os.environ)


def _here() -> Backend:
    if sys.platform == "darwin":
        return BACKENDS["metal"]
    cuda = any(_installed(name) for name in ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")) and os.path.exists(
        "/dev/nvidia0"
    )
    return BACKENDS["cuda" if cuda else "cpu"]


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
