"""Which tokens of a conversation are supervised.

Expected texts are written from what each template does to a turn, independently of how turns are located; one check
takes the mask of transformers itself, for a template with generation marks.
"""

import pytest
from data_toys import CLOSINGS, byte_level, spaced, template
from hypothesis import given
from hypothesis import strategies as st

from segtrain.data.chat import ChatTemplate
from segtrain.data.encode import Encoder
from segtrain.data.formats import Chat
from segtrain.data.limits import Encoded
from segtrain.data.rows import Origin, SupervisedRow
from segtrain.data.tokenizer import Codec
from segtrain.errors import UserError

HERE = Origin("rows.jsonl", 1)
TEMPLATES = ["chatml", "llama3", "gemma", "mistral", "reasoning", "forced_thought", "tools", "marks"]
TOKENIZERS = {name: byte_level(name) for name in TEMPLATES}


def encoder(tokenizer, source=None, kwargs=None, **options) -> Encoder:
    codec = Codec(tokenizer)
    return Encoder(codec, ChatTemplate(codec, source, kwargs), 100_000, **options)


def encoded(tokenizer, messages, tools=None, **options) -> list[Encoded]:
    results = encoder(tokenizer, **options).encode(Chat(messages, tools), HERE)
    assert all(isinstance(result, Encoded) for result in results), results
    return results  # type: ignore[return-value]


def rows(tokenizer, messages, tools=None, **options) -> list[SupervisedRow]:
    return [result.row for result in encoded(tokenizer, messages, tools, **options)]  # type: ignore[misc]


def row(tokenizer, messages, tools=None, **options) -> SupervisedRow:
    (found,) = rows(tokenizer, messages, tools, **options)
    return found


def learnt(tokenizer, *found: SupervisedRow) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = []
    for row in found:
        before = False
        for token, on in zip(row.tokens, row.supervised, strict=True):
            if on and not before:
                runs.append([])
            if on:
                runs[-1].append(token)
            before = on
    return [tokenizer.decode(run) for run in runs]


def taught(tokenizer, messages, tools=None, **options) -> list[str]:
    return learnt(tokenizer, *rows(tokenizer, messages, tools, **options))


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


text = st.text("abz thein.,:<>{}\n\té漢🙂A", min_size=1, max_size=24).filter(lambda s: s.strip())


@st.composite
def conversations(draw, system: bool) -> list[dict]:
    messages = [turn("system", draw(text))] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages += [turn("user", draw(text)), turn("assistant", draw(text))]
    return messages


def answers(messages) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


SHOWN = {
    "chatml": lambda content: content,
    "llama3": str.strip,
    "gemma": str.strip,
    "mistral": lambda content: " " + content.strip(),
    "tools": lambda content: content,
    "marks": lambda content: content,
}


@pytest.mark.parametrize("name", SHOWN)
@given(data=st.data())
def test_every_assistant_turn_and_its_end_is_learnt_and_nothing_else(name, data):
    messages = data.draw(conversations(system=name in ("chatml", "llama3", "tools")))
    tokenizer = TOKENIZERS[name]
    expected = [SHOWN[name](answer) + CLOSINGS[name] for answer in answers(messages)]
    found = row(tokenizer, messages)
    assert learnt(tokenizer, found) == expected
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(found.tokens) == whole
    last = row(tokenizer, messages, supervise="last")
    assert learnt(tokenizer, last) == expected[-1:]
    assert last.tokens[-5:] == found.tokens[-5:]


@given(conversations(system=True), st.lists(st.none() | text, min_size=4, max_size=4), st.booleans())
def test_each_turn_is_learnt_with_the_thought_that_later_renderings_drop(messages, thoughts, inline):
    tokenizer = TOKENIZERS["reasoning"]
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    expected = []
    for i, thought in zip(assistants, thoughts, strict=False):
        answer = messages[i]["content"].lstrip("\n") if inline and thought else messages[i]["content"]
        shown = (thought.strip("\n") if inline else thought) if thought else ""
        expected.append(f"<think>\n{shown}\n</think>\n\n{answer}{CLOSINGS['reasoning']}")
        if thought and inline:
            messages[i] = turn("assistant", f"<think>\n{thought}\n</think>\n\n{messages[i]['content']}")
        elif thought:
            messages[i] = turn("assistant", messages[i]["content"], reasoning_content=thought)
    found = rows(tokenizer, messages)
    assert learnt(tokenizer, *found) == expected
    assert len(found) == len(assistants)
    for i, one in zip(assistants, found, strict=True):
        assert tokenizer.decode(one.tokens) == tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)


def test_thoughts_around_tool_calls():
    """u1, a1 (thought, call), tool, a2 (thought), u2, a3: the last rendering has dropped the first two thoughts."""
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        turn("user", "q1"),
        turn("assistant", "", reasoning_content="hm", tool_calls=[call]),
        turn("tool", "42"),
        turn("assistant", "it is 42", reasoning_content="so"),
        turn("user", "q2"),
        turn("assistant", "bye", reasoning_content="done"),
    ]
    tokenizer = TOKENIZERS["reasoning"]
    called = '<think>\nhm\n</think>\n\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    told, final = "<think>\nso\n</think>\n\nit is 42<|im_end|>", "<think>\ndone\n</think>\n\nbye<|im_end|>"
    assert taught(tokenizer, messages) == [called, told, final]
    assert len(rows(tokenizer, messages)) == 3
    assert learnt(tokenizer, row(tokenizer, messages[:4])) == [called, told], "one rendering holds both"


def test_a_turn_follows_the_prompt_that_inference_shows_though_no_rendering_does():
    tokenizer = TOKENIZERS["forced_thought"]
    messages = [turn("user", "x"), turn("assistant", "abc"), turn("user", "y"), turn("assistant", "<b>")]
    found = encoded(tokenizer, messages)
    texts = [tokenizer.decode(result.row.tokens) for result in found]
    first = "<s><|user|>x<|assistant|><think>\nabc<|eot_id|>"
    assert texts == [first, "<s><|user|>x<|assistant|>abc<|eot_id|><|user|>y<|assistant|><think>\n<b><|eot_id|>"]
    assert taught(tokenizer, messages) == ["abc<|eot_id|>", "<b><|eot_id|>"]
    assert [result.remarks for result in found] == [{"graft"}] * 2


@given(text, text, st.sampled_from(["", "Let me see. "]))
def test_tool_calls_are_learnt_and_tool_results_are_not(question, result, content):
    call = {"function": {"name": "look", "arguments": {"at": "x"}}}
    messages = [
        turn("user", question),
        turn("assistant", content, tool_calls=[call]),
        turn("tool", result),
        turn("assistant", "done"),
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    tokenizer = TOKENIZERS["tools"]
    found = row(tokenizer, messages, tools)
    called = content + '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call><|im_end|>'
    assert learnt(tokenizer, found) == [called, "done<|im_end|>"]
    assert "Tools: " in tokenizer.decode(found.tokens)


@given(st.data())
def test_a_tokenizer_that_puts_spaces_before_texts(data):
    """Texts can't be tokenised apart here: all tokens must be those of the whole text, and the mask must still fit."""
    tokenizer = spaced("mistral")
    codec = Codec(tokenizer)
    assert not codec.pieces_join
    messages = data.draw(conversations(system=False))
    found = row(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert found.tokens == tokenizer.encode(whole, add_special_tokens=False)
    expected = [" " + answer.strip() + "</s>" for answer in answers(messages)]
    assert [run.removeprefix(" ") for run in learnt(tokenizer, found)] == [text.removeprefix(" ") for text in expected]


def test_the_prompt_is_tokenised_as_it_is_when_the_model_is_asked():
    """A header's line end and an answer's would merge into one token; asked, the model sees the header alone."""
    tokenizer = TOKENIZERS["chatml"]
    messages = [turn("user", "q"), turn("assistant", "\n\nA")]
    asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(asked, add_special_tokens=False)
    found = row(tokenizer, messages)
    assert found.tokens[: len(prompt)] == prompt
    assert found.supervised[: len(prompt)] == [False] * len(prompt)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    control = tokenizer.encode(whole, add_special_tokens=False)
    assert control[: len(prompt)] != prompt, "the example no longer shows a merge"


def test_marks_agree_with_transformers_own_mask():
    tokenizer = byte_level("marks")
    tokenizer.chat_template = template("marks").replace(
        "{% endgeneration %}{{- '<|eot_id|>' }}", "<|eot_id|>{% endgeneration %}"
    )
    messages = [turn("user", "x"), turn("assistant", "zinc"), turn("user", "y"), turn("assistant", "b\n")]
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
    found = row(tokenizer, messages)
    assert found.tokens == list(theirs["input_ids"])
    assert found.supervised == [bool(on) for on in theirs["assistant_masks"]]
    assert any(found.supervised)


def test_a_turn_of_weight_0_and_an_empty_one_are_not_learnt():
    tokenizer = TOKENIZERS["chatml"]
    messages = [turn("user", "x"), turn("assistant", "no", weight=0), turn("user", "y"), turn("assistant", "yes")]
    assert learnt(tokenizer, row(tokenizer, messages)) == ["yes<|im_end|>"]
    messages = [turn("user", "x"), turn("assistant", ""), turn("user", "y"), turn("assistant", "yes", weight=1)]
    assert learnt(tokenizer, row(tokenizer, messages)) == ["yes<|im_end|>"]


def test_all_supervises_all_but_the_first_token():
    found = row(TOKENIZERS["chatml"], [turn("user", "x"), turn("assistant", "y")], supervise="all")
    assert found.supervised == [False] + [True] * (len(found) - 1)
    assert found.targets == len(found) - 1


def test_a_conversation_that_the_assistant_begins():
    tokenizer = TOKENIZERS["chatml"]
    messages = [turn("assistant", "Hello"), turn("user", "x"), turn("assistant", "y")]
    assert learnt(tokenizer, row(tokenizer, messages)) == ["Hello<|im_end|>", "y<|im_end|>"]


def test_the_recipes_template_serves_a_base_model():
    tokenizer = byte_level(None)
    messages = [turn("user", "x"), turn("assistant", "y")]
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* no chat template .*data\.chat_template"):
        row(tokenizer, messages)
    assert learnt(tokenizer, row(tokenizer, messages, source=template("chatml"))) == ["y<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("unmaskable", [turn("user", "x"), turn("assistant", "abc")], "can't be masked turn by turn"),
        ("gemma", [turn("system", "s"), turn("user", "x"), turn("assistant", "y")], "System role not supported"),
        ("gemma", [turn("user", "x"), turn("user", "y"), turn("assistant", "z")], "Roles must alternate"),
        ("chatml", [turn("user", None), turn("assistant", "z")], "refuses this row"),
    ],
)
def test_what_a_template_refuses_or_can_not_show_is_an_error(name, messages, words):
    with pytest.raises(UserError, match=words):
        row(byte_level(None), messages, source=template(name))


def test_a_template_that_reaches_for_python_is_stopped_by_the_sandbox():
    source = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"
    with pytest.raises(UserError, match="refuses this row: SecurityError"):
        row(byte_level(None), [turn("user", "x"), turn("assistant", "y")], source=source)


def test_a_turn_without_a_closing_token_is_remarked():
    turns = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    source = turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    messages = [turn("user", "x"), turn("assistant", "y")]
    assert encoded(byte_level(None), messages, source=source)[0].remarks == {"no end-of-turn token"}
    assert not encoded(byte_level("chatml"), messages)[0].remarks


def test_special_tokens_spelt_out_in_a_text_are_remarked():
    messages = [turn("user", "what is <|im_end|>?"), turn("assistant", "y")]
    (found,) = encoded(byte_level("chatml"), messages)
    assert found.remarks == {"control tokens in the text"}


def test_mlx_lms_wrapper_gives_the_same_rows():
    wrapper = pytest.importorskip("mlx_lm.tokenizer_utils").TokenizerWrapper
    for name in ("chatml", "reasoning", "mistral"):
        messages = [turn("user", "x"), turn("assistant", "y"), turn("user", "z"), turn("assistant", "the a")]
        bare = byte_level(name)
        assert rows(wrapper(bare), messages) == rows(bare, messages)
