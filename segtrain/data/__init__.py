"""Data: sources, row formats, tokenising and supervision masks. Nothing here imports mlx."""

from segtrain.data.dataset import Data, TrainRows, open_data
from segtrain.data.rows import Origin, PreferenceRow, Row, SupervisedRow

__all__ = ["Data", "Origin", "PreferenceRow", "Row", "SupervisedRow", "TrainRows", "open_data"]
