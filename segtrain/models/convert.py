"""A quantised copy of a model directory, as `mlx_lm.convert` makes one, but a tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.convert import MODEL_CONVERSION_DTYPES

from segtrain.errors import UserError
from segtrain.models import quantise
from segtrain.models.load import load_unread
from segtrain.models.saving import save


def convert(source: Path, out: Path, kind: int | str, *, trust_remote_code: bool = False) -> None:
    """Write the model in `source`, quantised as `quantise.KINDS[kind]`, into the directory `out`.

    What isn't quantised takes the dtype that `config.json` names, as in mlx-lm. Raises UserError where nothing can be
    quantised, RunFailed, OSError.
    """
    model, config = load_unread(source, trust_remote_code=trust_remote_code)
    _cast(model, config)
    found = quantise.quantised(model, config, kind)
    if not quantise.packings(model):
        group = found["quantization"]["group_size"]
        raise UserError(f"quantize: {kind}: no layer of {source} has rows that groups of {group} divide; leave it out")
    save(model, found, source, out)


def _cast(model: nn.Module, config: Mapping[str, Any]) -> None:
    name = config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    if name not in MODEL_CONVERSION_DTYPES:
        return
    dtype, wanted = getattr(mx, name), getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if wanted(path) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))
