"""Shared set-up: what a run on long rows sets before mlx is imported, float32 that isn't rounded to TF32, a cache
directory of the tests' own, and property tests that draw the same examples every time, without deadlines (the machine
may be busy). By day they draw fewer, and graphs are compiled without fused kernels."""

import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from segtrain.memory.backends import LONG
from segtrain.run.environment import prepare

prepare(os.environ, longest=LONG, exact=True)  # before anything imports mlx, and with the user's cache of kernels
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="segtrain-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

NO_FUSE = 2  # mlx::core::CompileMode

settings.register_profile("segtrain", deadline=None, derandomize=True, print_blob=True, max_examples=30)
settings.register_profile("nightly", settings.get_profile("segtrain"), max_examples=200)  # `make nightly` asks for it
settings.load_profile("segtrain")


def pytest_configure(config: pytest.Config) -> None:
    """`-m "not slow"` on Linux: `mx.compile` traces and replays graphs, as ever, but fuses no operations.

    For each new kernel MLX's CPU backend runs the C++ compiler, a second of work; the fast tests need some 300. MLX
    has this mode in C++ only.
    """
    if config.option.markexpr == "not slow" and sys.platform == "linux":
        import mlx.core as mx

        if mx.default_device() == mx.Device(mx.cpu):
            with suppress(OSError, AttributeError):  # then they are fused, and the tests take longer
                library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib/libmlx.so"))
                library._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(NO_FUSE)


def pytest_collection_finish() -> None:
    """Collections of garbage pass over what was imported and collected until here, which no test frees."""
    gc.collect()
    gc.freeze()
