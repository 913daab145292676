"""Whether the logits of scored rows are picked from those of all rows of a stream. Pure."""

MOST = 7 / 8


def most(scored: int, rows: int) -> bool:
    """Whether so many of `rows` are scored that scoring the others too, for nothing, costs less than picking."""
    return scored >= MOST * rows
