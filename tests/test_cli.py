"""The command line: arguments and files to exit code and message, the commands' work done by small stand-ins."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from segtrain import cli
from segtrain.errors import RunFailed, UserError
from segtrain.event import Evaluated, Event, Notice, RunEnded, RunStarted
from segtrain.signals import Stop
from segtrain.terminal.counter import CLEAR, counter

RECIPE = "model: m\ndata: {train: a.jsonl}\noutput: {dir: run, report_every: 7}\n"
COMMANDS = [
    "sft",
    "orpo",
    "simpo",
    "cpo",
    "dpo",
    "eval",
    "plan-segments",
    "check",
    "verify-grads",
    "export",
    "report",
    "init",
    "models",
    "bench",
]
COMMANDS += ["doctor"]

Install = Callable[..., None]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a stand-in module where a command will import it from."""

    def put(name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)

    return put


class FakeTrainer:
    """Yields what `script` says, or raises it."""

    script: tuple[Event | BaseException, ...] = ()
    made: tuple[Any, ...] = ()

    def __init__(self, recipe: Any, loss: str, stop: Stop, **flags: bool) -> None:
        type(self).made = (recipe, loss, flags)

    def events(self) -> Iterator[Event]:
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            yield item


@pytest.fixture
def trainer(install: Install) -> SimpleNamespace:
    """Stand-ins for all that `sft` and `orpo` use; `shown` collects the events, `every` the progress interval."""
    seen = SimpleNamespace(shown=[], every=None, rank=0, trainer=FakeTrainer, logged=[], directories=[])

    @contextmanager
    def make_progress(*, every: int) -> Iterator[Callable[[Event], None]]:
        seen.every = every
        yield seen.shown.append

    def make_loggers(names: Any, directory: Path, project: str) -> list[Callable[[Event], None]]:
        seen.directories.append((tuple(names), directory, project))
        return [seen.logged.append]

    def require(names: Any) -> None:
        if "trackio" in names:
            raise UserError("trackio isn't installed")

    FakeTrainer.script = ()
    install("segtrain.run.trainer", Trainer=FakeTrainer)
    install("segtrain.terminal.progress", make_progress=make_progress)
    install("segtrain.run.logging_backends", make_loggers=make_loggers, require=require)
    install("segtrain.parallel.ranks", join=lambda: SimpleNamespace(writes=seen.rank == 0))
    return seen


def ended(reason: str) -> RunEnded:
    return RunEnded(reason, 3, 1.0, Path("run"))  # type: ignore[arg-type]


STARTED = RunStarted("sft", Path("run"), "m", "llama", 2, 10, 100, 3)


def test_training_passes_recipe_and_flags_on(workplace: Path, trainer: SimpleNamespace) -> None:
    FakeTrainer.script = (Notice("hello"), ended("done"))
    assert cli.run(["sft", "r.yaml", "--set", "train.steps=3", "--resume", "--force"]) == 0
    recipe, loss, flags = FakeTrainer.made
    assert (recipe.train.steps, loss) == (3, "sft")
    assert flags == {"resume": True, "dry_run": False, "overwrite": False, "force": True}
    assert trainer.shown == [Notice("hello"), ended("done")]
    assert trainer.every == 7
    for name in cli.TRAINING:
        assert cli.run([name, "r.yaml", "--dry-run", "--overwrite"]) == 0
        _, loss, flags = FakeTrainer.made
        assert (loss, flags["dry_run"], flags["overwrite"], flags["resume"]) == (name, True, True, False)


def test_only_rank_0_shows_and_logs(workplace: Path, trainer: SimpleNamespace) -> None:
    FakeTrainer.script = (STARTED, ended("interrupted"))
    trainer.rank = 1
    assert cli.run(["sft", "r.yaml", "--set", "output.report_to=wandb"]) == 130
    assert (trainer.shown, trainer.logged) == ([], [])


def test_trackers_start_with_the_run(workplace: Path, trainer: SimpleNamespace) -> None:
    """Not before it is accepted: some write into its directory, which may hold an earlier run."""
    evaluated = Evaluated(0, 1.0, 3, 1.0, False)
    FakeTrainer.script = (Notice("before"), STARTED, evaluated, evaluated, ended("done"))
    changes = ["--set", "output.report_to=wandb", "--set", "output.project=p", "--set", "output.dir=run"]
    assert cli.run(["sft", "r.yaml", *changes]) == 0
    assert trainer.logged == [evaluated, evaluated, ended("done")]
    assert trainer.directories == [(("wandb",), Path("run"), "p")]
    assert cli.run(["sft", "r.yaml", *changes, "--dry-run"]) == 0
    assert len(trainer.directories) == 1


def test_a_missing_tracker_is_said_before_anything_runs(
    workplace: Path, trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeTrainer.made = ()
    assert cli.run(["sft", "r.yaml", "--set", "output.report_to=trackio"]) == 2
    assert "trackio isn't installed" in capsys.readouterr().err
    assert FakeTrainer.made == ()


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ((ended("done"),), 0, ""),
        ((ended("interrupted"),), 130, ""),
        ((UserError("a.jsonl line 3 is broken"),), 2, "segtrain: a.jsonl line 3 is broken\n"),
        ((RunFailed("loss is NaN at step 3"),), 1, "segtrain: loss is NaN at step 3\n"),
        ((OSError(28, "No space left on device", "run/x"),), 1, "segtrain: No space left on device: run/x\n"),
        ((MemoryError(),), 1, "segtrain: out of memory; `segtrain plan-segments` shows what would fit\n"),
        ((KeyboardInterrupt(),), 130, "segtrain: interrupted\n"),
        ((ValueError("odd\nsecond line"),), 1, "segtrain: unexpected ValueError: odd; --debug shows the traceback"),
    ],
    ids=["done", "interrupted", "user", "failed", "disk", "memory", "ctrl-c", "unexpected"],
)
def test_exit_codes_of_a_run(
    script: tuple[Any, ...],
    code: int,
    message: str,
    workplace: Path,
    trainer: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    FakeTrainer.script = script
    assert cli.run(["sft", "r.yaml"]) == code
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert "Traceback" not in err
    assert err.count("\n") <= 1


@pytest.mark.parametrize("arguments", [["--debug", "sft", "r.yaml"], ["sft", "r.yaml", "--debug"]])
def test_debug_shows_the_traceback(
    arguments: list[str], workplace: Path, trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeTrainer.script = (UserError("broken"),)
    assert cli.run(arguments) == 2
    assert "Traceback" in (err := capsys.readouterr().err)
    assert err.endswith("segtrain: broken\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sft", "no recipe given; `segtrain init` writes one to start from, then: segtrain sft recipe.yaml"),
        ("check", "then: segtrain check recipe.yaml"),
        ("verify-grads", "no recipe given"),
        ("plan-segments", "give a recipe, or --model with --seq"),
        ("plan-segments --model m --set lora.rank=3", "--set changes a recipe, and none is given"),
        ("plan-segments --model m --budget 24", "'24' isn't a memory size"),
        ("plan-segments --model m --seq 1", "--seq"),
        ("sft none.yaml", "recipe none.yaml doesn't exist"),
        ("sft r.yaml --set train.learning_rte=1", "train.learning_rte: unknown key; did you mean learning_rate?"),
        ("sft r.yaml --set nonsense", "must look like train.steps=100"),
        ("sft r.yaml --sett a=b", "No such option: --sett"),
        ("sft r.yaml other.yaml", "unexpected extra argument"),
        ("frobnicate", "No such command 'frobnicate'"),
        ("export run --out d", "Missing option '--format'"),
        (
            "export run --out d --format onnx",
            "Invalid value for '--format': 'onnx' is not one of 'peft', 'mlx', 'merged', 'gguf'",
        ),
        ("export", "Missing argument 'RUN'"),
        ("report nowhere", "is no run directory"),
        ("init --loss kto", "'kto' is not one of 'sft', 'orpo', 'simpo', 'cpo', 'dpo'"),
        ("init --out r.yaml", "r.yaml exists; give another --out, or --overwrite"),
    ],
)
def test_wrong_usage(arguments: str, message: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(workplace.rglob("*"))
    assert cli.run(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert len(err) < 400
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"  segtrain {command}" in out
    assert "Example" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "--debug" in out
    assert ("--set" in out) == (command in {*cli.TRAINING, "doctor", "plan-segments", "check", "verify-grads"})


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits(
    command: str | None, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.run([*([command] if command else []), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > width] == []
    assert len(lines) > 5  # something was shown


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_all_commands_are_listed(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == code
    lines = capsys.readouterr().out.splitlines()
    assert [name for name in COMMANDS if any(line.startswith(f"  {name} ") for line in lines)] == COMMANDS
    assert not any(line.rstrip().endswith("...") and not line.startswith("Usage") for line in lines)


def test_completion() -> None:
    """As bash asks for it; a word that begins no command gets nothing."""
    for word, expected in (("pl", ["plan-segments"]), ("zz", [])):
        asked = {"_SEGTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": f"segtrain {word}", "COMP_CWORD": "1"}
        code = "from segtrain.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.split() == expected


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from segtrain import __version__

    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"segtrain {__version__}\n"


@pytest.mark.parametrize("fits", [True, False])
def test_plan_segments(fits: bool, workplace: Path, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}

    def preview(recipe: Any, **options: Any) -> Any:
        asked.update(options, recipe=recipe)
        return SimpleNamespace(fits=fits, as_json=lambda: {"fits": fits})

    install("segtrain.run.preview", preview=preview)
    install("segtrain.terminal.progress", print_preview=lambda found: print("table"))
    assert cli.run(["plan-segments", "r.yaml", "--budget", "24GB"]) == (0 if fits else 1)
    assert capsys.readouterr().out == "table\n"
    assert (asked["budget"], asked["measure"], asked["recipe"].model) == ("24GB", False, "m")
    assert cli.run(["plan-segments", "--model", "m", "--seq", "4096", "--measure", "--json"]) == (0 if fits else 1)
    assert json.loads(capsys.readouterr().out) == {"fits": fits}
    assert (asked["recipe"], asked["model"], asked["seq"], asked["measure"]) == (None, "m", 4096, True)


@pytest.mark.parametrize("passed", [True, False])
def test_verify_grads(passed: bool, workplace: Path, install: Install) -> None:
    shown: list[Any] = []
    report = SimpleNamespace(passed=passed)
    install("segtrain.run.verify", verify_gradients=lambda recipe: report)
    install("segtrain.terminal.progress", print_verify=shown.append)
    assert cli.run(["verify-grads", "r.yaml"]) == (0 if passed else 1)
    assert shown == [report]


def test_check_models_and_bench_print(workplace: Path, install: Install) -> None:
    shown: list[Any] = []
    report = SimpleNamespace(counts={"longest": 3})
    install("segtrain.data.check", check_data=lambda recipe, progress, **_: progress(1, 2) or report)
    install("segtrain.models.positions", check_positions=lambda config, longest: [])
    install("segtrain.models.support", table=lambda: ["llama"])
    install("segtrain.run.bench", bench=lambda: "bench")
    install("segtrain.terminal.progress", print_check=shown.append, print_models=shown.append, print_bench=shown.append)
    assert [cli.run(arguments.split()) for arguments in ("check r.yaml", "models", "bench")] == [0, 0, 0]
    assert shown == [report, ["llama"], "bench"]


@pytest.mark.parametrize(("command", "said"), [("check", True), ("sft", False)])
def test_notices_are_said_once(
    command: str,
    said: bool,
    workplace: Path,
    install: Install,
    trainer: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run shows them as events, so the command line itself stays silent there."""
    install("segtrain.data.check", check_data=lambda *_, **__: SimpleNamespace(counts={"longest": 3}))
    vars(sys.modules["segtrain.terminal.progress"])["print_check"] = lambda report: None
    assert cli.run([command, "r.yaml", "--set", "trust_remote_code=true"]) == 0
    assert ("note: trust_remote_code runs" in capsys.readouterr().err) == said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_counter_draws_now_and_then_and_clears() -> None:
    out, now = Terminal(), iter([0.0, 0.0, 0.1, 0.3, 0.3])
    with counter("rows", stream=out, clock=lambda: next(now)) as count:
        for done in (1000, 2000, 3000):
            count(done, 5000 if done < 3000 else None)
    assert out.getvalue() == f"{CLEAR}rows 1,000 of 5,000{CLEAR}rows 3,000{CLEAR}"


def test_counter_is_silent_in_a_pipe() -> None:
    out = io.StringIO()
    with counter("rows", stream=out) as count:
        count(1, 2)
    assert out.getvalue() == ""


def test_export_and_report(workplace: Path, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("segtrain.lora.adapters", export=lambda run, out, kind, model: [f"{run} {out} {kind} {model}"])
    install("segtrain.report", write_report=lambda run: run / "report.html", follow=None)
    assert cli.run(["export", "run", "--format", "peft", "--out", "there"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("wrote there\n", "run there peft None\n")
    assert cli.run(["report", "run"]) == 0
    assert capsys.readouterr().out == f"wrote {Path('run/report.html')}\n"


def test_init_then_overwrite(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = workplace / "new/recipe.yaml"
    assert cli.run(["init", "--out", str(path)]) == 0
    first = path.read_text()
    assert cli.run(["init", "--out", str(path), "--loss", "orpo"]) == 2
    assert path.read_text() == first
    assert cli.run(["init", "--out", str(path), "--loss", "orpo", "--overwrite"]) == 0
    assert "orpo:" in path.read_text()
    assert sorted(path.parent.iterdir()) == [path]


def test_init_where_nothing_can_be_written(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "--out", "r.yaml/inside.yaml"]) == 2
    assert "can't be written" in capsys.readouterr().err


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "segtrain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


def test_as_a_module_and_without_input(workplace: Path) -> None:
    done = process("sft", stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("segtrain: no recipe given")
    assert process("--version").returncode == 0


def test_closed_output_is_no_traceback() -> None:
    """As in `segtrain --help | true`."""
    code = "import sys; from segtrain.cli import main; sys.argv = ['segtrain', '--help']; main()"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr
