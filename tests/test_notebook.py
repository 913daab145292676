"""examples/quickstart.ipynb runs from top to bottom, and the outputs that are kept in it are those of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
KEPT = 200_000  # bytes: a reader loads all of it


def cells(path: Path = NOTEBOOK) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def printed(cells: list[dict[str, Any]]) -> str:
    outputs = [output for cell in cells for output in cell["outputs"] if output["output_type"] == "stream"]
    return "".join("".join(output["text"]) for output in outputs if output["name"] == "stdout")


def pictures(cells: list[dict[str, Any]]) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"])


def test_outputs_are_kept_small_and_name_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < KEPT
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    assert not any(output["output_type"] == "error" for cell in cells() for output in cell["outputs"])
    assert "validation loss" in printed(cells())
    assert pictures(cells()) == 1
    assert str(ROOT) not in text
    assert "site-packages" not in text


def test_the_notebook_runs() -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient isn't installed: make optional")
    nbformat = pytest.importorskip("nbformat", reason="nbformat isn't installed: make optional")
    pytest.importorskip("ipykernel", reason="ipykernel isn't installed: make optional")
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: make optional")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute(env=environment)
    done = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    assert "validation loss" in printed(done)
    assert "adapters.safetensors" in printed(done)
    assert pictures(done) == 1
