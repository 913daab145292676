"""The system's page cache, which keeps what was read of files for as long as there is memory.

Weights that are read over and over are worth keeping only as a whole: where they are larger than the cache can become,
each page is gone before it is wanted again, and meanwhile other programs' pages were dropped for it. macOS can read
past the cache; on Linux pages that were read once go first, and nothing need be done.
"""

import os

SHARE = 0.5  # of the machine's memory, beyond which a model won't stay in the cache

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def outgrown_by(size: int) -> bool:
    """Whether so many bytes are more than the cache can be relied on to keep."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that doesn't say
        return False
    return size > SHARE * memory


def read_past(descriptor: int) -> None:
    """From now on reads of this open file don't fill the cache, where the system has that (F_NOCACHE)."""
    if (command := getattr(fcntl, "F_NOCACHE", None)) is not None:
        fcntl.fcntl(descriptor, command, 1)
