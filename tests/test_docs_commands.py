"""Every `segtrain` command in a block of a page runs, on a shallow demo model, in a directory like a user's.

A hub's model becomes the demo model, training is one update, and what would take minutes has tests of its own.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run
import yaml

from segtrain import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]
TRAINING = set(cli.TRAINING)
LONG = {"bench", "doctor"}  # minutes; see test_bench.py and test_doctor.py
ELSEWHERE = "--converter"  # needs a program of llama.cpp's
SLOW = TRAINING | {"verify-grads"}
ONE_UPDATE = ("train.steps=1", "train.warmup_ratio=null", "train.warmup_steps=0", "train.grad_accumulation_steps=1")
SHORT = (*ONE_UPDATE, "eval.rows=1", "eval.prompts=[]", "output.save_every=0", "output.eval_every=0")


def lines(page: Path) -> Iterator[str]:
    """The commands in the page's blocks that name no language, with their continuation lines, comments off."""
    for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("segtrain "):
                yield line.split(" #")[0].strip()


HUB, DEMO = r"mlx-community/[\w.-]+", "examples/demo-model"
COMMANDS = sorted({line for page in PAGES for line in lines(page)})


def words(line: str) -> list[str]:
    """The command as it is run here."""
    line = line.replace("examples/data/preferences-valid.jsonl", "pairs.jsonl")
    found = shlex.split(re.sub(HUB, DEMO, line))[1:]
    if "--seq" in found:
        found[found.index("--seq") + 1] = "512"
    if found[0] in TRAINING:
        changes = SHORT if "--resume" in found else (*SHORT, "output.dir=runs/new")
        found += [word for change in changes for word in ("--set", change)]
        found += [] if "--resume" in found else ["--overwrite"]
    return [*found, "--force"] if "--resume" in found else found


def recipe(path: Path, **changes: object) -> str:
    """A recipe of the repository for the demo model, with other sections."""
    text = re.sub(r"max_seq_length: \d{4,}", "max_seq_length: 512", path.read_text(encoding="utf-8"))
    return yaml.safe_dump({**yaml.safe_load(re.sub(HUB, DEMO, text)), **changes})


def first_row(name: str) -> str:
    return (ROOT / f"examples/data/{name}.jsonl").read_text(encoding="utf-8").splitlines()[0] + "\n"


def write_inputs(home: Path) -> None:
    """What a user would have: recipes, also of mlx-lm's keys, and rows."""
    tiny_run.examples(home / "examples")
    texts = {f"configs/{path.name}": recipe(path) for path in (ROOT / "configs").glob("*.yaml")}
    texts |= {f"data/{part}.jsonl": first_row(name) for part, name in (("train", "chat"), ("valid", "chat-valid"))}
    texts |= {f"pairs/{part}.jsonl": first_row("preferences") for part in ("train", "valid")}
    theirs = {"model": DEMO, "num_layers": -1, "iters": 1, "batch_size": 1, "val_batches": 1, "max_seq_length": 256}
    texts |= {
        "recipe.yaml": recipe(ROOT / "configs/demo.yaml", output={"dir": "runs/my-run"}),
        "preferences.yaml": recipe(ROOT / "examples/orpo.yaml", output={"dir": "runs/preferences"}),
        "lora_config.yaml": yaml.safe_dump({**theirs, "data": "data"}),
        "orpo_config.yaml": yaml.safe_dump({**theirs, "data": "pairs", "training_mode": "orpo"}),
        "held-out.jsonl": first_row("chat-valid"),
        "pairs.jsonl": first_row("preferences-valid"),
        "runs/short-documents/train.jsonl": '{"text": "a document of some words"}\n',
    }
    for name, text in texts.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory: recipes, rows, and runs that have been trained."""
    path = tmp_path_factory.mktemp("home")
    write_inputs(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for line, run in (
            ("segtrain sft recipe.yaml", "my-run"),
            ("segtrain sft recipe.yaml", "demo"),
            ("segtrain dpo preferences.yaml", "dpo-example"),
        ):
            assert cli.run([*words(line), "--set", f"output.dir=runs/{run}"]) == 0, line
    return path


def test_there_are_commands_of_every_kind() -> None:
    kinds = {line.split()[1] for line in COMMANDS}
    assert {"init", "check", "plan-segments", "sft", "orpo", "report", "export", "eval", "verify-grads"} <= kinds


def marked(line: str) -> object:
    slow = line.split()[1] in SLOW or "--measure" in line
    return pytest.param(line, marks=pytest.mark.slow) if slow else line


@pytest.mark.parametrize(
    "line", [marked(line) for line in COMMANDS if line.split()[1] not in LONG and ELSEWHERE not in line]
)
def test_it_runs(line: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--format gguf" in line or "--format ollama" in line:
        pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path if line.startswith("segtrain init") else home)
    assert cli.run(words(line)) == 0
