"""The map of CONTRIBUTING.md as a test: which room imports which, and what must stay out of the files.

Two kinds of proof: the import statements of every module (wherever they stand in it), and fresh interpreters that
import a module and look at what came with it. A room is a folder of the package, or a module
at its root.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "segtrain"

MLX = {"mlx"}
MLX_LM = {"mlx", "mlx_lm"}
HUB = {"huggingface_hub"}


class Room(NamedTuple):
    """What a room may import beside the standard library and itself: third-party packages and other rooms."""

    packages: Set[str] = frozenset()
    rooms: Set[str] = frozenset()


LEAVES = {"cache", "errors", "event", "signals"}  # they import nothing
ROOMS: dict[str, Room] = {
    "recipe": Room({"pydantic", "pydantic_core", "yaml"}, {"cache", "errors"}),
    "data": Room({"datasets", "numpy", "pyarrow", "transformers"}, {"errors", "event", "hub", "recipe"}),
    "engine": Room(MLX, {"errors", "lora"}),
    "attention": Room(MLX, {"errors"}),
    "recurrence": Room(MLX | {"numpy"}, {"errors"}),
    "models": Room(MLX_LM | HUB, {"attention", "engine", "errors", "hub", "lora", "recurrence"}),
    "lora": Room(MLX_LM | HUB | {"gguf", "numpy"}, {"errors", "recipe", "storage"}),
    "memory": Room(
        MLX_LM | HUB | {"psutil"},
        {"attention", "cache", "engine", "errors", "event", "hub", "lora", "models", "recipe", "recurrence"},
    ),
    "storage": Room(MLX, {"errors", "recipe"}),
    "parallel": Room(MLX | {"numpy"}, {"errors", "signals"}),
    "run": Room(
        MLX_LM,
        {
            *{*LEAVES, "attention", "data", "engine", "lora", "memory", "models", "parallel", "recipe", "recurrence"},
            "storage",
        },
    ),
    "terminal": Room({"rich"}, {"errors", "event"}),
    "report": Room({"plotly", "yaml"}, {"errors", "terminal"}),
    "api": Room(set(), {*LEAVES, "data", "memory", "models", "parallel", "recipe", "run", "terminal"}),
    "cli": Room(
        {"typer"}, {*LEAVES, "api", "lora", "memory", "models", "parallel", "recipe", "report", "run", "terminal"}
    ),
    "hub": Room(HUB, {"errors"}),
    **{leaf: Room() for leaf in LEAVES},
    "__main__": Room(set(), {"cli"}),
    # segtrain/__init__.py, whose version everybody may import, and which itself imports when a name is used
    "": Room(set(), {"api", "errors", "event", "recipe"}),
}
WITHOUT_MLX = {"api", "cli", "data", "hub", "memory", "recipe", "report", "terminal", *LEAVES}
BUT = {"memory.meter", "memory.anatomy", "memory.doors", "memory.graph"}
WITHOUT_MLX_TOO = ["engine.segments", "models.support", "run.preview"]


def modules() -> dict[str, Path]:
    """`models.stack` -> file, `models` for the package itself, "" for segtrain/__init__.py."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()
SOURCES = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}


def room(module: str) -> str:
    return module.split(".")[0]


@cache
def imports(source: str) -> Set[str]:
    """Every imported name in full, wherever it stands: `from a.b import c` is `a.b.c`, `import a.b` is `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide from this test"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inner(name: str) -> str:
    """The module of segtrain that an imported name is or lies in: `segtrain.errors.UserError` -> `errors`."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def violations(module: str, source: str) -> list[str]:
    """What `module` imports against the table."""
    rule = ROOMS.get(room(module), Room())
    found = []
    for name in sorted(imports(source)):
        top = name.split(".")[0]
        if top == "segtrain":
            if room(inner(name)) not in {"", room(module), *rule.rooms}:
                found.append(f"{module} may not import {name}")
        elif top not in sys.stdlib_module_names and top not in rule.packages:
            found.append(f"{module} may not import {name}")
    return found


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of segtrain that it imports, on top or inside a function."""
    return {
        module: {inner(name) for name in imports(source) if name.split(".")[0] == "segtrain"} - {module, ""}
        for module, source in sources.items()
    }


def between_rooms(modules: Mapping[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, targets in modules.items():
        found.setdefault(room(module), set()).update(room(target) for target in targets)
    return {name: targets - {name} for name, targets in found.items()}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of the graph; [] where it has none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_each_module_imports_what_its_room_may() -> None:
    found = [line for module, source in SOURCES.items() for line in violations(module, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("engine.segments", "import mlx_lm"),
        ("engine.backward", "from segtrain.models.stack import LayerStack"),
        ("engine.objectives", "from segtrain.recipe import schema"),
        ("engine.head", "from segtrain.data.rows import Row"),
        ("recipe.schema", "import mlx.core"),
        ("data.jsonl", "from mlx_lm import load"),
        ("data.jsonl", "def f():\n    import mlx.core"),
        ("attention.band", "from segtrain.models import stack"),
        ("models.stack", "from segtrain.engine.backward import FullBackward\nfrom segtrain.run import trainer"),
        ("memory.plan", "import rich"),
        ("memory.plan", "from segtrain.run.preview import Preview"),
        ("run.trainer", "import rich"),
        ("run.trainer", "from segtrain.terminal.progress import make_progress"),
        ("run.trainer", "from segtrain import cli"),
        ("run.trainer", "def f():\n    from segtrain.report import page"),
        ("storage.durable", "from segtrain.run import state"),
        ("terminal.check", "import plotly"),
        ("report.page", "import rich"),
        ("cli", "import mlx.core"),
        ("errors", "from segtrain import event"),
        ("a_new_module", "import requests"),
        ("a_new_room.module", "from segtrain import errors"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    assert violations(module, line)


def test_each_room_has_its_line_and_each_line_its_room() -> None:
    assert {room(module) for module in MODULES} == set(ROOMS)
    assert set().union(*(rule.rooms for rule in ROOMS.values())) <= set(ROOMS)


def test_no_module_imports_itself_by_a_detour() -> None:
    found = circle(graph(SOURCES))
    assert not found, "a circle: " + " -> ".join(found)


def test_no_room_imports_itself_by_a_detour() -> None:
    found = circle(between_rooms(graph(SOURCES)))
    assert not found, "a circle: " + " -> ".join(found)


def test_the_table_allows_no_circle_of_rooms() -> None:
    assert not circle({name: rule.rooms for name, rule in ROOMS.items()})


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("run.measure", "def f():\n    from segtrain.run.preview import Preview"),
        ("event", "from segtrain import cli"),
        ("engine.segments", "from segtrain.engine.backward import Backward"),
    ],
)
def test_a_circle_is_found(module: str, line: str) -> None:
    assert module in circle(graph({**SOURCES, module: line}))


def test_a_circle_of_rooms_is_found() -> None:
    changed = graph({**SOURCES, "lora.flat": "from segtrain.engine import layouts"})
    assert not circle(changed)  # between modules there is none
    assert {"lora", "engine"} <= set(circle(between_rooms(changed)))


def test_engine_knows_no_concrete_model() -> None:
    names = {node.id for node in ast.walk(ast.parse(SOURCES["engine.backward"])) if isinstance(node, ast.Name)}
    assert not names & {"LayerStack"}


@pytest.mark.parametrize(("package", "home"), [("rich", "terminal"), ("plotly", "report"), ("typer", "cli")])
def test_what_renders_has_one_home(package: str, home: str) -> None:
    users = {
        room(module) for module, source in SOURCES.items() if package in {n.split(".")[0] for n in imports(source)}
    }
    assert users == {home}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_rooms_without_mlx() -> None:
    names = [name for name in MODULES if room(name) in WITHOUT_MLX and name not in BUT] + WITHOUT_MLX_TOO
    first = run_python(
        f"import importlib, sys\n"
        f"for name in {names!r}:\n"
        f"    importlib.import_module('segtrain.' + name)\n"
        f"    if {{'mlx', 'mlx_lm'}} & sys.modules.keys():\n"
        f"        sys.exit(print(name))"
    )
    assert not first, f"{first.strip()} loads mlx"
    assert len(names) > len(WITHOUT_MLX_TOO) + 30


def loaded_by(module: str) -> set[str]:
    """Top-level packages in a fresh interpreter after importing the module."""
    return set(run_python(f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})").split())


def test_the_command_line_is_light() -> None:
    heavy = {"mlx", "mlx_lm", "datasets", "transformers", "numpy", "pydantic", "rich", "plotly", "torch", "yaml"}
    assert not loaded_by("segtrain.cli") & heavy
    assert loaded_by("segtrain.recipe.schema") & heavy  # the control: the recipe does need pydantic


def test_functions_fit_on_a_screen() -> None:
    long = []
    for module, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > 50:
                    long.append(f"{module}.{node.name}: {length} lines")
    assert not long
