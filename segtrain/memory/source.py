"""A model's `config.json` and size from a directory or the hub; no weights are read or fetched.

From a directory everything is read offline: a safetensors file's header says how large its arrays are. From the hub
come two small files, `config.json` and the safetensors index.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segtrain.errors import UserError, reason

INDEX = "model.safetensors.index.json"
NOT_TEXT = ("vision", "visual", "audio", "multi_modal", "image")
MAX_HEADER = 100 << 20
QUANTISATION = ("quantization", "quantization_config")


@dataclass(frozen=True)
class Source:
    """`weights`: bytes of the text model's arrays, where they could be told without reading them."""

    name: str
    config: dict[str, Any]
    weights: int | None = None


def find(name: str) -> Source:
    """The model `name`, a directory or a hub id. Raises UserError where there is none or its files can't be read."""
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(name, _json(path / "config.json", name), _local_bytes(path))
    if path.exists():
        raise UserError(f"model: {name} is a file; give the directory that holds config.json")
    config = _json(_fetched(name, "config.json"), name)
    try:
        index = _json(_fetched(name, INDEX), name)
    except UserError:
        return Source(name, config)  # a small model has one file and no index
    return Source(name, config, _indexed_bytes(index))


def described(config: Mapping[str, Any]) -> str:
    """How a model with this `config.json` is quantised, in words; empty where it isn't."""
    found: Any = next(
        (part[key] for part in (config, config.get("text_config") or {}) for key in QUANTISATION if part.get(key)), {}
    )
    if not found:
        return ""
    bits = f"{found['bits']} bits" if found.get("bits") else str(found.get("quant_method", "in its own way"))
    return f"{bits}, groups of {found['group_size']}" if found.get("group_size") else bits


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"model: {name} has no config.json, so it isn't a model directory") from error
    except (OSError, ValueError) as error:
        raise UserError(f"model: {path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"model: {path} isn't a JSON object")
    return found


def _fetched(name: str, file: str) -> Path:
    """One file of a hub model, from the local cache if it is there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    from segtrain.hub import advice, hub

    with hub() as unreachable:
        try:
            return Path(hf_hub_download(name, file))
        except HFValidationError as error:
            raise UserError(f"model: there is no directory {name}, and it isn't a hub id (owner/name)") from error
        except Exception as error:  # no network, gated, missing: the hub client's errors have no common base
            why = advice(name, unreachable) if unreachable else f"and {file} could not be fetched ({reason(error)})"
            raise UserError(f"model: there is no directory {name}, {why}") from error


def _indexed_bytes(index: dict[str, Any]) -> int | None:
    """The index's total, unless the files hold more than the text model."""
    names = index.get("weight_map") or {}
    total = (index.get("metadata") or {}).get("total_size")
    if not isinstance(total, int) or any(_is_other(name) for name in names):
        return None
    return total


def _local_bytes(path: Path) -> int | None:
    """Of all arrays in the directory's model files; None where there are none, or one can't be read."""
    files = sorted(path.glob("model*.safetensors"))
    try:
        return sum(size for file in files for size in _arrays(file)) or None
    except (OSError, ValueError, struct.error, KeyError, TypeError):
        return None


def _arrays(file: Path) -> Iterator[int]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER:
            raise ValueError(f"{file} has a header of {length} bytes")
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__" and not _is_other(name):
            first, last = entry["data_offsets"]
            yield last - first


def _is_other(name: str) -> bool:
    return any(part in name for part in NOT_TEXT)
