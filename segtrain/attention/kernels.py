"""What each backend's fused attention has a memory-bounded backward for, as data, and which way a call goes. Pure.

`dispatch` computes by this table, and the planner counts by it.
"""

from typing import Any, Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal["fused", "band", "blocks"]

HALF = ("float16", "bfloat16")

# Field by field as `dispatch.Backend` says; `dtypes` by name.
KERNELS: dict[str, dict[str, Any]] = {
    "cuda": {
        "head_dims": frozenset(range(8, 129, 8)),
        "dtypes": HALF,
        "query_multiple": 128,
        "array_mask": True,
        "unequal_dims": True,
        "tile_bytes": 64 << 20,
    },
    "metal": {
        "head_dims": frozenset({64, 72, 80, 96, 128, 192, 256}),
        "dtypes": (*HALF, "float32"),
        "query_multiple": 32,
        "widens_values": True,  # latent attention: 192 and 128
        "tile_bytes": 64 << 20,
    },
    "cpu": {"dtypes": (), "tile_bytes": 1 << 20},
}


class Row(Protocol):
    """What the rule needs of a backend."""

    @property
    def head_dims(self) -> frozenset[int]: ...
    @property
    def array_mask(self) -> bool: ...
    @property
    def unequal_dims(self) -> bool: ...
    @property
    def widens_values(self) -> bool: ...


class Attention(Protocol):
    """What the rule needs of a call: D and Dv, and whether it has a soft-cap or sinks."""

    @property
    def dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def softcap(self) -> float | bool | None: ...
    @property
    def sinks(self) -> bool: ...


def form(row: Row, call: Attention, *, dtype: bool, windowed: bool) -> Kind:
    """The fastest way whose memory is bounded. `dtype`: whether the kernel takes the call's; `windowed`: in effect."""
    wide = call.value_dim <= call.dim and (row.widens_values or call.value_dim == call.dim)
    fused = (
        dtype
        and not call.softcap
        and not call.sinks
        and {call.dim, call.value_dim} <= row.head_dims
        and (row.unequal_dims or wide)
    )
    if fused and not windowed:
        return "fused"
    return "band" if fused and row.array_mask else "blocks"
