"""SIGINT and SIGTERM to real processes at each kind of moment; a slowed function makes it long enough to hit."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_run
from processes import ended, said, send, start, wait_for

from segtrain.recipe.schema import load_recipe
from segtrain.run.trainer import Trainer
from segtrain.signals import StopRequest
from segtrain.storage import checkpoint

STEP = "segtrain.run.updates:Updates._apply"
EVALUATION = "segtrain.engine.backward:SegmentedBackward.evaluate"
SAVING = "segtrain.storage.durable:write_new"
TOKENISING = "segtrain.data.dataset:Pipeline.encode"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def whole(folder: Path) -> object:
    recipe_file(folder, "whole")
    return finished(folder, "whole")


def recipe_file(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    values = {"output__dir": str(folder / name / "run"), "output__eval_every": 2, "output__save_every": 4}
    values["eval__at_start"] = False
    path = tiny_run.recipe_file(folder, data__valid=str(folder / "sft-valid.jsonl"), **values)
    return path.rename(folder / name / "recipe.yaml")


def change(path: Path, **values: Any) -> None:
    recipe = json.loads(path.read_text())
    for name, value in values.items():
        section, _, key = name.partition("__")
        recipe[section][key] = value
    path.write_text(json.dumps(recipe))


def finished(folder: Path, name: str) -> object:
    """The run's result, after going on with it to its end."""
    for _ in Trainer(load_recipe(folder / name / "recipe.yaml"), resume=True).events():
        pass
    return tiny_run.result(folder / name / "run")


MOMENTS = {
    "step": (STEP, "<_apply>", 3),
    "evaluation": (EVALUATION, "<evaluate>", 3),
    "saving": (SAVING, "<write_new>", 4),  # two files are written before the first update
}
# Both signals go to one handler: a pair of each moment, the others nightly.
QUICK = {("step", signal.SIGTERM), ("evaluation", signal.SIGINT), ("saving", signal.SIGTERM)}


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in product(MOMENTS, (signal.SIGINT, signal.SIGTERM))
    ],
)
def test_the_first_signal_saves_and_ends_with_130(
    folder: Path, whole: object, moment: str, number: signal.Signals
) -> None:
    slow, mark, times = MOMENTS[moment]
    name = f"{moment} {number.name}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow=slow)
    wait_for(said(log, mark, times), f"the {moment}")
    send(process, number)
    assert ended(process) == 130
    assert "finishing this step and saving" in log.read_text()
    found, notices = checkpoint.newest(path.parent / "run")
    assert found is not None
    assert not notices
    assert 0 < found.step < 6
    assert [line["step"] for line in tiny_run.lines(path.parent / "run") if line["event"] == "train"][-1] == found.step
    adapter, lines, _ = finished(folder, name)  # type: ignore[misc]
    assert (adapter, lines) == whole[:2]  # type: ignore[index]


def test_a_terminal_that_closes_saves_however_often_it_says_so(folder: Path, whole: object) -> None:
    path, log = recipe_file(folder, "hung up"), folder / "hung up.log"
    process = start(["sft", str(path)], log, slow=STEP, seconds=1.0)
    wait_for(said(log, "<_apply>", 3), "the step")
    send(process, signal.SIGHUP)
    wait_for(said(log, "finishing this step"), "the announcement")
    send(process, signal.SIGHUP)
    assert ended(process) == 130
    assert checkpoint.steps(path.parent / "run")
    adapter, lines, _ = finished(folder, "hung up")  # type: ignore[misc]
    assert (adapter, lines) == whole[:2]  # type: ignore[index]


def test_a_command_that_is_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("both", [False, True])
def test_a_run_goes_on_without_its_output(folder: Path, whole: object, both: bool) -> None:
    """As in `segtrain sft r.yaml | head -1`, and with `2>&1`."""
    name = f"closed {both}"
    path = recipe_file(folder, name)
    process = subprocess.Popen(
        tiny_run.command("sft", path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE,
        env=tiny_run.ENVIRONMENT,
        cwd=tiny_run.ROOT,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read().decode() if process.stderr else ""
    assert process.wait(120) == 0, errors
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
    assert both or errors.count("the run goes on") == 1
    assert tiny_run.result(path.parent / "run") == whole


def test_a_run_goes_on_where_its_streams_were_never_open(folder: Path, whole: object) -> None:
    """As in `segtrain sft r.yaml <&- >&- 2>&-`: no file of the run takes the numbers of the streams."""
    path = recipe_file(folder, "never open")
    line = shlex.join(tiny_run.command("sft", path))
    done = subprocess.run(f"{line} <&- >&- 2>&-", shell=True, env=tiny_run.ENVIRONMENT, cwd=tiny_run.ROOT, timeout=120)
    assert done.returncode == 0
    assert tiny_run.result(path.parent / "run") == whole


@pytest.mark.parametrize(("slow", "mark"), [(STEP, "<_apply>"), (SAVING, "<write_new>")])
def test_the_second_signal_ends_at_once(folder: Path, whole: object, slow: str, mark: str) -> None:
    name = f"twice {mark[1:-1]}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow=slow, seconds=20.0 if slow == STEP else 1.0)
    wait_for(said(log, mark), "the moment")
    send(process)
    wait_for(said(log, "finishing this step"), "the announcement")
    begun = time.monotonic()
    send(process)
    assert ended(process) == 130
    assert time.monotonic() - begun < 15  # not the 20 s that the step still takes
    adapter, lines, _ = finished(folder, name)  # type: ignore[misc]
    assert (adapter, lines) == whole[:2]  # type: ignore[index]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signals_are_answered_while_mlx_computes(folder: Path, whole: object, number: signal.Signals) -> None:
    """A step that takes half a minute in one evaluation: the first is acknowledged meanwhile, the second leaves."""
    name = f"computing {number.name}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow=STEP, seconds=30.0, computing=True)
    wait_for(said(log, "<computing>"), "the step")
    time.sleep(0.5)
    begun = time.monotonic()
    send(process, number)
    wait_for(said(log, "finishing this step"), "the answer", 10.0)
    time.sleep(0.5)
    assert process.is_alive()  # the first alone waits for the step
    send(process, number)
    assert ended(process) == 130
    assert time.monotonic() - begun < 15
    assert "left at once" in log.read_text()
    adapter, lines, _ = finished(folder, name)  # type: ignore[misc]
    assert (adapter, lines) == whole[:2]  # type: ignore[index]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_second_of_a_sluggish_set_up_ends_it(folder: Path, whole: object, number: signal.Signals) -> None:
    """Reading the model takes half a minute inside mlx, so the first can't interrupt it."""
    name = f"set-up {number.name}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow="segtrain.run.session:attach", seconds=30.0, computing=True)
    wait_for(said(log, "<computing>"), "the set-up")
    time.sleep(0.5)
    begun = time.monotonic()
    send(process, number)
    time.sleep(0.5)
    send(process, number)
    assert ended(process) == 130
    assert time.monotonic() - begun < 15
    assert (path.parent / "run").exists()  # left as it was, with its lock, which nobody holds now
    assert finished(folder, name)[0] == whole[0]  # type: ignore[index]


def started(path: Path, output: int) -> subprocess.Popen[bytes]:
    """The program as a user starts it."""
    command = [sys.executable, "-m", "segtrain", "sft", str(path)]
    plain = ("CI", "NO_COLOR", "TERM")  # what would keep a terminal from being a live one
    environment = {name: value for name, value in tiny_run.ENVIRONMENT.items() if name not in plain}
    environment["TERM"] = "xterm"
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=tiny_run.ROOT)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether that process has a handler for the signal; the interpreter alone has none for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's handlers in /proc")
@pytest.mark.parametrize("moments", [pytest.param(5, id="5"), pytest.param(60, id="60", marks=pytest.mark.slow)])
def test_a_signal_while_the_program_starts(folder: Path, moments: int) -> None:
    """At moments over the first seconds from the program's first line on, most of them in an import."""
    path = recipe_file(folder, f"starting {moments}")
    for moment in range(moments):
        log = folder / f"starting-{moment}.log"
        with log.open("wb") as file:
            process = started(path, file.fileno())
        wait_for(lambda process=process: catches(process.pid, signal.SIGTERM), "the program's first line")
        time.sleep(1.5 * moment / moments)
        process.send_signal(signal.SIGTERM if moment % 2 else signal.SIGINT)
        assert process.wait(60) == 130, (moment, log.read_text())
        assert "Traceback" not in log.read_text()
        text = log.read_text()  # one that comes after the start stops the run at its first step
        assert "segtrain: " in text or "stopped after step" in text, (moment, text)


def test_the_terminal_gets_its_cursor_back(folder: Path) -> None:
    """A live display hides the cursor; two signals end the program in the middle of it."""
    path = recipe_file(folder, "terminal")
    change(path, train__steps=100_000, output__save_every=0, output__eval_every=0)
    ours, theirs = pty.openpty()
    process = started(path, theirs)
    os.close(theirs)
    screen = b""
    while b"step" not in screen or b"?25l" not in screen:
        screen += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    with suppress(OSError):  # how Linux says that the other end is closed
        while data := os.read(ours, 4096):
            screen += data
    assert process.wait(60) == 130
    assert screen.rindex(b"?25h") > screen.rindex(b"?25l")
    os.close(ours)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_while_tokenising_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    name = f"tokenising {number.name}"
    path, log = recipe_file(folder, name), folder / f"{name}.log"
    process = start(["sft", str(path)], log, slow=TOKENISING)
    wait_for(said(log, "<encode>", 2), "a row")
    send(process, number)
    assert ended(process) == 130
    assert not (path.parent / "run").exists()
    assert "Traceback" not in log.read_text()


WORKERS = """
import time, types
from segtrain.data import batches
codec = types.SimpleNamespace(leave_offsets=list)
with batches._pool(types.SimpleNamespace(encoder=types.SimpleNamespace(codec=codec)), 2) as submit:
    for job in [submit([], {}) for _ in range(8)]:
        job.result()
    print("ready", flush=True)
    time.sleep(100)
"""


def test_workers_end_with_a_killed_parent() -> None:
    """`check` tokenises in several processes; a second signal leaves as abruptly as this."""
    process = subprocess.Popen([sys.executable, "-c", WORKERS], stdout=subprocess.PIPE, cwd=tiny_run.ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    children = psutil.Process(process.pid).children()
    assert len(children) >= 2
    process.kill()
    _, alive = psutil.wait_procs(children, 20)
    for child in alive:
        child.kill()
    assert not alive
    process.wait()
    process.stdout.close()


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop, stop.held():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_a_step_a_signal_interrupts() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_library_that_turns_the_interrupt_into_an_error() -> None:
    def load() -> None:
        with StopRequest():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt as error:
                raise ImportError("an extension's way to say so") from error

    with pytest.raises(KeyboardInterrupt):
        load()


def test_a_library_that_swallows_the_interrupt() -> None:
    """Nothing is to be done then, but the run that follows stops at its first step."""
    with StopRequest() as stop:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with stop.held():
            assert stop.requested


def test_in_another_thread_nothing_is_caught() -> None:
    before = signal.getsignal(signal.SIGINT)
    found = []

    def run() -> None:
        with StopRequest():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def test_signals_of_a_forked_process_are_its_own() -> None:
    """Ctrl-C reaches a whole group of processes: a child's must not count as its parent's second."""
    with StopRequest() as stop, stop.held():
        child = os.fork()
        if not child:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        time.sleep(0.2)
        assert not stop.requested


def test_nothing_stays_open() -> None:
    with StopRequest():
        pass
    wait_for(lambda: not any(thread.name == "segtrain-signals" for thread in threading.enumerate()), "the thread", 5)
    count = len(os.listdir("/dev/fd"))
    for _ in range(20):
        with StopRequest():
            pass
    wait_for(lambda: len(os.listdir("/dev/fd")) <= count, "the pipes", 5)
    assert signal.set_wakeup_fd(-1) == -1
