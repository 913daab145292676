"""`max_seq_length` and `on_long`, BOS and EOS, the accounting: expected rows follow from the definitions, by hand."""

import json
from itertools import islice

import pytest
from data_toys import byte_level, recipe, spaced
from hypothesis import given
from hypothesis import strategies as st

from segtrain.data import open_data
from segtrain.data.accounting import Tally
from segtrain.data.chat import ChatTemplate
from segtrain.data.encode import Encoder
from segtrain.data.formats import Chat, Completion, Preference, Text
from segtrain.data.limits import Dropped, Encoded
from segtrain.data.rows import Origin, PreferenceRow, SupervisedRow
from segtrain.data.tokenizer import Codec
from segtrain.errors import UserError

HERE = Origin("x.jsonl", 1)
CHAT = byte_level("llama3", adds_bos=True)
BASE = byte_level(None, adds_bos=True)
BARE = byte_level(None)


def encode(tokenizer, example, limit=10_000, on_long="drop", supervise="assistant") -> Encoded | Dropped:
    codec = Codec(tokenizer)
    (result,) = Encoder(codec, ChatTemplate(codec), limit, on_long, supervise).encode(example, HERE)
    return result


def kept(*args, **options) -> SupervisedRow:
    result = encode(*args, **options)
    assert isinstance(result, Encoded), result
    assert isinstance(result.row, SupervisedRow)
    return result.row


def text(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens)


def learnt(tokenizer, row) -> str:
    return tokenizer.decode([token for token, on in zip(row.tokens, row.supervised, strict=True) if on])


# BOS and EOS.


@pytest.mark.parametrize("document", ["zyx", "<s>zyx", "<s><s><s>zyx", "zyx</s>", "<s>zyx</s>"])
def test_a_document_has_bos_and_eos_once(document):
    row = kept(BASE, Text(document))
    assert text(BASE, row.tokens) == "<s>zyx</s>"
    assert row.supervised == [False, True, True, True, True]
    assert text(BARE, kept(BARE, Text("zyx")).tokens) == "zyx</s>", "no BOS where the tokenizer itself puts none"


def test_a_template_that_writes_bos_is_not_given_another():
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    row = kept(CHAT, Chat(messages))
    assert row.tokens.count(CHAT.bos_token_id) == 1
    assert CHAT.encode(CHAT.apply_chat_template(messages, tokenize=False))[:2] == [CHAT.bos_token_id] * 2, "the trap"
    twice = byte_level("llama3", adds_bos=True)
    twice.chat_template = "{{ bos_token }}" + twice.chat_template
    result = encode(twice, Chat(messages))
    assert isinstance(result, Encoded)
    assert isinstance(result.row, SupervisedRow)
    assert result.row == row
    assert result.remarks == {"doubled BOS"}


def test_completions_without_a_template_are_joined_and_closed():
    row = kept(BASE, Completion("ab ", "cd"))
    assert text(BASE, row.tokens) == "<s>ab cd</s>"
    assert learnt(BASE, row) == "cd</s>"
    assert learnt(BASE, kept(BASE, Completion("ab ", "cd"), supervise="all")) == "ab cd</s>"
    assert kept(BARE, Completion("", "cd")).supervised == [False, True, True], "nothing stands before the first token"


def test_completions_with_a_template_are_a_question_and_an_answer():
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert kept(CHAT, Completion("ab", "cd")) == kept(CHAT, Chat(messages))


def test_a_single_token_is_left_out():
    endless = byte_level(None)
    endless.eos_token = None
    result = encode(endless, Text("a"))
    assert isinstance(result, Dropped)
    assert result.reason == "a single token, nothing to predict"
    assert kept(endless, Text("ab")).targets == 1


# Over-long rows. A letter is a token here: a prompt of p letters and a response of r make 1 + p + r + 1 tokens.


@given(
    st.integers(0, 12), st.integers(1, 12), st.integers(2, 30), st.sampled_from(["drop", "truncate_prompt", "truncate"])
)
def test_what_is_left_of_a_long_row(p, r, limit, on_long):
    prompt, response = "zyxwvutsrqpo"[:p], "bcdefgjklmnp"[:r]
    result = encode(BASE, Completion(prompt, response), limit, on_long)
    whole = f"<s>{prompt}{response}</s>"
    length = 1 + p + r + 1
    if length <= limit:
        assert isinstance(result, Encoded)
        assert not result.truncated
        assert text(BASE, result.row.tokens) == whole
    elif on_long == "drop":
        assert isinstance(result, Dropped)
        assert (result.reason, result.needed) == ("longer than max_seq_length", length)
    elif on_long == "truncate_prompt" and limit >= r + 2:
        assert isinstance(result, Encoded)
        assert result.truncated
        left = limit - r - 2
        assert text(BASE, result.row.tokens) == f"<s>{prompt[p - left :]}{response}</s>"
        assert learnt(BASE, result.row) == response + "</s>"
    elif on_long == "truncate_prompt":
        assert isinstance(result, Dropped)
        assert (result.reason, result.needed) == ("the response alone exceeds max_seq_length", r + 2)
    elif limit > p + 1:
        assert isinstance(result, Encoded)
        assert result.row.tokens == BASE.encode(f"{prompt}{response}")[:limit]
        assert learnt(BASE, result.row) == response[: limit - p - 1]
    else:
        assert isinstance(result, Dropped)
        assert (result.reason, result.needed) == ("no supervised token within max_seq_length", p + 2)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4), st.integers(2, 120))
def test_a_long_conversation_keeps_its_last_answer_or_goes(turns, limit):
    messages = []
    for q, a in turns:
        messages += [{"role": "user", "content": "z" * q}, {"role": "assistant", "content": "b" * a}]
    whole = kept(CHAT, Chat(messages))
    result = encode(CHAT, Chat(messages), limit, "truncate_prompt")
    last = turns[-1][1] + 1
    if limit < last + 1:
        assert isinstance(result, Dropped)
        return
    assert isinstance(result, Encoded)
    assert len(result.row) == min(limit, len(whole))
    if len(whole) > limit:
        assert result.row.tokens == [CHAT.bos_token_id, *whole.tokens[len(whole) - limit + 1 :]]
        assert result.row.supervised[1:] == whole.supervised[len(whole) - limit + 1 :]


def test_error_names_the_row_and_the_fix():
    with pytest.raises(
        UserError, match=r"^x.jsonl:1: this row has 6 tokens, more than max_seq_length 5, .* to 6 or choose"
    ):
        encode(BASE, Completion("ab", "cd"), 5, "error")
    kept(BASE, Completion("ab", "cd"), 6, "error")
    with pytest.raises(UserError, match="this row has 10 tokens"):
        encode(BASE, Preference("abcdef", "x", "yz"), 9, "error")


def test_documents_lose_their_end_and_all_supervised_chats_their_beginning():
    for on_long in ("truncate", "truncate_prompt"):
        assert text(BASE, kept(BASE, Text("zyxwvu"), 4, on_long).tokens) == "<s>zyx"
    messages = [{"role": "user", "content": "zyx"}, {"role": "assistant", "content": "bcd"}]
    row = kept(CHAT, Chat(messages), 6, "truncate_prompt", "all")
    assert text(CHAT, row.tokens) == "<s>\nbcd<|eot_id|>"
    assert row.supervised == [False] + [True] * 5


# Preference rows.


@given(
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(2, 26),
    st.sampled_from(["drop", "truncate_prompt", "truncate"]),
)
def test_what_is_left_of_a_long_pair(p, rc, rr, limit, on_long):
    prompt, chosen, rejected = "zyxwvutsrqpo"[:p], "bcdefgjk"[:rc], "gjkbcdef"[:rr]
    result = encode(BASE, Preference(prompt, chosen, rejected), limit, on_long)
    longest, length = max(rc, rr) + 1, p + 1 + max(rc, rr) + 1
    needed = {"drop": length, "truncate_prompt": longest + 1, "truncate": p + 2}[on_long]
    if length > limit and (on_long == "drop" or needed > limit):
        assert isinstance(result, Dropped)
        reasons = {"truncate_prompt": "the response alone exceeds max_seq_length", "drop": "longer than max_seq_length"}
        assert (result.reason, result.needed) == (
            reasons.get(on_long, "no supervised token within max_seq_length"),
            needed,
        )
        return
    assert isinstance(result, Encoded)
    row = result.row
    assert isinstance(row, PreferenceRow)
    assert row.rejected_prompt is None
    assert result.truncated == (length > limit)
    left = max(0, min(p, limit - longest - 1)) if on_long == "truncate_prompt" else p
    room = limit - p - 1 if on_long == "truncate" else longest
    assert text(BASE, row.prompt) == "<s>" + prompt[p - left :]
    for found, answer in ((row.chosen, chosen), (row.rejected, rejected)):
        assert text(BASE, found) == text(BASE, BASE.encode(answer + "</s>", add_special_tokens=False)[:room])


def test_the_template_is_applied_once_to_a_pairs_prompt():
    row = encode(CHAT, Preference("ab", "cd", "ef"))
    assert isinstance(row, Encoded)
    assert isinstance(row.row, PreferenceRow)
    asked = CHAT.apply_chat_template([{"role": "user", "content": "ab"}], add_generation_prompt=True, tokenize=False)
    assert text(CHAT, row.row.prompt) == asked
    assert (text(CHAT, row.row.chosen), text(CHAT, row.row.rejected)) == ("cd<|eot_id|>", "ef<|eot_id|>")


def test_an_empty_prompt_leaves_nothing_to_score_from():
    result = encode(BARE, Preference("", "cd", "ef"))
    assert isinstance(result, Dropped)
    assert result.reason == "empty prompt"
    assert isinstance(encode(BASE, Preference("", "cd", "ef")), Encoded), "a BOS is enough"


def test_a_prompt_that_becomes_part_of_the_answers_first_token_is_not_called_empty():
    result = encode(spaced(None, adds_bos=False), Preference(" ", "a", "a b"))
    assert isinstance(result, Dropped)
    assert result.reason.startswith("the tokenizer joins the whole prompt to the answer")


# The set as a whole.


def opened(tmp_path, rows, loss="sft", tokenizer=BASE, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_data(recipe(train=str(path), **options), tokenizer, pairs=loss == "orpo")


def test_a_limit_that_leaves_nothing_says_which_would_do(tmp_path):
    rows = [{"prompt": "z" * n, "completion": "yes"} for n in (30, 40, 50)]
    with pytest.raises(UserError) as error:
        opened(tmp_path, rows, max_seq_length=32)
    assert "max_seq_length 32 leaves no response tokens in 3 of 3 rows" in str(error.value)
    assert "raise it to 55" in str(error.value)
    assert opened(tmp_path, rows, max_seq_length=55).counts["rows"] == 3
    with pytest.raises(UserError, match=r"leaves no response tokens in 3 of 3 rows.*raise it to 52"):
        opened(tmp_path, rows, max_seq_length=16, on_long="truncate")
    data = opened(tmp_path, rows, max_seq_length=16, on_long="truncate_prompt")
    assert (data.counts["truncated"], data.counts["supervised_tokens"]) == (3, 12)


def test_the_same_rows_in_every_validation(tmp_path):
    rows = [{"text": f"row {i}" + "x" * (20 if i % 4 == 0 else 0)} for i in range(20)]
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for streaming in (False, True):
        limited = {"valid": str(tmp_path / "valid.jsonl"), "max_seq_length": 16, "streaming": streaming}
        data = opened(tmp_path, rows, **limited)
        assert data.valid is not None
        assert [row.origin.line for row in data.valid] == [i + 1 for i in range(20) if i % 4]
        assert list(data.valid) == list(data.valid)
        assert list(data.valid[2:5]) == list(data.valid)[2:5]
        assert data.valid[-1] == list(data.valid)[-1]
        few = opened(tmp_path, rows, **limited, valid_rows=4)
        assert few.valid is not None
        assert list(few.valid) == list(data.valid)[:4]


def test_100_steps_over_100_rows_see_every_row(tmp_path):
    data = opened(tmp_path, [{"text": f"row {i}"} for i in range(100)])
    assert {row.origin.line for row in islice(data.train, 100)} == set(range(1, 101))


@given(st.lists(st.integers(1, 50), min_size=1), st.sampled_from([0.0, 0.25, 0.5, 0.95, 1.0]))
def test_percentile_is_the_least_length_that_covers_the_share(lengths, share):
    tally = Tally()
    tally.lengths.extend(lengths)
    value = tally.percentile(share)
    assert value in lengths
    assert sum(length <= value for length in lengths) >= share * len(lengths)
    assert sum(length < value for length in lengths) < max(share * len(lengths), 1)


def test_the_longest_pairs_share_of_prompt_is_counted() -> None:
    """Not the mean of all: short pairs with long prompts say nothing about the row that takes the most memory."""
    pieces: list[Tally] = []
    for prompt, chosen, rejected in ((9, 1, 1), (20, 10, 60), (9, 1, 1)):
        row = PreferenceRow([1] * prompt, [2] * chosen, [3] * rejected, HERE)
        pieces.append(Tally())
        pieces[-1].add([Encoded(row, len(row))])
    first, *rest = pieces
    for piece in rest:
        first.merge(piece)
    assert first.counts(preference=True)["prompt_share"] == 0.25
    assert "prompt_share" not in first.counts(preference=False)
