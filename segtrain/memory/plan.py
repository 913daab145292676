"""How one row's backward will run. Pure values; no mlx."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Plan:
    """The engine's settings for rows up to some length; `peak_bytes` is what they should give (None: not estimated).

    `boundaries`: segment edges whose carries stay from forward to backward (None: all). `mlp_rows`: tokens that a
    layer's MLP is differentiated for at a time (None: all). `dequantize`: each segment's quantised weights are expanded
    once to a dense copy, for as long as the segment runs. `compiled`: like segments share one traced graph. `tight`:
    the allocator's limit is so low that the device waits for memory: slower, smaller.
    """

    backward: Literal["segmented", "full"]
    segment_size: int = 1
    head_chunk: int = 256
    keep: int = 0
    boundaries: int | None = None
    lookahead: int = 0
    mlp_rows: int | None = None
    dequantize: bool = False
    compiled: bool = False
    tight: bool = False
    peak_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        peak = plain.pop("peak_bytes")
        return {**plain, "peak_gib": None if peak is None else round(peak / 2**30, 4)}
