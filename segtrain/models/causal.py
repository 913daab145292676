"""The causal mask by name, so that no [T, T] array is made."""


class Causal(str):
    """The mask "causal" as mlx-lm spells it, with the sliding window that comes with it."""

    window: int | None

    def __new__(cls, window: int | None = None) -> "Causal":
        mask = super().__new__(cls, "causal")
        mask.window = window
        return mask
