"""Real processes that run the command line.

They are forked from a server that has imported it all, so that they start in a moment; on a Mac, where a process that
holds Metal must not be forked, each is started anew.
"""

import functools
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
PRELOADED = ["segtrain.cli", "segtrain.terminal.progress", "segtrain.run.trainer", "segtrain.recipe.schema"]
CONTEXT.set_forkserver_preload(PRELOADED)
LIMIT = 120.0  # seconds for anything to happen on a busy machine


def start(
    arguments: Sequence[str],
    log: Path,
    *,
    slow: str = "",
    seconds: float = 0.3,
    computing: bool = False,
    file_limit: int = 0,
    environment: dict[str, str] | None = None,
) -> BaseProcess:
    """Run `segtrain ARGUMENTS` with its output in `log`.

    `slow`: a function such as `segtrain.storage.durable:write_new` that takes `seconds` longer and logs each call;
    `computing`: it spends them inside mlx, where no handler of Python's runs; `file_limit`: bytes beyond which no file
    may grow.
    """
    options = (list(arguments), str(log), slow, seconds, computing, file_limit, environment or {})
    process = CONTEXT.Process(target=_run, args=options)
    process.start()
    return process


def start_ranks(arguments: Sequence[str], folder: Path, size: int = 2, **options: Any) -> list[BaseProcess]:
    """The same on `size` ranks of a ring, as `mlx.launch` sets one up; their output is in rank-0.log, rank-1.log."""
    ports = free_ports(size)
    hosts = folder / "hosts.json"
    hosts.write_text(str([[f"127.0.0.1:{port}"] for port in ports]).replace("'", '"'))
    return [
        start(
            arguments,
            folder / f"rank-{rank}.log",
            environment={"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            **options,
        )
        for rank in range(size)
    ]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def ended(process: BaseProcess, limit: float = LIMIT) -> int:
    """Its exit code (negative: a signal); a process that doesn't end is a failure."""
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the process still ran after {limit} s")
    return process.exitcode


def wait_for(condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, f"waited {limit} s for {what}"
        time.sleep(0.01)


def said(log: Path, text: str, times: int = 1) -> Callable[[], bool]:
    return lambda: log.exists() and log.read_text(errors="replace").count(text) >= times


def send(process: BaseProcess, number: signal.Signals = signal.SIGINT) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def _run(
    arguments: list[str],
    log: str,
    slow: str,
    seconds: float,
    computing: bool,
    limit: int,
    environment: dict[str, str],
) -> None:
    import resource

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update({"HF_HUB_OFFLINE": "1", **environment})
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if slow:
        _slow_down(slow, seconds, _compute if computing else time.sleep)
    from segtrain.cli import run

    raise SystemExit(run(arguments))


def _slow_down(name: str, seconds: float, wait: Callable[[float], None]) -> None:
    module, _, path = name.partition(":")
    *owners, function = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    inner = getattr(owner, function)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        os.write(1, f"<{function}>".encode())
        wait(seconds)
        return inner(*args, **kwargs)

    setattr(owner, function, slowed)


def _compute(seconds: float) -> None:
    """One evaluation of about so many seconds, or some times more; logs when it begins."""
    import mlx.core as mx

    matrix = mx.random.normal((256, 256))
    mx.eval(_product(matrix, 2))
    begun = time.monotonic()
    mx.eval(_product(matrix, 20))
    long = _product(matrix, int(20 * seconds / (time.monotonic() - begun)) + 1)
    os.write(1, b"<computing>")
    mx.eval(long)


def _product(matrix: Any, count: int) -> Any:
    import mlx.core as mx

    result = matrix
    for _ in range(count):
        result = mx.tanh(result @ matrix)
    return result
