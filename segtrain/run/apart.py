"""Functions at the same time, each in a Python process of its own.

For checks on CUDA: each spends seconds compiling its kernels, on one thread of the process.
"""

import copyreg
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx

from segtrain.memory.backends import LONG, set_buffers

T = TypeVar("T")
SERVE = "from segtrain.run.apart import serve; serve()"
PATIENCE = 300.0  # seconds after which a process is given up


def _dtype(name: str) -> mx.Dtype:
    return getattr(mx, name)


copyreg.pickle(mx.Dtype, lambda dtype: (_dtype, (str(dtype).rsplit(".", 1)[-1],)))


def apart(tasks: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """What each of `tasks` returns, in order; at most `workers` run at a time. What they are and return is pickled.

    A task whose process ends without a result, or can't begin, runs here instead; what it raises then is raised.
    """
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(_result, tasks))
    return [pickle.loads(result) if result else task() for task, result in zip(tasks, found, strict=True)]


def _result(task: Callable[[], object]) -> bytes:
    """The pickled result, b"" if there is none."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    set_buffers(environment, LONG)  # what a check finds of memory concerns long rows
    try:
        done = subprocess.run(
            [sys.executable, "-c", SERVE], input=pickle.dumps(task), capture_output=True, timeout=PATIENCE,
            env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return b"" if done.returncode else done.stdout


def serve() -> None:
    """Run the task on standard input; its result goes to standard output."""
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    out.write(pickle.dumps(pickle.load(sys.stdin.buffer)()))
