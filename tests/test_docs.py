"""What the documentation says exists: links, commands and their options, files, keys, counts, tables, pictures."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from segtrain.cli import app
from segtrain.models.support import FAMILIES, table
from segtrain.recipe.mlx_lm_keys import KEYS
from segtrain.recipe.schema import Recipe, Section, load_recipe

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "examples", "benchmarks")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of these languages ("": none named)."""
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in languages:
            yield block


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown viewer makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> list[list[str]]:
    """Every command line of the page's blocks and inline code, comments off, as words."""
    lines = [line for block in blocks(page, "", "sh", "bash") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", without_blocks(page))
    found = []
    for line in lines:
        line = re.sub(r"^(MLX_\w+=\S+ )+", "", line)
        if re.match(r"(segtrain|mlx\.launch|make|python|examples/)\b", line):
            found.append(shlex.split(line, comments=True))
    return found


def segtrain_part(words: list[str]) -> list[str] | None:
    return words[words.index("segtrain") + 1 :] if "segtrain" in words else None


def broken_links(page: Path) -> list[str]:
    bad = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            bad.append(target)
    return bad


def command_errors(words: list[str]) -> list[str]:
    """What is wrong with a `segtrain` command line: its name, an option, a file that should be there, a key."""
    commands_ = get_command(app).commands  # type: ignore[attr-defined]
    name, arguments = words[0], words[1:]
    if name.startswith("--"):
        return [] if name in ("--version", "--help", "--install-completion") else [f"option {name}"]
    if name not in commands_:
        return [f"command {name}"]
    known = {option for parameter in commands_[name].params for option in parameter.opts}
    errors = [
        f"option {word} of {name}" for word in arguments if word.startswith("-") and word not in known | {"--help"}
    ]
    files = [word for word in arguments if word.startswith(("configs/", "examples/")) and "=" not in word]
    errors += [f"file {word}" for word in files if not (ROOT / word).exists()]
    for key in re.findall(r"--set ([\w.]+)=", " ".join(arguments)):
        errors += [] if key in recipe_keys() else [f"key {key}"]
    return errors


def recipe_keys() -> dict[str, Any]:
    """Every key of the recipe by its path, with its default."""
    return dict(_keys(Recipe, ""))


def _keys(section: type[Section], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _keys(inner, f"{name}.")
        else:
            yield f"{prefix}{name}", field.default


def test_the_pages_are_there() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/moving.md", "docs/recipe.md"} <= set(NAMES)
    assert sum(len(commands(page)) for page in PAGES) > 40


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](page.md#one) [d](nowhere.md) [e](https://example.org)\n")
    assert broken_links(page) == ["#two", "nowhere.md"]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page: Path) -> None:
    parts = [part for words in commands(page) if (part := segtrain_part(words))]
    assert [error for part in parts for error in command_errors(part)] == []


@pytest.mark.parametrize(
    "line", ["sfft r.yaml", "sft --fast", "sft configs/none.yaml", "sft r.yaml --set train.step=1"]
)
def test_a_wrong_command_is_seen(line: str) -> None:
    assert len(command_errors(line.split())) == 1


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_scripts_and_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in commands(page):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word and word != "..."} <= targets, words
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words
        if words[0].startswith("examples/"):
            assert (ROOT / words[0]).exists(), words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_yaml_blocks_are_recipes(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        file = tmp_path / "recipe.yaml"
        file.write_text(block, encoding="utf-8")
        assert load_recipe(file).model


def test_readme_shows_a_recipe() -> None:
    assert len(list(blocks(ROOT / "README.md", "yaml"))) >= 1


def test_every_key_is_explained_with_its_default() -> None:
    text = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| *([^|]*?) *\|", text, re.MULTILINE))
    assert set(rows) == set(recipe_keys())
    for key, default in recipe_keys().items():
        if isinstance(default, str | float | int) and key != "output.dir":
            assert yaml.safe_load(rows[key]) == default, key


def test_every_mlx_lm_key_is_in_the_guide() -> None:
    """Apart from those that say nothing about training; and the guide invents none."""
    section = (ROOT / "docs/moving.md").read_text(encoding="utf-8").split("## TRL")[0]
    shown = set(re.findall(r"`(\w+)[`:]", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    assert KEYS - shown <= {"config", "test"}
    inner = {"rank", "scale", "dropout", "keys", "full"}
    assert shown - inner <= KEYS | {"data"}


def test_readme_is_short_and_begins_with_one_sentence() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 220
    first = text.split("\n\n")[1]
    assert first.startswith("segtrain ")
    assert first.count(". ") == 0
    table = text.split("<!-- user table -->")[1].split("<!-- end")[0]
    assert "| `mlx_lm.lora" in table
    assert "| `segtrain sft" in table
    assert table.count("\n| ") <= 6


def test_readme_counts_models() -> None:
    rows = table()
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{sum(row.sft for row in rows)} of {len(rows)} model types" in text
    assert len(FAMILIES) > 100


def test_make_quickstart_runs_the_recipe_of_the_readme() -> None:
    assert "segtrain sft configs/demo.yaml" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "segtrain sft configs/demo.yaml" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_rendered_from_their_results() -> None:
    script = [sys.executable, str(ROOT / "docs/render_tables.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}: run python docs/render_tables.py"


def test_a_changed_figure_is_seen() -> None:
    render = runpy.run_path(str(ROOT / "docs/render_tables.py"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wrong = re.sub(r"(\| `mlx_lm.*?\|) [\d,.]+ ", r"\1 1 ", text)
    assert wrong != text
    assert render["rendered"](wrong) == text


def test_picture_is_what_its_script_draws() -> None:
    draw = runpy.run_path(str(ROOT / "docs/draw_segmented_backward.py"))
    assert draw["picture"]() == (ROOT / "docs/segmented_backward.svg").read_text(encoding="utf-8")


def test_picture_tells_the_truth() -> None:
    """One live segment at most, always beside a kept boundary; plain backward holds all of them before the loss."""
    draw = runpy.run_path(str(ROOT / "docs/draw_segmented_backward.py"))
    for _, segment, backward in draw["moments"]():
        segments, boundaries = draw["live"]("segmented", segment, backward)
        assert len(segments) <= 1
        assert all(boundaries > number for number in segments)
    assert draw["live"]("plain", None, True) == ({0, 1, 2, 3}, 0)


def test_contributing_names_what_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w./]+(?:\.py|/))`", text))
    assert len(names) >= 8
    roots = (ROOT, ROOT / "segtrain")
    assert {name for name in names if not any((root / name).exists() for root in roots)} == set()


def test_citation_names_the_licence_file() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "message", "authors", "type", "license", "version"} <= citation.keys()
    assert (ROOT / "LICENSE").is_file()


@pytest.mark.parametrize("name", ["first_run", "check", "plan_segments"])
def test_terminal_pictures_are_drawn_from_their_recordings(name: str) -> None:
    pictures = runpy.run_path(str(ROOT / "docs/render_pictures.py"))
    text = (ROOT / f"docs/recordings/{name}.txt").read_text(encoding="utf-8")
    assert text.startswith(f"$ {pictures['RECORDINGS'][name][0]}\n")
    picture = (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8")
    assert pictures["drawn"](name, text) == picture
    assert "url(http" not in picture  # a viewer fetches nothing


def test_run_picture_is_drawn_from_its_recording() -> None:
    draw = runpy.run_path(str(ROOT / "docs/draw_run.py"))
    run = json.loads((ROOT / "docs/recordings/run.json").read_text(encoding="utf-8"))
    assert draw["picture"](run) == (ROOT / "docs/run.svg").read_text(encoding="utf-8")


def test_pictures_are_small() -> None:
    pictures = [path for kind in ("svg", "png") for path in (ROOT / "docs").glob(f"*.{kind}")]
    assert {"first_run.svg", "plan_segments.svg", "segmented_backward.svg"} <= {path.name for path in pictures}
    assert all(path.stat().st_size < 250_000 for path in pictures)


GUIDES = ("data", "distributed", "export", "how-it-works", "mac", "memory", "moving", "preferences", "troubleshooting")


def unlinked_keys(text: str, where: str) -> set[str]:
    """Recipe keys that the page names without a link to where they are explained."""
    running = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    named = {key for key in re.findall(r"`(\w+\.\w+)(?:: [^`]*)?`", running) if key in recipe_keys()}
    linked = re.findall(r"\[`(\w+\.\w+)[^`]*`\]\(" + where + r"recipe\.md#(\w+)\)", running)
    return named - {key for key, section in linked if key.split(".")[0] == section}


@pytest.mark.parametrize("page", GUIDES)
def test_keys_are_linked_to_their_explanation(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    assert unlinked_keys(text, "") == set()
    assert re.search(r"recipe\.md#", text)


def test_an_unlinked_key_is_seen() -> None:
    text = "[`lora.rank`](recipe.md#train) `train.seed: 1` `no.key` [`data.test`](recipe.md#data) `data.test`"
    assert unlinked_keys(text, "") == {"lora.rank", "train.seed"}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} == set(
        re.findall(r"\]\(([\w-]+\.md)\)", index)
    )
