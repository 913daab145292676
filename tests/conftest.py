"""Shared set-up: float32 that isn't rounded to TF32, a cache directory of the tests' own, and property tests that draw
the same examples every time, without deadlines (the machine may be busy)."""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read when mlx first multiplies: before anything imports it
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="segtrain-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile("segtrain", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("segtrain")
