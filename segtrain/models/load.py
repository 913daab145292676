"""A model and its tokenizer from a directory or the hub, by mlx-lm.

What can't work is refused with one clear sentence, before any weight is read where possible. Weights are read from
safetensors only and no code that comes with a model runs, unless `trust_remote_code` says so.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_config, load_model, load_tokenizer

from segtrain.errors import UserError, reason
from segtrain.hub import advice, hub
from segtrain.models.exceptions import replaced
from segtrain.models.support import refuse
from segtrain.models.weights import Loads, Streamed, streamed

WEIGHTS = "model*.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer (mlx-lm's wrapper), `config.json` and where they came from."""

    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    path: Path
    weights: Streamed | None = None  # where the layers' weights come from if they aren't held in memory

    @property
    def vocabulary(self) -> int:
        """Rows of the token embedding: every token id must be below it."""
        return embedding_rows(self.model)

    def held(self, lo: int, hi: int) -> AbstractContextManager[None]:
        """Around reading the weights of layers lo..hi-1."""
        return self.weights.held(lo, hi) if self.weights else nullcontext()


def never(path: Path) -> bool:
    return False


def load(path_or_hub_id: str, *, trust_remote_code: bool = False, stream: Callable[[Path], bool] = never) -> Loaded:
    """Load a local directory or a hub id. `stream`: from the directory, whether the layers' weights stay on disk.

    Raises UserError for what can't be found, read or trained.
    """
    path, config = located(path_or_hub_id, trust_remote_code=trust_remote_code)
    if stream(path):
        loads = Loads()
        with replaced(mx, "load", lambda load: loads):
            model, config = _model(path, trust_remote_code, lazy=True)
        weights = streamed(model, loads, path_or_hub_id)
    else:
        (model, config), weights = _model(path, trust_remote_code), None
    tokenizer = _tokenizer(path, config, trust_remote_code)
    loaded = Loaded(model, tokenizer, config, path, weights)
    _check_vocabulary(loaded)
    return loaded


def load_unread(path: Path, *, trust_remote_code: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a directory and its `config.json`. Arrays are read when they are computed with. Raises UserError."""
    return _model(path, trust_remote_code, lazy=True)


def located(path_or_hub_id: str, *, trust_remote_code: bool = False) -> tuple[Path, dict[str, Any]]:
    """The directory with a model's files, fetched if need be, and its `config.json`.

    Raises UserError for what can't be found, read or trained.
    """
    path = _local(path_or_hub_id, ["config.json"])
    config = _config(path, path_or_hub_id)
    if config.get("model_file") is not None and not trust_remote_code:
        raise UserError(
            f"{path_or_hub_id} brings its own model code ({config['model_file']!r}), which is not run; "
            "set trust_remote_code: true if you trust its author"
        )
    refuse(config)
    code = [] if trust_remote_code else ["*.py"]
    path = _local(path_or_hub_id, [pattern for pattern in DEFAULT_ALLOW_PATTERNS if pattern not in code])
    _check_weights(path)
    return path, config


def embedding_rows(model: nn.Module) -> int:
    """Rows of the model's largest embedding outside its layers: the token embedding."""
    inside = {id(m) for layer in model.layers for m in layer.modules()}
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    return max((m.weight.shape[0] for m in model.modules() if isinstance(m, kinds) and id(m) not in inside), default=0)


def _local(name: str, patterns: Sequence[str]) -> Path:
    """The directory `name`, or a hub model's snapshot with the files that match `patterns`."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model: {name} is a file; give the directory that holds config.json and the weights")
    with hub() as unreachable:
        return _snapshot(name, patterns, unreachable)


def _snapshot(name: str, patterns: Sequence[str], unreachable: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise UserError(f"model: there is no directory {name}, and it isn't a hub id (owner/name)") from error
    except GatedRepoError as error:
        raise UserError(
            f"model: {name} is gated; accept its terms on the hub and log in (`hf auth login`), then start again"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(f"model: there is no directory {name}, and the hub has no such model") from error
    except Exception as error:  # no network, a proxy, a timeout: the hub client's errors have no common base
        if unreachable:
            raise UserError(f"model: there is no directory {name}, {advice(name, unreachable)}") from error
        raise UserError(
            f"model: there is no directory {name}, and it could not be fetched from the hub ({reason(error)})"
        ) from error


def _config(path: Path, name: str) -> dict[str, Any]:
    if not (path / "config.json").exists():
        if (path / "adapter_config.json").exists():
            raise UserError(f"model: {name} is an adapter, not a model; give the base model that it was trained on")
        raise UserError(f"model: {name} has no config.json, so it isn't a model directory")
    try:
        config = load_config(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model: {path / 'config.json'} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"model: {path / 'config.json'} isn't a JSON object")
    return config


def _check_weights(path: Path) -> None:
    """Raise UserError unless the directory has all of its safetensors files."""
    if not any(path.glob(WEIGHTS)):
        if any(file for pattern in PICKLES for file in path.glob(pattern)):
            raise UserError(
                f"model: {path} holds its weights only as pickle files, which can run code when read; "
                "convert them to safetensors first"
            )
        raise UserError(f"model: {path} has no weights (no {WEIGHTS})")
    if (path / INDEX).exists():
        try:
            names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"model: {path / INDEX} can't be read: {error}") from error
        if outside := sorted(str(name) for name in names if name == ".." or Path(str(name)).name != name):
            raise UserError(f"model: {path / INDEX} names a file outside of the directory: {outside[0]}")
        if missing := sorted(name for name in names if not (path / name).exists()):
            raise UserError(f"model: {path} lacks {len(missing)} of {len(names)} weight files, such as {missing[0]}")


def _model(path: Path, trust_remote_code: bool, *, lazy: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    try:
        return load_model(path, lazy=lazy, trust_remote_code=trust_remote_code)
    except SystemExit as error:  # how a model file of mlx-lm says that it needs another package
        raise UserError(f"model: {path} needs a package that isn't installed; see the message above") from error
    except (LookupError, ArithmeticError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        detail = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[1]} (and {len(lines) - 1} lines in all)"
        raise UserError(f"model: mlx-lm can't load {path}: {detail}") from error


def _tokenizer(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    try:
        return load_tokenizer(path, {"trust_remote_code": trust_remote_code}, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # transformers raises whatever the tokenizer's class does
        raise UserError(f"model: the tokenizer in {path} can't be loaded: {reason(error)}") from error


def _check_vocabulary(loaded: Loaded) -> None:
    """Raise UserError if text can yield a token that the embedding has no row for.

    A few added tokens beyond the embedding are common (Gemma 3's text models have one for images) and harmless as
    long as neither the end of a text nor the chat template uses them.
    """
    rows, tokenizer = loaded.vocabulary, loaded.tokenizer
    if not rows:
        return
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"model: the tokenizer in {loaded.path} has {tokenizer.vocab_size} tokens and the model only {rows} "
            "embeddings: they don't belong together"
        )
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for token, number in tokenizer.get_added_vocab().items():
        if number >= rows and (number in tokenizer.eos_token_ids or token in template):
            raise UserError(
                f"model: token {token!r} of the tokenizer in {loaded.path} has id {number}, but the model has only "
                f"{rows} embeddings; use the tokenizer that belongs to the model"
            )
