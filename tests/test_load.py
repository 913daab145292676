"""Loading: what comes back, and one clear sentence for everything that can't be loaded."""

import json
import re
import shutil
from pathlib import Path

import data_toys
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_configs

import segtrain.models.load as module
from segtrain.errors import UserError
from segtrain.models.load import load

TOKENIZER = data_toys.byte_level()
VOCABULARY = len(TOKENIZER)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_configs.save("llama", tmp_path_factory.mktemp("models") / "llama", vocab_size=VOCABULARY)
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(name: object, message: str, **options: bool) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        load(str(name), **options)
    assert "\n" not in str(error.value)


def test_a_directory(saved: Path):
    loaded = load(str(saved))
    weights = mx.load(str(saved / "model.safetensors"))
    assert mx.array_equal(loaded.model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert loaded.config["model_type"] == "llama"
    assert loaded.path == saved
    assert loaded.vocabulary == VOCABULARY
    assert loaded.tokenizer.encode("the", add_special_tokens=False) == TOKENIZER.encode("the", add_special_tokens=False)


def test_no_such_directory(tmp_path: Path):
    refused(tmp_path / "nothing", "there is no directory")


def test_a_file(saved: Path):
    refused(saved / "config.json", "is a file; give the directory")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ConnectionError("no route to host"), "could not be fetched from the hub (no route to host)"),
        (module.RepositoryNotFoundError.__new__(module.RepositoryNotFoundError), "the hub has no such model"),
        (module.GatedRepoError.__new__(module.GatedRepoError), "is gated"),
    ],
)
def test_a_hub_id_that_can_not_be_had(monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str):
    def download(*args: object, **options: object) -> str:
        raise failure

    monkeypatch.setattr("segtrain.hub._unreachable", lambda: "")
    monkeypatch.setattr(module, "snapshot_download", download)
    refused("owner/model", message)


def test_a_hub_id_is_refused_before_its_weights_are_fetched(monkeypatch: pytest.MonkeyPatch, directory: Path):
    change(directory, model_type="bitnet")
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(directory)

    monkeypatch.setattr(module, "snapshot_download", download)
    refused("owner/model", "bitnet can't be trained")
    assert asked == [["config.json"]]


def test_code_of_a_hub_model_is_not_even_fetched(monkeypatch: pytest.MonkeyPatch, saved: Path):
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(saved)

    monkeypatch.setattr(module, "snapshot_download", download)
    load("owner/model")
    assert "model*.safetensors" in asked
    assert not [pattern for pattern in asked if pattern.endswith(".py")]


def test_no_config(directory: Path):
    (directory / "config.json").unlink()
    refused(directory, "has no config.json")
    (directory / "adapter_config.json").write_text("{}")
    refused(directory, "is an adapter, not a model")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config(directory: Path, text: str):
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    refused(directory, "config.json")


def test_no_weights(directory: Path):
    (directory / "model.safetensors").unlink()
    refused(directory, "has no weights")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_not_read(directory: Path, name: str):
    (directory / "model.safetensors").rename(directory / name)
    refused(directory, "only as pickle files")


def test_a_missing_shard(directory: Path):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, "lacks 1 of 2 weight files, such as model-00002-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text("[1]")
    refused(directory, "index.json can't be read")


def test_truncated_weights(directory: Path):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    refused(directory, "mlx-lm can't load")


def test_weights_of_another_model(directory: Path):
    change(directory, num_hidden_layers=6)
    refused(directory, "mlx-lm can't load")


def test_an_unknown_model_type(directory: Path):
    change(directory, model_type="lama")
    refused(directory, "knows no model_type lama (the nearest is llama)")


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, directory: Path):
    """As mlx-lm's olmo file does it."""

    def load_model(*args: object, **options: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(module, "load_model", load_model)
    refused(directory, "needs a package that isn't installed")


MINE = "raise RuntimeError('the code of the model ran')"


def test_code_that_comes_with_the_model_is_not_run(directory: Path):
    (directory / "mine.py").write_text(MINE)
    change(directory, model_file="mine.py")
    refused(directory, "brings its own model code ('mine.py'), which is not run")
    refused(directory, "the code of the model ran", trust_remote_code=True)


def test_code_that_comes_with_the_tokenizer_is_not_run(directory: Path):
    (directory / "mine.py").write_text(MINE)
    path = directory / "tokenizer_config.json"
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer") as error:
        load(str(directory))
    assert "ran" not in str(error.value)


def test_no_tokenizer(directory: Path):
    for path in directory.glob("tokenizer*"):
        path.unlink()
    refused(directory, "the tokenizer in")


def test_a_tokenizer_of_another_model(tmp_path: Path):
    directory = tiny_configs.save("llama", tmp_path / "small", vocab_size=100)
    TOKENIZER.save_pretrained(directory)
    refused(directory, f"has {TOKENIZER.vocab_size} tokens and the model only 100 embeddings")


def test_an_added_token_without_an_embedding(tmp_path: Path):
    """One that the chat template writes is refused, one that nothing writes is not (Gemma 3 has such a one)."""
    directory = tiny_configs.save("llama", tmp_path / "small", vocab_size=VOCABULARY)
    tokenizer = data_toys.byte_level()
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(directory)
    assert load(str(directory)).vocabulary == VOCABULARY
    tokenizer.chat_template += "<image>"
    tokenizer.save_pretrained(directory)
    refused(directory, f"token '<image>' of the tokenizer in {directory} has id {VOCABULARY}")


@pytest.mark.parametrize("name", ["llama", "gemma3n", "qwen3_vl"])
@pytest.mark.parametrize("quantised", [False, True])
def test_the_vocabulary_is_the_token_embeddings_rows(name: str, quantised: bool):
    model = tiny_configs.build(name)
    if quantised:
        nn.quantize(model, group_size=32, class_predicate=lambda _, m: isinstance(m, nn.Embedding))
    assert module.embedding_rows(model) == tiny_configs.VOCAB
