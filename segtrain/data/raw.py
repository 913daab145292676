"""A row as a source yields it: not yet parsed where it came from a file, so that windows of rows stay small."""

import json
import re
from dataclasses import dataclass
from typing import Any

from segtrain.data.rows import Origin
from segtrain.errors import UserError

BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Raw:
    """One row: the bytes of a JSON line, or the mapping that a data set library yields."""

    payload: bytes | dict[str, Any]
    origin: Origin

    def value(self) -> dict[str, Any]:
        """The row as a mapping. Raises UserError naming file and line."""
        return parse_line(self.payload, self.origin) if isinstance(self.payload, bytes) else self.payload

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(self.payload) if isinstance(self.payload, bytes) else len(repr(self.payload))

    @property
    def blank(self) -> bool:
        return isinstance(self.payload, bytes) and not self.payload.strip()


def parse_line(line: bytes, origin: Origin) -> dict[str, Any]:
    """One JSON line as a mapping. Raises UserError naming file, line and what is wrong."""
    try:
        text = line.decode("utf-8-sig")  # files that were joined have a mark within them
    except UnicodeDecodeError as error:
        what = "this looks like UTF-16" if line[:2] in (b"\xff\xfe", b"\xfe\xff") else "not UTF-8"
        raise UserError(
            f"{origin}: byte {error.start + 1} is 0x{line[error.start]:02x}, {what}; save the file as UTF-8"
        ) from None
    try:
        value = json.loads(text)
    except RecursionError:
        raise UserError(f"{origin}: the JSON is nested too deeply to be read") from None
    except ValueError as error:
        raise UserError(f"{origin}: not valid JSON ({_reason(error)}){_hint(text)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{origin}: a row must be a JSON object, not {kind(value)}{_hint(text)}")
    if _SURROGATE.search(line):
        _refuse_surrogates(text, value, origin)
    return value


def kind(value: Any) -> str:
    """How messages call a JSON value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error).split(";")[0]


def _hint(text: str) -> str:
    stripped = text.strip()
    if stripped.startswith("["):
        return "; a file that is one JSON array must become one object a line, e.g. `jq -c '.[]' FILE`"
    if "\0" in stripped:
        return "; there are NUL bytes in it, so the file was cut off or overwritten while it was written"
    if stripped == "{":
        return "; each row must be on one line, e.g. `jq -c . FILE`"
    if re.search(r",\s*[}\]]", stripped):
        return "; remove the trailing comma"
    return ""


def _refuse_surrogates(text: str, value: dict[str, Any], origin: Origin) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise UserError(f"{origin}: \\u{code:04x} is half of a surrogate pair and stands for no character") from None
