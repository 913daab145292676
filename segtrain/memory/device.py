"""How much memory a run may use on this machine, asked without mlx.

On Apple silicon Metal recommends two thirds of the memory up to 36 GB and three quarters above, unless the user set
`iogpu.wired_limit_mb`. On CUDA it is the card's memory, on a CPU the machine's. `MARGIN` leaves room for what the
allocator doesn't count: kernels, the process itself, another program's window.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

import psutil

from segtrain.errors import UserError
from segtrain.memory.backends import BACKENDS, CUDA_BUFFERS, SHORT_ROWS, Backend, here, with_buffers

MARGIN = 0.9
CPU_MARGIN = 0.8
GB = 10**9
H200 = 143771 << 20  # of memory, as nvidia-smi says it
NAMES = "cpu, h200 or mac-24gb, mac-64gb and the like"


@dataclass(frozen=True)
class Device:
    """What is planned for: a backend, the budget of a run where nobody says, and words for both.

    `here`: this machine, whose measurements count.
    """

    words: str
    backend: Backend
    budget: int
    here: bool = False


def device(name: str | None, longest: int = 0) -> Device:
    """The device of that name, None for this machine. Raises UserError for a name that isn't known.

    `longest`: tokens of the longest row, on which CUDA's command buffers depend (`backends.set_buffers`).
    """
    if name is None:
        backend = here()
        return Device(f"this machine ({WORDS[backend.name]})", backend, default_budget(backend), True)
    if name == "cpu":
        return Device("a CPU with this machine's memory", BACKENDS["cpu"], default_budget(BACKENDS["cpu"]))
    if name == "h200":
        buffers = CUDA_BUFFERS if longest > SHORT_ROWS else {}
        return Device("one NVIDIA H200", with_buffers(BACKENDS["cuda"], buffers), int(MARGIN * H200))
    if mac := re.fullmatch(r"mac-([1-9]\d{0,3})gb", name.lower()):
        recommended = metal_recommended(int(mac[1]) << 30)
        return Device(f"a Mac with {mac[1]} GB", BACKENDS["metal"], int(MARGIN * recommended))
    raise UserError(f"there is no device {name!r}; give {NAMES}, or leave it out for this machine")


WORDS = {"cpu": "CPU", "cuda": "NVIDIA GPU", "metal": "Metal"}


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
