"""The table of supported models against mlx-lm's own files, and what is refused before anything is read."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest
import tiny_configs
from mlx_lm.utils import MODEL_REMAPPING

from segtrain.errors import UserError
from segtrain.models import support

FILES = sorted((Path(mlx_lm.__file__).parent / "models").glob("*.py"))
IS_MODEL = re.compile(r"^class Model\(|^from .* import .*\bModel\b|^    Model,$", re.MULTILINE)


def test_every_model_file_of_mlx_lm_is_supported_or_refused_with_a_reason():
    files = {file.stem for file in FILES if IS_MODEL.search(file.read_text())}
    listed = {*support.FAMILIES, *support.REFUSED}
    assert listed == files
    assert not {*support.FAMILIES} & {*support.REFUSED}
    assert all(len(reason) > 20 for reason in support.REFUSED.values())


def test_as_many_as_promised():
    assert len(support.FAMILIES) >= 105
    assert sum(not family.two_streams for family in support.FAMILIES.values()) >= 40


def test_other_names_are_mlx_lms():
    assert support.ALIASES == MODEL_REMAPPING


def test_every_supported_file_has_a_tested_configuration():
    assert {name.split("/")[0] for name in tiny_configs.CONFIGS} == {*support.FAMILIES}


def test_rows():
    rows = {row.model_type: row for row in support.table()}
    assert rows["mistral"] == support.Row("mistral", True, True, True, True, None, "runs as llama")
    assert rows["qwen3_moe"].moe_lora is True
    assert rows["mamba"].shared_prefix is True
    assert rows["gpt2"].shared_prefix is False
    assert rows["gpt2"].pairs is True
    assert "two streams" in rows["gpt2"].notes
    bitnet = rows["bitnet"]
    assert (bitnet.sft, bitnet.pairs, bitnet.shared_prefix, bitnet.quantised) == (False,) * 4
    assert "ternary" in bitnet.notes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no model_type"),
        ({"model_type": 3}, "names no model_type"),
        ({"model_type": "bitnet"}, "bitnet can't be trained: its linear layers hold packed ternary weights"),
        ({"model_type": "lama"}, "knows no model_type lama (the nearest is llama); `segtrain models`"),
        ({"model_type": "../../evil"}, "knows no model_type ../../evil"),
        ({"model_type": "os.path"}, "knows no model_type os.path"),
    ],
)
def test_refused_by_name(config: dict, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        support.refuse(config)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma4", "lfm2-vl"])
def test_not_refused(model_type: str):
    support.refuse({"model_type": model_type})


def test_a_model_that_mlx_lm_has_and_the_table_not_is_unproven(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(support.FAMILIES, "llama")
    support.refuse({"model_type": "llama"})
    assert "covers llama" in support.why_unproven({"model_type": "llama"})
    assert not support.shares_prefix("llama")
    assert not support.why_unproven({"model_type": "qwen3"})
    assert "covers qwen3" in support.why_unproven({"model_type": "qwen3", "model_file": "mine.py"})


def test_the_lookup_imports_no_mlx():
    code = (
        "import sys; from segtrain.models import support; support.table(); support.refuse({'model_type': 'llama'});"
        "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documentation_is_up_to_date():
    page = Path(__file__).parent.parent / "docs" / "models.md"
    assert support.as_markdown() in page.read_text(), "write it anew: python -m segtrain.models.support"


def test_the_table_is_of_the_mlx_lm_that_is_installed():
    """A newer mlx-lm may add files: look at them, then raise this."""
    assert importlib.metadata.version("mlx-lm") == support.MLX_LM
