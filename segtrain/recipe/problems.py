"""Validation errors as sentences: one line each, with the YAML path, the value and a suggestion for a misspelt key."""

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

_EXPECTED = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text (put it in quotes)",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping of keys",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True)
class Problem:
    """A fault that concerns several keys of a section; `key` is the one to point at."""

    key: str
    text: str


def problems_error(*problems: Problem) -> PydanticCustomError:
    """The exception for a section's validator to raise; `render` makes one line of each problem."""
    return PydanticCustomError("problems", "inconsistent", {"problems": list(problems)})


def lines_of(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> list[str]:
    """One line for each error; `origins` names the key that the user wrote where it isn't the path itself."""
    found = error.errors()
    inner = [one["loc"] for one in found]
    details = [one for one in found if not (one["type"] == "too_short" and _has_inner(one["loc"], inner))]
    return [line for detail in details for line in _lines(detail, model, origins)]


def _has_inner(location: tuple[int | str, ...], others: Sequence[tuple[int | str, ...]]) -> bool:
    """Whether an item of this list is wrong itself; pydantic then calls the list too short as well."""
    return any(len(other) > len(location) and other[: len(location)] == location for other in others)


def listing(lines: typing.Iterable[str], source: str) -> str:
    """`source: line` for a single line, otherwise a list under a count."""
    lines = list(lines)
    if len(lines) == 1:
        return f"{source}: {lines[0]}"
    return "\n".join([f"{source} has {len(lines)} errors:", *(f"  {line}" for line in lines)])


def suggestion(key: str, valid: Sequence[str]) -> str:
    """`; did you mean X?`, or the valid keys where nothing is near."""
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; the keys here are {', '.join(valid)}"


def _lines(detail: ErrorDetails, model: type[BaseModel], origins: Mapping[str, str]) -> Iterator[str]:
    path = _path(detail["loc"])
    if detail["type"] == "problems":
        for problem in detail["ctx"]["problems"]:
            yield f"{_written(f'{path}.{problem.key}', origins)}: {problem.text}"
    elif detail["type"] == "extra_forbidden":
        yield f"{_written(path, origins)}: unknown key{_place(detail['loc'], model)}"
    else:
        yield f"{_written(path, origins)} {_sentence(detail)}"


def _written(path: str, origins: Mapping[str, str]) -> str:
    """The key as the user wrote it: an alias, or what `--set` named, which may be a section above."""
    if path in origins:
        return origins[path]
    typed = [name for name, written in origins.items() if written.startswith("--set ")]
    above = next((name for name in typed if path.startswith((f"{name}.", f"{name}["))), None)
    return path if above is None else origins[above] + path.removeprefix(above)


def _sentence(detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return _EXPECTED[kind]
    if kind in ("string_type", "too_short") and value in (None, [], ()):
        return "must not be empty"
    if kind == "value_error":
        text = str(context["error"])
        return text if text.startswith("must") else f"is wrong: {text}"
    if kind == "literal_error":
        return f"must be one of {context['expected']}, not {_shown(value)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        return f"must be {words} {int(bound) if bound == int(bound) else bound}, not {_shown(value)}"
    return f"{_EXPECTED.get(kind, detail['msg'])}, not {_shown(value)}"


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    text = {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _path(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _place(location: Sequence[int | str], model: type[BaseModel]) -> str:
    """A suggestion from the keys of the same level, or the section where that very key lives."""
    key = str(location[-1])
    level = _model_at(model, location[:-1])
    elsewhere = [name for name, section in _sections(model).items() if key in section.model_fields]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}.{key}?"
    return suggestion(key, list((level or model).model_fields))


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in location:
        if current is None or isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        current = next(_models_in(field.annotation), None) if field else None
    return current


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, UnionType) and typing.get_origin(annotation) is None:
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)


def _sections(model: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    found = {name: next(_models_in(field.annotation), None) for name, field in model.model_fields.items()}
    return {name: section for name, section in found.items() if section is not None}
