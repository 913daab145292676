"""Checks at the same time, each in a process of its own."""

import os
from functools import partial

import mlx.core as mx
import pytest

from segtrain.models.quantized_check import Quantisation
from segtrain.run import checks, readiness
from segtrain.run.apart import apart


def _here_alone(process: int) -> str:
    if os.getpid() != process:
        os._exit(3)
    return "here"


def test_results_come_in_order_from_other_processes() -> None:
    assert apart([os.getpid, partial(pow, 2, 5)], 2)[1] == 32
    assert apart([os.getpid], 1) != [os.getpid()]


def test_a_task_whose_process_dies_runs_here() -> None:
    assert apart([partial(_here_alone, os.getpid())], 1) == ["here"]


def test_what_a_task_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        apart([partial(divmod, 1, 0)], 1)


def test_a_models_checks_find_the_same_apart() -> None:
    kind, subject = checks.AttentionKind(2, 64, 64, mx.bfloat16), Quantisation(64, 4, "affine")
    tasks = [
        partial(checks.with_safe_form, checks.attention_is_right, kind, readiness.table()),
        partial(checks.quantised_products, subject, mx.float32),
    ]
    assert [finding.right for finding in apart(tasks, 2)] == [task().right for task in tasks]
