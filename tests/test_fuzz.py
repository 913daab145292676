"""Recipes and data that nobody would write: an error is one clear message with the right exit code, never a traceback.

1,000 cases with the fast tests, 20,000 nightly. The parsers are called directly, as a process per case would take
hours; a few go through the command line.
"""

import contextlib
import io
import json
import string
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segtrain.cli import run
from segtrain.data import open_data
from segtrain.errors import UserError
from segtrain.models.load import load
from segtrain.recipe.schema import Recipe, load_recipe

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["auto", "all", "1e-4", "24GB", "last", "../x", "~", "null", "true", "{{ x }}", "nan", "\udcff"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SECTIONS = {
    name: list(getattr(Recipe.model_fields[name].annotation, "model_fields", {})) for name in Recipe.model_fields
}
MLX_LM = [
    "iters",
    "batch_size",
    "num_layers",
    "lora_parameters",
    "mask_prompt",
    "adapter_path",
    "steps_per_report",
    "fine_tune_type",
]


@st.composite
def recipes(draw: st.DrawFn) -> Any:
    """A recipe that could be right, with some of its keys given any value, and some keys that don't exist."""
    values: dict[str, Any] = {"model": "no/such", "data": {"train": "none.jsonl"}}
    for _ in range(draw(st.integers(0, 4))):
        section = draw(st.sampled_from([*SECTIONS, *MLX_LM, "lerning"]))
        keys = SECTIONS.get(section)
        inner = values.setdefault(section, {})
        if keys and isinstance(inner, dict) and draw(st.booleans()):
            inner[draw(st.sampled_from([*keys, "typo"]))] = draw(VALUES)
        else:
            values[section] = draw(VALUES)
    return values


TEXTS = st.one_of(
    recipes().map(lambda values: json.dumps(values, default=str)),
    st.text(alphabet=string.printable, max_size=80),
    recipes().map(lambda values: yaml.safe_dump(values)[:-3] if values else ""),
    st.sampled_from(
        ["", "a: b: c", "- 1", "&a [*a]", "!!python/object:os.system {}", "x: &a [*a]", "? {a: 1}\n: 2", "\t"]
    ),
)
MESSAGES = st.dictionaries(st.sampled_from(["role", "content", "x"]), VALUES)
ROWS = st.one_of(
    st.fixed_dictionaries({"prompt": VALUES, "completion": VALUES}),
    st.fixed_dictionaries({"prompt": VALUES, "chosen": VALUES, "rejected": VALUES}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), VALUES), max_size=3) | VALUES}
    ),
    st.fixed_dictionaries({"text": VALUES}),
    VALUES,
)
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row)),
    ROWS.map(lambda row: json.dumps(row)[:-2]),
    st.text(max_size=30),
    st.just(json.dumps({"prompt": "w1", "completion": " w2"})),
    st.just('{"prompt": "w1", "completion": NaN}'),
    st.just("[" * 3000),
)
FILES = st.lists(LINES, max_size=4).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogateescape"))


def budget(cases: int) -> Any:
    return settings(max_examples=cases, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    tiny_run.model(folder / "model")
    return folder


def check_message(error: UserError) -> None:
    text = str(error)
    assert text.strip()
    assert "Traceback" not in text
    assert len(text) < 4000


def read_recipe(folder: Path, text: str) -> None:
    path = folder / "fuzzed.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_recipe(path)
    except UserError as error:
        check_message(error)


def read_data(folder: Path, tokenizer: Any, content: bytes, loss: str, streaming: bool) -> None:
    path = folder / "fuzzed.jsonl"
    path.write_bytes(content)
    recipe = tiny_run.recipe(folder, data__train=str(path), data__streaming=streaming)
    try:
        data = open_data(recipe, tokenizer, pairs=loss == "orpo")
        for _ in range(3):
            next(data.train)
    except UserError as error:
        check_message(error)


def fuzz_recipes(folder: Path, cases: int) -> None:
    budget(cases)(given(TEXTS)(lambda text: read_recipe(folder, text)))()


def fuzz_data(folder: Path, cases: int) -> None:
    tokenizer = load(str(folder / "model")).tokenizer
    strategy = given(FILES, st.sampled_from(["sft", "orpo"]), st.booleans())
    budget(cases)(strategy(lambda content, loss, streaming: read_data(folder, tokenizer, content, loss, streaming)))()


def test_recipes(folder: Path) -> None:
    fuzz_recipes(folder, 300)


def test_data(folder: Path) -> None:
    fuzz_data(folder, 200)


@pytest.mark.slow
def test_ten_thousand_recipes(folder: Path) -> None:
    fuzz_recipes(folder, 10_000)


@pytest.mark.slow
def test_ten_thousand_data_files(folder: Path) -> None:
    fuzz_data(folder, 10_000)


@pytest.mark.parametrize("text", ["", "- 1", "a: b: c", "model: x", "{", "\x00", "!!python/object:os.system {}"])
def test_exit_code_of_a_bad_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert run(["check", str(path)]) == 2
    assert "Traceback" not in errors.getvalue()


@pytest.mark.parametrize(
    "line", ["{", "1", "null", '{"prompt": 3, "completion": 4}', '{"nothing": 1}', "\x00", "[" * 3000]
)
def test_exit_code_of_bad_data(folder: Path, line: str) -> None:
    data = folder / "bad.jsonl"
    data.write_text(line + "\n")
    path = tiny_run.recipe_file(folder, data__train=str(data))
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert run(["check", str(path)]) == 2
    assert "bad.jsonl" in errors.getvalue()
