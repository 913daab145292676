"""Malformed and tricky inputs (tests/data/rows) and their exact outcome: a message, or what is learnt and left out.

A message here ends a command with exit code 2. Expected texts are written out by hand.
"""

import gzip
import json
import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import yaml
from data_toys import FILES, byte_level, recipe
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segtrain.data import Data, PreferenceRow, open_data
from segtrain.data.raw import parse_line
from segtrain.data.rows import Origin
from segtrain.errors import UserError
from segtrain.recipe.schema import Recipe

TOKENIZER = byte_level("chatml", adds_bos=True)
END = "<|im_end|>"
FORMS = "chosen and rejected; prompt and completion; messages; conversations; instruction and output; text"
ROLES = "not one of system, developer, user, assistant, tool, function, ipython, documents"
ARRAY = "; a file that is one JSON array must become one object a line, e.g. `jq -c '.[]' FILE`"
RENAMED = {"columns": {"prompt": "question", "completion": "reply"}}


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(FILES / "rows")


def opened(path: str, loss: str = "sft", tokenizer=TOKENIZER, **options) -> Data:
    return open_data(recipe(train=path, **options), tokenizer, pairs=loss == "orpo")


def rows(data: Data) -> list:
    """One epoch, in file order."""
    return sorted(islice(data.train, data.counts["rows"]), key=lambda row: row.origin.line)


def learnt(row) -> str | tuple[str, str, str]:
    if isinstance(row, PreferenceRow):
        prompt = TOKENIZER.decode(row.prompt)
        return prompt.split("user\n")[1].split(END)[0], TOKENIZER.decode(row.chosen), TOKENIZER.decode(row.rejected)
    return TOKENIZER.decode([token for token, on in zip(row.tokens, row.supervised, strict=True) if on])


# File, what is learnt of each row with its line, how many rows are left out for which reason.
GOOD = [
    ("bom.jsonl", {1: "one", 2: "two"}, {}),
    ("crlf.jsonl", {1: "one", 2: "two"}, {}),
    ("blank_lines.jsonl", {2: "one", 6: "two"}, {}),
    ("bom_inside.jsonl", {1: "one", 2: "two"}, {}),
    ("no_final_newline.jsonl", {1: "one", 2: "two"}, {}),
    ("nul_escape.jsonl", {1: "o\0ne"}, {}),
    ("surrogate_pair.jsonl", {1: "🙂"}, {}),
    ("content_parts.jsonl", {1: "yes, no"}, {}),
    ("tools_as_string.jsonl", {1: "x"}, {}),
    ("extra_fields.jsonl", {1: "yes"}, {}),
    ("sharegpt.jsonl", {1: "yes"}, {}),
    ("alpaca.jsonl", {1: "3", 2: "x"}, {}),
    ("renamed.jsonl", {1: "yes", 2: "no"}, {}),
    ("ends_with_user.jsonl", {1: "yes"}, {}),
    ("one_token.jsonl", {1: "a", 2: "two"}, {}),
    ("special_in_text.jsonl", {1: "yes"}, {}),
    ("doubled_bos.jsonl", {1: "one", 2: "two", 3: "six"}, {}),
    ("no_answer_in_one.jsonl", {1: "yes", 3: "yes"}, {"no assistant turn": 1}),
    ("empty_answer.jsonl", {1: "yes"}, {"empty response": 2}),
    ("whitespace_completion.jsonl", {2: "y"}, {"empty response": 1}),
    ("empty_text.jsonl", {3: "one"}, {"empty text": 2}),
]


@pytest.mark.parametrize(
    ("file", "expected", "dropped"), GOOD, ids=lambda value: str(value) if type(value) is str else ""
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_learnt(file, expected, dropped, streaming):
    data = opened(file, streaming=streaming, **(RENAMED if file.startswith("renamed") else {}))
    assert {row.origin.line: learnt(row) for row in rows(data)} == {line: text + END for line, text in expected.items()}
    assert {key.split(": ")[1]: n for key, n in data.counts.items() if ": " in key} == dropped
    assert data.counts["dropped"] == sum(dropped.values())
    assert data.counts["rows"] == len(expected)
    assert bool(dropped) == any("left out" in notice for notice in data.notices)


PAIRS = [
    ("pair.jsonl", [("q", "yes", "no")], 0, 0),
    ("pair_messages.jsonl", [("q", "yes", "no")], 0, 0),
    ("pair_conversations.jsonl", [("q", "yes", "no")], 0, 0),
    ("pair_prompt_repeated.jsonl", [("q", "yes", "no")], 0, 0),
    ("pair_prompts_differ.jsonl", [("q", "yes", "no")], 0, 1),
    ("pair_one_identical.jsonl", [("q", "yes", "yes"), ("z", "yes", "no")], 1, 0),
]


@pytest.mark.parametrize(("file", "expected", "identical", "fallbacks"), PAIRS, ids=[case[0] for case in PAIRS])
def test_what_is_preferred(file, expected, identical, fallbacks):
    data = opened(file, "orpo")
    assert [learnt(row) for row in rows(data)] == [(q, good + END, bad + END) for q, good, bad in expected]
    assert (data.counts["identical"], data.counts["fallbacks"]) == (identical, fallbacks)
    assert len(data.notices) == identical + fallbacks
    assert sum(row.rejected_prompt is not None for row in rows(data)) == fallbacks


BAD = [
    ("alpaca_number.jsonl", ":1: input must be a string, not a number"),
    ("array.jsonl", ":1: not valid JSON (Expecting value at column 18)" + ARRAY),
    ("array_one_line.jsonl", ":1: a row must be a JSON object, not a list" + ARRAY),
    ("blank_then_broken.jsonl", ":5: not valid JSON (Expecting ',' delimiter at column 15)"),
    ("broken.jsonl", ":3: not valid JSON (Unterminated string starting at column 10)"),
    ("content_image.jsonl", ":1: messages[0].content[1] is 'image_url'; only text parts can be trained on"),
    ("content_missing.jsonl", ":1: messages[1].content is missing"),
    ("content_null.jsonl", ":1: messages[1].content is null"),
    ("content_number.jsonl", ":1: messages[1].content must be a string, not a number"),
    ("empty.jsonl", ": the data holds no row"),
    ("only_blank_lines.jsonl", ": the data holds no row"),
    (
        "empty_object.jsonl",
        f":1: a row needs one of: {FORMS}; this one has no fields",
    ),
    (
        "unknown_fields.jsonl",
        f":1: a row needs one of: {FORMS}; this one has question, answer; if these are they, "
        "write data.columns: {prompt: question, completion: answer}",
    ),
    (
        "prompt_only.jsonl",
        f":1: a row needs one of: {FORMS}; this one has prompt, answer, so completion is missing"
        "; if these are they, write data.columns: {completion: answer}",
    ),
    (
        "from_in_messages.jsonl",
        ":1: messages[0] has no role (it has from, value); for from/value turns name the field conversations",
    ),
    ("human_role.jsonl", f":1: messages[0].role is 'human', {ROLES}; write user"),
    ("unknown_role.jsonl", f":1: messages[1].role is 'robot', {ROLES}"),
    ("role_number.jsonl", f":1: messages[0].role is 1, {ROLES}"),
    ("no_role.jsonl", ":1: messages[1] has no role (it has content)"),
    ("invalid_utf8.jsonl", ":2: byte 14 is 0xe9, not UTF-8; save the file as UTF-8"),
    ("utf16.jsonl", ":1: byte 1 is 0xff, this looks like UTF-16; save the file as UTF-8"),
    ("lone_surrogate.jsonl", r":2: \ud800 is half of a surrogate pair and stands for no character"),
    ("surrogate_in_a_key.jsonl", r":1: \udfff is half of a surrogate pair and stands for no character"),
    (
        "nul_bytes.jsonl",
        ":2: not valid JSON (Expecting value at column 1); there are NUL bytes in it, so the file was cut off or "
        "overwritten while it was written",
    ),
    ("message_string.jsonl", ":1: messages[0] must be an object with role and content, not a string"),
    ("messages_empty.jsonl", ":2: messages is empty"),
    ("messages_string.jsonl", ":1: messages must be a list of messages, not a string"),
    (
        "mixed_forms.jsonl",
        ":3: this row is in text form, but mixed_forms.jsonl:1 is in chat form; keep one form in a data set "
        "(here: text)",
    ),
    (
        "mixed_sharegpt.jsonl",
        ":2: this row is in chat form, but mixed_sharegpt.jsonl:1 is in chat (ShareGPT) form; keep one form in a "
        "data set (here: messages)",
    ),
    ("null_row.jsonl", ":1: a row must be a JSON object, not null"),
    ("number_row.jsonl", ":2: a row must be a JSON object, not a number"),
    ("string_row.jsonl", ":1: a row must be a JSON object, not a string"),
    ("prompt_null.jsonl", ":1: prompt must be a string, not null"),
    ("text_nan.jsonl", ":1: text must be a string, not a number"),
    ("text_number.jsonl", ":2: text must be a string, not a number"),
    ("renamed_missing.jsonl", ":2: data.columns takes completion from 'reply', but this row has question"),
    ("sharegpt_no_value.jsonl", ":1: conversations[0] must be an object with from and value (found: from, text)"),
    ("sharegpt_string.jsonl", ":1: conversations must be a list of turns, not a string"),
    ("tool_calls_string.jsonl", ":1: messages[1].tool_calls must be a list of objects, not a string"),
    ("tools_broken_string.jsonl", ":1: tools is a string that isn't valid JSON"),
    ("two_on_a_line.jsonl", ":1: not valid JSON (Extra data at column 17)"),
    (
        "system_only.jsonl",
        ": the only row has no supervised token (1 × no assistant turn, e.g. system_only.jsonl:1)",
    ),
    ("pair_answer_only.jsonl", ":1: chosen holds no turn before its answer, and there is no prompt"),
    ("pair_ends_with_user.jsonl", ":1: chosen must end with an assistant turn, not with user"),
    ("pair_identical.jsonl", ": chosen and rejected are identical in every row (2), so there is nothing to prefer"),
    (
        "pair_no_prompt.jsonl",
        ":1: prompt is missing: chosen and rejected are strings, so the prompt must be given",
    ),
    ("pair_number.jsonl", ":1: rejected must be a string or a list of messages, not a number"),
    (
        "pair_no_rejected.jsonl",
        f":1: a row needs one of: {FORMS}; this one has prompt, chosen, so rejected is missing",
    ),
    (
        "pair_whitespace.jsonl",
        ": none of the 2 rows has a supervised token (2 × empty response, e.g. pair_whitespace.jsonl:1)",
    ),
]


@pytest.mark.parametrize(("file", "message"), BAD, ids=[case[0] for case in BAD])
def test_what_is_refused(file, message):
    with pytest.raises(UserError) as error:
        opened(file, "orpo" if file.startswith("pair") else "sft", **(RENAMED if file.startswith("renamed") else {}))
    assert str(error.value) == file + message


# Messages that quote Python's or a library's own words, which differ between versions.
QUOTED = [
    ("trailing_comma.jsonl", r":2: not valid JSON \(.* column \d+\); remove the trailing comma"),
    ("single_quotes.jsonl", r":1: not valid JSON \(Expecting property name enclosed in double quotes at column 2\)"),
    ("pretty.jsonl", r":1: not valid JSON .*; each row must be on one line, e.g. `jq -c . FILE`"),
    ("nul_in_text.jsonl", r":1: not valid JSON \(Invalid control character at column 12\); there are NUL bytes .*"),
    ("huge_number.jsonl", r":1: not valid JSON \(Exceeds the limit .* 5000 digits\)"),
    ("sharegpt_unknown.jsonl", r":1: conversations\[0\].from is 'alien', not one of human, user, gpt, .*"),
    ("not_gzip.jsonl.gz", r": the gzip data is broken or cut off \(Not a gzipped file .*\); copy or download it again"),
    ("cut.jsonl.gz", r": the gzip data is broken or cut off \(Compressed file ended .*\); copy or download it again"),
    ("broken.parquet", r": not a readable Parquet file: .*"),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("file", "pattern"), QUOTED, ids=[case[0] for case in QUOTED])
def test_what_is_refused_in_anothers_words(file, pattern, streaming):
    with pytest.raises(UserError) as error:
        opened(file, streaming=streaming)
    assert re.fullmatch(re.escape(file) + pattern, str(error.value))


def test_all_files_are_used():
    used = {case[0] for case in [*GOOD, *PAIRS, *BAD, *QUOTED]} | {"long_prompts.jsonl"}
    assert used == set(os.listdir("."))
    assert len(used) >= 40


def test_streaming_refuses_the_same_rows():
    for file, message in BAD:
        if file in ("only_blank_lines.jsonl", "renamed_missing.jsonl"):
            continue
        with pytest.raises(UserError) as error:
            opened(file, "orpo" if file.startswith("pair") else "sft", streaming=True)
        assert str(error.value) == file + message


# Generated inputs: too large, or not files of one kind.


def test_a_line_of_a_megabyte(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "a" * 1_000_000, "two")))
    data = opened(str(path), max_seq_length=64)
    assert {row.origin.line for row in rows(data)} == {1, 3}
    assert data.counts["longest"] == 5  # of those that are trained
    assert any("max_seq_length 1000002 would keep" in notice for notice in data.notices)  # BOS, a million, EOS


def test_deep_nesting_is_refused_or_read_but_never_a_crash(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(UserError, match=r"deep.jsonl:1: (the JSON is nested too deeply|text must be a string)"):
        opened(str(path))


def test_a_link_to_itself(tmp_path):
    path = tmp_path / "loop.jsonl"
    path.symlink_to(path)
    with pytest.raises(UserError, match="can't be read: Too many levels"):
        opened(str(path))


def test_directories_that_link_in_circles_are_read_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert opened(f"{tmp_path}/**/*.jsonl").counts["rows"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tmp_path):
    path = tmp_path / "secret.jsonl"
    path.write_text('{"text": "one"}\n')
    path.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        opened(str(path))


def test_parquet_with_a_missing_column(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"prompt": "q", "answer": "x"}]).to_parquet(tmp_path / "x.parquet")
    path = str(tmp_path / "x.parquet")
    for streaming in (False, True):
        with pytest.raises(UserError, match=r"x.parquet:1: .* has prompt, answer, so completion is missing"):
            opened(path, streaming=streaming)
        data = opened(path, columns={"completion": "answer"}, streaming=streaming)
        assert learnt(next(data.train)) == "x" + END


def test_fields_that_a_column_store_adds_as_null_are_not_seen(tmp_path):
    """Arrow gives all structs of a column the same fields: a user turn would have tool_calls: null."""
    import datasets

    call = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes", "tool_calls": call}]
    datasets.Dataset.from_list([{"messages": chat}]).to_parquet(tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": chat}))
    ours, plain = (opened(str(tmp_path / f"x.{kind}"), tokenizer=byte_level("tools")) for kind in ("parquet", "jsonl"))
    assert next(ours.train).tokens == next(plain.train).tokens


# Which files a source names.


def text_file(path: Path, *texts: str) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_a_directory_gives_its_parts(tmp_path):
    text_file(tmp_path / "train.jsonl", "one", "two")
    text_file(tmp_path / "valid.jsonl", "six")
    text_file(tmp_path / "test.jsonl", "ten")
    data = opened(str(tmp_path))
    assert [learnt(row) for row in rows(data)] == ["one" + END, "two" + END]
    assert data.valid is not None
    assert [learnt(row) for row in data.valid] == ["six" + END]
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no train.jsonl, only test.jsonl, valid.jsonl"):
        opened(str(tmp_path))


def test_a_directory_without_parts_gives_all_its_files(tmp_path):
    text_file(tmp_path / "b.jsonl", "two")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "one"}')
    (tmp_path / "notes.md").write_text("no data")
    (tmp_path / ".hidden.jsonl").write_text("no data")
    assert sorted(learnt(row) for row in rows(opened(str(tmp_path)))) == ["one" + END, "two" + END]
    assert sorted(learnt(row) for row in rows(opened(f"{tmp_path}/*.jsonl*"))) == ["one" + END, "two" + END]


def test_what_does_not_exist(tmp_path):
    text_file(tmp_path / "train.jsonl", "one")
    with pytest.raises(UserError, match=r"data.train: .*/trian.jsonl: no such file; did you mean .*/train.jsonl\?"):
        opened(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match=r"nothing matches .*\*.json"):
        opened(str(tmp_path / "*.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no .jsonl, .jsonl.gz or .parquet file \(it has: nothing\)"):
        opened(str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"data.valid: .*/gone.jsonl: no such file"):
        opened(str(tmp_path / "train.jsonl"), valid=str(tmp_path / "gone.jsonl"))


def test_a_saved_data_set_and_its_splits(tmp_path):
    import datasets

    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(10)]}) for name in ("train", "held")
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    for streaming in (False, True):
        data = opened(str(tmp_path / "set"), valid="held", streaming=streaming)
        assert data.valid is not None
        assert [learnt(row) for row in data.valid] == [f"held {i}{END}" for i in range(10)]
        assert str(next(data.train).origin).startswith(f"{tmp_path}/set[train]:")
    assert opened(str(tmp_path / "set"), split="train[:40%]").counts["rows"] == 4
    with pytest.raises(UserError, match=r"has the splits train, held; name one as data.split, not dev"):
        opened(str(tmp_path / "set"), split="dev")


def test_several_sources_and_a_mix(tmp_path):
    text_file(tmp_path / "a.jsonl", *(f"a{i}" for i in range(4)))
    (tmp_path / "b.jsonl").write_text('{"q": "x", "r": "b"}\n' * 2)
    b = {"path": str(tmp_path / "b.jsonl"), "columns": {"prompt": "q", "completion": "r"}}
    a = {"path": str(tmp_path / "a.jsonl")}
    both = opened([a, b])  # type: ignore[arg-type]
    assert sorted(learnt(row) for row in islice(both.train, 6)) == [
        *(f"a{i}{END}" for i in range(4)),
        "b" + END,
        "b" + END,
    ]
    for streaming in (False, True):
        mixed = opened([a | {"weight": 1}, b | {"weight": 3}], streaming=streaming)  # type: ignore[arg-type]
        taken = [learnt(row)[0] for row in islice(mixed.train, 40)]
        assert (taken.count("a"), taken.count("b")) == (10, 30)


def test_rows_must_suit_the_loss():
    with pytest.raises(UserError, match=r"pair.jsonl:1: this is a preference row; train with a preference command"):
        opened("pair.jsonl")
    assert [learnt(row) for row in rows(opened("pair.jsonl", columns={"completion": "chosen"}))] == ["yes" + END]
    with pytest.raises(
        UserError, match=r"crlf.jsonl:1: pairs need the fields chosen and rejected, but this is a text row"
    ):
        opened("crlf.jsonl", "orpo")


def attempted(call: Callable[[], object]) -> object:
    """What a call returns, or the message of its UserError; anything else it raises is a failure."""
    try:
        return call()
    except UserError as error:
        return str(error)


any_bytes = st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))
near_json = st.text('{}[]":,\\u0dDetxs1. \n', max_size=40).map(lambda text: ('{"text": ' + text).encode())


def parses_or_says_why(line: bytes) -> None:
    outcome = attempted(lambda: parse_line(line, Origin("x", 1)))
    assert isinstance(outcome, dict) or str(outcome).startswith("x:1: ")


@settings(max_examples=100)
@given(any_bytes | near_json)
@example(b"7")
@example(b'"text"')
def test_no_bytes_crash_the_parser(line):
    parses_or_says_why(line)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(any_bytes | near_json)
def test_20_000_lines_do_not_crash_the_parser(line):
    parses_or_says_why(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls", "type", "text"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
fields = st.sampled_from(
    ["messages", "conversations", "prompt", "completion", "chosen", "rejected", "text", "tools", "system"]
)


rows_of_anything = st.dictionaries(fields, json_values, max_size=4)
losses = st.sampled_from(["sft", "orpo"])


def gives_a_row_or_says_why(home: Path, row: dict, loss: str) -> None:
    path = home / "x.jsonl"
    path.write_text(json.dumps(row))
    outcome = attempted(lambda: next(opened(str(path), loss).train).targets)
    assert outcome.startswith(str(path)) if isinstance(outcome, str) else outcome > 0  # type: ignore[operator]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=100)
@given(row=rows_of_anything, loss=losses)
def test_no_row_crashes(home, row, loss):
    gives_a_row_or_says_why(home, row, loss)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(row=rows_of_anything, loss=losses)
def test_20_000_rows_do_not_crash(home, row, loss):
    gives_a_row_or_says_why(home, row, loss)


def test_a_folder_with_splits_subsets_and_slices(tmp_path):
    (tmp_path / "en").mkdir()
    for home in (tmp_path, tmp_path / "en"):
        text_file(home / "train-00000-of-00002.jsonl", *(f"{home.name[:2]}{i}" for i in range(6)))
        text_file(home / "train-00001-of-00002.jsonl", *(f"{home.name[:2]}{i}" for i in range(6, 10)))
        text_file(home / "validation.jsonl", f"{home.name[:2]}v")
        text_file(home / "extra.jsonl", f"{home.name[:2]}x")

    def texts(**options) -> list[str]:
        data = opened(str(tmp_path), **options)
        found = sorted(islice(data.train, data.counts["rows"]), key=lambda row: (row.origin.file, row.origin.line))
        return [learnt(row).removesuffix(END)[2:] for row in found]

    assert texts(split="train[:4]") == ["0", "1", "2", "3"]
    assert texts(split="train[-50%:]") == ["5", "6", "7", "8", "9"]
    assert texts(split="train[5:8]", subset="en") == ["5", "6", "7"]
    assert texts(split="validation") == ["v"]
    named = opened(str(tmp_path), split="train[:4]", valid="train[-2:]").valid
    assert named is not None
    assert [learnt(row)[2:] for row in named] == ["8" + END, "9" + END]
    assert texts(split="extra", subset="en", streaming=True) == ["x"]
    data = opened(str(tmp_path), split="train[:4]", subset="en")
    assert data.valid is not None
    assert [learnt(row) for row in data.valid] == ["env" + END]
    for options, words in {
        "none": ({"split": "dev2"}, "has no files of a split dev2"),
        "subset": ({"subset": "de"}, r"has no directory for the subset 'de' \(directories: en\)"),
        "order": ({"split": "train[:4]", "streaming": True}, "a slice needs streaming: false"),
        "slice": ({"split": "train[x:]"}, r"can't read the slice in 'train\[x:\]'"),
        "open": ({"split": "train[4"}, r"can't read the slice in 'train\[4'"),
    }.values():
        with pytest.raises(UserError, match=words):
            opened(str(tmp_path), **options)
    file = str(tmp_path / "extra.jsonl")
    with pytest.raises(UserError, match="is a file, so it has no subset 'en'"):
        opened(file, subset="en")
    with pytest.raises(UserError, match="it has no split 'dev'"):
        opened(file, split="dev")
    assert opened(file, split="train[:1]").counts["rows"] == 1


def test_mlx_lms_hf_dataset_on_a_local_folder(tmp_path):
    text_file(tmp_path / "train.jsonl", *(f"row {i}" for i in range(20)))
    text_file(tmp_path / "test.jsonl", "t")
    record = {"path": str(tmp_path), "train_split": "train[:10]"}
    given = {"model": "toy", "hf_dataset": record, "batch_size": 1, "iters": 1}
    data = open_data(Recipe.from_mapping(given), TOKENIZER)
    assert data.valid is not None
    assert (data.counts["rows"], [row.origin.line for row in data.valid]) == (10, [19, 20])


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"promt": "a", "completion": "b"}, "{prompt: promt}"),
        ({"prompt": "a", "chosen": "b", "rejectd": "c"}, "{rejected: rejectd}"),
        ({"mesages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "{messages: mesages}"),
        ({"question": "a", "answer": "b", "id": 3}, "{prompt: question, completion: answer}"),
        ({"body": "a"}, "{text: body}"),
        ({"a": "a", "b": "b", "c": "c"}, None),
        ({"id": 3}, None),
    ],
)
def test_the_line_to_type_is_told_and_works(tmp_path, row, columns):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    loss = "orpo" if "chosen" in row else "sft"
    with pytest.raises(UserError) as caught:
        opened(str(path), loss)
    found = re.search(r"write data\.columns: (\{.*\})", str(caught.value))
    assert (found and found[1]) == columns
    if found:
        assert opened(str(path), loss, columns=yaml.safe_load(found[1])).counts["rows"] == 1
