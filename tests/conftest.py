"""Shared set-up: float32 that isn't rounded to TF32, and property tests that draw the same examples every time, without
deadlines (the machine may be busy)."""

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read when mlx first multiplies: before anything imports it

from hypothesis import settings

settings.register_profile("segtrain", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("segtrain")
