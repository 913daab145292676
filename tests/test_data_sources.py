"""Tokenizers by name, and data sets of the hub: `datasets.load_dataset` is replaced, since tests have no network."""

import json
import os
from itertools import islice

import pytest
from data_toys import byte_level, recipe

from segtrain.data import Data, open_data
from segtrain.data.check import check_data
from segtrain.data.tokenizer import load_tokenizer
from segtrain.errors import UserError, reason

TOKENIZER = byte_level(None)


def opened(path: str, **options) -> Data:
    return open_data(recipe(train=path, **options), TOKENIZER)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A data set `someone/rows` with splits train and validation and the subset `small`; the calls made for it."""
    import datasets

    for split, count in (("train", 20), ("validation", 5)):
        rows = [{"text": f"{split} {i}", "extra": None} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    real, calls = datasets.load_dataset, []

    def load(name, subset=None, *, streaming=False):
        calls.append((name, subset, streaming))
        if name != "someone/rows":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "validation")}
        return real("json", data_files=files, streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr("segtrain.hub._unreachable", lambda: "")
    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_with_subset_and_splits(hub, streaming):
    data = opened("someone/rows", subset="small", valid="validation", streaming=streaming)
    assert set(hub) == {("someone/rows", "small", streaming)}
    first = list(islice(data.train, 20))
    assert {row.origin.line for row in first} == set(range(1, 21))
    assert {row.origin.file for row in first} == {"someone/rows[train]"}
    assert data.valid is not None
    assert [TOKENIZER.decode(row.tokens) for row in data.valid] == [f"validation {i}</s>" for i in range(5)]
    assert data.rows_per_epoch == (None if streaming else 20)
    assert data.counts["rows"] == 20
    state = data.train.state_dict()
    after = [row.origin for row in islice(data.train, 33)]
    again = opened("someone/rows", subset="small", valid="validation", streaming=streaming)
    again.train.load_state_dict(json.loads(json.dumps(state)))
    assert [row.origin for row in islice(again.train, 33)] == after


def test_slices_of_a_split(hub):
    assert opened("someone/rows", split="train[:25%]").counts["rows"] == 5
    assert opened("someone/rows", split="train[-3:]").counts["rows"] == 3
    assert opened("someone/rows", split="train[10:]").counts["rows"] == 10
    for split, streaming in (("train[:25%]", True), ("train[x:]", False), ("train[3]", False)):
        with pytest.raises(UserError, match=r"train\[:80%\]"):
            opened("someone/rows", split=split, streaming=streaming)
    with pytest.raises(UserError, match=r"the splits train, validation; name one as data.split, not dev"):
        opened("someone/rows", split="dev")


def test_what_neither_disk_nor_hub_has(hub):
    with pytest.raises(
        UserError, match=r"someone/else: no such file or directory, and no hub data set could be loaded"
    ):
        opened("someone/else")


def test_a_stream_is_checked_up_to_a_limit(hub, monkeypatch):
    monkeypatch.setattr("segtrain.data.check.STREAMED_ROWS", 12)
    report = check_data(recipe(train="someone/rows", streaming=True), tokenizer=TOKENIZER)
    assert report.counts["rows"] == 12
    assert "only the first 12 rows of someone/rows were read, since streaming is on" in report.suggestions


def test_a_pipe_is_refused_by_name():
    reader, writer = os.pipe()
    os.write(writer, b'{"text": "a b"}\n')
    os.close(writer)
    try:
        with pytest.raises(UserError, match=rf"/dev/fd/{reader}: a pipe can be read once only"):
            opened(f"/dev/fd/{reader}")
    finally:
        os.close(reader)


def test_a_tokenizer_is_loaded_without_weights(tmp_path):
    byte_level("chatml").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("the<|im_end|>") == byte_level("chatml").encode("the<|im_end|>")
    assert tokenizer.chat_template == byte_level("chatml").chat_template


def test_a_tokenizers_error_is_told_with_its_cause(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "Unknown"}}')
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(tmp_path))
    assert "any variant of untagged enum" in str(caught.value)
    assert "\n" not in str(caught.value)


def _chained() -> None:
    try:
        raise KeyError("sentencepiece")
    except KeyError as inner:
        raise ValueError("Couldn't make the tokenizer from one of:\n(1) a file\n(2) a slow one") from inner


def test_an_error_in_one_line():
    with pytest.raises(ValueError, match="Couldn't") as caught:
        _chained()
    assert reason(caught.value) == (
        "Couldn't make the tokenizer from one of: (1) a file (2) a slow one; caused by: KeyError: 'sentencepiece'"
    )
    assert len(reason(caught.value, 40)) == 40
    assert reason(TimeoutError()) == "TimeoutError"


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"^model .*: its tokenizer can't be loaded: "):
        load_tokenizer(str(tmp_path))


def test_code_that_comes_with_a_model_is_not_run(tmp_path, monkeypatch):
    byte_level("chatml").save_pretrained(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Mine(PreTrainedTokenizerFast):\n    pass\n"  # a class of its own: transformers marks it
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "code.Mine"]}, "tokenizer_class": "Mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": config["auto_map"]}))
    with pytest.raises(UserError, match="its tokenizer can't be loaded"):
        load_tokenizer(str(tmp_path))
    assert not ran.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    load_tokenizer(str(tmp_path), trust_remote_code=True)
    assert ran.exists(), "the control: it does run where the recipe allows it"


@pytest.mark.parametrize("kind", ["missing.jinja", "not utf-8"])
def test_a_chat_template_that_is_no_file(tmp_path, kind):
    (tmp_path / "not utf-8").write_bytes(b"\xff\xfe")
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match="neither a Jinja template nor a readable file"):
        opened(str(tmp_path / "x.jsonl"), chat_template=str(tmp_path / kind))


def test_a_chat_template_from_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}")
    (tmp_path / "x.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    row = next(opened(str(tmp_path / "x.jsonl"), chat_template=str(tmp_path / "t.jinja"), supervise="all").train)
    assert TOKENIZER.decode(row.tokens) == "user:q</s>assistant:a</s>"  # type: ignore[union-attr]
