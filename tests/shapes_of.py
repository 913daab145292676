"""Shapes of a model by its configuration, read once."""

import json
from functools import lru_cache
from typing import Any

from segtrain.memory import anatomy
from segtrain.memory.shapes import Model


def shapes_of(config: dict[str, Any], backend: str = "cpu", **adapter: Any) -> Model:
    """As `plan-segments` reads them; `adapter`: arguments of `lora.layers.attach`, rank 8 everywhere unless said."""
    return _read(json.dumps(config), backend, json.dumps(adapter))


@lru_cache
def _read(config: str, backend: str, adapter: str) -> Model:
    options = {"rank": 8, "scale": 2.0, **json.loads(adapter)}
    return anatomy.of_config(json.loads(config), backend, lambda layers: options)
