"""Examples to rows: tokens, the supervision mask and the length limit.

A row longer than `max_seq_length` follows `on_long`:

- `drop`: it is left out and counted;
- `truncate_prompt`: the prompt is cut from the left (a leading BOS stays) and the last response is kept whole; in a conversation the prompt
  is everything before its last supervised turn, system message included. A row whose response alone doesn't fit is dropped;
- `truncate`: it is cut from the right, and dropped if no supervised token is left;
- `error`: the run doesn't start.

Of a preference row the prompt is always cut from the left, alike for both responses (but under `error`); a response that
leaves no room for a prompt token follows `on_long`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from segtrain.data.chat import ChatTemplate, Rendered
from segtrain.data.formats import Chat, Completion, Example, Message, Preference, Text
from segtrain.data.rows import Origin, PreferenceRow, Row, SupervisedRow
from segtrain.data.spans import Tokens, encode_spans
from segtrain.data.tokenizer import Codec
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
BLANK = "blank line"


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
        if self._says_nothing(example):
            return Dropped(EMPTY_TEXT if isinstance(example, Text) else EMPTY_RESPONSE, origin)
        if isinstance(example, Chat) and not any(m["role"] == "assistant" for m in example.messages):
            return Dropped(NO_ASSISTANT, origin)
        tokens = self._single_bos(self._tokens(example, origin))
        if len(tokens) < 2:
            return Dropped(ONE_TOKEN, origin, len(tokens))
        tokens.supervised[0] = False
        return self._within_limit(tokens, origin)

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

    def _says_nothing(self, example: Example) -> bool:
        match example:
            case Text(text):
                return not text.strip()
            case Completion(completion=completion):
                return not completion.strip()
            case Chat(messages):
                assistant = [message for message in messages if message["role"] == "assistant"]
                return bool(assistant) and not any(_says(message) for message in assistant)
        return False

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
        wanted = self._wanted(messages)
        if self.supervise == "all":
            rendered = self.template.turns(messages, tools, [], origin)
            rendered = Rendered(rendered.text, [(0, len(rendered.text))])
        else:
            rendered = self.template.turns(messages, tools, wanted, origin)
        if not self.template.stops:
            self.remarks.add("no end-of-turn")
        return encode_spans(self.codec, rendered.text, rendered.spans)

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
        self.remarks.add("doubled BOS")
        starts = [max(0, start - extra) for start in tokens.starts]
        return Tokens(tokens.ids[extra:], tokens.supervised[extra:], starts)

    def _within_limit(self, tokens: Tokens, origin: Origin) -> Encoded | Dropped:
        length, limit = len(tokens), self.max_length
        if length > limit:
            cut = self._cut(tokens, origin)
            if isinstance(cut, Dropped):
                return cut
            tokens = cut
        if not any(tokens.supervised):
            needed = next((i + 1 for i, on in enumerate(tokens.supervised) if on), 0)
            return Dropped(EMPTY_RESPONSE, origin, length, needed)
        row = SupervisedRow(tokens.ids, tokens.supervised, origin)
        return Encoded(row, length, length > limit, frozenset(self.remarks))

    def _cut(self, tokens: Tokens, origin: Origin) -> Tokens | Dropped:
        """An over-long row under `on_long`. Raises UserError under `error`."""
        length, limit = len(tokens), self.max_length
        match self.on_long:
            case "error":
                raise _too_long(origin, length, limit)
            case "drop":
                return Dropped(TOO_LONG, origin, length, length)
            case "truncate":
                if not any(tokens.supervised[:limit]):
                    first = tokens.supervised.index(True) if any(tokens.supervised) else length - 1
                    return Dropped(NO_TARGETS_LEFT, origin, length, first + 1)
                return Tokens(tokens.ids[:limit], tokens.supervised[:limit], tokens.starts)
        return self._cut_prompt(tokens, origin)

    def _cut_prompt(self, tokens: Tokens, origin: Origin) -> Tokens | Dropped:
        """The last `max_length` tokens up to the end of the last response, with BOS kept in front."""
        if not any(tokens.supervised):
            return Dropped(EMPTY_RESPONSE, origin, len(tokens))
        end = len(tokens) - tokens.supervised[::-1].index(True)
        response = end - tokens.starts[-1] if tokens.starts else end
        bos = tokens.ids[: self._leading_bos(tokens.ids)]
        if response + max(1, len(bos)) > self.max_length:
            return Dropped(RESPONSE_TOO_LONG, origin, len(tokens), response + max(1, len(bos)))
        first = max(len(bos), end - (self.max_length - len(bos)))
        ids, supervised = [*bos, *tokens.ids[first:end]], [*(False for _ in bos), *tokens.supervised[first:end]]
        supervised[0] = False
        return Tokens(ids, supervised, [])

    def _leading_bos(self, ids: Sequence[int]) -> int:
        return 1 if self.codec.bos is not None and ids[:1] == [self.codec.bos] else 0

    # Preference rows.

    def _preference(self, example: Preference, origin: Origin) -> Encoded | Dropped:
        texts = [_last_text(example.chosen), _last_text(example.rejected)]
        if not all(text.strip() or _calls(side) for text, side in zip(texts, _sides(example), strict=True)):
            return Dropped(EMPTY_RESPONSE, origin)
        prompt, chosen = self._branch(example.prompt, example.chosen, example.tools, origin)
        other, rejected = self._branch(example.prompt, example.rejected, example.tools, origin)
        if not prompt or not other:
            return Dropped(EMPTY_PROMPT, origin)
        if chosen == rejected and prompt == other:
            self.remarks.add("identical")
        if prompt != other:
            self.remarks.add("prompts differ")
        return self._fit_pair(prompt, other, chosen, rejected, origin)

    def _branch(
        self, prompt: str | None, answer: str | list[Message], tools: list[Any] | None, origin: Origin
    ) -> tuple[list[int], list[int]]:
        """Token ids of a branch's prompt and of its response, end-of-turn included."""
        if isinstance(answer, str) and not self.template.exists:
            tokens = self._document([(prompt or "", False), (answer, True)])
        else:
            tokens = self._last_turn(_asked(prompt, answer) if isinstance(answer, str) else answer, tools, origin)
        tokens = self._single_bos(tokens)
        start = tokens.starts[-1]
        end = len(tokens) - tokens.supervised[::-1].index(True)
        return tokens.ids[:start], tokens.ids[start:end]

    def _last_turn(self, messages: list[Message], tools: list[Any] | None, origin: Origin) -> Tokens:
        rendered = self.template.turns(messages, tools, [len(messages) - 1], origin)
        if not self.template.stops:
            self.remarks.add("no end-of-turn")
        return encode_spans(self.codec, rendered.text, rendered.spans)

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


def _sides(example: Preference) -> tuple[str | list[Message], str | list[Message]]:
    return example.chosen, example.rejected


def _last_text(answer: str | list[Message]) -> str:
    return answer if isinstance(answer, str) else str(answer[-1]["content"])


def _calls(answer: str | list[Message]) -> bool:
    return not isinstance(answer, str) and bool(answer[-1].get("tool_calls"))


def _too_long(origin: Origin, length: int, limit: int) -> UserError:
    return UserError(
        f"{origin}: this row has {length} tokens, more than max_seq_length {limit}, and on_long is error; raise "
        f"max_seq_length to {length} or choose drop, truncate_prompt or truncate"
    )
