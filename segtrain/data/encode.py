"""Examples to rows: the conversation's targets as tokens with a mask, within the length limit.

An example gives one row, or several where its template shows no rendering that holds all its turns (`turns`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from segtrain.data.chat import ChatTemplate, one_line
from segtrain.data.formats import REASONING, Chat, Completion, Example, Message, Preference, Text
from segtrain.data.hidden import HiddenError, hidden
from segtrain.data.limits import Dropped, Encoded, Limit, OnLong, Split
from segtrain.data.narrow import within_marks, without_thought
from segtrain.data.rows import Origin, SupervisedRow
from segtrain.data.spans import SeamError, Tokens, encode_spans
from segtrain.data.tokenizer import Codec
from segtrain.data.turns import Definition, Laid, MaskError, Turns, pair
from segtrain.errors import UserError

Supervise: TypeAlias = Literal["assistant", "last", "all"]

EMPTY_TEXT = "empty text"
EMPTY_RESPONSE = "empty response"
NO_ASSISTANT = "no assistant turn"
ONE_TOKEN = "a single token, nothing to predict"
EMPTY_PROMPT = "empty prompt"
MERGED_PROMPT = "the tokenizer joins the whole prompt to the answer, so no token is left to score from"
UNSUPERVISED = "no supervised turn"
BLANK = "blank line"

# What is noticed about rows that are kept, beside `turns.How` and what `hidden` finds.
DOUBLED_BOS = "doubled BOS"
IDENTICAL = "identical"
PROMPTS_DIFFER = "prompts differ"
OPEN_TURN = "no end-of-turn token"
CONTROLS = "control tokens in the text"
UNASKED = "a turn that can't be asked for"

_WHOLE: frozenset[str] = frozenset(["whole"])


@dataclass
class Encoder:
    """Turns examples into rows under one recipe's rules."""

    codec: Codec
    template: ChatTemplate
    max_length: int
    on_long: OnLong = "drop"
    supervise: Supervise = "assistant"
    turns: Turns = "auto"
    supervise_reasoning: bool = True
    remarks: set[str] = field(default_factory=set)

    @cached_property
    def limit(self) -> Limit:
        return Limit(self.max_length, self.on_long, self.codec.bos)

    def encode(self, example: Example, origin: Origin) -> list[Encoded | Dropped]:
        """The rows of an example, or why there is none. Raises UserError for what no setting can repair."""
        self.remarks = set()
        if isinstance(example, Preference):
            return [self._preference(example, origin)]
        nothing = _says_nothing(example)
        if nothing is not None:
            return [Dropped(nothing, origin)]
        match example:
            case Text(text, weight):
                return [self._row(self._document([(text, True)], weight), origin, document=True)]
            case Completion() if self.template.exists:
                return self._conversation(_chat(example), origin)
            case Completion():
                return [self._row(self._plain_completion(example, origin), origin)]
            case Chat():
                return self._conversation(example, origin)
        raise AssertionError(example)

    def _row(self, tokens: Tokens, origin: Origin, document: bool = False) -> Encoded | Dropped:
        tokens = self._single_bos(tokens)
        if len(tokens) < 2:
            return Dropped(ONE_TOKEN, origin, len(tokens))
        tokens.supervised[0] = False  # nothing comes before it to predict it from
        if not any(tokens.supervised):
            return Dropped(UNSUPERVISED, origin, len(tokens))
        fitted = self.limit.fit(tokens, document, origin)
        if isinstance(fitted, Dropped):
            return fitted
        row = SupervisedRow(fitted.ids, fitted.supervised, origin, fitted.weights)
        return Encoded(row, len(tokens), len(tokens) > self.max_length, frozenset(self.remarks))

    def _plain_completion(self, example: Completion, origin: Origin) -> Tokens:
        """A prompt and its completion one after another, for a tokenizer without a chat template."""
        self._require_plain(example, origin)
        parts = [(example.prompt, self.supervise == "all"), (example.completion, True)]
        return self._document(parts, example.weight)

    def _require_plain(self, example: Completion | Preference, origin: Origin) -> None:
        extra = {"an earlier turn or system message": example.before, "tools": example.tools}
        for what, value in extra.items():
            if value:
                raise UserError(
                    f"{origin}: {what} stands beside the prompt, but the model's tokenizer has no chat template to "
                    "show it; give one as data.chat_template, or write it into the prompt"
                )

    def _document(self, parts: Sequence[tuple[str, bool]], weight: float = 1.0) -> Tokens:
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
        found = Tokens(
            [*begins, *tokens.ids, *ends],
            [*(False for _ in begins), *tokens.supervised, *(True for _ in ends)],
            [(lo + len(begins), hi + len(begins)) for lo, hi in tokens.spans],
        )
        if weight != 1:
            found.weights = [weight] * len(found)
        return found

    # Conversations.

    def _conversation(self, chat: Chat, origin: Origin) -> list[Encoded | Dropped]:
        self._notice_controls(chat.messages)
        definition = self._definition(chat.messages, chat.tools, chat.kwargs, origin)
        if self.supervise == "all":
            return [self._row(self._everything(definition, chat, origin), origin)]
        turns = self._wanted(chat)
        wanted = [turn for turn in turns if definition.askable(turn)]
        if len(wanted) < len(turns):
            self.remarks.add(UNASKED)
        if not wanted:
            return [Dropped(UNSUPERVISED, origin)]
        laid = self._laid(definition, wanted, origin)
        tokens = [self._tokens(one, chat, origin) for one in laid]
        rows = [self._noted(self._row(found, origin), one.how) for one, found in zip(laid, tokens, strict=True)]
        return self._with_cost(rows, tokens, definition)

    def _definition(
        self, messages: list[Message], tools: list[Any] | None, kwargs: dict[str, Any], origin: Origin
    ) -> Definition:
        """The conversation, once its template is known to take it. Raises UserError."""
        self.template.require(origin)
        definition = Definition(self.template, messages, tools, kwargs)
        try:
            definition.plain.full  # noqa: B018
        except MaskError as error:
            self.template.require_syntax(error.__cause__)
            reason = one_line(error.__cause__) if isinstance(error.__cause__, Exception) else str(error)
            raise UserError(f"{origin}: the chat template refuses this row: {reason}") from error
        return definition

    def _everything(self, definition: Definition, chat: Chat, origin: Origin) -> Tokens:
        weighted = [n for n, message in enumerate(chat.messages) if message.get("weight", 1) != 1]
        if weighted:
            raise UserError(
                f"{origin}: messages[{weighted[0]}] has a weight of its own, but supervise is all; leave it out, or "
                "choose supervise: assistant"
            )
        ids = self.codec.ids(definition.plain.full)
        return Tokens(ids, [True] * len(ids), [], None if chat.weight == 1 else [chat.weight] * len(ids))

    def _laid(self, definition: Definition, wanted: list[int], origin: Origin) -> list[Laid]:
        try:
            return [self._narrowed(laid) for laid in definition.rows(wanted, self.turns)]
        except MaskError as error:
            raise _refused(error, origin) from error

    def _narrowed(self, laid: Laid) -> Laid:
        """The row with what the template leaves out noticed, and its targets as the recipe wants them."""
        self.remarks |= hidden(laid)
        laid = within_marks(laid)
        return laid if self.supervise_reasoning else without_thought(laid)

    def _tokens(self, laid: Laid, chat: Chat, origin: Origin) -> Tokens:
        tokens = self._encoded_spans(laid, origin)
        tokens.weigh([chat.weight * chat.messages[target.turn].get("weight", 1) for target in laid.targets])
        return tokens

    def _encoded_spans(self, laid: Laid, origin: Origin) -> Tokens:
        if not all(self.codec.ends_special(laid.text[target.start : target.end]) for target in laid.targets):
            self.remarks.add(OPEN_TURN)
        try:
            return encode_spans(self.codec, laid.text, [(target.start, target.end) for target in laid.targets])
        except SeamError as error:
            raise UserError(f"{origin}: {error}; no mask can be made, use supervise: all") from None

    def _noted(self, result: Encoded | Dropped, how: str) -> Encoded | Dropped:
        if isinstance(result, Dropped) or how == "whole":
            return result
        return replace(result, remarks=result.remarks | {how})

    def _with_cost(
        self, rows: list[Encoded | Dropped], tokens: list[Tokens], definition: Definition
    ) -> list[Encoded | Dropped]:
        """The rows, the first kept one with what several rows cost against one."""
        if len(rows) < 2:
            return rows
        whole = len(self.codec.ids(definition.plain.full))
        split = Split(len(rows), sum(map(len, tokens)), whole)
        kept = next((n for n, row in enumerate(rows) if isinstance(row, Encoded)), None)
        return [
            replace(row, split=split) if n == kept and isinstance(row, Encoded) else row for n, row in enumerate(rows)
        ]

    def _notice_controls(self, messages: list[Message]) -> None:
        if any(self.codec.find_special(str(message["content"])) for message in messages):
            self.remarks.add(CONTROLS)

    def _wanted(self, chat: Chat) -> list[int]:
        """The assistant turns to learn: those that say something and whose weight isn't 0."""
        turns = [
            number
            for number, message in enumerate(chat.messages)
            if message["role"] == "assistant" and _says(message) and chat.weight * message.get("weight", 1) != 0
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
        return tokens.shifted(extra)

    # Preference rows.

    def _preference(self, example: Preference, origin: Origin) -> Encoded | Dropped:
        if not _answers(example.chosen) or not _answers(example.rejected):
            return Dropped(EMPTY_RESPONSE, origin)
        (prompt, chosen), (other, rejected) = self._branches(example, origin)
        if not prompt or not other:
            return Dropped(MERGED_PROMPT if example.prompt else EMPTY_PROMPT, origin)
        if not chosen or not rejected:
            return Dropped(EMPTY_RESPONSE, origin)
        length = max(len(prompt) + len(chosen), len(other) + len(rejected))
        row = self.limit.fit_pair(prompt, other, chosen, rejected, origin)
        if isinstance(row, Dropped):
            return row
        if row.chosen == row.rejected and prompt == other:
            self.remarks.add(IDENTICAL)
        if prompt != other:
            self.remarks.add(PROMPTS_DIFFER)
        return Encoded(row, length, length > self.max_length, frozenset(self.remarks))

    def _branches(self, example: Preference, origin: Origin) -> list[tuple[list[int], list[int]]]:
        """Token ids of each branch's prompt and of its response, end-of-turn included."""
        answers = (example.chosen, example.rejected)
        if isinstance(example.chosen, str) and not self.template.exists:
            self._require_plain(example, origin)
            return [self._parted(self._document([(example.prompt or "", False), (str(a), True)])) for a in answers]
        talks = [_asked(example.before, example.prompt, a) if isinstance(a, str) else a for a in answers]
        definitions = []
        for messages in talks:
            self._notice_controls(messages)
            definitions.append(self._definition(messages, example.tools, example.kwargs, origin))
        try:
            branches = [self._narrowed(laid) for laid in pair(*definitions)]
        except MaskError as error:
            raise _refused(error, origin) from error
        self.remarks |= {laid.how for laid in branches} - _WHOLE
        return [self._parted(self._encoded_spans(laid, origin)) for laid in branches]

    def _parted(self, tokens: Tokens) -> tuple[list[int], list[int]]:
        tokens = self._single_bos(tokens)
        if not tokens.spans:
            return tokens.ids, []
        start = tokens.spans[0][0]
        end = len(tokens) - tokens.supervised[::-1].index(True)
        return tokens.ids[:start], tokens.ids[start:end]


def _refused(error: MaskError, origin: Origin) -> UserError:
    if isinstance(error, HiddenError):
        return UserError(
            f"{origin}: the chat template can't teach this row: {error}; give one that does as data.chat_template"
        )
    return UserError(
        f"{origin}: the chat template can't be masked turn by turn: {error}; use supervise: all, or give "
        "a template with {% generation %} marks as data.chat_template"
    )


def _chat(example: Completion) -> Chat:
    messages = _asked(example.before, example.prompt, example.completion)
    return Chat(messages, example.tools, example.weight, example.kwargs)


def _asked(before: list[Message], prompt: str | None, answer: str) -> list[Message]:
    return [*before, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _says(message: Message) -> bool:
    if str(message["content"]).strip():
        return True
    return any(message.get(name) for name in ("tool_calls", *REASONING))


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
