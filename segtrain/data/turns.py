"""What a conversation teaches, by definition.

The context of turn k is what inference would show, `asked = render(messages[:k], ask)`; its target is what follows it
in `shown = render(messages[:k + 1])`, through the token that ends a turn. Tried in this order:

- whole: the full rendering continues every `asked` and every `shown`, so that one row holds all turns;
- each: `shown` continues `asked`, but no rendering holds all turns (history is rewritten): a row a turn;
- switch: the prompt opens a thought that the turn lacks, or the other way round: the template's own switch is set so
  that both agree;
- marks: the prompt is no beginning of the turn, but `{% generation %}` marks say what the assistant writes;
- graft: `asked`, then what `shown` has after the opening that both share: what inference will see, though no rendering
  shows it.

All else is refused: a mask that might be wrong is worse than none. Positions are in characters of a rendered text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from segtrain.data.chat import MARK, ChatTemplate, Span, one_line
from segtrain.data.formats import Message
from segtrain.data.tokenizer import Codec

How: TypeAlias = Literal["whole", "each", "switch", "marks", "graft"]
Turns: TypeAlias = Literal["auto", "whole", "each"]

_SHOWN = 60  # characters of a text in a message


class MaskError(ValueError):
    """Why a turn's target can't be told."""


@dataclass(slots=True)
class Target:
    """What of a row's text is learnt of one turn (its index among the messages)."""

    turn: int
    start: int
    end: int


@dataclass(slots=True)
class Laid:
    """A row to be: its text, the turns' targets in order, how it was found, and the renderings it comes from."""

    text: str
    targets: list[Target]
    how: How
    view: "View"


class View:
    """The renderings of one conversation with one setting of the template's arguments, each made once."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None, kwargs: Mapping[str, Any]
    ) -> None:
        self.template, self.messages, self.tools, self.kwargs = template, messages, tools, kwargs
        self._made: dict[tuple[int, bool], str | Exception] = {}
        self._targets: dict[int, Target] = {}

    def render(self, count: int, ask: bool = False) -> str:
        """The first `count` messages. Raises MaskError with the template's words."""
        found = self._made.get((count, ask))
        if found is None:
            found = self._made[count, ask] = self._try(count, ask)
        if isinstance(found, str):
            return found
        what = f"for the prompt of turn {count + 1}" if ask else f"for the turns up to {count}"
        raise MaskError(f"the template fails {what}: {one_line(found)}") from found

    def _try(self, count: int, ask: bool) -> str | Exception:
        try:
            return self.of(self.messages[:count], ask)
        except Exception as error:
            return error

    def of(self, messages: Sequence[Message], ask: bool = False) -> str:
        return self.template.render(messages, self.tools, ask=ask, kwargs=self.kwargs)

    def asked(self, turn: int) -> str:
        return self.render(turn, ask=True)

    def shown(self, turn: int) -> str:
        return self.render(turn + 1)

    @property
    def full(self) -> str:
        return self.render(len(self.messages))

    def continues(self, turn: int) -> bool:
        """Whether what is shown of a turn continues its prompt, no token straddling the seam."""
        asked, shown = self.asked(turn), self.shown(turn)
        at = len(asked)
        return len(shown) > at and shown.startswith(asked) and not self.template.codec.splits_token(shown, at)

    def target(self, turn: int) -> Target:
        """The target in `shown`, where that continues `asked`."""
        found = self._targets.get(turn)
        if found is None:
            start = len(self.asked(turn))
            length = target_length(self.template, self.shown(turn)[start:])
            found = self._targets[turn] = Target(turn, start, start + length)
        return found

    def holds(self, turns: Sequence[int]) -> bool:
        """Whether the full rendering has every turn's prompt and target as they are by definition."""
        full, last = self.full, len(self.messages) - 1
        return all(turn == last or full.startswith(self.shown(turn)[: self.target(turn).end]) for turn in turns)


class Definition:
    """The rows of one conversation. `kwargs`: arguments of the template that hold for this conversation only."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.template, self.messages, self.tools, self.kwargs = template, messages, tools, dict(kwargs or {})
        self.plain = View(template, messages, tools, self.kwargs)
        self._switched: list[View] | None = None

    def askable(self, turn: int) -> bool:
        """Whether inference can ask for the turn; not so for a greeting, where the template needs a user's turn."""
        if any(message["role"] == "user" for message in self.messages[:turn]):
            return True
        try:
            self.plain.asked(turn)
        except MaskError:
            return False
        return True

    def rows(self, wanted: Sequence[int], mode: Turns = "auto") -> list[Laid]:
        """The rows that teach the turns `wanted`. Raises MaskError."""
        rows = self._rows(wanted, mode)
        if mode == "whole" and len(rows) > 1:
            apart = (turn for turn in wanted if not self.plain.continues(turn) or not self.plain.holds([turn]))
            turn = next(apart, wanted[0])
            raise MaskError(
                f"no rendering holds all turns as they are asked for (turn {turn + 1}: "
                f"{parting(self.plain.full, self.plain.shown(turn))}), and data.turns is whole"
            )
        return rows

    def _rows(self, wanted: Sequence[int], mode: Turns) -> list[Laid]:
        for view, how in self.views():
            if self.answers(view, wanted):
                if mode != "each" and view.holds(wanted):
                    return [Laid(view.full, [view.target(turn) for turn in wanted], how or "whole", view)]
                return [self.alone(view, turn, how or "each") for turn in wanted]
        return self._by_marks(wanted) or [self._one(turn) for turn in wanted]

    def one(self, turn: int) -> Laid:
        """The row that ends with `turn`. Raises MaskError."""
        return self._by_view(turn) or next(iter(self._by_marks([turn])), None) or self._graft(turn)

    def _one(self, turn: int) -> Laid:
        return self._by_view(turn) or self._graft(turn)

    def _by_view(self, turn: int) -> Laid | None:
        for view, how in self.views():
            if self.answers(view, [turn]):
                return self.alone(view, turn, how or "each")
        return None

    def alone(self, view: View, turn: int, how: How) -> Laid:
        """The row that ends with a turn which continues its prompt."""
        return Laid(view.shown(turn), [view.target(turn)], how, view)

    def views(self) -> Iterator[tuple[View, How | None]]:
        """The conversation as inference shows it, then with the template's thinking switch set otherwise."""
        yield self.plain, None
        if self._switched is None:
            settings = [setting for setting in self.template.switched() if not setting.keys() & self.kwargs.keys()]
            self._switched = [
                View(self.template, self.messages, self.tools, {**self.kwargs, **setting}) for setting in settings
            ]
        for view in self._switched:
            yield view, "switch"

    def answers(self, view: View, turns: Sequence[int]) -> bool:
        """Whether every turn continues its prompt; what the plain view fails with is raised."""
        try:
            return all(view.continues(turn) for turn in turns)
        except MaskError:
            if view is self.plain:
                raise
            return False

    def _by_marks(self, wanted: Sequence[int]) -> list[Laid]:
        """One row by the template's own marks, where each assistant turn has one."""
        if not self.template.has_marks:
            return []
        text = self.plain.full
        marks = self.template.marks(self.messages, self.tools, text, self.kwargs)
        turns = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(marks) != len(turns):
            return []
        spans = {turn: self._closed(text, *mark) for turn, mark in zip(turns, marks, strict=True)}
        return [Laid(text, [Target(turn, *spans[turn]) for turn in wanted], "marks", self.plain)]

    def _closed(self, text: str, start: int, end: int) -> Span:
        """A mark without what follows its end token, or with the one that follows it."""
        codec = self.template.codec
        inner = start + target_length(self.template, text[start:end])
        if codec.ends_special(text[start:inner]):
            return start, inner
        return start, end + codec.leading_special(text[end : end + 200])

    def _graft(self, turn: int) -> Laid:
        view = self.plain
        asked, shown = view.asked(turn), view.shown(turn)
        cut = self._shared_opening(turn, asked, shown)
        rest = shown[cut:]
        length = target_length(self.template, rest)
        if not rest.strip():
            raise MaskError(f"turn {turn + 1} has no text after its prompt ({parting(asked, shown)})")
        return Laid(asked + rest, [Target(turn, len(asked), len(asked) + length)], "graft", view)

    def _shared_opening(self, turn: int, asked: str, shown: str) -> int:
        """Where what opens the turn ends in both texts, at the edge of a token. Raises MaskError."""
        floor = self._history(turn, asked)
        cut = min(common(asked, shown), common(asked, self._marked(turn) or asked))
        if cut < floor or asked[:floor] != shown[:floor]:
            raise MaskError(f"what stands before turn {turn + 1} depends on the turn itself: {parting(asked, shown)}")
        while cut > floor and not (_apart(asked, shown, cut) and joins(self.template.codec, floor, cut, asked, shown)):
            cut -= 1
        return cut

    def _history(self, turn: int, asked: str) -> int:
        """The length of the part of a prompt that stands before the turn is opened."""
        try:
            so_far = self.plain.render(turn)
        except MaskError:
            last = str(self.messages[turn - 1].get("content") or "").strip() if turn else ""
            return asked.rfind(last) + len(last)
        floor = common(asked, so_far)
        while floor and self.template.codec.splits_token(asked, floor):
            floor -= 1
        return floor

    def _marked(self, turn: int) -> str | None:
        """The turn with a mark before all that it says, so that nothing said is taken for a part of the opening."""
        said = ("content", "reasoning_content", "reasoning", "thinking")
        message = self.messages[turn]
        marked = {key: MARK + value for key, value in message.items() if key in said and value and type(value) is str}
        try:
            return self.plain.of([*self.messages[:turn], {**message, **marked}])
        except Exception:
            return None


def pair(good: Definition, bad: Definition) -> tuple[Laid, Laid]:
    """The last turns of two conversations, with one setting of the template for both where there is one."""
    last, other = len(good.messages) - 1, len(bad.messages) - 1
    for (view, how), (beside, _) in zip(good.views(), bad.views(), strict=False):
        if good.answers(view, [last]) and bad.answers(beside, [other]):
            return good.alone(view, last, how or "whole"), bad.alone(beside, other, how or "whole")
    return good.one(last), bad.one(other)


def target_length(template: ChatTemplate, piece: str) -> int:
    """The length of a target within `piece`, which begins it: through the last token of the closing run that ends a
    turn; all of the first run of special tokens where none does; all of it where it closes with no special token."""
    specials = template.codec.trailing_specials(piece)
    if not specials:
        return len(piece)
    ends = [end for start, end in specials if piece[start:end] in template.ends]
    return ends[-1] if ends else _first_run(specials)


def _first_run(spans: list[Span]) -> int:
    """The end of the first run of spans that touch."""
    end = spans[0][1]
    for start, stop in spans[1:]:
        if start != end:
            break
        end = stop
    return end


def common(a: str, b: str) -> int:
    """The length of the longest common beginning."""
    if a == b:
        return len(a)
    lo, hi = 0, min(len(a), len(b))
    while lo < hi:  # slices compare much faster than characters one by one
        middle = (lo + hi + 1) // 2
        lo, hi = (middle, hi) if a[:middle] == b[:middle] else (lo, middle - 1)
    return lo


def _apart(asked: str, shown: str, cut: int) -> bool:
    """Whether no word of either text goes over `cut`."""
    before = asked[cut - 1 : cut].isalnum()
    return not (before and (asked[cut : cut + 1].isalnum() or shown[cut : cut + 1].isalnum()))


def joins(codec: Codec, floor: int, cut: int, *texts: str) -> bool:
    """Whether each text, tokenised from `floor` on, has the edge of a token at `cut`."""
    for text in texts:
        tail = text[floor : cut + _SHOWN]
        if codec.splits_token(text, cut):
            return False
        head = codec.ids(tail[: cut - floor])
        if codec.ids(tail)[: len(head)] != head:
            return False
    return True


def parting(asked: str, shown: str) -> str:
    """Both texts where they part."""
    at = common(asked, shown)
    lo = max(0, at - _SHOWN // 3)
    return f"inference shows {asked[lo : at + _SHOWN]!r}, the conversation {shown[lo : at + _SHOWN]!r}"
