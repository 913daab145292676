"""Which changes of a model directory are seen."""

import shutil
from pathlib import Path

import pytest

from segtrain.storage.fingerprint import SAMPLE, SAMPLES, model_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(SAMPLES * SAMPLE * 3))
    return directory


def test_a_copy_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "link").symlink_to(model)
    (model / "README.md").write_text("not part of the model")
    assert model_fingerprint(tmp_path / "copy") == model_fingerprint(model) == model_fingerprint(tmp_path / "link")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "more.safetensors"])
def test_a_changed_or_added_file_is_seen(name: str, model: Path) -> None:
    before = model_fingerprint(model)
    (model / name).write_text("changed")
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("where", [0, -1, SAMPLE * SAMPLES * 3 * 3 // 7])
def test_weights_that_changed_throughout_are_seen(where: int, model: Path) -> None:
    before = model_fingerprint(model)
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[where] = 1
    path.write_bytes(data)
    assert model_fingerprint(model) != before


def test_a_cut_weight_file_is_seen(model: Path) -> None:
    before = model_fingerprint(model)
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert model_fingerprint(model) != before
