"""Row formats: which one a row is in, and the row in one of four plain shapes.

Understood are `messages`; `prompt` and `completion`; `text`; `prompt`, `chosen` and `rejected`; and besides ShareGPT
rows (`conversations` of `from`/`value`) and Alpaca rows (`instruction`, `input`, `output`). `columns` renames the
data's fields first. Beside each of them may stand `system`, `tools`, `weight` (of the row), `chat_template_kwargs`, and
`history` in Alpaca rows; turns may have `weight`, or `train` or `loss` (true or false).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from segtrain.data.columns import guessed
from segtrain.data.raw import Raw, kind
from segtrain.data.rows import Origin
from segtrain.errors import UserError

OURS = frozenset(  # arguments that a rendering gets from what calls it
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    )
)

Message: TypeAlias = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "documents")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}


REASONING = ("reasoning_content", "reasoning", "thinking")
_FLAGS = ("train", "loss", "training")
_PARTS = ("train_detail", "training_detail")
_WEIGHTED = frozenset((*_FLAGS, *_PARTS, "weight"))


@dataclass(frozen=True)
class Text:
    """A plain document; all of it is learnt."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True)
class Completion:
    """A prompt and what should follow it; `before` are earlier turns, which only a chat template can show."""

    prompt: str
    completion: str
    tools: list[Any] | None = None
    before: list[Message] = field(default_factory=list)
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """A conversation, with the tools that its template may announce.

    A turn's `weight` multiplies the row's; `kwargs` are arguments of the template for this row.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preference:
    """Two responses. As strings they follow `prompt`; as conversations both hold the prompt's turns themselves."""

    prompt: str | None
    chosen: str | list[Message]
    rejected: str | list[Message]
    tools: list[Any] | None = None
    before: list[Message] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


Example: TypeAlias = Text | Completion | Chat | Preference


@dataclass(frozen=True)
class Form:
    """A recognised row format: the contract's name of it and the fields that tell it."""

    format: str
    fields: tuple[str, ...]
    label: str

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(field in row for field in self.fields)


# In order of preference: the first that fits is taken.
FORMS = (
    Form("preference", ("chosen", "rejected"), "preference"),
    Form("completion", ("prompt", "completion"), "prompt/completion"),
    Form("chat", ("messages",), "chat"),
    Form("chat", ("conversations",), "chat (ShareGPT)"),
    Form("completion", ("instruction", "output"), "prompt/completion (Alpaca)"),
    Form("text", ("text",), "text"),
)


class Reader:
    """Raw rows of one source to examples, all in the same form.

    The form is the recipe's `format`, or else whatever the first row is in; a later row in another form is an error.
    """

    def __init__(
        self, format: str = "auto", columns: Mapping[str, str] | None = None, pairs: bool | None = None
    ) -> None:
        self.format, self.columns, self.pairs = format, dict(columns or {}), pairs
        self.form: Form | None = None
        self.first: Origin | None = None

    def read(self, raw: Raw) -> Example:
        """The row's example. Raises UserError naming file, line and field."""
        row = self._renamed(raw)
        form = self.recognise(row, raw.origin)
        if self.form is None:
            self._settle(form, raw.origin)
        elif form != self.form:
            raise UserError(
                f"{raw.origin}: this row is in {form.label} form, but {self.first} is in {self.form.label} form; "
                f"keep one form in a data set (here: {_keys(row)})"
            )
        return _Fields(row, raw.origin).example(form)

    def recognise(self, row: Mapping[str, Any], origin: Origin) -> Form:
        """Which form a row is in. Raises UserError with the keys that were found where it is in none."""
        forms = [form for form in FORMS if self.format in ("auto", form.format)]
        for form in forms:
            if form.fits(row):
                return form
        wanted = "; ".join(" and ".join(form.fields) for form in forms)
        what = "a row" if self.format == "auto" else f"a {self.format} row"
        needs = f"needs one of: {wanted}" if len(forms) > 1 else f"needs {wanted}"
        columns = self.columns | guessed([form.fields for form in forms], row)
        line = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
        fix = f"; if these are they, write data.columns: {{{line}}}" if columns != self.columns else ""
        raise UserError(f"{origin}: {what} {needs}; this one has {_keys(row)}{_missing(forms, row)}{fix}")

    def _settle(self, form: Form, origin: Origin) -> None:
        if self.pairs is True and form.format != "preference":
            raise UserError(
                f"{origin}: pairs need the fields chosen and rejected, but this is a {form.label} row; "
                "name them with data.columns, or train with `segtrain sft`"
            )
        if self.pairs is False and form.format == "preference":
            raise UserError(
                f"{origin}: this is a preference row; train with a preference command (`segtrain --help`), "
                "or learn one response of it with data.columns: {completion: chosen}"
            )
        self.form, self.first = form, origin

    def _renamed(self, raw: Raw) -> dict[str, Any]:
        row = dict(raw.value())
        values = {}
        for ours, theirs in self.columns.items():
            if theirs not in row:
                raise UserError(
                    f"{raw.origin}: data.columns takes {ours} from {theirs!r}, but this row has {_keys(row)}"
                )
            values[ours] = row[theirs]
        for theirs in self.columns.values():
            row.pop(theirs, None)
        return row | values


class _Fields:
    """One row's fields, checked as they are taken."""

    def __init__(self, row: Mapping[str, Any], origin: Origin) -> None:
        self.row, self.origin = row, origin

    def example(self, form: Form) -> Example:
        match form.fields:
            case ("text",):
                return Text(self.text("text"), self.weight(self.row, "weight"))
            case ("prompt", "completion"):
                return self.completion()
            case ("instruction", "output"):
                return self.question(self.alpaca_prompt(), self.text("output"), self.history())
            case ("messages",):
                return self.chat(self.messages("messages"))
            case ("conversations",):
                return self.chat(self.sharegpt())
        return self.preference()

    def chat(self, messages: list[Message]) -> Chat:
        return Chat(self.with_system(messages), self.tools(), self.weight(self.row, "weight"), self.kwargs())

    def completion(self) -> Example:
        if isinstance(self.row["prompt"], list) or isinstance(self.row["completion"], list):
            prompt, completion = self.turns("prompt", "user"), self.turns("completion", "assistant")
            return self.chat([*prompt, *completion])
        return self.question(self.text("prompt"), self.text("completion"), [])

    def question(self, prompt: str, completion: str, before: list[Message]) -> Completion:
        before = self.with_system(before)
        return Completion(prompt, completion, self.tools(), before, self.weight(self.row, "weight"), self.kwargs())

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The turns with the row's own `system` before them."""
        system = self.text("system") if self.row.get("system") else ""
        if not system.strip():
            return messages
        if messages and messages[0]["role"] in ("system", "developer"):
            if messages[0]["content"] == system:
                return messages
            raise self.error("system stands beside a conversation that begins with another system message; keep one")
        return [{"role": "system", "content": system}, *messages]

    def history(self) -> list[Message]:
        """Alpaca's earlier turns: a list of [instruction, response]."""
        turns = self.row.get("history") or []
        if not isinstance(turns, list) or not all(
            isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in turns
        ):
            raise self.error("history must be a list of [instruction, response], each a string")
        roles = ("user", "assistant")
        return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]

    def kwargs(self) -> dict[str, Any]:
        found = self.row.get("chat_template_kwargs") or {}
        if not isinstance(found, dict):
            raise self.error(f"chat_template_kwargs must be an object, not {kind(found)}")
        if name := next(iter(found.keys() & OURS), None):
            raise self.error(f"chat_template_kwargs.{name} is given by segtrain itself; leave it out")
        return found

    def weight(self, values: Mapping[str, Any], where: str) -> float:
        """A weight of at least 0; 1 where none is given."""
        weight = values.get("weight")
        if weight is None:
            return 1.0
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise self.error(f"{where} must be a number of at least 0, not {weight!r}")
        return float(weight)

    def preference(self) -> Preference:
        chosen, rejected = self.row["chosen"], self.row["rejected"]
        prompt, tools, kwargs = self.row.get("prompt"), self.tools(), self.kwargs()
        if self.weight(self.row, "weight") != 1:
            raise self.error("weight has no meaning in a preference row; leave it out")
        if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
            if prompt is None:
                raise self.error("prompt is missing: chosen and rejected are strings, so the prompt must be given")
            return Preference(self.text("prompt"), chosen, rejected, tools, self.with_system([]), kwargs)
        before = [] if prompt is None else self.turns("prompt", "user")
        good, bad = (self.with_system(self.answered(before, field)) for field in ("chosen", "rejected"))
        return Preference(None, good, bad, tools, kwargs=kwargs)

    def answered(self, prompt: list[Message], field: str) -> list[Message]:
        """The whole conversation that `field` ends; it may hold the prompt's turns again, or only the answer."""
        turns = self.turns(field, "assistant")
        whole = turns if turns[: len(prompt)] == prompt else [*prompt, *turns]
        if whole[-1]["role"] != "assistant":
            raise self.error(f"{field} must end with an assistant turn, not with {whole[-1]['role']}")
        if len(whole) == 1:
            raise self.error(f"{field} holds no turn before its answer, and there is no prompt")
        if whole[-1].get("weight", 1) != 1:
            raise self.error(f"{field} ends with a turn of weight {whole[-1]['weight']:g}; an answer has none here")
        return whole

    def turns(self, field: str, role: str) -> list[Message]:
        """A list of messages, or a string as one turn of `role`."""
        value = self.row[field]
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        if isinstance(value, dict):
            return [self.message(field, value)]
        if not isinstance(value, list):
            raise self.error(f"{field} must be a string or a list of messages, not {kind(value)}")
        return self.messages(field)

    def messages(self, field: str) -> list[Message]:
        value = self.row[field]
        if not isinstance(value, list):
            raise self.error(f"{field} must be a list of messages, not {kind(value)}")
        if not value:
            raise self.error(f"{field} is empty")
        return [self.message(f"{field}[{i}]", message) for i, message in enumerate(value)]

    def message(self, where: str, message: Any) -> Message:
        if not isinstance(message, dict):
            raise self.error(f"{where} must be an object with role and content, not {kind(message)}")
        if "role" not in message:
            hint = "; for from/value turns name the field conversations" if "from" in message else ""
            raise self.error(f"{where} has no role (it has {_keys(message)}){hint}")
        role = message["role"]
        if role not in ROLES:
            meant = SHAREGPT_ROLES.get(role) if isinstance(role, str) else None
            hint = f"; write {meant}" if meant else ""
            raise self.error(f"{where}.role is {role!r}, not one of {', '.join(ROLES)}{hint}")
        if "tool_calls" in message or "function_call" in message:
            message = {**message, **self.calls(where, message)}
        return {**self.weighted(where, message), "content": self.content(where, message)}

    def weighted(self, where: str, message: Message) -> Message:
        """The turn with its `weight`, into which `train` and `loss` go. Raises UserError where it can't be honoured."""
        if _WEIGHTED.isdisjoint(message):
            return message
        given = [name for name in (*_FLAGS, *_PARTS, "weight") if message.get(name) is not None]
        if not given:
            return message
        weight = self.weight(message, f"{where}.weight")
        for name in given:
            if name in _PARTS:
                raise self.error(f"{where}.{name} isn't supported; a turn is learnt as a whole or not at all")
            if name in _FLAGS and type(message[name]) is not bool:
                raise self.error(f"{where}.{name} must be true or false, not {message[name]!r}")
            weight *= message[name] is not False
        if message["role"] != "assistant":
            if weight:
                raise self.error(
                    f"{where}.{given[0]} asks for a turn of role {message['role']} to be learnt; only the assistant's "
                    "turns can be (or everything, by supervise: all); leave it out or set it to "
                    f"{'0' if given[0] == 'weight' else 'false'}"
                )
            return {key: value for key, value in message.items() if key not in given}
        return {**{key: value for key, value in message.items() if key not in given}, "weight": weight}

    def calls(self, where: str, message: Message) -> Message:
        """`tool_calls`, their arguments decoded from JSON text, as servers do before they render."""
        calls, single = message.get("tool_calls"), message.get("function_call")
        if calls is None and isinstance(single, dict):
            calls, where = [{"type": "function", "function": single}], f"{where}.function_call"
        if calls is None:
            return {}
        if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise self.error(f"{where}.tool_calls must be a list of objects, not {kind(calls)}")
        return {"tool_calls": [self.call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]}

    def call(self, where: str, call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": self.call(f"{where}.function", call["function"])}
        arguments = call.get("arguments")
        if not isinstance(arguments, str):
            return call
        try:
            return {**call, "arguments": json.loads(arguments) if arguments.strip() else {}}
        except (ValueError, RecursionError):
            raise self.error(f"{where}.arguments is a string that isn't valid JSON") from None

    def content(self, where: str, message: Message) -> str:
        content = message.get("content")
        if content is None:
            if message.get("tool_calls") or any(message.get(name) for name in REASONING):
                return ""
            raise self.error(f"{where}.content is {'null' if 'content' in message else 'missing'}")
        if isinstance(content, list):
            return "".join(self.part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
        if not isinstance(content, str):
            raise self.error(f"{where}.content must be a string, not {kind(content)}")
        return content

    def part(self, where: str, part: Any) -> str:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        found = part.get("type") if isinstance(part, dict) else kind(part)
        raise self.error(f"{where} is {found!r}; only text parts can be trained on")

    def sharegpt(self) -> list[Message]:
        turns = self.row["conversations"]
        if not isinstance(turns, list):
            raise self.error(f"conversations must be a list of turns, not {kind(turns)}")
        if turns and isinstance(turns[0], dict) and "role" in turns[0]:
            return self.messages("conversations")
        if not turns:
            raise self.error("conversations is empty")
        return [self.sharegpt_turn(f"conversations[{i}]", turn) for i, turn in enumerate(turns)]

    def sharegpt_turn(self, where: str, turn: Any) -> Message:
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            found = _keys(turn) if isinstance(turn, dict) else kind(turn)
            raise self.error(f"{where} must be an object with from and value (found: {found})")
        if turn["from"] not in SHAREGPT_ROLES:
            raise self.error(f"{where}.from is {turn['from']!r}, not one of {', '.join(SHAREGPT_ROLES)}")
        if not isinstance(turn["value"], str):
            raise self.error(f"{where}.value must be a string, not {kind(turn['value'])}")
        more = {key: turn[key] for key in (*_FLAGS, *_PARTS, "weight") if key in turn}
        message = {**more, "role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}
        calls = _calls(turn["value"]) if turn["from"] == "function_call" else None
        return self.message(where, {**message, "content": "", "tool_calls": calls} if calls else message)

    def alpaca_prompt(self) -> str:
        instruction, extra = self.text("instruction"), self.row.get("input")
        return f"{instruction}\n\n{self.text('input')}" if extra else instruction

    def tools(self) -> list[Any] | None:
        tools = self.row.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools) if tools.strip() else None
            except ValueError:
                raise self.error("tools is a string that isn't valid JSON") from None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise self.error(f"tools must be a list of objects, not {kind(tools)}")
        return tools or None

    def text(self, field: str) -> str:
        value = self.row[field]
        if not isinstance(value, str):
            raise self.error(f"{field} must be a string, not {kind(value)}")
        return value

    def error(self, text: str) -> UserError:
        return UserError(f"{self.origin}: {text}")


def _calls(text: str) -> list[dict[str, Any]] | None:
    """The tool calls that a ShareGPT turn spells out in JSON; None where it spells none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def thought_of(message: Message) -> tuple[str, str]:
    """A turn's thought and the text after it, both without white space around them."""
    content = str(message.get("content") or "")
    given = next((str(message[name]) for name in REASONING if message.get(name)), "")
    if "</think>" not in content:
        return given.strip(), content.strip()
    inline, _, answer = content.rpartition("</think>")
    return (given or inline.rpartition("<think>")[2]).strip(), answer.strip()


def _keys(row: Mapping[str, Any]) -> str:
    shown = [str(key) for key in list(row)[:8]]
    return ", ".join(shown) + (", …" if len(row) > 8 else "") if shown else "no fields"


def _missing(forms: Sequence[Form], row: Mapping[str, Any]) -> str:
    """What the nearest form lacks, when the row has part of it."""
    partial = [form for form in forms if any(field in row for field in form.fields)]
    if not partial:
        return ""
    lacking = [field for field in partial[0].fields if field not in row]
    return f", so {' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"
