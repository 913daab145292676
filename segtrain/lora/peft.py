"""LoRA and DoRA adapters in PEFT's files, from and to mlx-lm's names and layouts.

| | mlx-lm | PEFT |
|---|---|---|
| linear, A | `<path>.lora_a` [in, r] | `base_model.model.<path>.lora_A.weight` [r, in] |
| linear, B | `<path>.lora_b` [r, out] | `base_model.model.<path>.lora_B.weight` [out, r] |
| linear, m | `<path>.m` [out] | `base_model.model.<path>.lora_magnitude_vector` [out] |
| experts, A | `…switch_mlp.<name>.lora_a` [E, r, in] | E times `…experts.<e>.<name>.lora_A.weight` [r, in] |
| experts, B | `…switch_mlp.<name>.lora_b` [E, out, r] | E times `…experts.<e>.<name>.lora_B.weight` [out, r] |
| strength | `scale` | `lora_alpha` / r, or / sqrt(r) with `use_rslora` |

`<path>` is a Hugging Face module path. Those of the model types in `COMPARED` were compared with transformers' models
module by module and by their logits (tests/test_peft.py), those in `READ` by name with transformers' source
(tests/test_peft_names.py); for any other type the conversion is refused.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from segtrain.errors import UserError

Arrays = dict[str, mx.array]
WEIGHTS, CONFIG, PICKLE = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"
ROOT = "base_model.model."
STACKED = "switch_mlp"


@dataclass(frozen=True)
class Family:
    """How a model type's module paths differ: the layers are at `mlx` in mlx-lm and at `hf` in Hugging Face's model.

    `experts`: mlx-lm's name of an expert's matrix -> Hugging Face's, where experts are one Linear each. Empty: PEFT
    can't take experts of this type. `renamed`: paths within a layer that differ. `routers`: paths of modules that are
    no linear layer in Hugging Face's model.
    """

    mlx: str = "model.layers"
    hf: str = "model.layers"
    experts: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()


_PLAIN = Family()
_WRAPPED = Family("language_model.model.layers", "model.language_model.layers")
_MLP_EXPERTS = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
COMPARED: dict[str, Family] = {
    **dict.fromkeys(
        (
            "apertus",
            "cohere",
            "cohere2",
            "ernie4_5",
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm",
            "glm4",
            "granite",
            "helium",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        (
            "hunyuan_v1_dense",
            "internlm3",
            "llama",
            "ministral3",
            "mistral",
            "nemotron",
            "olmo2",
            "olmo3",
            "phi",
            "phi3",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(("qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"), _PLAIN),
    **dict.fromkeys(("gemma3", "mistral3", "qwen2_vl"), _WRAPPED),
    "mixtral": Family(experts={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}),
    "qwen3_moe": Family(experts=_MLP_EXPERTS),
    "olmoe": Family(experts=_MLP_EXPERTS),
}
# Where AutoModelForCausalLM has the text model alone, its paths count, since that is what PEFT's own loader makes.
_TEXT_ALONE = Family("language_model.model.layers")
READ: dict[str, Family] = {
    **dict.fromkeys(("gemma4_text", "lfm2"), _PLAIN),
    **dict.fromkeys(("gemma4", "qwen3_vl", "qwen2_5_vl", "lfm2-vl", "lfm2_vl"), _WRAPPED),
    "gemma3n": Family("model.language_model.layers", "model.language_model.layers"),
    "qwen3_5": _TEXT_ALONE,
    "qwen3_5_moe": replace(_TEXT_ALONE, routers=("mlp.gate",)),
    "qwen3_next": Family(routers=("mlp.gate",)),
    "qwen3_vl_moe": replace(_WRAPPED, routers=("mlp.gate",)),
    "gpt_oss": Family(routers=("mlp.router",)),
    "lfm2_moe": Family(
        renamed={
            "feed_forward.gate_proj": "feed_forward.w1",
            "feed_forward.down_proj": "feed_forward.w2",
            "feed_forward.up_proj": "feed_forward.w3",
        },
        routers=("feed_forward.gate",),
    ),
}
FAMILIES: dict[str, Family] = {**COMPARED, **READ}

_PARAMETERS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_MLX = {theirs: ours for ours, theirs in _PARAMETERS.items()}
MLX_NAME = re.compile(rf"(?P<base>.+?layers)\.(?P<layer>\d+)\.(?P<path>.+)\.(?P<key>{'|'.join(_PARAMETERS)})")
_PEFT_NAME = re.compile(
    rf"(?P<base>.+?layers)\.(?P<layer>\d+)\.(?P<path>.+)\.(?P<key>{'|'.join(map(re.escape, _MLX))})"
)
_EXPERT = re.compile(r"(?P<outer>.+)\.experts\.(?P<number>\d+)\.(?P<leaf>[^.]+)")


def to_peft(params: Arrays, config: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any], list[str]]:
    """PEFT's arrays, its `adapter_config.json`, and notices. Raises UserError, naming what PEFT can't express."""
    model = str(config.get("model", ""))
    model_type, family = _family(config, model)
    weights: Arrays = {}
    modules: dict[str, set[int]] = {}  # Hugging Face path within a layer -> its layers
    for name in sorted(params):
        match = MLX_NAME.fullmatch(name)
        if match is None or match["base"] != family.mlx:
            raise UserError(
                f"{name}: PEFT export of {model_type} covers {family.mlx}.<n> only; leave it out of lora.targets"
            )
        base, path, key = f"{ROOT}{family.hf}.{match['layer']}", match["path"], _PARAMETERS[match["key"]]
        for hf_path, matrix in _peft_matrices(path, params[name], family, model_type):
            weights[f"{base}.{hf_path}.{key}"] = mx.contiguous(matrix)
            modules.setdefault(hf_path, set()).add(int(match["layer"]))
    mx.eval(weights)
    model = config.get("segtrain", {}).get("made_from") or model  # PEFT loads the original, not its quantised copy
    return weights, _peft_config(config, model, family, modules), _notices(model, model_type)


def _peft_matrices(path: str, value: mx.array, family: Family, model_type: str) -> Iterable[tuple[str, mx.array]]:
    """(Hugging Face path within the layer, array) for one mlx-lm array: one pair, or one per expert."""
    if path in family.routers:
        raise UserError(
            f"{path}: it is no linear layer in Hugging Face's {model_type}, so PEFT can't express LoRA on it; leave it "
            "out of lora.targets, or use the mlx format"
        )
    outer, _, leaf = path.rpartition(f".{STACKED}.")
    if value.ndim <= 2:
        if leaf.rpartition(".")[2] in family.experts:  # PEFT tells modules by their last name where experts are fused
            raise UserError(
                f"{path}: PEFT can't tell it from the experts of {model_type}; leave it out of lora.targets"
            )
        return [(family.renamed.get(path, path), value.T)]
    if not outer or leaf not in family.experts:
        raise UserError(
            f"{path}: PEFT can't express LoRA on the stacked experts of {model_type}; leave it out of lora.targets, or "
            "use the mlx format"
        )
    return [(f"{outer}.experts.{number}.{family.experts[leaf]}", value[number]) for number in range(value.shape[0])]


def _peft_config(
    config: Mapping[str, Any], model: str, family: Family, modules: Mapping[str, set[int]]
) -> dict[str, Any]:
    lora, own = config["lora_parameters"], config.get("segtrain", {})
    rank, scale = int(lora["rank"]), float(lora["scale"])
    rslora = bool(own.get("use_rslora", False))
    alpha = scale * (math.sqrt(rank) if rslora else rank)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": rank,
        "lora_alpha": round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-9) else alpha,
        "use_rslora": rslora,
        "use_dora": config.get("fine_tune_type") == "dora",
        "lora_dropout": float(lora.get("dropout", 0.0)),
        **_targets(family, modules, int(own.get("layers_total", 0))),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(family: Family, modules: Mapping[str, set[int]], total: int) -> dict[str, Any]:
    """`target_modules`: paths within a layer where each is on the same layers of a plain model, else full paths."""
    layers = set.union(*modules.values())
    same = all(own == layers for own in modules.values())
    if any(_EXPERT.fullmatch(path) for path in modules):
        # an exact list would name every expert; PEFT's conversion to fused experts wants last names
        modules = {path.rpartition(".")[2]: own for path, own in modules.items()}
    elif family.hf != _PLAIN.hf or not same:
        names = [f"{family.hf}.{layer}.{path}" for path, own in modules.items() for layer in own]
        return {"target_modules": sorted(names)}
    chosen: dict[str, Any] = {"target_modules": sorted(modules)}
    if layers != set(range(total)):
        chosen |= {"layers_to_transform": sorted(layers), "layers_pattern": "layers"}
    return chosen


def _notices(model: str, model_type: str) -> list[str]:
    found = []
    if model_type in READ:
        found.append(
            f"module names of {model_type} were compared with transformers' source only, not by running both: check a "
            "generation before you rely on it"
        )
    if "quantization" not in (model_config(model) or {}):
        return found
    return [
        *found,
        f"{model} is quantised for MLX, which PEFT can't load: load this adapter on the original model, and name it "
        f"in base_model_name_or_path of {CONFIG}",
    ]


def import_peft(directory: Path, model: str | None = None) -> tuple[Arrays, dict[str, Any]]:
    """A PEFT directory as (parameters by mlx-lm name in float32, mlx-lm's adapter configuration).

    `model`: the base model, where the one that the adapter names isn't on this machine. Raises UserError for a pickle
    and for every option of PEFT that LoRA and DoRA on linear layers don't have.
    """
    config, weights = _read(directory)
    model = model or str(config.get("base_model_name_or_path") or "")
    model_type, family = _family({}, model)
    params: Arrays = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, value in sorted(weights.items()):
        match = _PEFT_NAME.fullmatch(name.removeprefix(ROOT))
        if match is None or match["base"] != family.hf or not _has_place(match, value, config):
            raise UserError(f"{directory / WEIGHTS}: {name} has no place in mlx-lm's {model_type}")
        base, path, key = f"{family.mlx}.{match['layer']}", match["path"], _MLX[match["key"]]
        value = value.astype(mx.float32)
        expert = _EXPERT.fullmatch(path)
        if expert is None:
            ours = {hf: mlx for mlx, hf in family.renamed.items()}.get(path, path)
            params[f"{base}.{ours}.{key}"] = mx.contiguous(value.T)
        else:
            leaf = _stacked_leaf(expert["leaf"], family, model_type, name)
            stacked = f"{base}.{expert['outer']}.{STACKED}.{leaf}.{key}"
            experts.setdefault(stacked, {})[int(expert["number"])] = value
    params |= {name: _stack(name, values) for name, values in experts.items()}
    _check_magnitudes(directory / WEIGHTS, config, params)
    mx.eval(params)
    return params, _imported_config(config, model, model_type, family, params)


def _check_magnitudes(path: Path, config: Mapping[str, Any], params: Arrays) -> None:
    """Raise UserError where an adapter of DoRA leaves a module's magnitudes out: loaded, it would begin with others."""
    bare = [name for name in params if name.endswith(".lora_a") and f"{name.removesuffix('lora_a')}m" not in params]
    if config.get("use_dora") and bare:
        raise UserError(f"{path}: use_dora, and no magnitudes beside {min(bare)}; save the adapter again with PEFT")


def _has_place(match: re.Match[str], value: mx.array, config: Mapping[str, Any]) -> bool:
    """Whether an array of PEFT's is one that mlx-lm has: matrices, and DoRA's magnitudes of linear layers."""
    if _MLX[match["key"]] != "m":
        return value.ndim == 2
    return value.ndim == 1 and bool(config.get("use_dora")) and not _EXPERT.fullmatch(match["path"])


def _stacked_leaf(leaf: str, family: Family, model_type: str, name: str) -> str:
    for mlx_name, hf_name in family.experts.items():
        if hf_name == leaf:
            return mlx_name
    raise UserError(f"{name}: no such expert matrix is known for {model_type}")


def _stack(name: str, values: Mapping[int, mx.array]) -> mx.array:
    if sorted(values) != list(range(len(values))):
        raise UserError(f"{name}: experts are missing in the PEFT adapter (it has {sorted(values)})")
    return mx.stack([values[number] for number in range(len(values))])


def _imported_config(
    config: Mapping[str, Any], model: str, model_type: str, family: Family, params: Arrays
) -> dict[str, Any]:
    rank, rslora = int(config["r"]), bool(config.get("use_rslora"))
    matches = [match for name in params if (match := MLX_NAME.fullmatch(name))]
    for name, value in params.items():
        if value.ndim > 1 and (own := _rank(name, value)) != rank:
            raise UserError(
                f"{name} has rank {own} and the adapter's r is {rank}; mlx-lm knows one rank for all modules"
            )
    total = _layers_total(model_config(model) or {})
    lowest = min(int(match["layer"]) for match in matches)
    return {
        "fine_tune_type": "dora" if config.get("use_dora") else "lora",
        "model": model,
        "num_layers": total - lowest if total else -1,  # -1: all of them
        "lora_parameters": {
            "rank": rank,
            "scale": config["lora_alpha"] / (math.sqrt(rank) if rslora else rank),
            "dropout": float(config.get("lora_dropout") or 0.0),
            "keys": sorted({match["path"] for match in matches}),
        },
        "segtrain": {"model_type": model_type, "layers_total": total, "use_rslora": rslora},
    }


def _rank(name: str, value: mx.array) -> int:
    """Of an mlx-lm array: A [in, r] or [E, r, in], B [r, out] or [E, out, r]."""
    return int(value.shape[-1 if name.endswith("lora_a") == (value.ndim == 2) else -2])


# options of PEFT's LoRA -> the values that leave it LoRA or DoRA on linear layers
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    # the others (pissa, olora, loftq, corda) also change the base weights
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def _read(directory: Path) -> tuple[dict[str, Any], Arrays]:
    if not (directory / WEIGHTS).exists():
        raise UserError(
            f"{directory / PICKLE} is a pickle, which can run code when it is loaded, so it isn't read; save the "
            f"adapter as {WEIGHTS} (PEFT's save_pretrained does)"
        )
    try:
        config = json.loads((directory / CONFIG).read_text())
        weights = mx.load(str(directory / WEIGHTS), format="safetensors")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the PEFT adapter in {directory} can't be read: {error}") from error
    assert isinstance(weights, dict)
    _check_plain(directory / CONFIG, config)
    if not weights:
        raise UserError(f"{directory / WEIGHTS} holds no arrays")
    return config, weights


def _check_plain(path: Path, config: Any) -> None:
    if not isinstance(config, dict):
        raise UserError(f"{path} isn't a JSON object")
    for name, allowed in _PLAIN_VALUES.items():
        if name in config and config[name] not in allowed:
            raise UserError(f"{path}: {name} {config[name]!r} can't be expressed in mlx-lm's LoRA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"{path}: r {rank!r} and lora_alpha {alpha!r} must be a whole number from 1 and a number")


def type_of(config: Mapping[str, Any], model: str) -> str:
    """The type of an adapter's base model. Raises UserError where it isn't known."""
    model_type = config.get("segtrain", {}).get("model_type") or (model_config(model) or {}).get("model_type")
    if not model_type:
        raise UserError(f"the base model {model!r} isn't on this machine, so its type is unknown; give --model")
    return str(model_type)


def _family(config: Mapping[str, Any], model: str) -> tuple[str, Family]:
    """The model type and its names. Raises UserError where either isn't known."""
    model_type = type_of(config, model)
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"module names of {model_type} aren't mapped between mlx-lm and PEFT; mapped are {known}")
    return model_type, FAMILIES[model_type]


def model_config(model: str) -> dict[str, Any] | None:
    """`config.json` of a model directory or of a hub model in the local cache; None where there is none. No network."""
    path: Any = Path(model) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return None
    if not isinstance(path, str | Path):
        return None
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _layers_total(config: Mapping[str, Any]) -> int:
    """The number of layers; 0 where the configuration doesn't say."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else {}
    return int(config.get("num_hidden_layers") or inner.get("num_hidden_layers") or 0)
