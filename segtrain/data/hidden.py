"""What a row says and the template doesn't show: refused where it is the answer, counted and said otherwise.

Text that isn't found as it stands may have been trimmed or escaped; whether it is shown at all is then told by
rendering the turn with something else in its place.
"""

import json
from collections.abc import Iterator
from typing import Any

from segtrain.data.chat import MARK
from segtrain.data.formats import REASONING, Message, thought_of
from segtrain.data.turns import Laid, MaskError, Target, View

THOUGHT = "thoughts aren't shown"
CONTENT = "text beside a tool call isn't shown"
CALL = "a part of a tool call isn't shown"
MESSAGE = "a message isn't shown"
TOOLS = "tools aren't shown"


class HiddenError(MaskError):
    """What a turn says and the template leaves out."""


def hidden(laid: Laid) -> set[str]:
    """What of the turns learnt in a row, and of what stands before them, the template leaves out.

    Raises MaskError where that is a turn's answer or a tool call.
    """
    found: set[str] = set()
    for target in laid.targets:
        found |= _of_turn(laid, target)
    found |= _of_context(laid)
    return found


def _of_turn(laid: Laid, target: Target) -> set[str]:
    view, turn = laid.view, target.turn
    message, text = view.messages[turn], laid.text[target.start : target.end]
    found: set[str] = set()
    calls = message.get("tool_calls") or []
    for number, call in enumerate(calls):
        shown = _parts_shown(view, turn, number, text)
        if not any(shown):
            raise HiddenError(f"it doesn't show the tool call {_function(call).get('name')!r} of turn {turn + 1}")
        if not all(shown):
            found.add(CALL)
    thought, answer = thought_of(message)
    if thought and thought not in text and not _differs(view, turn, _with_thought(message)):
        found.add(THOUGHT)
    if answer and answer not in text and not _differs(view, turn, {**message, "content": MARK}):
        if not calls:
            raise HiddenError(f"it doesn't show the text of turn {turn + 1}")
        found.add(CONTENT)
    return found


def _differs(view: View, turn: int, message: Message) -> bool:
    """Whether another message in the turn's place changes what is shown; a template that fails looks at it."""
    try:
        return view.of([*view.messages[:turn], message]) != view.shown(turn)
    except Exception:
        return True


def _with_thought(message: Message) -> Message:
    """The turn with another thought where it has one."""
    changed = {key: MARK for key in REASONING if message.get(key)}
    content = str(message.get("content") or "")
    if not changed and "</think>" in content:
        changed = {"content": f"<think>{MARK}</think>{content.split('</think>')[-1]}"}
    return {**message, **changed}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def _parts_shown(view: View, turn: int, number: int, text: str) -> list[bool]:
    """Whether a tool call's name, and each value among its arguments, are in the turn's text."""
    function = _function(view.messages[turn]["tool_calls"][number])
    parts = _leaves({"name": function.get("name"), "arguments": function.get("arguments")})
    return [
        _said(value, text) or _differs(view, turn, _changed(view.messages[turn], number, path))
        for path, value in parts
        if value is not None and value != "" and not isinstance(value, bool)  # too short to tell anything
    ]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, inner in items:
        yield from _leaves(inner, (*path, key))


def _said(value: Any, text: str) -> bool:
    """Whether a value stands in a text, as it is or in JSON."""
    if not isinstance(value, str):
        return json.dumps(value) in text
    return value in text or json.dumps(value)[1:-1] in text or json.dumps(value, ensure_ascii=False)[1:-1] in text


def _changed(message: Message, number: int, path: tuple[Any, ...]) -> Message:
    """The turn with something else at `path` of one of its tool calls."""
    calls = json.loads(json.dumps(message["tool_calls"]))
    inner: Any = _function(calls[number])
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = MARK
    return {**message, "tool_calls": calls}


def _of_context(laid: Laid) -> set[str]:
    """Whether the tools, and the messages before the last target, are shown."""
    view, found = laid.view, set()
    last = laid.targets[-1].turn
    for number, message in enumerate(view.messages[:last]):
        content = str(message.get("content") or "").strip()
        if message["role"] != "assistant" and content not in laid.text and not _changes(view, last, number):
            found.add(MESSAGE)
    if view.tools:
        names = [str(_function(tool).get("name", "")) for tool in view.tools]
        if not all(name in laid.text for name in names) and _same_without_tools(view, last):
            found.add(TOOLS)
    return found


def _changes(view: View, turn: int, number: int) -> bool:
    """Whether another text of an earlier message changes the prompt of `turn`."""
    messages = list(view.messages[:turn])
    messages[number] = {**messages[number], "content": MARK}
    try:
        return view.of(messages, ask=True) != view.asked(turn)
    except Exception:
        return True


def _same_without_tools(view: View, turn: int) -> bool:
    try:
        return view.template.render(view.messages[:turn], None, ask=True, kwargs=view.kwargs) == view.asked(turn)
    except Exception:
        return False
