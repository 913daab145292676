"""Shared set-up: property tests that draw the same examples every time, without deadlines (the machine may be busy)."""

from hypothesis import settings

settings.register_profile("segtrain", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("segtrain")
