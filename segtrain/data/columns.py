"""A guess at what the fields of an unrecognised row are, for the message that refuses it."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

Fields = tuple[str, ...]
OURS = ("prompt", "completion", "chosen", "rejected", "text", "instruction", "output")  # names that mean one thing
BY_ORDER: tuple[Fields, ...] = (("chosen", "rejected"), ("prompt", "completion"), ("text",))


def guessed(forms: Sequence[Fields], row: Mapping[str, Any]) -> dict[str, str]:
    """Our field names -> the row's, where all of a form's fields can be told: misspelt ones, else texts by order."""
    for fields in forms:
        found = _alike(fields, row)
        if len(found) == len(fields):
            return {ours: theirs for ours, theirs in found.items() if ours != theirs}
    known_first = sorted(BY_ORDER, key=lambda fields: not any(name in row for name in fields))
    for fields in (fields for fields in known_first if fields in forms):
        lacking = [name for name in fields if name not in row]
        texts = [key for key, value in row.items() if isinstance(value, str) and key not in OURS]
        known = any(name in row for name in fields)
        if len(lacking) == len(texts) and (known or fields != BY_ORDER[0]):
            return dict(zip(lacking, texts, strict=True))
    return {}


def _alike(fields: Fields, row: Mapping[str, Any]) -> dict[str, str]:
    """The row's field for each of ours: itself, or one that is spelt nearly so and means nothing else."""
    found = {name: name for name in fields if name in row}
    for name in fields:
        left = [key for key in row if key not in found.values() and key not in OURS]
        near = difflib.get_close_matches(name, left, n=1, cutoff=0.75)
        if name not in found and near:
            found[name] = near[0]
    return found
