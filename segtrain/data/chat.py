"""Chat templates: a conversation as text, with the arguments that inference gives.

Templates run in the sandbox of transformers. `enable_thinking` is given as mlx-lm's generation gives it (on where the
tokenizer has marks for a thought, off elsewhere), unless `data.chat_template_kwargs` says otherwise.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from segtrain.data.formats import OURS, Message
from segtrain.data.rows import Origin
from segtrain.data.tokenizer import PYTHON_TEMPLATE, Codec
from segtrain.errors import UserError, reason

MARK = "\ue0f1\ue0f2\ue0f3"  # private-use characters: in no template, and untouched by trimming

# What a tokenizer has whose model thinks (all of one line), as in mlx_lm/tokenizer_utils.py.
_THOUGHTS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
    ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
)
SWITCHES = ("enable_thinking", "thinking")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


class ChatTemplate:
    """The chat template of a tokenizer, or the recipe's own (`source`: Jinja text or the path of a file with it).

    `kwargs` are arguments of the template, as in `data.chat_template_kwargs`.
    """

    def __init__(self, codec: Codec, source: str | None = None, kwargs: Mapping[str, Any] | None = None) -> None:
        self.codec, self.tokenizer = codec, codec.tokenizer
        self.source = template_text(source) if source else None
        self.given = dict(kwargs or {})
        if name := next(iter(self.given.keys() & OURS), None):
            raise UserError(f"data.chat_template_kwargs.{name} is given by segtrain itself; leave it out")

    @property
    def exists(self) -> bool:
        return bool(self.source or self.tokenizer.chat_template or self._in_python or self._own_renderer)

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        ask: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text; with `ask`, an assistant turn is opened after it. Raises what the template does.

        `kwargs` are further arguments of the template, for this conversation.
        """
        options = {**self._thinking, **self.given, **(kwargs or {})}
        turns = [_arguments_as_text(message) for message in messages] if self._wants_text else list(messages)
        return self._rendered(turns, tools, ask, options)

    def _rendered(self, messages: list[Message], tools: list[Any] | None, ask: bool, options: dict[str, Any]) -> str:
        if self._in_python is not None:
            text = self._in_python(messages, tools=tools, add_generation_prompt=ask, **options)
        else:
            chosen = {"chat_template": self.source} if self.source else {}
            batch: Any = [[]]  # a conversation without turns is taken in a batch only
            text = self.tokenizer.apply_chat_template(
                messages or batch, tools=tools, add_generation_prompt=ask, tokenize=False, **chosen, **options
            )
            text = text if messages else text[0]
        assert isinstance(text, str)
        return text

    def require(self, origin: Origin) -> None:
        """Raises UserError where there is no template."""
        if not self.exists:
            raise UserError(
                f"{origin}: this is a chat row, but the model's tokenizer has no chat template (a base model?); give "
                "one as data.chat_template (Jinja text or a file), use an instruct model, or prompt/completion rows"
            )

    def require_syntax(self, error: BaseException | None) -> None:
        """Raises UserError where a rendering failed since the template itself is wrong: no row is to blame for that."""
        if error is not None and type(error).__name__ == "TemplateSyntaxError":
            place = "data.chat_template" if self.source else "the chat template of the model's tokenizer"
            raise UserError(
                f"{place}, line {getattr(error, 'lineno', '?')}: not valid Jinja: {reason(error)}"
            ) from None

    @cached_property
    def _thinking(self) -> dict[str, bool]:
        """The switch as mlx-lm's generation sets it."""
        vocabulary: Any = getattr(self.tokenizer, "get_vocab", dict)()
        return {self._switch: any(all(mark in vocabulary for mark in marks) for marks in _THOUGHTS)}

    @cached_property
    def _switch(self) -> str:
        """The argument's name: a tokenizer with a renderer of its own may call it otherwise."""
        if self._own_renderer:
            import inspect

            names = inspect.signature(type(self.tokenizer).apply_chat_template).parameters
            if "thinking" in names and "enable_thinking" not in names:
                return "thinking"
        return "enable_thinking"

    def switched(self) -> list[dict[str, bool]]:
        """Other settings of the template's thinking switch than the one in use, where it has one and none is given."""
        names = [name for name in SWITCHES if name not in self.given and self._mentions(name)]
        now = self._thinking
        return [{name: on} for name in names for on in (True, False) if now.get(name) is not on]

    def _mentions(self, name: str) -> bool:
        text = self.source or self.tokenizer.chat_template
        if self._in_python is not None or not isinstance(text, str):
            return name == self._switch
        return re.search(rf"(?<![.\w\"'\[]){name}\b", text) is not None

    @cached_property
    def _in_python(self) -> Any:
        """mlx-lm's own renderer of a few models; None where the template is Jinja text."""
        if self.source:
            return None
        name = getattr(self.tokenizer, PYTHON_TEMPLATE, None)
        if name:
            import importlib

            return importlib.import_module(f"mlx_lm.chat_templates.{name}").apply_chat_template
        found = getattr(self.codec.given, "_chat_template", None)
        return found if self.codec.given is not self.tokenizer and callable(found) else None

    @cached_property
    def _own_renderer(self) -> bool:
        """Whether the tokenizer's class renders conversations in a way of its own."""
        from transformers import PreTrainedTokenizerBase

        own = getattr(type(self.tokenizer), "apply_chat_template", None)
        return own is not PreTrainedTokenizerBase.apply_chat_template and not self.source

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template takes the arguments of a tool call as JSON text only, and fails on an object."""
        if self._in_python is not None:
            return False
        call = {"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {"x": "y"}}}
        turns: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return not self._takes(turns) and self._takes([_arguments_as_text(turn) for turn in turns])

    def _takes(self, messages: list[Message]) -> bool:
        try:
            self._rendered(messages, None, False, {**self._thinking, **self.given})
        except Exception:
            return False
        return True

    @cached_property
    def has_marks(self) -> bool:
        """Whether `{% generation %}` marks say what the assistant writes."""
        template = self.source or self.tokenizer.chat_template
        return self._in_python is None and isinstance(template, str) and _GENERATION.search(template) is not None

    def marks(
        self, messages: Sequence[Message], tools: list[Any] | None, text: str, kwargs: Mapping[str, Any] | None = None
    ) -> list[Span]:
        """[start, end) of what the template marks as generated in `text`, the conversation's rendering."""
        from transformers.utils.chat_template_utils import render_jinja_template

        found: Any = render_jinja_template(
            [list(messages)],
            tools=tools,
            chat_template=self.source or self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **dict(getattr(self.tokenizer, "special_tokens_map", {})),
            **{**self._thinking, **self.given, **(kwargs or {})},
        )
        rendered, marks = found
        return [(int(start), int(end)) for start, end in marks[0]] if rendered[0] == text else []

    @cached_property
    def ends(self) -> frozenset[str]:
        """Texts that end a turn: the end tokens, and the special token that follows an assistant turn's text."""
        return self.codec.end_texts | ({self.closing} if self.closing else set())

    @cached_property
    def closing(self) -> str | None:
        """The special token that follows an assistant turn's text, such as `<|im_end|>`; None where none does."""
        try:
            text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}])
        except Exception:
            return None
        after = text.split(MARK)[-1].lstrip()
        return after[: self.codec.leading_special(after)] or None


def _arguments_as_text(message: Message) -> Message:
    """The same turn with the arguments of its tool calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}


def _call_as_text(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _call_as_text(inner)}
    arguments = call.get("arguments", {})
    return {**call, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}


def template_text(source: str) -> str:
    """A chat template, given as Jinja text or as a file that holds it. Raises UserError."""
    if "{%" in source or "{{" in source:
        return source
    path = Path(source).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template: {source!r} is neither a Jinja template nor a readable file ({one_line(error)})"
        ) from None


def one_line(error: Exception) -> str:
    """An exception's name and message, without line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
