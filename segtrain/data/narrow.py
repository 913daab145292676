"""Targets made smaller: by the template's own generation marks, and by `data.supervise_reasoning: false`."""

from dataclasses import replace

from segtrain.data.formats import REASONING, Message, thought_of
from segtrain.data.turns import Laid, Target, View, common

# What closes a thought in the templates of many families.
CLOSERS = (
    "</think>",
    "<|/think|>",
    "[/THINK]",
    "</thought>",
    "</thinking>",
    "</reasoning>",
    "<|END_THINKING|>",
    "<channel|>",
    "</seed:think>",
    "</longcat_think>",
    "<|think:end|>",
)


def within_marks(laid: Laid) -> Laid:
    """Where the template has marks and they say less than the definition, only what both say is learnt.

    The token that ends a turn is learnt whether it is marked or not; a turn that no mark touches stays as it is.
    """
    view = laid.view
    if laid.how in ("marks", "graft") or not view.template.has_marks or not laid.targets:
        return laid
    count = len(view.messages) if laid.how == "whole" else laid.targets[-1].turn + 1
    marks = view.template.marks(view.messages[:count], view.tools, laid.text, view.kwargs)
    targets = [part for target in laid.targets for part in _marked_parts(laid, target, marks)]
    return replace(laid, targets=targets)


def _marked_parts(laid: Laid, target: Target, marks: list[tuple[int, int]]) -> list[Target]:
    parts = [(max(target.start, lo), min(target.end, hi)) for lo, hi in marks if lo < target.end and hi > target.start]
    if not parts:
        return [target]
    lo, hi = parts[-1]
    rest = laid.text[hi : target.end]
    if laid.view.template.codec.only_specials(rest):
        parts[-1] = (lo, target.end)
    return [Target(target.turn, start, end) for start, end in parts]


def without_thought(laid: Laid) -> Laid:
    """The same row with every thought, an empty one too, as context."""
    targets = [_after_thought(laid, target) for target in laid.targets]
    return replace(laid, targets=[target for target in targets if target.start < target.end])


def _after_thought(laid: Laid, target: Target) -> Target:
    text, message = laid.text[target.start : target.end], laid.view.messages[target.turn]
    thought, answer = thought_of(message)
    limit = text.rfind(answer) if answer in text else len(text)  # the thought may say the answer too
    closed = [at + len(closer) for closer in CLOSERS if (at := text.rfind(closer, 0, limit)) >= 0]
    start = max(closed, default=0)
    if not start and thought:
        start = _by_difference(laid.view, target.turn, text)
    space = len(text[start:]) - len(text[start:].lstrip())
    return Target(target.turn, target.start + start + (space if start else 0), target.end)


def _by_difference(view: View, turn: int, text: str) -> int:
    """Where `text` goes on as it does without the thought."""
    message: Message = {key: value for key, value in view.messages[turn].items() if key not in REASONING}
    try:
        shown = view.of([*view.messages[:turn], message])
    except Exception:
        return 0
    end = shown.rfind(text[-1:]) + 1
    same = common(text[::-1], shown[:end][::-1])
    start = len(text) - same
    while start < len(text) and view.template.codec.splits_token(text, start):
        start += 1
    return start
