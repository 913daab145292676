"""The examples folder: its data, its demo model and the scripts that make them."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO = EXAMPLES / "demo-model"
SETS = {"chat": 300, "chat-valid": 40, "preferences": 320, "preferences-valid": 64}
STUNT = (
    "00046344 04 n 02 stunt 0 bold_feat(p) 0 004 @ 00036762 n 0000 + 01713366 v 0101 ! 00190931 n 0101 ~ 0043 n 0000 "
    '| a difficult or unusual or dangerous feat; usually done to gain attention; "the stunt failed"  '
)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    paths = [str(EXAMPLES), str(EXAMPLES / "demo_model"), str(EXAMPLES / "data")]
    sys.path[:0] = paths
    yield
    del sys.path[: len(paths)]


def module(name: str) -> ModuleType:
    return import_module(name)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (EXAMPLES / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def first_question(row: dict) -> str:
    return (row.get("messages") or row["prompt"])[0]["content"]


def asked_word(row: dict) -> str:
    return first_question(row).rstrip("?.").replace(" mean", "").split()[-1].strip('"')


def entry(word: str, **changes: object) -> dict:
    base = {"word": word, "part": "noun", "gloss": f"a thing called {word}", "examples": [], "synonyms": [], "uses": 9}
    return {**base, "kind": None, "opposite": None, **changes}


@pytest.mark.parametrize("name", SETS)
def test_data_sets_have_their_rows(name: str) -> None:
    found = rows(name)
    assert len(found) == SETS[name]
    fields = {"messages"} if name.startswith("chat") else {"prompt", "chosen", "rejected"}
    assert all(set(row) == fields for row in found)
    for row in found:
        turns = row.get("messages") or [*row["prompt"], *row["chosen"]]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        assert all(turn["content"].strip() for turn in turns)


def test_data_is_small() -> None:
    assert sum(path.stat().st_size for path in (EXAMPLES / "data").glob("*.jsonl")) < 300_000


@pytest.mark.parametrize(("train", "valid"), [("chat", "chat-valid"), ("preferences", "preferences-valid")])
def test_no_word_is_in_both_parts(train: str, valid: str) -> None:
    seen, held_out = ({asked_word(row) for row in rows(name)} for name in (train, valid))
    assert len(held_out) == SETS[valid]  # the words were really found in the questions
    assert not seen & held_out


def test_preferences_differ() -> None:
    assert all(row["chosen"] != row["rejected"] for row in rows("preferences") + rows("preferences-valid"))


def test_build_does_not_depend_on_the_order_of_entries() -> None:
    build = module("make_examples").build
    entries = [entry(f"word{number}", gloss=f"thing number {number}") for number in range(800)]
    mixed = random.Random(1).sample(entries, len(entries))
    assert build(entries) == build(mixed)
    assert build(entries) != build(entries, seed=1)


def test_a_word_of_two_parts_of_speech_is_used_once_by_its_more_frequent_one() -> None:
    well_known = module("make_examples").well_known
    found = well_known([entry("run", part="noun", uses=6), entry("run", part="verb", uses=30), entry("rare", uses=1)])
    assert [(one["word"], one["part"]) for one in found] == [("run", "verb")]


def test_synset_line() -> None:
    synset = module("wordnet").parse_synset(STUNT)
    assert synset.words == ("stunt", "bold feat")
    assert [pointer[0] for pointer in synset.pointers] == ["@", "+", "!", "~"]
    assert synset.pointers[2] == ("!", "00190931", "n", "0101")


def test_gloss_is_split_into_definition_and_examples() -> None:
    gloss = 'cause to lose air; also burst; "puncture a balloon"; "it was punctured"'
    assert module("wordnet").split_gloss(gloss) == ("cause to lose air", ("puncture a balloon", "it was punctured"))


@pytest.mark.parametrize(("gloss", "kept"), [("offensive term for somebody", False), ("a small house of wood", True)])
def test_unfit_words_are_left_out(gloss: str, kept: bool) -> None:
    wordnet = module("wordnet")
    made = wordnet.make_entry("word", "noun", wordnet.Synset(("word",), (), gloss), {}, 3)
    assert (made is not None) == kept


def test_long_documents_lose_nothing() -> None:
    documents = module("long_documents").documents
    text = "\n\n".join(f"paragraph {number} " + "x" * (number % 70) for number in range(500))
    parts = documents(text, 2000)
    assert "\n\n".join(parts) == text
    assert len(parts) > 5
    assert all(1900 <= len(part) <= 2600 for part in parts)  # a paragraph has 90 characters at most


def test_rate_rises_then_falls_to_its_end() -> None:
    pretrain = module("pretrain")
    rates = [pretrain.learning_rate(2e-3, step / 100) for step in range(101)]
    peak = int(np.argmax(rates))
    assert 1 <= peak <= 3
    assert rates[peak] == pytest.approx(2e-3)
    assert rates[-1] == pytest.approx(2e-3 * pretrain.FINAL_RATE)
    assert sorted(rates[peak:], reverse=True) == rates[peak:]


def test_batches_are_slices_of_the_text_and_cover_it() -> None:
    pretrain = module("pretrain")
    source = pretrain.batches(np.arange(1000, dtype=np.uint16), pretrain.Phase(10, 4, 1.0), np.random.default_rng(0))
    taken = np.concatenate([np.array(next(source)) for _ in range(24)])
    assert (np.diff(taken, axis=1) == 1).all()
    assert len({int(row[0]) for row in taken}) == 96  # one pass: no row twice


def demo_tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(DEMO))


def test_pre_training_text_is_the_chat_template() -> None:
    tokenizer = demo_tokenizer()
    messages = rows("chat")[0]["messages"]
    rendered = module("train_tokenizer").render({"messages": messages})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == rendered
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt)


def test_tokenizer_keeps_text_and_marks() -> None:
    tokenizer = demo_tokenizer()
    text = "  Naïve café: x = 3\n\n\tend 日本 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    assert tokenizer.eos_token_id == 2


def test_demo_model_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in DEMO.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= set(files)
    assert sum(files.values()) < 9_500_000
    assert {path.name for path in (DEMO / "LICENSES").iterdir()} == {"WordNet.txt", "Python.txt", "KingJamesBible.txt"}


def test_demo_model_is_trained() -> None:
    """Its loss on a sentence of its text is far below that of a uniform guess, and of the same tokens in disorder."""
    model, tokenizer = pytest.importorskip("mlx_lm").load(str(DEMO))
    model.set_dtype(mx.float32)
    question = {"role": "user", "content": "What does river mean?"}
    answer = {
        "role": "assistant",
        "content": "The noun river means: a large natural stream of water (larger than a creek).",
    }
    tokens = tokenizer.apply_chat_template([question, answer])
    disorder = random.Random(0).sample(tokens, len(tokens))

    def loss(ids: list[int]) -> float:
        row = mx.array([ids])
        return nn.losses.cross_entropy(model(row[:, :-1]), row[:, 1:], reduction="mean").item()

    assert loss(tokens) < 0.5 * math.log(4096)
    assert loss(disorder) > 2 * loss(tokens)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_recipes_load(name: str) -> None:
    recipe = module("segtrain.recipe.schema").load_recipe(EXAMPLES / name)
    assert recipe.model == "examples/demo-model"
    assert recipe.output.dir.startswith("runs/")


@pytest.mark.slow
def test_pre_training_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen steps on a text of one repeated sentence: the loss falls by more than half."""
    tokens = np.array(
        demo_tokenizer().encode("In the beginning God created the heaven and the earth. ") * 60, np.uint16
    )
    for part in ("train", "valid"):
        np.save(tmp_path / f"{part}.npy", tokens)
    (tmp_path / "tokenizer").mkdir()
    sizes = ["--steps", "12", "--tokens", "256", "--length", "64", "--long", "128"]
    monkeypatch.setattr(sys, "argv", ["pretrain", "--data", str(tmp_path), "--out", str(tmp_path / "out"), *sizes])
    module("pretrain").main()
    log = [json.loads(line) for line in (tmp_path / "out/training.jsonl").read_text().splitlines()]
    assert log[0]["loss"] > 6
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]


def run(*arguments: str) -> None:
    assert module("segtrain.cli").run(arguments) == 0, arguments


def events(directory: Path, kind: str) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes' paths start at the repository's root."""
    monkeypatch.chdir(EXAMPLES.parent)


def short(directory: Path, steps: int, rows: int, *changes: str) -> list[str]:
    """Settings of a run of some seconds; `rows` is for an update and for the evaluation."""
    settings = [f"train.steps={steps}", f"train.grad_accumulation_steps={rows}", f"eval.rows={rows}", *changes]
    settings += [f"output.dir={directory}", "output.save_every=0", "output.eval_every=0"]
    return changed(*settings)


def changed(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.usefixtures("at_root")
def test_quick_start_learns_and_its_adapter_loads(tmp_path: Path) -> None:
    """Six short updates lower the loss by a third or more; stock mlx-lm then gives other logits than without."""
    out = tmp_path / "run"
    run("sft", "configs/demo.yaml", *short(out, 6, 2, "train.warmup_steps=0"))
    losses = [event["loss"] for event in events(out, "train")]
    assert len(losses) == 6
    assert min(losses[3:]) < 0.7 * losses[0]
    mlx_lm = pytest.importorskip("mlx_lm")
    tokens = mx.array([demo_tokenizer().encode("What does student mean?")])
    with_adapter, without = (mlx_lm.load(str(DEMO), adapter_path=path)[0](tokens) for path in (str(out), None))
    assert not mx.allclose(with_adapter, without, atol=0.1)


def evaluations(directory: Path) -> tuple[dict, dict]:
    """Of the same held-out rows, before the first update and after the last."""
    before, after = events(directory, "eval")
    assert (before["step"], before["rows"]) == (0, after["rows"])
    return before, after


@pytest.mark.parametrize(
    ("steps", "rows", "rate"), [(4, 2, "6e-3"), pytest.param(6, 3, "2e-3", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("at_root")
def test_preferences_are_learnt(tmp_path: Path, steps: int, rows: int, rate: str) -> None:
    changes = (f"train.learning_rate={rate}", "train.warmup_ratio=0.0", "output.eval_every=100", f"eval.rows={steps}")
    run("orpo", "examples/orpo.yaml", *short(tmp_path / "run", steps, rows), *changed(*changes))
    before, after = evaluations(tmp_path / "run")
    assert after["loss"] < 0.8 * before["loss"]
    assert after["log_odds"] > before["log_odds"] + 0.5
    assert 0 <= after["accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["simpo", "cpo"])
@pytest.mark.usefixtures("at_root")
def test_rewards_are_learnt(tmp_path: Path, loss: str) -> None:
    """Six updates of three pairs move the held-out margin by a tenth of a nat or more."""
    changes = ("train.learning_rate=2e-3", "train.warmup_ratio=0.0", "output.eval_every=100", "eval.rows=8")
    run(loss, f"examples/{loss}.yaml", *short(tmp_path / "run", 6, 3), *changed(*changes))
    before, after = evaluations(tmp_path / "run")
    assert after["loss"] < before["loss"]
    assert after["rewards_margins"] > before["rewards_margins"] + 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("at_root")
def test_long_documents_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's own script and recipe, with documents of some 500 tokens."""
    data = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["long_documents", "--out", str(data), "--characters", "1500"])
    module("long_documents").main()
    changes = [f"data.train={data}/train.jsonl", f"data.valid={data}/valid.jsonl", "train.learning_rate=2e-3"]
    run(
        "sft", "examples/long-documents.yaml", *short(tmp_path / "run", 8, 1), *changed(*changes, "output.eval_every=9")
    )
    assert max(step["tokens"] for step in events(tmp_path / "run", "train")) > 500
    before, after = evaluations(tmp_path / "run")
    assert after["loss"] < before["loss"] - 0.02


@pytest.mark.slow
def test_two_processes_write_one_run(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("mlx.launch", path=path) is None:
        pytest.skip("mlx.launch isn't installed")
    out = tmp_path / "run"
    command = [str(EXAMPLES / "two_processes.sh"), *short(out, 2, 2, "train.warmup_steps=0")]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(events(out, "train")) == 2  # one rank writes
    assert (out / "adapters.safetensors").is_file()
