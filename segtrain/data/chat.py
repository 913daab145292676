"""Chat templates: a conversation as text, and which parts of that text the assistant wrote.

Where a template has `{% generation %}` marks, they say it. Otherwise a part begins where the prompt of its turn ends:
the conversation so far, rendered with a generation prompt, must be a prefix of the whole rendering. It ends with the
turn's end-of-turn token. Templates may rewrite history, say by removing the reasoning from all but the last turn, and
then neither prefix need hold; such a turn is found by what the template puts around it, learnt from a rendering in
which a mark stands for the turn's text. A template for which that fails too is refused with the reason: a mask that
might be wrong is worse than none.

Templates run in the sandbox of transformers. Positions here are in characters of the rendered text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from segtrain.data.formats import Message
from segtrain.data.rows import Origin
from segtrain.data.tokenizer import Codec
from segtrain.data.turns import MARK, Locator, MaskError
from segtrain.errors import UserError

_THINKING = ("<think>", "</think>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, the [start, end) of each supervised turn, and whether each ends with a special token."""

    text: str
    spans: list[Span]
    closed: bool = True


class ChatTemplate:
    """The chat template of a tokenizer, or the recipe's own (`source`: Jinja text or the path of a file with it)."""

    def __init__(self, codec: Codec, source: str | None = None) -> None:
        self.codec, self.tokenizer = codec, codec.tokenizer
        self.source = _template_text(source) if source else None
        wrapped: Any = getattr(codec.tokenizer, "_tokenizer", None)
        if self.source and hasattr(wrapped, "apply_chat_template"):
            self.tokenizer = wrapped  # mlx-lm's wrapper may have a template in Python, which would be taken instead

    @property
    def exists(self) -> bool:
        known = getattr(self.tokenizer, "has_chat_template", None)  # mlx-lm's wrapper has templates in Python too
        return self.source is not None or bool(self.tokenizer.chat_template if known is None else known)

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, ask: bool = False) -> str:
        """The conversation as text; with `ask`, an assistant turn is opened after it. Raises what the template does."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=ask, tokenize=False, **self._options
        )
        assert isinstance(text, str)
        return text

    def whole(self, messages: list[Message], tools: list[Any] | None, origin: Origin) -> str:
        """The whole conversation as text. Raises UserError."""
        if not self.exists:
            raise UserError(
                f"{origin}: this is a chat row, but the model's tokenizer has no chat template (a base model?); give "
                "one as data.chat_template (Jinja text or a file), use an instruct model, or prompt/completion rows"
            )
        try:
            return self.render(messages, tools)
        except Exception as error:
            raise UserError(f"{origin}: the chat template refuses this row: {_one_line(error)}") from error

    def turns(
        self, messages: list[Message], tools: list[Any] | None, wanted: Sequence[int], origin: Origin
    ) -> Rendered:
        """The whole conversation and the spans of the assistant turns `wanted`. Raises UserError."""
        text = self.whole(messages, tools, origin)
        locator = Locator(self, messages, tools, text)
        try:
            spans = self._marked(messages, tools, wanted, text) if self.has_marks else None
            if spans is None:
                spans = locator.spans(wanted)
        except MaskError as error:
            raise UserError(
                f"{origin}: the chat template can't be masked turn by turn: {error}; use supervise: all, or give "
                "a template with {% generation %} marks as data.chat_template"
            ) from error
        return Rendered(text, spans, all(self.codec.ends_special(text[start:end]) for start, end in spans))

    @cached_property
    def has_marks(self) -> bool:
        template = self.source or self.tokenizer.chat_template
        return isinstance(template, str) and _GENERATION.search(template) is not None

    def _marked(
        self, messages: list[Message], tools: list[Any] | None, wanted: Sequence[int], text: str
    ) -> list[Span] | None:
        """Spans by the template's own generation marks, each with the end-of-turn token that follows it.

        None where the marks can't be matched with turns one to one.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        found: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=self.source or self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **dict(getattr(self.tokenizer, "special_tokens_map", {})),
            **{name: value for name, value in self._options.items() if name != "chat_template"},
        )
        rendered, marks = found
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if rendered[0] != text or len(marks[0]) != len(turns):
            return None
        by_turn = dict(zip(turns, marks[0], strict=True))
        return [self._closed_mark(text, *by_turn[turn]) for turn in wanted]

    def _closed_mark(self, text: str, start: int, end: int) -> Span:
        if not self.codec.ends_special(text[start:end]):
            end += self.codec.leading_special(text[end : end + 200])
        return start, end

    @cached_property
    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"chat_template": self.source} if self.source else {}
        if not hasattr(self.tokenizer, "has_thinking"):  # what mlx-lm's wrapper does by itself
            options["enable_thinking"] = all(len(self.codec.ids(text)) == 1 for text in _THINKING)
        return options

    @cached_property
    def closing(self) -> str | None:
        """The special token that follows an assistant turn's text, such as `<|im_end|>`; None where none does."""
        try:
            text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}])
        except Exception:
            return None
        after = text.split(MARK)[-1].lstrip()
        return after[: self.codec.leading_special(after)] or None


def _template_text(source: str) -> str:
    if "{%" in source or "{{" in source:
        return source
    path = Path(source).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template: {source!r} is neither a Jinja template nor a readable file ({_one_line(error)})"
        ) from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
