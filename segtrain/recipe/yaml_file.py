"""YAML text to plain values and back, and `--set a.b=c`.

Scalars follow YAML 1.2's core schema, so `1e-4` is a number, and `no` or `2024-01-01` are text. A key given twice is an
error. The resolvers live on subclasses: `yaml.SafeLoader` itself stays as it is for everybody else in the process.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from segtrain.errors import UserError, reason

MAX_NODES, MAX_DEPTH = 50_000, 40
_TAG = "tag:yaml.org,2002:"
_DIGITS = "-+.0123456789"
_BREAKS = frozenset("\r\x85\u2028\u2029")
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", _DIGITS),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        _DIGITS,
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Also quotes text that either schema would read as something else."""


def _quoted(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Text in double quotes where PyYAML's other styles would turn one of its characters into a line end."""
    return dumper.represent_scalar(_TAG + "str", text, style='"' if _BREAKS.intersection(text) else None)


_Dumper.add_representer(str, _quoted)
for _kind, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list(_first))
_Dumper.add_implicit_resolver(_TAG + "float", re.compile(f"^(?:{_SCALARS['float'][0]})$"), list(_DIGITS))


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError for anything else, with the file and line."""
    return mapping(_text(path), str(path))


def mapping(text: str, source: str) -> dict[str, Any]:
    """The mapping that `text` holds; `source` is its name in messages."""
    value = parse(text, source)
    if value is None:
        raise UserError(f"{source} is empty; `segtrain init` writes a recipe to start from")
    if not isinstance(value, dict):
        raise UserError(f"{source} must hold a mapping such as `model: ...`, not {_kind_of(value)}")
    return value


def parse(text: str, source: str) -> Any:
    """Any YAML value as dicts, lists, text, numbers, booleans and None."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Reader(loader, source).value(node, 0)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{source}{_line(error.problem_mark)}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {reason(error)}") from None
    except RecursionError:
        raise UserError(f"{source}: nested too deeply for a recipe") from None


def dump(value: Mapping[str, Any]) -> str:
    """YAML that this module and YAML 1.1 parsers read back as `value`."""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def assignments(texts: Sequence[str]) -> list[tuple[tuple[str, ...], Any]]:
    """`["train.steps=5", ...]` as (path, value). Raises UserError where one has another form."""
    return [_assignment(text) for text in texts]


def assign(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set `target[a][b] = value` in place, making the mappings in between."""
    for depth, name in enumerate(path[:-1], start=1):
        inner = target.get(name)
        if inner is None:
            inner = target[name] = {}
        if not isinstance(inner, dict):
            raise UserError(f"--set {'.'.join(path)}: {'.'.join(path[:depth])} is {inner!r}, which has no keys")
        target = inner
    target[path[-1]] = value


def _assignment(text: str) -> tuple[tuple[str, ...], Any]:
    name, equals, value = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise UserError(f"--set {text!r} must look like train.steps=100")
    return path, parse(value, f"--set {name.strip()}")


class _Reader:
    """Nodes to values, with a bound on size: an alias may repeat a large node many times."""

    def __init__(self, loader: _Loader, source: str) -> None:
        self.loader, self.source, self.nodes = loader, source, 0

    def value(self, node: yaml.Node, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise UserError(f"{self.source}{_line(node.start_mark)}: too large or nested too deeply for a recipe")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, depth + 1) for item in node.value]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node, depth + 1)
            where = f"{self.source}{_line(key_node.start_mark)}"
            if not isinstance(key, str):
                raise UserError(f"{where}: the key {key!r} must be text")
            if key in result:
                raise UserError(f"{where}: the key {key!r} is given twice; keep one of them")
            result[key] = self.value(value_node, depth + 1)
        return result

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text = str(node.value)
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    return int(text.replace("_", ""), 0)
                case "float":
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
                case "str":
                    return _paired(text)
        except UnicodeDecodeError:
            where = f"{self.source}{_line(node.start_mark)}"
            raise UserError(f"{where}: {text[:40]!r} has half of a surrogate pair, which is no character") from None
        except ValueError:
            pass
        else:
            raise UserError(f"{self.source}{_line(node.start_mark)}: the tag {node.tag} has no meaning in a recipe")
        raise UserError(f"{self.source}{_line(node.start_mark)}: {text[:40]!r} isn't a usable number")


def _paired(text: str) -> str:
    """JSON writes a character beyond 16 bits as two escapes, which YAML reads as two. Raises UnicodeDecodeError."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def _text(path: Path) -> str:
    if path.suffix in (".jsonl", ".parquet"):
        raise UserError(f"{path} holds data; name it as data.train in a recipe (`segtrain init` writes one)")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"recipe {path} doesn't exist; `segtrain init` writes one to start from") from None
    except IsADirectoryError:
        raise UserError(f"recipe {path} is a directory; give a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} isn't UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"recipe {path} can't be read: {reason}") from None


def _line(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f", line {mark.line + 1}"


def _kind_of(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the single value {str(value)[:40]!r}"
