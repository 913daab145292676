"""`segtrain report`: a run directory as one self-contained HTML page."""

from segtrain.report.page import write_report

__all__ = ["write_report"]
