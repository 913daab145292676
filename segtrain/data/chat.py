"""Chat templates: a conversation as text, and which parts of that text the assistant wrote.

A part begins where the prompt of its turn ends: the conversation so far, rendered with a generation prompt, must be a prefix of
the whole rendering. It ends with the turn's end-of-turn token. Templates may rewrite history, say by removing the reasoning
from all but the last turn, and then neither prefix need hold; such a turn is found by what the template puts around it,
learnt from a rendering in which a mark stands for the turn's text. A template for which that fails too is
refused with the reason: a mask that might be wrong is worse than none.

Templates run in the sandbox of transformers. Positions here are in characters of the rendered text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from segtrain.data.formats import Message
from segtrain.data.rows import Origin
from segtrain.data.tokenizer import Codec
from segtrain.errors import UserError

# Private-use characters: in no template's vocabulary, untouched by trimming.
MARK = "\ue0f1\ue0f2\ue0f3"
_THINKING = ("<think>", "</think>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation's text and the [start, end) of each supervised turn in it, in order."""

    text: str
    spans: list[tuple[int, int]]


class MaskError(ValueError):
    """Why a turn can't be located in the rendered text."""


class ChatTemplate:
    """The chat template of a tokenizer, or the recipe's own (`source`: Jinja text or the path of a file with it)."""

    def __init__(self, codec: Codec, source: str | None = None) -> None:
        self.codec, self.tokenizer = codec, codec.tokenizer
        self.source = _template_text(source) if source else None

    @property
    def exists(self) -> bool:
        known = getattr(self.tokenizer, "has_chat_template", None)
        return self.source is not None or bool(self.tokenizer.chat_template if known is None else known)

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, ask: bool = False) -> str:
        """The conversation as text; with `ask`, the header of an assistant turn follows. Raises what the template raises."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=ask, tokenize=False, **self._options
        )
        assert isinstance(text, str)
        return text

    def turns(
        self, messages: list[Message], tools: list[Any] | None, wanted: Sequence[int], origin: Origin
    ) -> Rendered:
        """The whole conversation and the spans of the assistant turns `wanted`. Raises UserError."""
        self.require(origin)
        try:
            text = self.render(messages, tools)
        except Exception as error:
            raise UserError(f"{origin}: the chat template refuses this row: {_one_line(error)}") from error
        try:
            spans = _Locator(self, messages, tools, text).spans(wanted)
        except MaskError as error:
            raise UserError(
                f"{origin}: the chat template can't be masked turn by turn: {error}; use supervise: all, or give "
                "a template with {% generation %} marks as data.chat_template"
            ) from error
        return Rendered(text, spans)

    def require(self, origin: Origin) -> None:
        if not self.exists:
            raise UserError(
                f"{origin}: this is a chat row, but the model's tokenizer has no chat template (a base model?); give "
                "one as data.chat_template (Jinja text or a file), use an instruct model, or prompt/completion rows"
            )

    @cached_property
    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"chat_template": self.source} if self.source else {}
        # mlx-lm's wrapper turns thinking on by itself for tokenizers that know it; do the same for a bare one.
        if not hasattr(self.tokenizer, "has_thinking") and _knows_thinking(self.codec):
            options["enable_thinking"] = True
        return options

    @cached_property
    def closing(self) -> str | None:
        """What ends an assistant turn, from its text on: `<|im_end|>`; None where that can't be told."""
        try:
            text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}])
        except Exception:
            return None
        if self.codec.specials is None or text.count(MARK) != 1:
            return None
        after = text.split(MARK)[1].lstrip()
        match = re.match(f"(?:{self.codec.specials.pattern})", after)
        return match[0] if match else None

    @cached_property
    def stops(self) -> bool:
        """Whether assistant turns end with a token at which generation can stop."""
        return self.closing is not None


class _Locator:
    """Finds assistant turns in one rendered conversation."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[Any] | None, text: str) -> None:
        self.template, self.messages, self.tools, self.text = template, messages, tools, text

    def spans(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for turn in wanted:
            floor = found[-1][1] if found else 0
            start = self.start(turn, floor)
            span = start, self.end(turn, start)
            self.check(turn, span, floor)
            found.append(span)
        return found

    def start(self, turn: int, floor: int) -> int:
        """Where the turn's own text begins: just after its prompt."""
        asked = self.attempt(lambda: self.template.render(self.messages[:turn], self.tools, ask=True))
        if asked is not None and self.text.startswith(asked):
            return len(asked)
        return self.start_by_header(turn, asked)

    def start_by_header(self, turn: int, asked: str | None) -> int:
        """For a prompt that is no prefix: the turn's header, found before a mark in the turn's place."""
        marked = self.marked(turn)
        if marked is None:
            raise MaskError(f"the prompt of turn {turn + 1} isn't a prefix of the conversation")
        before = marked[0]
        header = self.header(turn, asked)
        at = before.rfind(header) + len(header) if header else len(before)
        if at < len(header) or self.text[:at] != before[:at]:
            raise MaskError(f"what stands before turn {turn + 1} depends on the turn itself")
        return at

    def header(self, turn: int, asked: str | None) -> str:
        """What opens an assistant turn, whether the model writes it or is prompted with it."""
        so_far = self.attempt(lambda: self.template.render(self.messages[:turn], self.tools))
        shown = self.attempt(lambda: self.template.render([*self.messages[:turn], _marked_message({})], self.tools))
        if asked is None or so_far is None or shown is None or not asked.startswith(so_far):
            return ""
        if not shown.startswith(so_far):
            return asked[len(so_far) :]
        return _common_prefix(asked[len(so_far) :], shown[len(so_far) :].split(MARK)[0])

    def end(self, turn: int, start: int) -> int:
        """Just after the turn's end-of-turn token."""
        if turn == len(self.messages) - 1:
            return start + self.closed(self.text[start:])
        through = self.attempt(lambda: self.template.render(self.messages[: turn + 1], self.tools))
        if through is not None and self.text.startswith(through):
            return start + self.closed(self.text[start : len(through)])
        marked = self.marked(turn)
        if marked is not None and self.text.endswith(marked[1]) and not self.messages[turn].get("tool_calls"):
            own_end = len(self.text) - len(marked[1])
            return own_end + self.opening_close(marked[1])
        return self.end_by_closing(turn, start)

    def end_by_closing(self, turn: int, start: int) -> int:
        closing = self.template.closing
        at = self.text.find(closing, start) if closing else -1
        if at < 0 or closing is None:
            raise MaskError(f"the end of turn {turn + 1} can't be told")
        if closing in str(self.messages[turn].get("content")):
            raise MaskError(f"turn {turn + 1} contains {closing!r} itself")
        return at + len(closing)

    def opening_close(self, after: str) -> int:
        """The length of the end-of-turn token at the start of `after` (0: there is none)."""
        specials = self.template.codec.specials
        match = re.match(rf"\s*(?:{specials.pattern})", after) if specials else None
        return len(match[0]) if match else 0

    def closed(self, piece: str) -> int:
        """The length of a turn that runs to the end of `piece`: through its end-of-turn token, or all of it."""
        codec, closing = self.template.codec, self.template.closing
        if codec.specials is None:
            return len(piece)
        tail = re.search(rf"(?:{codec.specials.pattern}|\s)*$", piece)
        assert tail is not None
        ends = codec.stop_texts | ({closing} if closing else set())
        cuts = [match.end() for match in codec.specials.finditer(piece, tail.start())]
        stops = [cut for cut in cuts if any(piece.endswith(end, 0, cut) for end in ends if end)]
        return (stops or cuts or [len(piece)])[0]

    def marked(self, turn: int) -> tuple[str, str] | None:
        """The text before and after the turn's content, from a rendering with a mark in its place."""
        messages = list(self.messages)
        messages[turn] = _marked_message(messages[turn])
        text = self.attempt(lambda: self.template.render(messages, self.tools))
        if text is None or text.count(MARK) != 1:
            return None
        before, after = text.split(MARK)
        return before, after

    def check(self, turn: int, span: tuple[int, int], floor: int) -> None:
        """The span must follow the one before and hold what the turn says (its answer, where reasoning may go)."""
        start, end = span
        if not floor <= start < end:
            raise MaskError(f"turn {turn + 1} takes no place of its own")
        answer = str(self.messages[turn].get("content") or "").split("</think>")[-1].strip()
        if answer not in self.text[start:end]:
            raise MaskError(f"the text of turn {turn + 1} isn't where its prompt ends")

    @staticmethod
    def attempt(render: Callable[[], str]) -> str | None:
        """A rendering of part of a conversation; templates may refuse that (say, one without a user turn)."""
        try:
            return render()
        except Exception:
            return None


def _marked_message(message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name not in ("reasoning_content", "thinking")}
    return {"role": "assistant", **kept, "content": MARK}


def _common_prefix(a: str, b: str) -> str:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return a[:count]


def _knows_thinking(codec: Codec) -> bool:
    return all(len(codec.ids(text)) == 1 for text in _THINKING)


def _template_text(source: str) -> str:
    if "{%" in source or "{{" in source:
        return source
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"data.chat_template: {source!r} is neither a Jinja template nor a file")
    return path.read_text(encoding="utf-8")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
