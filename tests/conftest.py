"""Shared set-up: what a run on long rows sets before mlx is imported, float32 that isn't rounded to TF32, a cache
directory of the tests' own, and property tests that draw the same examples every time, without deadlines (the machine
may be busy)."""

import atexit
import gc
import os
import shutil
import tempfile

from hypothesis import settings

from segtrain.memory.backends import LONG
from segtrain.run.environment import prepare

prepare(os.environ, longest=LONG, exact=True)  # before anything imports mlx, and with the user's cache of kernels
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="segtrain-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile("segtrain", deadline=None, derandomize=True, print_blob=True, max_examples=30)
settings.register_profile("nightly", settings.get_profile("segtrain"), max_examples=200)  # `make nightly` asks for it
settings.load_profile("segtrain")


def pytest_collection_finish() -> None:
    """Collections of garbage pass over what was imported and collected until here, which no test frees."""
    gc.collect()
    gc.freeze()
