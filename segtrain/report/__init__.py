"""`segtrain report`: a run directory as one self-contained HTML page, written or served while the run goes on."""

from segtrain.report.live import follow
from segtrain.report.page import write_report

__all__ = ["follow", "write_report"]
