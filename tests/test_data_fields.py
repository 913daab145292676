"""Fields beside a row's text: each is honoured, or the row is refused by the field's name."""

import json
from typing import Any

import pytest
from data_toys import SPECIALS, byte_level, recipe, saved, template

from segtrain.data.dataset import Pipeline
from segtrain.data.limits import Dropped, Encoded
from segtrain.data.raw import Raw
from segtrain.data.rows import Origin, PreferenceRow, SupervisedRow
from segtrain.data.tokenizer import Codec, load_tokenizer
from segtrain.errors import UserError

CHAT = byte_level("tools")
END = "<|im_end|>"
Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}
LOOK = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


def results(row: dict, use: Any = CHAT, **data: Any) -> list[Encoded | Dropped]:
    pipeline = Pipeline(recipe(train="x", **data).data, None, use)
    return pipeline.encode(Raw(json.dumps(row).encode(), Origin("x", 1)))


def text(row: dict, use: Any = CHAT, **data: Any) -> str:
    """The row's text, what is learnt of it between ⟦ and ⟧."""
    (found,) = results(row, use, **data)
    assert isinstance(found, Encoded), found
    assert isinstance(found.row, SupervisedRow)
    out, before = "", False
    for token, on in [*zip(found.row.tokens, found.row.supervised, strict=True), (None, False)]:
        out += ("⟦" if on else "⟧") * (on != before) + (use.decode([token]) if token is not None else "")
        before = on
    return out


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}{END}\n"


def answer(content: str) -> str:
    return f"<|im_start|>assistant\n⟦{content}{END}⟧\n"


LOOK_TEXT = {"type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
SYSTEM = turn("system", "brief") + turn("user", "q") + answer("yes")
PAST = turn("user", "a") + answer("b") + turn("user", "q") + answer("yes")
BOTH = turn("user", "q") + answer("yes") + turn("user", "q") + turn("assistant", "yes")
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
CALLED = turn("user", "q") + answer(CALL) + turn("user", "<tool_response>42</tool_response>") + answer("yes")
OFF = {**A, "content": "yes"}


def called(**message: Any) -> list[dict]:
    return [Q, {"role": "assistant", **message}, {"role": "tool", "content": "42"}, A]


HONOURED = {
    "system beside prompt and completion": ({"system": "brief", "prompt": "q", "completion": "yes"}, SYSTEM),
    "system beside messages": ({"system": "brief", "messages": [Q, A]}, SYSTEM),
    "the same system twice": ({"system": "brief", "messages": [{"role": "system", "content": "brief"}, Q, A]}, SYSTEM),
    "an empty system": ({"system": " ", "prompt": "q", "completion": "yes"}, SYSTEM.split("\n", 2)[2]),
    "system beside lists": ({"system": "brief", "prompt": [Q], "completion": [A]}, SYSTEM),
    "system beside Alpaca": ({"system": "brief", "instruction": "q", "output": "yes"}, SYSTEM),
    "system beside ShareGPT": (
        {"system": "brief", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]},
        SYSTEM,
    ),
    "history": ({"history": [["a", "b"]], "instruction": "q", "output": "yes"}, PAST),
    "no history": ({"history": [], "instruction": "q", "output": "yes"}, SYSTEM.split("\n", 2)[2]),
    "train": ({"messages": [Q, A, Q, {**OFF, "train": False}]}, BOTH),
    "training": ({"messages": [Q, {**A, "training": True}, Q, {**OFF, "training": False}]}, BOTH),
    "loss": ({"messages": [{**Q, "loss": False}, {**A, "loss": True}, Q, {**OFF, "loss": False}]}, BOTH),
    "weight 0": ({"messages": [Q, {**A, "weight": 1}, Q, {**OFF, "weight": 0}]}, BOTH),
    "flags of ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "yes", "weight": 1},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "yes", "train": False},
            ]
        },
        BOTH,
    ),
    "arguments as text": ({"messages": called(tool_calls=[LOOK_TEXT])}, CALLED),
    "a single function_call": (
        {"messages": called(function_call={"name": "look", "arguments": '{"at": "x"}'})},
        CALLED,
    ),
    "calls of ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "x"}}'},
                {"from": "observation", "value": "42"},
                {"from": "gpt", "value": "yes"},
            ]
        },
        CALLED,
    ),
}


@pytest.mark.parametrize("name", HONOURED)
def test_fields_are_honoured(name):
    row, expected = HONOURED[name]
    assert text(row) == expected


REFUSED = {
    "two systems": (
        {"system": "brief", "messages": [{"role": "system", "content": "long"}, Q, A]},
        "system stands beside a conversation that begins with another system message",
    ),
    "system number": ({"system": 3, "prompt": "q", "completion": "yes"}, "system must be a string, not a number"),
    "history": (
        {"history": [["a"]], "instruction": "q", "output": "y"},
        r"history must be a list of \[instruction, resp",
    ),
    "train on a question": (
        {"messages": [{**Q, "train": True}, A]},
        r"messages\[0\]\.train asks for a turn of role user",
    ),
    "weight of a question": ({"messages": [{**Q, "weight": 1}, A]}, r"messages\[0\]\.weight .* set it to 0"),
    "weight text": (
        {"messages": [Q, {**A, "weight": "1"}]},
        r"messages\[1\]\.weight must be a number of at least 0, not '1'",
    ),
    "weight below 0": ({"messages": [Q, {**A, "weight": -1}]}, r"messages\[1\]\.weight must be a number of at least 0"),
    "train number": ({"messages": [Q, {**A, "train": 1}]}, r"messages\[1\]\.train must be true or false, not 1"),
    "parts of a turn": ({"messages": [Q, {**A, "train_detail": []}]}, r"messages\[1\]\.train_detail isn't supported"),
    "row's weight": ({"weight": "x", "messages": [Q, A]}, r"x:1: weight must be a number of at least 0"),
    "arguments": (
        {"messages": called(tool_calls=[{"function": {"name": "f", "arguments": "{"}}])},
        r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is a string that isn't valid JSON",
    ),
    "kwargs": ({"chat_template_kwargs": 1, "messages": [Q, A]}, "chat_template_kwargs must be an object"),
    "kwargs of ours": (
        {"chat_template_kwargs": {"tools": []}, "messages": [Q, A]},
        r"chat_template_kwargs\.tools is given by segtrain itself",
    ),
    "weight of a pair": (
        {"weight": 2, "prompt": "q", "chosen": "a", "rejected": "b"},
        "weight has no meaning in a pref",
    ),
    "weight of an answer": (
        {"prompt": [Q], "chosen": [{**A, "weight": 0.5}], "rejected": [A]},
        "chosen ends with a turn of weight 0.5",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_are_refused_by_name(name):
    row, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        results(row)


def test_fields_that_only_a_template_shows_are_refused_without_one():
    for extra in ({"system": "brief"}, {"tools": [{"name": "f"}]}):
        for rest in ({"completion": "yes"}, {"chosen": "yes", "rejected": "no"}):
            with pytest.raises(UserError, match="has no chat template to show it"):
                results({"prompt": "q", **rest, **extra}, byte_level(None))


def test_weights_of_turn_and_row_multiply():
    row = {"weight": 0.5, "messages": [Q, A, Q, {**A, "content": "no", "weight": 3}]}
    (found,) = results(row)
    assert isinstance(found, Encoded)
    assert isinstance(found.row, SupervisedRow)
    assert found.row.weights is not None
    learnt = [w for w, on in zip(found.row.weights, found.row.supervised, strict=True) if on]
    assert learnt == [0.5] * 4 + [1.5] * 3
    (nothing,) = results({"weight": 0, "messages": [Q, A]})
    assert isinstance(nothing, Dropped)
    with pytest.raises(UserError, match="has a weight of its own, but supervise is all"):
        results({"messages": [Q, {**A, "weight": 0.5}]}, supervise="all")
    with_text = results({"weight": 0.5, "text": "abc"})[0]
    assert isinstance(with_text, Encoded)
    assert set(with_text.row.weights) == {0.5}  # type: ignore[union-attr]


def test_weights_are_cut_with_their_tokens():
    row = {"messages": [Q, A, Q, {**A, "weight": 2}]}
    for on_long in ("truncate", "truncate_prompt"):
        (found,) = results(row, max_seq_length=40, on_long=on_long)
        assert isinstance(found, Encoded)
        assert isinstance(found.row, SupervisedRow)
        assert found.truncated
        assert found.row.weights is not None
        assert [bool(w) for w in found.row.weights] == found.row.supervised


@pytest.mark.parametrize("kind", ["strings", "lists", "conversations"])
def test_pairs_have_system_and_tools(kind):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    shape = {
        "strings": {"prompt": "q", "chosen": "yes", "rejected": "no"},
        "lists": {"prompt": [Q], "chosen": [A], "rejected": [{**A, "content": "no"}]},
        "conversations": {"chosen": [Q, A], "rejected": [Q, {**A, "content": "no"}]},
    }[kind]
    (found,) = results({"system": "brief", "tools": json.dumps(tools), **shape})
    assert isinstance(found, Encoded)
    assert isinstance(found.row, PreferenceRow)
    messages = [{"role": "system", "content": "brief"}, Q]
    asked = CHAT.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert CHAT.decode(found.row.prompt) == asked
    assert (CHAT.decode(found.row.chosen), CHAT.decode(found.row.rejected)) == ("yes" + END, "no" + END)


def test_a_template_that_wants_arguments_as_text_gets_them():
    use = byte_level("tools")
    use.chat_template = template("tools").replace(
        "{'name': call.function.name, 'arguments': call.function.arguments} | tojson",
        "call.function.name + ' ' + call.function.arguments",
    )
    expected = CALLED.replace('{"name": "look", "arguments": {"at": "x"}}', 'look {"at": "x"}')
    for arguments in ({"at": "x"}, '{"at": "x"}'):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        assert text({"messages": called(tool_calls=[call])}, use) == expected


def test_several_end_tokens_each_end_a_turn(tmp_path):
    saved(tmp_path, ["<a>", "<b>", "<c>"], "<a>", "x", ["<a>", "<b>"])
    codec = Codec(load_tokenizer(str(tmp_path)))
    assert codec.end_texts == {"<a>", "<b>"}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": codec.ids("<c>")[0]}))
    assert Codec(load_tokenizer(str(tmp_path))).end_texts == {"<a>", "<c>"}, "as mlx-lm: generation's own come first"


@pytest.mark.parametrize("chat", ["tools", "reasoning", "chatml", "marks"])
def test_check_and_training_have_one_renderer(tmp_path, chat):
    """The tokenizer that check loads, and mlx-lm's wrapper as training has it, give the same rows."""
    load = pytest.importorskip("mlx_lm.tokenizer_utils").load
    saved(tmp_path, SPECIALS, "<|im_end|>", template(chat), ["<|im_end|>", "<|eot_id|>"])
    ids = json.loads((tmp_path / "config.json").read_text())["eos_token_id"]
    row = {"messages": [Q, {**A, "reasoning_content": "hm"}, Q, A]}
    ours = results(row, load_tokenizer(str(tmp_path)))
    assert ours == results(row, load(tmp_path, eos_token_ids=ids))
    assert ours


def test_offsets_change_no_token():
    slow, fast = Codec(CHAT), Codec(CHAT)
    fast.leave_offsets()
    for text_ in (CALLED, "é漢🙂 \n\n x", "<|im_end|><think>the the", ""):
        assert fast.ids(text_) == slow.ids(text_)
