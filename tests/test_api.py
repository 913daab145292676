"""`import segtrain`: the surface, one code path with the command, and a process that is as it was before the call."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_run
from mlx_lm.models import llama
from processes import ended, start

import segtrain
from segtrain import cli
from segtrain.event import Event, RunEnded, RunStarted, Saved, TrainStep
from segtrain.memory.meter import Meter
from segtrain.run.updates import Updates
from segtrain.storage import checkpoint

ROWS = [{"prompt": "w1 w2", "completion": " w3"}, {"prompt": "w4", "completion": " w5 w6"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


def recipe(folder: Path, name: str, loss: str = "sft", **changes: Any) -> segtrain.Recipe:
    values = {"output__dir": str(folder / name), "output__eval_every": 3, **changes}
    valid = str(folder / f"{tiny_run.kind_of(loss)}-valid.jsonl")
    return segtrain.Recipe(**tiny_run.mapping(folder, loss, data__valid=valid, **values))


@pytest.fixture(scope="module")
def whole(folder: Path) -> object:
    """What the command leaves, in a process of its own."""
    return by_command(folder, "whole")


def by_command(folder: Path, name: str, loss: str = "sft") -> object:
    file = folder / f"{name}.yaml"
    file.write_text(recipe(folder, name, loss).to_yaml(()))
    assert ended(start([loss, str(file)], log := file.with_suffix(".log"))) == 0, log.read_text()
    return tiny_run.result(folder / name)


def process() -> dict[str, Any]:
    """What a run might leave behind in its process."""
    cache = mx.set_cache_limit(0)
    mx.set_cache_limit(cache)
    return {
        "memory limit": mx.get_memory_limit(),
        "cache limit": cache,
        "random numbers of mlx": [key.tolist() for key in mx.random.state],  # type: ignore[attr-defined]
        "random numbers of Python": random.getstate(),
        "random numbers of numpy": np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        "device": mx.default_device(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "environment": dict(os.environ),
        "threads": {thread.name for thread in threading.enumerate() if thread.name.startswith("segtrain")},
        "attention": mx.fast.scaled_dot_product_attention,
        "a layer's call": llama.TransformerBlock.__call__,
        "attention's call": llama.Attention.__call__,
        "working directory": Path.cwd(),
        "descriptors": len(list(Path("/dev/fd").iterdir())),
    }


def test_every_name_is_there_and_importing_the_package_costs_nothing() -> None:
    code = (
        "import sys, segtrain; heavy = {'mlx', 'mlx_lm', 'pydantic', 'datasets', 'transformers', 'rich', 'numpy'};"
        "print(sorted(heavy & sys.modules.keys())); print(sorted(set(segtrain.__all__) - set(dir(segtrain))));"
        "print(all(getattr(segtrain, name) is not None for name in segtrain.__all__)); print('mlx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tiny_run.ROOT)
    assert done.stdout.split("\n")[:4] == ["[]", "[]", "True", "False"]
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        _ = segtrain.tune  # type: ignore[attr-defined]
    assert callable(segtrain.events)  # whatever was imported before


def test_two_runs_in_one_process_leave_the_bytes_of_two_processes(folder: Path, whole: object) -> None:
    preferences = by_command(folder, "preferences", "dpo")
    before = process()
    first = segtrain.train(recipe(folder, "first"))
    segtrain.train(recipe(folder, "second", "dpo"), "dpo")
    segtrain.train(recipe(folder, "third"))
    assert tiny_run.result(folder / "first") == whole
    assert tiny_run.result(folder / "second") == preferences
    assert tiny_run.result(folder / "third") == whole
    assert process() == before
    assert first.adapter.is_file()


@pytest.mark.parametrize("call", ["train", "evaluate", "plan", "check", "close", "fail"])
def test_the_process_is_as_it_was_before(folder: Path, call: str, whole: object) -> None:
    answers = {"prompts": ["w1 w2"], "max_tokens": 5}
    calls: dict[str, Callable[[], Any]] = {
        "train": lambda: segtrain.train(recipe(folder, "state", eval=answers), overwrite=True),
        "evaluate": lambda: segtrain.evaluate(folder / "whole", data=ROWS, base=True),
        "plan": lambda: segtrain.plan(recipe(folder, "state"), measure=True),
        "check": lambda: segtrain.check(recipe(folder, "state")),
        "close": lambda: until(segtrain.events(recipe(folder, "closed"), overwrite=True), TrainStep),
        "fail": lambda: refused(recipe(folder, "failed", engine__memory_budget="10KB")),
    }
    calls[call]()  # what is imported and found out once
    before, active = process(), mx.get_active_memory()
    mx.random.uniform()
    before["random numbers of mlx"] = process()["random numbers of mlx"]
    calls[call]()
    assert process() == before
    assert mx.get_active_memory() - active < 1 << 12


def refused(recipe: segtrain.Recipe) -> None:
    with pytest.raises(segtrain.RunFailed, match="memory_budget"):
        segtrain.train(recipe)


def until(events: Iterator[Any], kind: type, step: int = 1) -> None:
    for event in events:
        if isinstance(event, kind) and getattr(event, "step", step) >= step:
            break


def at_step(events: Iterator[Any], step: int, act: Callable[[], Any]) -> None:
    for event in events:
        if isinstance(event, TrainStep) and event.step == step:
            act()


def test_what_the_process_holds_beside_a_run_is_not_counted(folder: Path) -> None:
    """Nor do later runs plan by it: what was measured of a model is kept on the machine."""
    kept = mx.zeros((1 << 20,))
    mx.eval(kept)
    held = mx.get_active_memory()
    own, all_of_it = Meter(held=held), Meter()
    assert own.memory().active_gib == 0 < all_of_it.memory().active_gib
    segtrain.train(recipe(folder, "beside"), overwrite=True)
    peaks = [line["peak_gib"] for line in segtrain.Run(folder / "beside").metrics if line["event"] == "train"]
    assert 0 < max(peaks) < kept.nbytes / 2**30


def test_nothing_is_printed_unless_asked(
    folder: Path, whole: object, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = segtrain.train(recipe(folder, "quiet"))
    segtrain.evaluate(run, data=ROWS)
    segtrain.check(recipe(folder, "quiet"), rows=1)
    segtrain.plan(recipe(folder, "quiet"))
    assert capfd.readouterr() == ("", "")
    segtrain.train(recipe(folder, "shown"), progress=True)
    assert "step 6/6" in capfd.readouterr().out
    assert tiny_run.result(folder / "shown") == whole


def test_what_a_run_left(folder: Path, whole: object) -> None:
    run = segtrain.Run(str(folder / "whole"))
    assert run.adapter.read_bytes() == (folder / "whole" / "adapters.safetensors").read_bytes()
    evals = [line["loss"] for line in run.metrics if line["event"] == "eval"]
    assert len(evals) == 3
    assert run.best_loss == min(evals[1:])
    assert segtrain.Run(folder / "nowhere").metrics == []
    assert segtrain.Run(folder / "nowhere").best_loss is None
    with pytest.raises(segtrain.UserError, match="is no run directory"):
        segtrain.evaluate(folder / "nowhere")


def test_leaving_the_loop_saves_what_the_run_has(folder: Path, whole: object) -> None:
    """By `break`, and by an exception of the loop's own. Then it goes on as if it had never stopped."""
    until(segtrain.events(recipe(folder, "left")), TrainStep, 3)
    assert checkpoint.steps(folder / "left")[-1] == 3
    with pytest.raises(ZeroDivisionError):
        at_step(segtrain.events(recipe(folder, "left"), resume=True), 5, lambda: 1 // 0)
    assert checkpoint.steps(folder / "left")[-1] == 5
    segtrain.train(recipe(folder, "left"), resume=True)
    assert tiny_run.result(folder / "left")[:2] == whole[:2]  # type: ignore[index]


def test_leaving_before_the_run_is_accepted_changes_nothing(folder: Path, whole: object) -> None:
    until(segtrain.events(recipe(folder, "early")), RunStarted)
    assert not (folder / "early").exists()
    until(segtrain.events(recipe(folder, "whole"), overwrite=True), RunStarted)
    assert tiny_run.result(folder / "whole") == whole


def test_events_are_those_of_the_run(folder: Path) -> None:
    found = list(segtrain.events(recipe(folder, "events"), "sft"))
    assert [event.step for event in found if isinstance(event, TrainStep)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(found[-1], RunEnded)
    assert all(event.path.is_dir() for event in found if isinstance(event, Saved) and event.step > 2)
    dry = list(segtrain.events(recipe(folder, "dry"), dry_run=True))
    assert isinstance(dry[-1], RunEnded)
    assert not (folder / "dry").exists()


def interrupting(monkeypatch: pytest.MonkeyPatch, step: int, times: int = 1) -> None:
    """Ctrl-C in the middle of an update."""
    inner = Updates._apply

    def apply(self: Updates, *args: Any) -> None:
        if self.optimizer.step == step - 1:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        inner(self, *args)

    monkeypatch.setattr(Updates, "_apply", apply)


def test_an_interrupt_during_a_step_comes_after_its_checkpoint(
    folder: Path, whole: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Event] = []
    with monkeypatch.context() as patch:
        interrupting(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            found.extend(segtrain.events(recipe(folder, "interrupted")))
    assert isinstance(found[-1], RunEnded)
    assert found[-1].reason == "interrupted"
    assert checkpoint.steps(folder / "interrupted")[-1] == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    segtrain.train(recipe(folder, "interrupted"), resume=True)
    assert tiny_run.result(folder / "interrupted")[:2] == whole[:2]  # type: ignore[index]


def test_a_second_interrupt_comes_at_once_and_the_process_lives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, 3, times=2)
    with pytest.raises(KeyboardInterrupt):
        segtrain.train(recipe(folder, "twice"))
    assert checkpoint.steps(folder / "twice") == [2]
    assert not (folder / "twice" / ".lock").exists()


def test_an_interrupt_of_the_loops_own_work_saves_too(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        at_step(segtrain.events(recipe(folder, "own work")), 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert checkpoint.steps(folder / "own work")[-1] == 3


def test_a_handler_of_the_programs_own_stays_in_charge(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        interrupting(monkeypatch, 3)
        segtrain.train(recipe(folder, "own handler"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
    assert checkpoint.steps(folder / "own handler")[-1] == 6


def test_a_run_in_another_thread(folder: Path, whole: object) -> None:
    thread = threading.Thread(target=segtrain.train, args=(recipe(folder, "thread"),))
    thread.start()
    thread.join()
    assert tiny_run.result(folder / "thread") == whole


def sets(rows: list[dict[str, Any]]) -> list[Any]:
    import datasets

    return [rows, iter(rows), (row for row in rows), tuple(rows), datasets.Dataset.from_list(rows)]


def test_rows_of_a_program_train_as_a_files_rows_do(folder: Path, whole: object) -> None:
    parts = {part: [json.loads(line) for line in lines_of(folder, part)] for part in ("train", "valid")}
    paths = set()
    for train, valid in zip(sets(parts["train"]), sets(parts["valid"]), strict=True):
        made = recipe(folder, "rows", data__train=train)
        made = segtrain.Recipe(**{**made.dump(), "data": {**made.dump()["data"], "valid": valid}})
        paths.add((made.data.train[0].path, made.data.valid[0].path))
    assert len(paths) == 1  # one content, one file
    until(segtrain.events(made), TrainStep, 3)
    assert segtrain.check(made).counts["rows"] == 12
    until(segtrain.events(made, resume=True), TrainStep, 5)
    resumed = ["sft", str(segtrain.Run(folder / "rows").recipe_file), "--resume"]
    assert ended(start(resumed, folder / "rows.log")) == 0
    assert tiny_run.result(folder / "rows")[:2] == whole[:2]  # type: ignore[index]
    other = recipe(folder, "rows", data__train=parts["train"][:-1], train__steps=8)
    with pytest.raises(segtrain.UserError, match=r"data\.train"):
        segtrain.train(other, resume=True)


def lines_of(folder: Path, part: str) -> list[str]:
    return (folder / f"sft-{part}.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "data.train must not be empty"),
        (iter(()), "data.train: the iterable gave no row"),
        ([{"text": "w1"}, "w2"], "data.train, row 2 is a str"),
        ([{"text": {1}}], "data.train, row 1 can't be written as JSON"),
        ([{"text": float("nan")}], "data.train, row 1 can't be written as JSON"),
        ([{"text": "\ud800"}], "data.train, row 1 can't be written as JSON"),
        (3, "data.train must be"),
    ],
)
def test_rows_that_are_none(rows: Any, message: str) -> None:
    with pytest.raises(segtrain.UserError, match=message):
        segtrain.Recipe(model="m", data={"train": rows})


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(segtrain.UserError, match="set XDG_CACHE_HOME"):
        segtrain.Recipe(model="m", data={"train": iter(ROWS)})


def test_an_iterable_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def failing() -> Iterator[dict[str, str]]:
        yield {"text": "w1"}
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        segtrain.Recipe(model="m", data={"train": failing()})
    assert not list((tmp_path / "segtrain" / "rows").iterdir())


def test_fields_that_a_table_fills_with_nulls_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table = datasets.Dataset.from_list([{"text": "w1", "other": None}, {"text": None, "other": "w2"}])
    made = segtrain.Recipe(model="m", data={"train": table})
    lines = Path(made.data.train[0].path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "w1"}, {"other": "w2"}]


def test_sections_change_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: m\ndata: {train: x.jsonl}\ntrain: {epochs: 2, seed: 3}\n")
    made = segtrain.Recipe.from_yaml(file, train={"steps": 5}, output={"dir": tmp_path / "run"})
    assert (made.train.steps, made.train.epochs, made.train.seed) == (5, None, 3)
    assert made.output.dir == str(tmp_path / "run")
    assert made.notices == ("train.steps takes the place of train.epochs (2)",)
    assert segtrain.Recipe.from_yaml(file).output.dir == "runs/mine"
    with pytest.raises(segtrain.UserError, match=r"^train\.step: unknown key; did you mean steps\?$"):
        segtrain.Recipe.from_yaml(file, train={"step": 5})


def test_keywords_are_checked_all_at_once_and_equal_a_file(tmp_path: Path) -> None:
    with pytest.raises(segtrain.UserError, match=r"(?s)3 errors.*model.*lora\.rank.*train\.step"):
        segtrain.Recipe(model=3, data={"train": "x.jsonl"}, train={"step": 1}, lora={"rank": 0})
    made = segtrain.Recipe(model=Path("m"), data={"train": [Path("x.jsonl"), {"path": "y.jsonl"}]}, lora={"rank": 4})
    (tmp_path / "r.yaml").write_text(made.to_yaml(()))
    assert segtrain.Recipe.from_yaml(tmp_path / "r.yaml") == made
    assert segtrain.Recipe(model="m", data="x", iters=7, batch_size=1).train.steps == 7  # mlx-lm's keys too


def test_objectives_that_are_none(folder: Path) -> None:
    with pytest.raises(segtrain.UserError, match="'ppo' isn't available"):
        segtrain.train(recipe(folder, "none"), "ppo")  # type: ignore[arg-type]


def test_plan_check_and_evaluate_give_what_the_commands_print(
    folder: Path, whole: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed_by(*words: object) -> Any:
        assert cli.run([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    file = folder / "whole.yaml"
    made = segtrain.Recipe.from_yaml(file)
    printed = printed_by("check", file)
    assert json.loads(json.dumps(segtrain.check(made, rows=1).as_json())) == printed
    test = str(folder / "sft-valid.jsonl")
    printed = printed_by("eval", folder / "whole", "--data", test)
    assert json.loads(json.dumps(segtrain.evaluate(folder / "whole", data=test).as_json())) == printed
    rows = [json.loads(line) for line in lines_of(folder, "valid")]
    assert segtrain.evaluate(segtrain.Run(folder / "whole"), data=rows).models == printed["models"]
    planned = segtrain.plan(model=str(folder / "model"), seq=64, budget="1GB")
    assert planned.fits
    with pytest.raises(segtrain.UserError, match="give a recipe"):
        segtrain.plan()


@pytest.mark.slow  # mypy takes a while
def test_a_type_checker_knows_the_surface(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(
        "import segtrain\n"
        "recipe = segtrain.Recipe.from_yaml('r.yaml', train={'steps': 2})\n"
        "for event in segtrain.events(recipe, 'sft'):\n"
        "    if isinstance(event, segtrain.event.TrainStep):\n"
        "        loss: float = event.loss\n"
        "text: str = segtrain.train(recipe).adapter\n"
        "segtrain.train(recipe, 'ppo')\n"
    )
    environment = {**os.environ, "MYPYPATH": str(tiny_run.ROOT)}
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "use.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line] == ["6", "7"], done.stdout
