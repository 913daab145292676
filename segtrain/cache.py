"""Where what is kept between runs lies."""

import os
import sys
from pathlib import Path


def cache() -> Path:
    """The directory of what is kept between runs, on this system."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "segtrain"
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "segtrain"
