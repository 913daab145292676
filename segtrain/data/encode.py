"""Examples to rows: tokens, the supervision mask and the length limit.

A row longer than `max_seq_length` follows `on_long`:

- `drop`: it is left out and counted;
- `truncate_prompt`: the prompt is cut from the left (a leading BOS stays) and the last response is kept whole; in a
  conversation the prompt is everything before its last supervised turn, system message included. A row whose response
  alone doesn't fit is dropped. A plain document, which has no prompt, loses its end;
- `truncate`: it is cut from the right, and dropped if no supervised token is left;
- `error`: it is an error, when the data is opened or, in a set too large to be counted then, when the row is reached.

Of a preference row the prompt is always cut from the left, alike for both responses (but under `error`), so that they
can still share it; a response that leaves no room for a prompt token follows `on_long`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from segtrain.data.chat import ChatTemplate
from segtrain.data.formats import Chat, Completion, Example, Message, Preference, Text
from segtrain.data.rows import Origin, PreferenceRow, Row, SupervisedRow
from segtrain.data.spans import Tokens, encode_spans
from segtrain.data.tokenizer import Codec
from segtrain.data.turns import MaskError
from segtrain.errors import UserError

OnLong: TypeAlias = Literal["drop", "truncate_prompt", "truncate", "error"]
Supervise: TypeAlias = Literal["assistant", "last", "all"]

TOO_LONG = "longer than max_seq_length"
NO_TARGETS_LEFT = "no supervised token within max_seq_length"
RESPONSE_TOO_LONG = "the response alone exceeds max_seq_length"
EMPTY_TEXT = "empty text"
EMPTY_RESPONSE = "empty response"
NO_ASSISTANT = "no assistant turn"
ONE_TOKEN = "a single token, nothing to predict"
EMPTY_PROMPT = "empty prompt"
UNSUPERVISED = "no supervised turn"
BLANK = "blank line"

# What is noticed about rows that are kept.
DOUBLED_BOS = "doubled BOS"
IDENTICAL = "identical"
PROMPTS_DIFFER = "prompts differ"
OPEN_TURN = "no end-of-turn token"
CONTROLS = "control tokens in the text"


@dataclass(frozen=True)
class Dropped:
    """Why a row is left out. `length` is the tokens it would have had, `needed` the limit at which it would stay."""

    reason: str
    origin: Origin
    length: int = 0
    needed: int = 0


@dataclass(frozen=True)
class Encoded:
    """A row, its length before the limit was applied, and what was noticed about it."""

    row: Row
    length: int
    truncated: bool = False
    remarks: frozenset[str] = frozenset()


@dataclass
class Encoder:
    """Turns examples into rows under one recipe's rules."""

    codec: Codec
    template: ChatTemplate
    max_length: int
    on_long: OnLong = "drop"
    supervise: Supervise = "assistant"
    remarks: set[str] = field(default_factory=set)

    def encode(self, example: Example, origin: Origin) -> Encoded | Dropped:
        """The row of an example, or why there is none. Raises UserError for what no setting can repair."""
        self.remarks = set()
        if isinstance(example, Preference):
            return self._preference(example, origin)
        nothing = _says_nothing(example)
        if nothing is not None:
            return Dropped(nothing, origin)
        tokens = self._single_bos(self._tokens(example, origin))
        if len(tokens) < 2:
            return Dropped(ONE_TOKEN, origin, len(tokens))
        tokens.supervised[0] = False  # nothing comes before it to predict it from
        if not any(tokens.supervised):
            return Dropped(UNSUPERVISED, origin, len(tokens))
        if len(tokens) <= self.max_length:
            return self._encoded(tokens, len(tokens), origin)
        cut = self._cut(tokens, isinstance(example, Text), origin)
        return cut if isinstance(cut, Dropped) else self._encoded(cut, len(tokens), origin)

    def _encoded(self, tokens: Tokens, length: int, origin: Origin) -> Encoded:
        row = SupervisedRow(tokens.ids, tokens.supervised, origin)
        return Encoded(row, length, length > self.max_length, frozenset(self.remarks))

    def _tokens(self, example: Example, origin: Origin) -> Tokens:
        match example:
            case Text(text):
                return self._document([(text, True)])
            case Completion(prompt, completion, tools) if self.template.exists:
                return self._conversation(_asked(prompt, completion), tools, origin)
            case Completion(prompt, completion):
                return self._document([(prompt, self.supervise == "all"), (completion, True)])
            case Chat(messages, tools):
                return self._conversation(messages, tools, origin)
        raise AssertionError(example)

    def _document(self, parts: Sequence[tuple[str, bool]]) -> Tokens:
        """Plain text: BOS once (where the tokenizer has one), the parts, EOS once."""
        text = "".join(part for part, _ in parts)
        spans, at = [], 0
        for part, supervised in parts:
            if supervised and part:
                spans.append((at, at + len(part)))
            at += len(part)
        tokens = encode_spans(self.codec, text, spans)
        begins = [] if tokens.ids[:1] == self.codec.begins else self.codec.begins
        ends = [] if tokens.ids[-1:] == self.codec.ends else self.codec.ends
        return Tokens(
            [*begins, *tokens.ids, *ends],
            [*(False for _ in begins), *tokens.supervised, *(True for _ in ends)],
            [start + len(begins) for start in tokens.starts],
        )

    def _conversation(self, messages: list[Message], tools: list[Any] | None, origin: Origin) -> Tokens:
        self._notice_controls(messages)
        if self.supervise != "all":
            return self._supervised(messages, tools, self._wanted(messages), origin)
        ids = self.codec.ids(self.template.whole(messages, tools, origin))
        return Tokens(ids, [True] * len(ids), [])

    def _supervised(self, messages: list[Message], tools: list[Any] | None, turns: list[int], origin: Origin) -> Tokens:
        """A conversation of which `turns` are supervised."""
        rendered = self.template.turns(messages, tools, turns, origin)
        if not rendered.closed:
            self.remarks.add(OPEN_TURN)
        try:
            return encode_spans(self.codec, rendered.text, rendered.spans)
        except MaskError as error:
            raise UserError(f"{origin}: {error}; no mask can be made, use supervise: all") from None

    def _notice_controls(self, messages: list[Message]) -> None:
        if any(self.codec.find_special(str(message["content"])) for message in messages):
            self.remarks.add(CONTROLS)

    def _wanted(self, messages: list[Message]) -> list[int]:
        """The assistant turns to learn: those that say something and aren't given weight 0 (as OpenAI's format can)."""
        turns = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and _says(message) and message.get("weight", 1) != 0
        ]
        return turns[-1:] if self.supervise == "last" else turns

    def _single_bos(self, tokens: Tokens) -> Tokens:
        """At most one BOS at the start."""
        bos, extra = self.codec.bos, 0
        while bos is not None and tokens.ids[extra : extra + 2] == [bos, bos]:
            extra += 1
        if not extra:
            return tokens
        self.remarks.add(DOUBLED_BOS)
        starts = [max(0, start - extra) for start in tokens.starts]
        return Tokens(tokens.ids[extra:], tokens.supervised[extra:], starts)

    def _cut(self, tokens: Tokens, document: bool, origin: Origin) -> Tokens | Dropped:
        """An over-long row under `on_long` (a document has no prompt and loses its end). Raises UserError."""
        length, limit = len(tokens), self.max_length
        if self.on_long == "error":
            raise _too_long(origin, length, limit)
        if self.on_long == "drop":
            return Dropped(TOO_LONG, origin, length, length)
        if self.on_long == "truncate_prompt" and not document:
            return self._cut_prompt(tokens, origin)
        if not any(tokens.supervised[:limit]):
            return Dropped(NO_TARGETS_LEFT, origin, length, tokens.supervised.index(True) + 1)
        return Tokens(tokens.ids[:limit], tokens.supervised[:limit], tokens.starts)

    def _cut_prompt(self, tokens: Tokens, origin: Origin) -> Tokens | Dropped:
        """The last `max_length` tokens up to the end of the last response, with BOS kept in front.

        Where everything is supervised there is no last response to keep whole, and the row just loses its beginning.
        """
        end = len(tokens) - tokens.supervised[::-1].index(True)
        response = end - tokens.starts[-1] if tokens.starts else 1
        bos = self._leading_bos(tokens.ids)
        needed = response + max(1, bos)
        if needed > self.max_length:
            return Dropped(RESPONSE_TOO_LONG, origin, len(tokens), needed)
        first = max(bos, end - (self.max_length - bos))
        supervised = [*tokens.supervised[:bos], *tokens.supervised[first:end]]
        supervised[0] = False
        return Tokens([*tokens.ids[:bos], *tokens.ids[first:end]], supervised, [])

    def _leading_bos(self, ids: Sequence[int]) -> int:
        return 1 if self.codec.bos is not None and ids[:1] == [self.codec.bos] else 0

    # Preference rows.

    def _preference(self, example: Preference, origin: Origin) -> Encoded | Dropped:
        if not _answers(example.chosen) or not _answers(example.rejected):
            return Dropped(EMPTY_RESPONSE, origin)
        prompt, chosen = self._branch(example.prompt, example.chosen, example.tools, origin)
        other, rejected = self._branch(example.prompt, example.rejected, example.tools, origin)
        if not prompt or not other:
            return Dropped(EMPTY_PROMPT, origin)
        if chosen == rejected and prompt == other:
            self.remarks.add(IDENTICAL)
        if prompt != other:
            self.remarks.add(PROMPTS_DIFFER)
        return self._fit_pair(prompt, other, chosen, rejected, origin)

    def _branch(
        self, prompt: str | None, answer: str | list[Message], tools: list[Any] | None, origin: Origin
    ) -> tuple[list[int], list[int]]:
        """Token ids of a branch's prompt and of its response, end-of-turn included."""
        if isinstance(answer, str) and not self.template.exists:
            tokens = self._document([(prompt or "", False), (answer, True)])
        else:
            messages = _asked(prompt, answer) if isinstance(answer, str) else answer
            self._notice_controls(messages)
            tokens = self._supervised(messages, tools, [len(messages) - 1], origin)
        tokens = self._single_bos(tokens)
        start = tokens.starts[-1]
        end = len(tokens) - tokens.supervised[::-1].index(True)
        return tokens.ids[:start], tokens.ids[start:end]

    def _fit_pair(
        self, prompt: list[int], other: list[int], chosen: list[int], rejected: list[int], origin: Origin
    ) -> Encoded | Dropped:
        limit, longest = self.max_length, max(len(chosen), len(rejected))
        length = max(len(prompt) + len(chosen), len(other) + len(rejected))
        truncated = length > limit
        if truncated and self.on_long == "error":
            raise _too_long(origin, length, limit)
        least = max(1, self._leading_bos(prompt))
        if longest + least > limit:
            if self.on_long != "truncate":
                return Dropped(RESPONSE_TOO_LONG, origin, length, longest + least)
            chosen, rejected = chosen[: limit - least], rejected[: limit - least]
            longest = limit - least
        room = limit - longest
        differ = prompt != other
        prompt, other = self._tail(prompt, room), self._tail(other, room)
        row = PreferenceRow(prompt, chosen, rejected, origin, other if differ else None)
        return Encoded(row, length, truncated, frozenset(self.remarks))

    def _tail(self, prompt: list[int], room: int) -> list[int]:
        """The last `room` tokens of a prompt, BOS kept in front."""
        if len(prompt) <= room:
            return prompt
        bos = self._leading_bos(prompt)
        keep = room - bos
        return prompt[:bos] + (prompt[-keep:] if keep else [])


def _asked(prompt: str | None, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _says(message: Message) -> bool:
    return bool(str(message["content"]).strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _says_nothing(example: Example) -> str | None:
    """The reason to leave a row out before it is tokenised."""
    match example:
        case Text(text):
            return None if text.strip() else EMPTY_TEXT
        case Completion(completion=completion):
            return None if completion.strip() else EMPTY_RESPONSE
        case Chat(messages):
            assistant = [message for message in messages if message["role"] == "assistant"]
            if not assistant:
                return NO_ASSISTANT
            return None if any(map(_says, assistant)) else EMPTY_RESPONSE
    return None


def _answers(answer: str | list[Message]) -> bool:
    return bool(answer.strip()) if isinstance(answer, str) else _says(answer[-1])


def _too_long(origin: Origin, length: int, limit: int) -> UserError:
    return UserError(
        f"{origin}: this row has {length} tokens, more than max_seq_length {limit}, and on_long is error; raise "
        f"max_seq_length to {length} or choose drop, truncate_prompt or truncate"
    )
