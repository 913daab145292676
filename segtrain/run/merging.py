"""`segtrain export --format merged`: base model and adapter in one model directory.

The base is loaded unread, its layers are described anew with the adapter in them, and `saving` computes and writes one
tensor after the other. Quantised weights can't take an adapter without losing most of it to rounding, so a quantised
base becomes dense, unless it is to be quantised again: then the loss is measured on both sides of that.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from segtrain.data.chat import template_text
from segtrain.errors import UserError
from segtrain.lora import adapters
from segtrain.lora.adapters import Adapter
from segtrain.memory.source import described
from segtrain.models import quantise
from segtrain.models.dense_weights import dequantise, merge
from segtrain.models.load import load_unread, located
from segtrain.models.saving import save
from segtrain.recipe.schema import Recipe
from segtrain.run.base import base
from segtrain.run.comparison import compared
from segtrain.storage.fresh import fresh, refuse_existing

AS_BASE = "base"
TEMPLATE = "chat_template.jinja"


def export_merged(
    run: Path, out: Path, *, recipe: Recipe | None, model: str | None = None, quantize: int | str | None = None
) -> list[str]:
    """Write the model to the directory `out`; returns notices.

    `recipe`: the run's, where `run` is one. `model`: the base model, where the adapter's own name for it doesn't lead
    there. `quantize`: a name in `quantise.KINDS`, or AS_BASE. Raises UserError, RunFailed where the disk refuses.
    """
    refuse_existing(out, "--out")
    model = base(recipe) if recipe and recipe.quantize and not model else model
    adapter = adapters.read(run, model)
    template = template_text(recipe.data.chat_template) if recipe and recipe.data.chat_template else ""
    name = str(adapter.config.get("model") or "")
    trust = bool(recipe and recipe.trust_remote_code)
    source, _ = located(name, trust_remote_code=trust)
    net, config = load_unread(source, trust_remote_code=trust)
    was = described(config)
    config = described_anew(net, config, adapter, quantize, name)
    with fresh(out, "--out") as inside:
        save(net, config, source, inside)
        if template:
            (inside / TEMPLATE).write_text(template, encoding="utf-8")
    if quantize is None:
        return [
            f"{name} is quantised ({was}): the merged model is dense, so nothing of the adapter is rounded away"
        ] * (bool(was))
    return [compared(run, recipe, adapter.params, out) if recipe else NO_RUN.format(run)]


NO_RUN = "{} is no run, so there are no rows to measure the quantised model's loss on: compare it before you rely on it"


def described_anew(
    net: nn.Module, config: Mapping[str, Any], adapter: Adapter, quantize: int | str | None, name: str
) -> dict[str, Any]:
    """Put the adapter into `net` and quantise it as asked; its `config.json`. Raises UserError."""
    if config.get("quantize_activations"):
        raise UserError(f"{name} quantises activations, and a merged model of it isn't made; give the original model")
    packed = quantise.packings(net)
    if quantize == AS_BASE and not packed:
        raise UserError(f"--quantize {AS_BASE}: {name} isn't quantised; leave --quantize out, or name 4, 8 or mxfp4")
    merge(net, adapter.params, float(adapter.config["lora_parameters"]["scale"]))
    if quantize == AS_BASE:
        quantise.repack(net, packed)
        return dict(config)
    dequantise(net)
    plain = quantise.without_quantisation(config)
    return plain if quantize is None else quantise.quantised(net, plain, quantize)
