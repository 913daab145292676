"""Adapter files, `adapters.safetensors` and `adapter_config.json`, as mlx-lm reads them; their conversion to PEFT."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from segtrain import __version__
from segtrain.errors import RunFailed, UserError
from segtrain.lora import peft
from segtrain.recipe.schema import LoraRecipe
from segtrain.storage.checkpoint import ADAPTERS, CONFIG, newest_path, plain_json, read_tensors, tensors
from segtrain.storage.durable import replace_together

Arrays = dict[str, mx.array]
Format = Literal["mlx", "peft"]


def mlx_config(
    lora: LoraRecipe,
    *,
    model: str,
    layers_total: int,
    lowest: int,
    keys: Sequence[str],
    rank: int,
    scale: float,
    dropout: float,
    model_type: str = "",
    made_from: str | None = None,
) -> dict[str, Any]:
    """`adapter_config.json` for `mlx_lm.load(model, adapter_path=...)`, `mlx_lm fuse` and the server.

    mlx-lm wraps the last `num_layers` layers and in each the modules at `keys`, paths within a layer. Where that is
    more than was trained (a range of layers that stops before the last), the others keep B = 0 and do nothing. Our own
    `segtrain` entry, which mlx-lm ignores, holds what a conversion to PEFT needs. `made_from`: where `model` is a
    quantised copy, the model that it was made of.
    """
    return {
        "fine_tune_type": lora.kind,
        "model": model,
        "num_layers": layers_total - lowest,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": dropout, "keys": sorted(keys)},
        "segtrain": {
            "version": __version__,
            "model_type": model_type,
            "layers_total": layers_total,
            "use_rslora": lora.rslora,
            **({"made_from": made_from} if made_from else {}),
        },
    }


@dataclass(frozen=True)
class Adapter:
    """An adapter read from a directory: parameters by mlx-lm name, and the mlx-lm configuration."""

    params: Arrays
    config: dict[str, Any]


def read(source: Path, model: str | None = None) -> Adapter:
    """The adapter in a run, a checkpoint, an mlx-lm or a PEFT directory, or in one weights file of such a directory.

    `model` (a hub id or a directory) is the base model, where the one that the adapter names isn't on this machine.
    Raises UserError.
    """
    directory, weights = (source.parent, source) if source.is_file() else (source, source / ADAPTERS)
    peft_files = (directory / peft.WEIGHTS, directory / peft.PICKLE)
    if weights in peft_files or (source == directory and any(path.exists() for path in peft_files)):
        return Adapter(*peft.import_peft(directory, model))
    if not weights.exists():
        newest = newest_path(directory)
        hint = (
            f"its newest checkpoint {newest} has one" if newest else "give a run, a checkpoint or an adapter directory"
        )
        raise UserError(f"{directory} holds no {ADAPTERS}; {hint}")
    try:
        config = json.loads((directory / CONFIG).read_text())
        params = read_tensors(weights)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the adapter in {directory} can't be read: {error}") from error
    if not isinstance(config, dict) or config.get("fine_tune_type", "lora") not in ("lora", "dora"):
        raise UserError(f"{directory / CONFIG} isn't of a LoRA or DoRA adapter; only those are read")
    lora = config.get("lora_parameters")
    if not isinstance(lora, dict) or not {"rank", "scale"} <= lora.keys():
        raise UserError(f"{directory / CONFIG} has no lora_parameters with rank and scale")
    return Adapter(params, config | ({"model": model} if model else {}))


def export(run: Path, out: Path, format: Format, model: str | None = None) -> list[str]:
    """Write the adapter in `run` to the directory `out`; returns notices. `model`: see `read`.

    Raises UserError for what the format can't express, by name, and where `out` holds an adapter already.
    """
    adapter = read(run, model)
    notices: list[str] = []
    if format == "mlx":
        weights, config, names = adapter.params, adapter.config, (ADAPTERS, CONFIG)
    else:
        weights, config, notices = peft.to_peft(adapter.params, adapter.config)
        names = (peft.WEIGHTS, peft.CONFIG)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: there is a file of that name; give the name of a directory")
    for name in names:
        if (out / name).exists():
            raise UserError(f"{out / name} exists; give another --out or remove it")
    _write(out, names, weights, config)
    return notices


def _write(out: Path, names: tuple[str, str], weights: Arrays, config: Mapping[str, Any]) -> None:
    """Both files or neither. Raises RunFailed."""
    weights_name, config_name = names
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_together([(out / config_name, plain_json(config)), (out / weights_name, tensors(weights))])
    except OSError as error:
        raise RunFailed(f"the adapter could not be written to {out}: {error.strerror or error}") from error
