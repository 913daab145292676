"""Where assistant turns stand in a rendered conversation, found from renderings of its parts."""

from collections.abc import Sequence
from typing import Any, Protocol

from segtrain.data.formats import Message
from segtrain.data.tokenizer import Codec

# Private-use characters: in no template, and untouched by trimming.
MARK = "\ue0f1\ue0f2\ue0f3"

_THOUGHT_END = "</think>"


class MaskError(ValueError):
    """Why a turn can't be located in the rendered text."""


class Template(Protocol):
    """What renders a conversation (`chat.ChatTemplate`)."""

    codec: Codec

    @property
    def closing(self) -> str | None: ...

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, ask: bool = False) -> str: ...


class Locator:
    """Finds the assistant turns of `messages` in `text`, their rendering."""

    def __init__(self, template: Template, messages: list[Message], tools: list[Any] | None, text: str) -> None:
        self.template, self.messages, self.tools, self.text = template, messages, tools, text

    def spans(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """[start, end) of each turn, the end-of-turn token included. Raises MaskError."""
        found: list[tuple[int, int]] = []
        floor = 0
        for turn in wanted:
            start = self._start(turn)
            end = self._end(turn, start)
            self._check(turn, start, end, floor)
            found.append((start, end))
            floor = end
        return found

    def _render(self, messages: Sequence[Message], ask: bool = False) -> str | None:
        """A rendering of part of a conversation; None where the template refuses it (say, one without a user turn)."""
        try:
            return self.template.render(messages, self.tools, ask=ask)
        except Exception:
            return None

    def _start(self, turn: int) -> int:
        """Just after the turn's prompt."""
        asked = self._render(self.messages[:turn], ask=True)
        if asked is not None and self.text.startswith(asked):
            return len(asked)
        return self._start_by_header(turn, asked)

    def _start_by_header(self, turn: int, asked: str | None) -> int:
        """Where the prompt is no prefix: after the header that stands before a mark in the turn's place."""
        marked = self._marked(turn)
        if marked is None:
            raise MaskError(f"the prompt of turn {turn + 1} isn't a prefix of the conversation")
        before, header = marked[0], self._header(turn, asked)
        at = before.rfind(header) + len(header) if header else len(before)
        if at < len(header) or self.text[:at] != before[:at]:
            raise MaskError(f"what stands before turn {turn + 1} depends on the turn itself")
        return at

    def _header(self, turn: int, asked: str | None) -> str:
        """What opens the turn both when the model is asked for it and when it is shown."""
        so_far = self._render(self.messages[:turn])
        shown = self._render([*self.messages[:turn], {"role": "assistant", "content": MARK}])
        if asked is None or so_far is None or shown is None or not asked.startswith(so_far):
            return ""
        opening = asked[len(so_far) :]
        return _common_prefix(opening, shown[len(so_far) :].split(MARK)[0]) if shown.startswith(so_far) else opening

    def _end(self, turn: int, start: int) -> int:
        """Just after the turn's end-of-turn token."""
        if turn == len(self.messages) - 1:
            return start + self._closed(self.text[start:])
        through = self._render(self.messages[: turn + 1])
        if through is not None and self.text.startswith(through):
            return start + self._closed(self.text[start : len(through)])
        marked = self._marked(turn)
        if marked is not None and self.text.endswith(marked[1]) and not self.messages[turn].get("tool_calls"):
            return len(self.text) - len(marked[1]) + self.template.codec.leading_special(marked[1])
        return self._end_by_closing(turn, start)

    def _end_by_closing(self, turn: int, start: int) -> int:
        closing = self.template.closing
        if closing is None or (at := self.text.find(closing, start)) < 0:
            raise MaskError(f"the end of turn {turn + 1} can't be told")
        if closing in str(self.messages[turn]):
            raise MaskError(f"turn {turn + 1} contains {closing!r} itself")
        return at + len(closing)

    def _closed(self, piece: str) -> int:
        """The length of a turn that runs to the end of `piece`: through its end-of-turn token, or all of it."""
        codec, closing = self.template.codec, self.template.closing
        specials = codec.trailing_specials(piece)
        if not specials:
            return len(piece)
        known = codec.stop_texts | ({closing} if closing else set())
        stops = [end for start, end in specials if piece[start:end] in known]
        return stops[0] if stops else _first_run(specials)

    def _marked(self, turn: int) -> tuple[str, str] | None:
        """The text before and after the turn's content, from a rendering with a mark in its place."""
        shown = {
            key: value for key, value in self.messages[turn].items() if key not in ("reasoning_content", "thinking")
        }
        messages = [*self.messages[:turn], {**shown, "content": MARK}, *self.messages[turn + 1 :]]
        text = self._render(messages)
        if text is None or text.count(MARK) != 1:
            return None
        before, after = text.split(MARK)
        return before, after

    def _check(self, turn: int, start: int, end: int, floor: int) -> None:
        """The span must follow the one before it and hold what the turn says; its reasoning may be gone."""
        if not floor <= start < end:
            raise MaskError(f"turn {turn + 1} takes no place of its own")
        message = self.messages[turn]
        answer = str(message.get("content") or "").split(_THOUGHT_END)[-1].strip()
        if not message.get("tool_calls") and answer not in self.text[start:end]:
            raise MaskError(f"the text of turn {turn + 1} isn't where its prompt ends")


def _first_run(spans: list[tuple[int, int]]) -> int:
    """The end of the first run of spans that touch."""
    end = spans[0][1]
    for start, stop in spans[1:]:
        if start != end:
            break
        end = stop
    return end


def _common_prefix(a: str, b: str) -> str:
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]
