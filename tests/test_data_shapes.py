"""Templates by shape, conversations drawn at random, and the definition itself as the oracle.

`expected` states the definition in a few lines over plain renderings; the rows must have just these texts and targets.
Where no rendering holds a turn (a graft), what must hold of any row is checked instead.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from data_toys import byte_level, spaced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_shapes import NAMED, SPECIALS, Shape

from segtrain.data.chat import ChatTemplate
from segtrain.data.encode import Encoder
from segtrain.data.formats import Reader
from segtrain.data.limits import Encoded
from segtrain.data.raw import Raw
from segtrain.data.rows import Origin, PreferenceRow, SupervisedRow
from segtrain.data.tokenizer import ENDS, Codec
from segtrain.errors import UserError

STOPS = ["<|im_end|>", "</s>", "<|eot|>", "<|end_turn|>", "<|end|>", "<|return|>", "<|call|>"]
HERE = Origin("x", 1)
SETTINGS: list[dict[str, bool]] = [
    {},
    *({name: on} for name in ("enable_thinking", "thinking") for on in (True, False)),
]


def tokenizer(make: Any = byte_level) -> Any:
    found = make(None, adds_bos=False)
    found.add_special_tokens({"additional_special_tokens": SPECIALS})
    found.eos_token = "<|im_end|>"
    setattr(found, ENDS, [found.convert_tokens_to_ids(stop) for stop in STOPS])
    return found


TOKENIZER, SPACED = tokenizer(), tokenizer(spaced)


def encoder(shape: Shape, use: Any = TOKENIZER, **options: Any) -> Encoder:
    codec = Codec(use)
    return Encoder(codec, ChatTemplate(codec, shape.jinja), 100_000, **options)


def rendered(shape: Shape, messages: list[dict], ask: bool = False, setting: dict[str, bool] | None = None) -> str:
    """By transformers, the switch set as mlx-lm's generation sets it: on, since the toys have marks for thoughts."""
    options = {"enable_thinking": True, **(setting or {})}
    return TOKENIZER.apply_chat_template(
        messages, chat_template=shape.jinja, add_generation_prompt=ask, tokenize=False, **options
    )


def through_stop(text: str) -> str:
    """Up to the last end token after which only white space and special tokens follow."""
    at = [text.rfind(stop) + len(stop) for stop in STOPS if stop in text]
    closed = [end for end in at if not without_specials(text[end:]).strip()]
    return text[: max(closed)] if closed else text


def without_specials(text: str) -> str:
    for special in SPECIALS:
        text = text.replace(special, "")
    return text


@dataclass
class Expected:
    """Rows as (text, targets); `graft`: turns that no rendering holds."""

    rows: list[tuple[str, list[str]]]
    graft: list[int]


def expected(shape: Shape, messages: list[dict], wanted: list[int]) -> Expected:
    """The definition."""

    def target(turn: int, setting: dict[str, bool]) -> tuple[str, str] | None:
        asked = rendered(shape, messages[:turn], True, setting)
        shown = rendered(shape, messages[: turn + 1], False, setting)
        return (asked, through_stop(shown[len(asked) :])) if shown.startswith(asked) and shown != asked else None

    for setting in SETTINGS:
        found = [target(turn, setting) for turn in wanted]
        if all(found):
            full = rendered(shape, messages, False, setting)
            if all(full.startswith(asked + text) for asked, text in found):  # type: ignore[misc]
                return Expected([(full, [text for _, text in found])], [])  # type: ignore[misc]
            shown = [rendered(shape, messages[: turn + 1], False, setting) for turn in wanted]
            return Expected([(row, [text]) for row, (_, text) in zip(shown, found, strict=True)], [])  # type: ignore[misc]
    rows, graft = [], []
    for turn in wanted:
        one = next(((s, found) for s in SETTINGS if (found := target(turn, s))), None)
        if one is None:
            graft.append(turn)
            continue
        setting, (_, text) = one
        rows.append((rendered(shape, messages[: turn + 1], False, setting), [text]))
    return Expected(rows, graft)


# Conversations.

words = st.text("ab the<>|.\né漢🙂A{", min_size=1, max_size=12).filter(lambda text: text.strip())
RESULT = "RESULT"


@st.composite
def conversations(draw: Any, shape: Shape, plain: bool = False) -> list[dict]:
    messages: list[dict] = []
    if shape.system != "refused" and draw(st.booleans()):
        messages.append({"role": "system", "content": "S" + draw(words)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": "Q" + draw(words)})
        if not plain and shape.tools != "ignored" and draw(st.integers(0, 3)) == 0:
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": draw(words)}}}
            messages.append(answer(draw, content=draw(st.sampled_from(["", "well"])), tool_calls=[call]))
            messages.append({"role": "tool", "content": RESULT + draw(words)})
        messages.append(answer(draw, content=draw(words)))
    return messages


def answer(draw: Any, **message: Any) -> dict:
    thought = draw(st.none() | words)
    flags = draw(st.sampled_from([{}] * 4 + [{"weight": 0.5}, {"weight": 0}, {"train": False}]))
    return {"role": "assistant", **message, **({"reasoning_content": "T" + thought} if thought else {}), **flags}


def shapes() -> st.SearchStrategy[Shape]:
    tags = [("<|im_start|>{role}\n", "<|im_end|>\n"), ("<|im_start|>{role}\n", "<|im_end|>"), ("<|{role}|>", "</s>")]
    tags += [("<|header|>{role}<|/header|>\n\n", "<|eot|>"), ("<|turn|>{role}\n", "<|end_turn|>\n"), ("{role}: ", "\n")]
    return st.builds(
        lambda tag, **options: Shape(*tag, **options),
        tag=st.sampled_from(tags),
        answer_closer=st.sampled_from([None, None, "<|end_answer|><|end_turn|>", "<|end_answer|>\n<|end|>\n"]),
        last_closer=st.sampled_from([None, None, None, "<|return|>", "<|im_end|>\n</s>"]),
        call_closer=st.sampled_from([None, None, "<|call|>"]),
        thought=st.sampled_from([("<think>\n", "\n</think>\n\n"), ("<|think|>", "<|/think|>")]),
        thoughts=st.sampled_from(["ignored", "kept", "last", "after"]),
        empty=st.booleans(),
        prompt=st.sampled_from(["", "", "<think>\n", "<|think|>", "<think>\n\n</think>\n\n"]),
        switch=st.sampled_from([None, None, "enable_thinking", "thinking"]),
        off=st.sampled_from(["", "<think>\n\n</think>\n\n", "<|think|><|/think|>"]),
        tools=st.sampled_from(["turn", "user", "inside", "opener", "ignored"]),
        marks=st.sampled_from(["", "", "", "closed"]),
        system=st.sampled_from(["turn", "folded", "ignored", "refused"]),
        bos=st.sampled_from(["", "<s>"]),
        naive=st.booleans(),
    )


# What must hold.


def encoded(shape: Shape, messages: list[dict], use: Any = TOKENIZER, **options: Any) -> list[Encoded]:
    example = Reader().read(Raw(json.dumps({"messages": messages}).encode(), HERE))
    results = encoder(shape, use, **options).encode(example, HERE)
    return [result for result in results if isinstance(result, Encoded)]


def runs(row: SupervisedRow, use: Any = TOKENIZER) -> list[str]:
    found, before = [], False
    for token, on in zip(row.tokens, row.supervised, strict=True):
        if on and not before:
            found.append([])
        if on:
            found[-1].append(token)
        before = on
    return [use.decode(run) for run in found]


def wanted(messages: list[dict]) -> list[int]:
    return [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight", 1) != 0 and message.get("train", True)
    ]


def check_tokens(row: SupervisedRow, text: str, use: Any = TOKENIZER) -> None:
    """Tokens say the text, no added token is split, and each text between two edges of the mask is whole tokens."""
    assert use.decode(row.tokens) == text
    for added in [*SPECIALS, "<think>", "</think>"]:
        if f"<|{added}" not in text:
            assert row.tokens.count(use.convert_tokens_to_ids(added)) == text.count(added)


def check(shape: Shape, messages: list[dict]) -> list[str]:
    """All of it for one conversation; returns how its rows were found."""
    turns = wanted(messages)
    if not turns:
        return []
    truth = expected(shape, messages, turns)
    rows = encoded(shape, messages)
    marked = bool(shape.marks) and bool(truth.graft)
    texts = [(TOKENIZER.decode(one.row.tokens), runs(one.row)) for one in rows]  # type: ignore[union-attr]
    for one, (text, _) in zip(rows, texts, strict=True):
        assert isinstance(one.row, SupervisedRow)
        check_tokens(one.row, text)
    if not truth.graft:
        assert texts == truth.rows
    for one, (text, targets) in zip(rows, texts, strict=True):
        for target in targets:
            assert RESULT not in target
            assert "Q" not in target.replace("RESULT", "")
        if "graft" in one.remarks and not marked:
            check_graft(shape, messages, text, targets)
    weights = [one.row.weights for one in rows]  # type: ignore[union-attr]
    assert any(weights) == any(messages[turn].get("weight", 1) != 1 for turn in turns)
    return ["graft" if "graft" in one.remarks else "whole" if len(rows) == 1 else "each" for one in rows]


def check_graft(shape: Shape, messages: list[dict], text: str, targets: list[str]) -> None:
    """The prompt as inference shows it, then the end of what is shown of the turn."""
    (target,) = targets
    asked = text[: text.rfind(target)]
    turn = next(n for n in wanted(messages) if rendered(shape, messages[:n], True) == asked)
    shown = rendered(shape, messages[: turn + 1])
    rest = text[len(asked) :]
    assert shown.endswith(rest)
    tokens, tail = (TOKENIZER.encode(part, add_special_tokens=False) for part in (shown, rest))
    assert tokens[-len(tail) :] == tail, "the turn's text begins within a token"
    assert messages[turn]["content"].strip() in target


drawn = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@drawn
@given(st.data())
def test_rows_are_those_of_the_definition(data):
    shape = data.draw(shapes())
    check(shape, data.draw(conversations(shape)))


@pytest.mark.slow
@settings(drawn, max_examples=2_000)
@given(st.data())
def test_2_000_combinations_are_those_of_the_definition(data):
    shape = data.draw(shapes())
    check(shape, data.draw(conversations(shape)))


@pytest.mark.parametrize("name", NAMED)
@settings(drawn, max_examples=6)
@given(data=st.data())
def test_named_shapes(name, data):
    shape = NAMED[name]
    check(shape, data.draw(conversations(shape)))


HOWS = {
    # plain turns, with thoughts, with a tool call and its result
    "turns between two marks": ("whole", "whole", "whole"),
    "end of sequence only at the very end": ("each", "each", "each"),
    "another closer for the last turn": ("each", "each", "each"),
    "thoughts in the last message only": ("whole", "each", "whole"),
    "thoughts after the last question": ("whole", "each", "whole"),
    "thoughts after the last question, an empty one for none": ("each", "each", "each"),
    "an empty thought everywhere": ("whole", "whole", "whole"),
    "the prompt opens a thought that turns show": ("each", "each", "each"),
    "the prompt opens a thought that turns lack": ("graft", "graft", "graft"),
    "the prompt opens a thought, a switch closes it": ("graft", "each", "graft"),
    "a switch empties the prompt's thought": ("each", "each", "each"),
    "results of tools inside the answer": ("whole", "whole", "whole"),
    "results of tools inside the answer, the prompt opens another": ("whole", "whole", "graft"),
    "another opener after a tool": ("whole", "whole", "whole"),
    "another opener after a tool, not in the prompt": ("whole", "whole", "graft"),
}


def talk(thoughts: bool = False, tools: bool = False) -> list[dict]:
    """Two questions and answers."""
    thought = {"reasoning_content": "Thm"} if thoughts else {}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    first = [{"role": "user", "content": "Qone"}]
    if tools:
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        first += [called, {"role": "tool", "content": RESULT}]
    first += [{"role": "assistant", "content": "yes.", **thought}, {"role": "user", "content": "Qtwo"}]
    return [*first, {"role": "assistant", "content": "no.", **thought}]


@pytest.mark.parametrize("name", HOWS)
def test_how_the_rows_of_a_shape_are_found(name):
    found = [check(NAMED[name], messages) for messages in (talk(), talk(thoughts=True), talk(tools=True))]
    assert ["graft" if "graft" in hows else hows[0] for hows in found] == list(HOWS[name])


@pytest.mark.parametrize("name", NAMED)
def test_tokenizers_that_put_a_space_before_texts_learn_the_same(name):
    """Texts can't be tokenised apart there; no special is split, and all that is learnt is in the targets."""
    shape, messages = NAMED[name], talk(thoughts=True)
    ours, theirs = encoded(shape, messages), encoded(shape, messages, SPACED)
    assert [one.remarks for one in ours] == [one.remarks for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one.row, SupervisedRow)
        assert isinstance(other.row, SupervisedRow)
        check_tokens(other.row, TOKENIZER.decode(one.row.tokens), SPACED)
        learnt = [text.strip() for text in runs(other.row, SPACED)]
        assert learnt == [text.strip() for text in runs(one.row)]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("thoughts", ["both", "chosen", "none"])
def test_a_pairs_prompt_is_the_prompt_of_inference(name, thoughts):
    shape = NAMED[name]
    talks = {"chosen": talk(thoughts=thoughts != "none"), "rejected": talk(thoughts=thoughts == "both")}
    talks["rejected"][:-1] = talks["chosen"][:-1]
    talks["rejected"][-1] = {**talks["rejected"][-1], "content": "maybe."}
    example = Reader().read(Raw(json.dumps(talks).encode(), HERE))
    (found,) = encoder(shape).encode(example, HERE)
    assert isinstance(found, Encoded)
    row = found.row
    assert isinstance(row, PreferenceRow)
    for messages, prompt, answer in (
        (talks["chosen"], row.prompt, row.chosen),
        (talks["rejected"], row.rejected_prompt or row.prompt, row.rejected),
    ):
        settings_ = [s for s in SETTINGS if rendered(shape, messages[:-1], True, s) == TOKENIZER.decode(prompt)]
        assert settings_, "no setting asks like that"
        if "graft" not in found.remarks and "marks" not in found.remarks:
            shown = [rendered(shape, messages, False, s) for s in settings_]
            assert any(through_stop(t) == TOKENIZER.decode([*prompt, *answer]) for t in shown)
    if found.remarks & {"graft", "marks"} == set() and "prompts differ" in found.remarks:
        assert thoughts == "chosen", "prompts that need not differ"


def test_a_row_a_turn_and_one_row_on_demand():
    messages = talk()
    (whole,) = encoded(NAMED["turns between two marks"], messages)
    each = encoded(NAMED["turns between two marks"], messages, turns="each")
    assert isinstance(whole.row, SupervisedRow)
    assert runs(whole.row) == [run for one in each for run in runs(one.row)] == ["yes.<|im_end|>", "no.<|im_end|>"]  # type: ignore[arg-type]
    assert len(each) == 2
    shape = NAMED["thoughts after the last question"]
    assert len(encoded(shape, messages, turns="whole")) == 1
    with pytest.raises(UserError, match=r"no rendering holds all turns .*turn 2.*and data.turns is whole"):
        encoded(shape, talk(thoughts=True), turns="whole")


@pytest.mark.parametrize(
    ("name", "thoughts", "right"),
    [
        ("thoughts kept everywhere", True, ["yes.<|im_end|>", "no.<|im_end|>"]),
        ("an empty thought everywhere", False, ["yes.<|im_end|>", "no.<|im_end|>"]),
        ("the prompt opens a thought that turns show", True, ["yes.<|im_end|>", "no.<|im_end|>"]),
        ("special thoughts, in the last message only", True, ["yes.<|return|>", "no.<|return|>"]),
        ("turns between two marks", False, ["yes.<|im_end|>", "no.<|im_end|>"]),
    ],
)
def test_thoughts_as_context(name, thoughts, right):
    found = encoded(NAMED[name], talk(thoughts=thoughts), supervise_reasoning=False)
    assert [run for one in found for run in runs(one.row)] == right  # type: ignore[arg-type]


def test_a_thought_that_says_the_answer_is_context_all_the_same():
    messages = [talk()[0], {"role": "assistant", "content": "42", "reasoning_content": "is it 42?"}]
    (found,) = encoded(NAMED["thoughts kept everywhere"], messages, supervise_reasoning=False)
    assert runs(found.row) == ["42<|im_end|>"]  # type: ignore[arg-type]
    messages[1] = {**talk(tools=True)[1], "reasoning_content": "look"}
    (found,) = encoded(NAMED["thoughts kept everywhere"], messages, supervise_reasoning=False)
    assert runs(found.row) == ['<call>look {"at": "x"}</call><|im_end|>']  # type: ignore[arg-type]


def test_a_thought_without_known_marks_as_context():
    shape = Shape(thought=("<|im_start|>deep\n", "\n<|end|>say "), thoughts="kept")
    found = encoded(shape, talk(thoughts=True), supervise_reasoning=False)
    assert [run for one in found for run in runs(one.row)] == ["yes.<|im_end|>", "no.<|im_end|>"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "messages", "remark"),
    [
        (Shape(), talk(thoughts=True), "thoughts aren't shown"),
        (Shape(system="ignored"), [{"role": "system", "content": "S"}, *talk()], "a message isn't shown"),
        (Shape(tools="ignored"), [{**talk()[0]}, {**talk()[1], "content": "<think>hm</think>yes."}], None),
    ],
)
def test_what_the_template_leaves_out_is_counted(shape, messages, remark):
    assert [one.remarks for one in encoded(shape, messages)] == [frozenset({remark} if remark else ())]


def test_a_thought_in_the_text_that_the_template_cuts_off_is_counted():
    shape = Shape()
    cut = shape.jinja.replace("{{- m.content }}{%-", "{{- m.content.split('</think>')[-1] }}{%-")
    messages = [talk()[0], {"role": "assistant", "content": "<think>hm</think>yes."}]
    codec = Codec(TOKENIZER)
    (found,) = Encoder(codec, ChatTemplate(codec, cut), 1000).encode(
        Reader().read(Raw(json.dumps({"messages": messages}).encode(), HERE)), HERE
    )
    assert isinstance(found, Encoded)
    assert found.remarks == {"thoughts aren't shown"}


def test_calls_that_are_not_shown_are_refused_by_name():
    with pytest.raises(UserError, match=r"x:1: .* doesn't show the tool call 'look' of turn 2"):
        encoded(NAMED["calls ignored"], talk(tools=True))


@pytest.mark.parametrize("setting", [True, False])
def test_a_switch_given_in_the_recipe_stays(setting):
    """Thinking off: the prompt has an empty thought, and the turn's own goes after it as it stands."""
    shape = NAMED["a switch empties the prompt's thought"]
    codec = Codec(TOKENIZER)
    template = ChatTemplate(codec, shape.jinja, {"enable_thinking": setting})
    example = Reader().read(Raw(json.dumps({"messages": talk()[:2]}).encode(), HERE))
    (found,) = Encoder(codec, template, 1000).encode(example, HERE)
    assert isinstance(found, Encoded)
    assert runs(found.row) == [["yes.<|im_end|>"], ["<think>\n\n</think>\n\nyes.<|im_end|>"]][setting]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "kwargs", "said"),
    [
        ("a\n{% for x in messages %}", {}, r"data\.chat_template, line 2: not valid Jinja"),
        (
            "{{ messages }}",
            {"tools": []},
            r"data\.chat_template_kwargs\.tools is given by segtrain itself; leave it out",
        ),
    ],
)
def test_a_wrong_template_is_not_blamed_on_a_row(template, kwargs, said):
    codec = Codec(TOKENIZER)
    example = Reader().read(Raw(json.dumps({"messages": talk()[:2]}).encode(), HERE))
    with pytest.raises(UserError, match=f"^{said}"):
        Encoder(codec, ChatTemplate(codec, template, kwargs), 1000).encode(example, HERE)


def test_a_row_can_set_the_templates_arguments():
    shape = NAMED["a switch empties the prompt's thought"]
    row = {"messages": talk()[:2], "chat_template_kwargs": {"enable_thinking": False}}
    (found,) = encoder(shape).encode(Reader().read(Raw(json.dumps(row).encode(), HERE)), HERE)
    assert isinstance(found, Encoded)
    assert runs(found.row) == ["yes.<|im_end|>"]  # type: ignore[arg-type]
