"""How much memory a run may use on this machine, asked without mlx.

On Apple silicon Metal recommends two thirds of the memory up to 36 GB and three quarters above, unless the user set
`iogpu.wired_limit_mb`. On CUDA it is the card's memory, on a CPU the machine's. `MARGIN` leaves room for what the
allocator doesn't count: kernels, the process itself, another program's window.
"""

import subprocess
import sys

import psutil

from segtrain.memory.backends import Backend

MARGIN = 0.9
CPU_MARGIN = 0.8
GB = 10**9


def default_budget(backend: Backend) -> int:
    """Bytes that a run may use here, when nobody says."""
    return (
        int(MARGIN * _recommended(backend))
        if backend.name != "cpu"
        else int(CPU_MARGIN * psutil.virtual_memory().total)
    )


def _recommended(backend: Backend) -> int:
    total = psutil.virtual_memory().total
    if backend.name == "cuda":
        megabytes = _asked(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
        return megabytes << 20 if megabytes else total
    return metal_recommended(total, _asked(["sysctl", "-n", "iogpu.wired_limit_mb"]) if sys.platform == "darwin" else 0)


def metal_recommended(total: int, wired_limit_mb: int = 0) -> int:
    """What Metal recommends as working set on a machine with `total` bytes."""
    if wired_limit_mb:
        return wired_limit_mb << 20
    return int(total * (2 / 3 if total <= 36 << 30 else 3 / 4))


def _asked(command: list[str]) -> int:
    """The first number that a small program prints; 0 where it can't be asked."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return int(done.stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return 0
