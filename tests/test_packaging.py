"""pyproject.toml, the lock file and the build files say the same. Markers and versions are read by `packaging`."""

import ast
import re
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

import segtrain
from segtrain.models.support import MLX_LM
from segtrain.recipe.schema import OutputRecipe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
PYTHONS = ("3.11", "3.12", "3.13")
SYSTEMS = {"linux": "Linux", "darwin": "Darwin"}


def pins(lock: str) -> list[Requirement]:
    return [Requirement(line.removesuffix("\\")) for line in re.findall(r"^\w.*==.*$", lock, re.MULTILINE)]


def environment(python: str, system: str) -> dict[str, str]:
    here = {key: str(value) for key, value in default_environment().items()}
    there = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": system}
    machine = "arm64" if system == "darwin" else "x86_64"
    return {**here, **there, "platform_system": SYSTEMS[system], "platform_machine": machine, "extra": ""}


def unmet(wanted: list[str], lock: str, python: str, system: str) -> list[str]:
    """The requirements that the lock's pins don't meet there, exactly one pin each."""
    there = environment(python, system)
    found: dict[str, list[str]] = {}
    for pin in pins(lock):
        if pin.marker is None or pin.marker.evaluate(there):
            found.setdefault(pin.name.lower(), []).append(str(pin.specifier).removeprefix("=="))
    bad = []
    for text in wanted:
        requirement = Requirement(text)
        versions = found.get(requirement.name.lower(), [])
        if len(versions) != 1 or not requirement.specifier.contains(versions[0]):
            bad.append(text)
    return bad


@pytest.mark.parametrize(("python", "system"), list(product(PYTHONS, SYSTEMS)))
def test_the_lock_meets_what_the_project_asks(python: str, system: str) -> None:
    """On each Python and system that is supported; where it fails: make lock."""
    assert unmet([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]], LOCK, python, system) == []


def test_an_unmet_requirement_is_seen() -> None:
    wanted = ["mlx>=99", "no-such-package", "pytest>=8"]
    assert unmet(wanted, LOCK, "3.11", "linux") == wanted[:2]
    assert unmet(["numpy>=1"], f"{LOCK}\nnumpy==1.0 \\", "3.11", "linux") == ["numpy>=1"]


def test_the_lock_names_no_host_and_every_pin_has_a_hash() -> None:
    assert "://" not in LOCK
    assert len(re.findall(r"^\w.*==.*\\\n    --hash=sha256:", LOCK, re.MULTILINE)) == len(pins(LOCK)) > 40


PARTS = {"huggingface_hub": "huggingface-hub", "mlx_lm": "mlx-lm", "yaml": "pyyaml", "pydantic_core": "pydantic"}
"""Imported name -> the package that brings it, where the names differ."""
EXTRAS = {"plotly", "wandb", "tensorboardx", "trackio", "gguf"}
"""Packages that only an extra of the project asks for."""


def packages(source: str) -> set[str]:
    """The packages outside the standard library whose names `source` imports, by their names in pyproject.toml."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return {PARTS.get(name, name).lower() for name in found - {"segtrain"} - sys.stdlib_module_names}


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "segtrain").rglob("*.py")]
    imported = set().union(*map(packages, sources))
    assert imported - EXTRAS == {Requirement(text).name.lower() for text in PROJECT["dependencies"]}
    extras = [
        text
        for name in ("report", "wandb", "tensorboard", "trackio", "gguf")
        for text in PROJECT["optional-dependencies"][name]
    ]
    assert {Requirement(text).name.lower() for text in extras} == EXTRAS
    assert packages("def f():\n    import torch.nn\n    from yaml import x") == {"torch", "pyyaml"}  # the control


def test_mlx_lm_has_a_ceiling() -> None:
    """Its model files are patched: a newer minor version is tried before it is allowed."""
    asked = next(Requirement(text).specifier for text in PROJECT["dependencies"] if text.startswith("mlx-lm"))
    assert asked.contains(MLX_LM)
    assert not asked.contains("0.33.0")


def test_every_tracker_is_an_extra() -> None:
    trackers = get_args(get_args(OutputRecipe.model_fields["report_to"].annotation)[0])
    assert set(trackers) <= PROJECT["optional-dependencies"].keys()
    assert len(trackers) == 3


def test_the_pythons_are_those_of_the_classifiers() -> None:
    named = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", text)}
    assert named == set(PYTHONS)
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_the_workflow_calls_targets_that_exist_on_every_python() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(jobs["linux"]["strategy"]["matrix"]["python"]) == set(PYTHONS)
    called = {step["run"].split()[1] for job in jobs.values() for step in job["steps"] if "run" in step}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert called == {"lint", "test", "doctor", "quickstart"}
    assert called <= targets


def test_the_version_stands_in_one_place() -> None:
    """In the package; hatch reads it there, and the citation says the same."""
    assert "version" not in PROJECT
    assert "version" in PROJECT["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == segtrain.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## (Unreleased|{re.escape(segtrain.__version__)}\b)", changelog, re.MULTILINE)


def test_what_is_shipped_names_its_licence() -> None:
    shipped = {"examples/data": ["WordNet.txt"], "examples/demo-model": ["WordNet.txt", "Python.txt", "KingJamesBible"]}
    for folder, notices in shipped.items():
        text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
        assert all(notice in text for notice in notices), folder
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert PROJECT["license"] == "Apache-2.0"


def test_packages_are_checked_where_they_are_built() -> None:
    assert "twine check --strict dist/*" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "make build" in (ROOT / ".ci/run").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["fault", "mac"])
def test_issue_templates_ask_for_the_doctors_output(name: str) -> None:
    text = (ROOT / f".github/ISSUE_TEMPLATE/{name}.md").read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---")[1])
    assert head.keys() == {"name", "about"}
    assert "`segtrain doctor`" in text
