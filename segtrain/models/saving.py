"""A model directory written tensor by tensor, so that no more than one of them is in memory.

Names and files are mlx-lm's (`mlx_lm.utils.save`): `model*.safetensors` of at most 5 GiB with their index,
`config.json`, and what the source directory has beside its weights. mlx's own writer evaluates a file's tensors
together, which of most models is all of them.
"""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, get_total_parameters, make_shards, save_config

from segtrain.errors import RunFailed, reason

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
# Written anew, or of the source's own weights and quantisation.
NOT_COPIED = (CONFIG, INDEX, "hf_quant_config.json", "quantize_config.json", "adapter_config.json")
COPIED = [pattern for pattern in DEFAULT_ALLOW_PATTERNS if "safetensors" not in pattern]
DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}


def save(model: nn.Module, config: Mapping[str, Any], source: Path, out: Path) -> None:
    """Write `model` into the directory `out`, with what lies beside the weights in `source`.

    The model is empty afterwards: each of its arrays is dropped once it is written. Raises RunFailed where one can't be
    computed, OSError where the disk refuses.
    """
    for path in _beside(source):
        shutil.copyfile(path, out / path.name)
    vision = "vision_tower" in getattr(model, "model", {})  # as mlx-lm does
    save_config(dict(config), out / CONFIG, keep_vision_config=vision)
    _save_weights(model, out)


def _beside(source: Path) -> list[Path]:
    found = {path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in NOT_COPIED)


def _save_weights(model: nn.Module, out: Path) -> None:
    parameters = get_total_parameters(model)
    shards: list[dict[str, mx.array]] = make_shards(dict(tree_flatten(model.parameters())))
    total = sum(array.nbytes for shard in shards for array in shard.values())
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))  # the shards hold the only references
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        places |= dict.fromkeys(shard, name)
        write_tensors(out / name, shard)
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(places.items())),
    }
    (out / INDEX).write_text(json.dumps(index, indent=4))


def write_tensors(path: Path, arrays: dict[str, mx.array]) -> None:
    """A safetensors file of `arrays`, each computed when its turn comes and taken out of the mapping then."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end := end + array.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in list(arrays):
            file.write(_bytes(name, arrays.pop(name)))


def _bytes(name: str, array: mx.array) -> memoryview:
    """The computed array's bytes. What computing it took is freed for the next one."""
    try:
        array = mx.contiguous(array)
        mx.eval(array)
    except RuntimeError as error:
        raise RunFailed(f"{name} can't be read or computed: {reason(error)}") from error
    mx.clear_cache()
    view: Any = array
    return memoryview(view).cast("B") if array.size else memoryview(b"")
