"""The import graph of DESIGN.md, and what must stay out of the files.

Two kinds of proof: the import statements of every module (wherever they stand in it), and fresh interpreters that
import a module and look at what came with it.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "segtrain"

MLX, RICH, PLOT = {"mlx"}, {"rich"}, {"plotly"}
PYDANTIC = {"pydantic", "pydantic_core"}
# Third-party packages by module; the longest prefix counts. `models` stands for models and models.*.
THIRD_PARTY: dict[str, set[str]] = {
    "": MLX,
    "bench": MLX | {"mlx_lm"},
    "adapters": MLX | {"safetensors", "numpy"},
    "checkpoint": MLX | {"safetensors", "numpy"},
    "cli": {"typer"},
    "data": {"datasets", "numpy", "pyarrow", "transformers", "jinja2"},
    "distributed": MLX | {"numpy"},
    "durable": set(),
    "errors": set(),
    "events": set(),
    "fingerprint": {"numpy"},
    "hub": {"huggingface_hub"},
    "logging_backends": set(),
    "lifeline": set(),
    "lora": MLX | {"mlx_lm"},
    "mlx_lm_keys": set(),
    "models": MLX | {"mlx_lm", "transformers", "huggingface_hub"},
    "memory": set(),
    "memory.device": {"psutil"},
    "memory.measure": MLX,
    "memory.meter": MLX | {"psutil"},
    "memory.source": {"huggingface_hub"},
    "peft": MLX | {"safetensors", "numpy", "huggingface_hub"},
    "progress": RICH,
    "recipe": PYDANTIC,
    "recipe_problems": PYDANTIC,
    "recipe_yaml": {"yaml"},
    "report": PLOT | {"yaml"},
    "rundir": set(),
    "sampling": MLX | {"mlx_lm"},
    "scaffold": set(),
    "segments": set(),
    "session": MLX,
    "runstate": set(),
    "signals": set(),
    "terminal": RICH,
    "trainer": MLX,
}
ATTENTION = {"attention", "attention_band", "attention_blocks", "attention_reference", "attention_turns"}
# Modules of segtrain that a module may import; the ones that aren't listed may import all but `NEVER`.
INTERNAL: dict[str, set[str]] = {
    "segments": set(),
    "errors": set(),
    "layouts": set(),
    "signals": set(),
    "losses": {"layouts"},
    "packing": set(),
    "logprobs": {"layouts"},
    "events": set(),
    "lora": {"errors", "packing"},
    "engine": {"layouts", "logprobs", "lora", "losses", "packing", "segments"},
    "recipe": {"errors", "mlx_lm_keys", "recipe_problems", "recipe_yaml"},
    "recipe_yaml": {"errors"},
    "recipe_problems": {"errors"},
    "mlx_lm_keys": {"recipe_problems"},
    "data": {"data", "errors", "events", "hub", "recipe"},
    "models": {"models", "errors", "hub", "layouts", "lora", "segments", *ATTENTION},
    **{name: {*ATTENTION, "layouts"} for name in ATTENTION},
    "optim": {"errors", "packing", "recipe"},
    "terminal": {"terminal", "events", "errors"},
    "progress": {"terminal", "events", "errors"},
    "report": {"report", "terminal", "errors"},
}
# Importer -> what it must not import, for everybody and beside the lists above.
NEVER = {"cli", "progress", "report", "terminal"}
MAY_RENDER = {"cli", "__main__", "progress", "report", "terminal"}
PURE_MEMORY = ["choose", "choices", "device", "estimate", "machine", "plan", "preview", "source", "timing"]
NO_MLX = ["cli", "data", "errors", "events", "mlx_lm_keys", "recipe", "scaffold", "segments"]
NO_MLX += [f"memory.{name}" for name in PURE_MEMORY]


def modules() -> dict[str, Path]:
    """`models.stack` -> file, `models` for the package itself, "" for segtrain/__init__.py."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(source: str) -> set[str]:
    """Every imported module by its full name; `from segtrain import x` counts as `segtrain.x`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide from this test"
            if node.module == "segtrain":
                found |= {f"segtrain.{alias.name}" for alias in node.names}
            else:
                found.add(str(node.module))
    return found


def rule(table: dict[str, set[str]], module: str) -> set[str] | None:
    """The entry of the module or of the nearest package around it."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in table:
            return table[name]
    return table.get("")


def violations(module: str, source: str) -> list[str]:
    """What `module` imports against the tables."""
    found = []
    package = module.split(".")[0]
    for name in sorted(imports(source)):
        top, _, inner = name.partition(".")
        target = inner.split(".")[0]
        if top == "segtrain":
            allowed = rule(INTERNAL, module)
            if target in ("", "__version__"):
                continue
            if allowed is not None and target not in allowed:
                found.append(f"{module} may not import segtrain.{inner}")
            elif target in NEVER and target != package and package not in MAY_RENDER:
                found.append(f"{module} may not import segtrain.{inner}, which renders")
        elif top not in sys.stdlib_module_names and top not in (rule(THIRD_PARTY, module) or set()):
            found.append(f"{module} may not import {name}")
    return found


def test_import_graph() -> None:
    sources = {module: path.read_text(encoding="utf-8") for module, path in modules().items()}
    found = [line for module, source in sources.items() for line in violations(module, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("segments", "import mlx.core as mx"),
        ("recipe", "import mlx.core"),
        ("data.jsonl", "from mlx_lm import load"),
        ("data.jsonl", "def f():\n    import mlx.core"),
        ("trainer", "import rich"),
        ("trainer", "from segtrain.terminal.progress import make_progress"),
        ("trainer", "from segtrain import cli"),
        ("engine", "from segtrain.models.stack import LayerStack"),
        ("engine", "import mlx_lm"),
        ("models.stack", "from segtrain.engine.backward import FullBackward"),
        ("losses", "from segtrain import recipe"),
        ("terminal.check", "import plotly"),
        ("memory.plan", "import rich"),
        ("a_new_module", "import requests"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    assert violations(module, line)


def test_tables_name_modules_that_exist() -> None:
    known = {name.split(".")[0] for name in modules()} | {""}
    assert {name.split(".")[0] for name in {*THIRD_PARTY, *INTERNAL}} <= known


def test_engine_knows_no_concrete_loss_or_model() -> None:
    names = {node.id for node in ast.walk(_tree("engine")) if isinstance(node, ast.Name)}
    assert not names & {"sft", "orpo", "LayerStack"}


def test_rich_and_plotly_have_one_home_each() -> None:
    users: dict[str, set[str]] = {"rich": set(), "plotly": set()}
    for module, path in modules().items():
        for name in imports(path.read_text(encoding="utf-8")):
            if (top := name.split(".")[0]) in users:
                users[top].add(module.split(".")[0])
    assert users["rich"] <= {"progress", "terminal"}
    assert users["plotly"] <= {"report"}
    assert users["rich"]  # the control: the search finds something


def loaded_by(module: str) -> set[str]:
    """Top-level packages in a fresh interpreter after importing the module."""
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", NO_MLX)
def test_imports_without_mlx(module: str) -> None:
    assert not loaded_by(f"segtrain.{module}") & {"mlx", "mlx_lm"}


def test_the_command_line_is_light() -> None:
    heavy = {"mlx", "mlx_lm", "datasets", "transformers", "numpy", "pydantic", "rich", "plotly", "torch", "yaml"}
    assert not loaded_by("segtrain.cli") & heavy
    assert loaded_by("segtrain.recipe.schema") & heavy  # the control: the recipe does need pydantic


def test_no_function_is_longer_than_80_lines() -> None:
    long = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > 80:
                    long.append(f"{module}.{node.name}: {length} lines")
    assert not long


def _tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
