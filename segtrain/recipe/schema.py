"""The recipe: what to train, on what, and how. Frozen values, checked once and all at once.

`load_recipe` reads a file, applies `--set`, translates an mlx-lm LoRA recipe's keys and reports every error together,
each with its YAML path. Nothing here imports mlx.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from segtrain.errors import UserError, counted
from segtrain.recipe import mlx_lm_keys, row_files, yaml_file
from segtrain.recipe.overrides import MARK, Typed, translated
from segtrain.recipe.problems import Problem, lines_of, listing, problems_error

Auto: TypeAlias = Literal["auto"]
Objective: TypeAlias = Literal["sft", "orpo", "simpo", "cpo", "dpo"]
Part: TypeAlias = Literal["train", "valid", "test"]
DEFAULT_ALPHA = 16.0
ALL_LINEAR = "all-linear"
RESOLVED_BY = "# resolved by"  # how a recipe begins that a run wrote
_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Bytes in a size such as `24GB` (10^9), `24GiB` (2^30), `512 MB` or `24g` (as GB). Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])(i?)b?\s*", text, re.IGNORECASE)
    size = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < 2**60:
        raise UserError(f"{text!r} isn't a memory size; write one with a unit, such as 24GB or 24GiB")
    return round(size)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


def _sources(value: Any) -> Any:
    items = [] if value is None else _listed(value)
    return [{"path": item} if isinstance(item, str) else item for item in items] if isinstance(items, list) else items


def _whole_or_auto(minimum: int) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value == "auto" or (type(value) is int and value >= minimum):
            return value
        raise ValueError(f"must be auto or a whole number of at least {minimum}, not {value!r}")

    return BeforeValidator(check)


def _one_of(*allowed: Any) -> BeforeValidator:
    def check(value: Any) -> Any:
        if any(value == item and type(value) is type(item) for item in allowed):
            return value
        raise ValueError(f"must be one of {', '.join(map(_plain, allowed))}, not {_plain(value)}")

    return BeforeValidator(check)


def _as_text(value: Any) -> Any:
    """A number without its unit, which is then asked for."""
    return str(value) if type(value) in (int, float) else value


Texts: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed), Strict(False)]
AutoFrom1: TypeAlias = Annotated[Any, _whole_or_auto(1)]
AutoFrom0: TypeAlias = Annotated[Any, _whole_or_auto(0)]


class Section(BaseModel):
    """A part of the recipe: no unknown keys, no silent conversion of types, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Source(Section):
    """One data set: a file, glob, directory or hub id. Sources with weights are mixed in those proportions, others
    follow one another."""

    path: str = Field(min_length=1)
    weight: float | None = Field(default=None, gt=0)
    subset: str | None = None
    split: str | None = None
    columns: dict[str, str] = {}

    @model_serializer
    def _compact(self) -> Any:
        given = {name: value for name, value in self if value not in (None, {})}
        return self.path if len(given) == 1 else given


Sources: TypeAlias = Annotated[tuple[Source, ...], BeforeValidator(_sources), Strict(False)]


class DataRecipe(Section):
    """Where rows come from and what of them is learnt. `valid` and `test` may also name splits of a hub `train`."""

    train: Sources = Field(min_length=1)
    valid: Sources = ()
    test: Sources = ()
    format: Literal["auto", "chat", "completion", "text", "preference"] = "auto"
    max_seq_length: int = Field(default=2048, ge=2)
    on_long: Literal["drop", "truncate_prompt", "truncate", "error"] = "drop"
    supervise: Literal["assistant", "last", "all"] = "assistant"
    supervise_reasoning: bool = True
    turns: Literal["auto", "whole", "each"] = "auto"  # rows of a conversation
    streaming: bool = False
    shuffle_window: int = Field(default=10_000, ge=1)
    columns: dict[str, str] = {}  # our field name -> the data's
    chat_template: str | None = None  # a Jinja template or a file that holds one
    chat_template_kwargs: dict[str, Any] = {}  # arguments of the template
    subset: str | None = None
    split: str | None = None

    def sources(self, part: Part) -> tuple[Source, ...]:
        """The sources of one part, with `subset`, `columns` and (for train) `split` of the section filled in."""
        chosen: tuple[Source, ...] = getattr(self, part)
        return tuple(self._completed(source, part) for source in chosen)

    def _completed(self, source: Source, part: Part) -> Source:
        split = self.split if part == "train" else None
        return source.model_copy(
            update={
                "subset": source.subset or self.subset,
                "split": source.split or split,
                "columns": {**self.columns, **source.columns},
            }
        )

    @model_validator(mode="after")
    def _check(self) -> "DataRecipe":
        weighted = [source.weight is not None for source in self.train]
        if any(weighted) and not all(weighted):
            raise problems_error(Problem("train", "give every source a weight (a mix), or none (all rows of each)"))
        return self


class LoraRecipe(Section):
    """Which layers get LoRA and how strong it is. Without `alpha` and `scale`, alpha is 16."""

    kind: Literal["lora", "dora"] = "lora"
    rank: int = Field(default=8, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    scale: float | None = Field(default=None, gt=0)
    rslora: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    plus_ratio: float = Field(default=1.0, gt=0)  # LoRA+: B's learning rate over A's
    targets: Annotated[str | tuple[str, ...], BeforeValidator(lambda value: _targets(value))] = ALL_LINEAR
    layers: Any = "all"  # "all", N (the last N) or (lo, hi): layers lo..hi-1
    init_from: Annotated[str, AfterValidator(os.path.expanduser)] | None = Field(default=None, min_length=1)

    @property
    def effective_scale(self) -> float:
        """What multiplies x A B: `scale`, or alpha / rank (rsLoRA: alpha / sqrt(rank))."""
        if self.scale is not None:
            return self.scale
        alpha = DEFAULT_ALPHA if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def layer_range(self, layers: int) -> tuple[int, int]:
        """(lo, hi) of the adapted layers in a model of that many. Raises UserError where the model has fewer."""
        match self.layers:
            case "all":
                return 0, layers
            case int(last):
                lo, hi = layers - last, layers
            case (lo, hi):
                pass
        if lo < 0 or hi > layers:
            raise UserError(
                f"lora.layers: {_plain(self.layers)} asks for more than the model's {counted(layers, 'layer')}"
            )
        return lo, hi

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, value: Any) -> Any:
        if value == "all" or (type(value) is int and value >= 1):
            return value
        if (
            isinstance(value, list | tuple)
            and [type(item) for item in value] == [int, int]
            and 0 <= value[0] < value[1]
        ):
            return tuple(value)
        raise ValueError(f"must be all, a number N (the last N layers) or a range [lo, hi] with lo < hi, not {value!r}")

    @model_validator(mode="after")
    def _check(self) -> "LoraRecipe":
        found = []
        if self.alpha is not None and self.scale is not None:
            found.append(Problem("alpha", "alpha and scale are both given; keep one (scale = alpha / rank)"))
        if self.rslora and self.scale is not None:
            found.append(Problem("rslora", "rslora turns alpha into a scale, so it has no effect on scale; give alpha"))
        if found:
            raise problems_error(*found)
        return self


class EngineRecipe(Section):
    """How backward runs. No key here changes what is learnt, beyond the rounding of sums."""

    backward: Literal["auto", "segmented", "full"] = "auto"
    segment_size: AutoFrom1 = "auto"  # layers
    head_chunk: AutoFrom1 = "auto"  # tokens
    keep_layers: AutoFrom0 = "auto"  # last layers whose matrix products are kept instead of recomputed
    lookahead: Annotated[Any, _one_of("auto", 0, 1, 2)] = "auto"  # how far segments run ahead of the awaited one
    dequantize: Annotated[Any, _one_of("auto", True, False)] = "auto"  # work on a dense copy of a segment's weights
    weights: Literal["auto", "resident", "streamed"] = "auto"  # the frozen ones: in memory, or read as layers run
    prefix_sharing: bool = True
    rows_together: AutoFrom1 = "auto"  # rows of an update in one forward and backward pass, at most
    memory_budget: Annotated[str, BeforeValidator(_as_text)] = "auto"
    wired: bool = True  # Metal: what is in use may not be paged out

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes; None: what the device recommends."""
        return None if self.memory_budget == "auto" else parse_bytes(self.memory_budget)

    @field_validator("memory_budget")
    @classmethod
    def _check_budget(cls, value: str) -> str:
        if value != "auto":
            parse_bytes(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> "EngineRecipe":
        if self.weights == "streamed" and self.backward == "full":
            raise problems_error(
                Problem(
                    "weights", "streamed reads a segment at a time, and full backward has none; leave backward on auto"
                )
            )
        return self


class LossRecipe(Section):
    """A loss's settings: the section has the name of the command that trains it."""


class OrpoRecipe(LossRecipe):
    """`beta` is the paper's lambda, the weight of the odds-ratio term."""

    beta: float = Field(default=0.1, ge=0)
    sft_scope: Literal["full", "response"] = "full"


class SimpoRecipe(LossRecipe):
    """`beta` multiplies mean log-probs; `gamma` is the margin by which the chosen one is to lead, in rewards."""

    beta: float = Field(default=2.0, gt=0)
    gamma: float = Field(default=0.5, ge=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)


class CpoRecipe(LossRecipe):
    """`beta` multiplies sums of log-probs; `alpha` is the weight of the chosen response's likelihood."""

    beta: float = Field(default=0.1, gt=0)
    alpha: float = Field(default=1.0, ge=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)


class DpoRecipe(LossRecipe):
    """`beta` multiplies log-ratios to the model as it was at the start, which `reference` says how to get."""

    beta: float = Field(default=0.1, gt=0)
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    reference: Literal["pass", "cached"] = "pass"

    @model_validator(mode="after")
    def _check(self) -> "DpoRecipe":
        if self.label_smoothing and self.loss != "sigmoid":
            raise problems_error(Problem("label_smoothing", f"has no effect on loss: {self.loss}; remove it"))
        return self


class TrainRecipe(Section):
    """How long and how fast. Steps and warm-up count optimiser updates; without `steps` and `epochs`, one epoch."""

    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=1e-4, gt=0)
    final_learning_rate: float = Field(default=0.0, ge=0)  # where cosine and linear end
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    optimizer: Literal["adamw", "adam", "sgd", "adafactor", "muon"] = "adamw"
    optimizer_config: dict[str, Any] = {}
    weight_decay: float = Field(default=0.0, ge=0)
    grad_accumulation_steps: int = Field(default=1, ge=1, le=1 << 16)
    max_grad_norm: float | None = Field(default=1.0, ge=0)  # 0 or null: no clipping
    patience: int | None = Field(default=None, ge=1)  # evaluations without a better loss that end the run
    seed: int = Field(default=0, ge=0, lt=2**63)

    def warmup(self, steps: int) -> int:
        """Warm-up updates in a run of `steps` updates."""
        return self.warmup_steps or 0 if self.warmup_ratio is None else round(self.warmup_ratio * steps)

    @model_validator(mode="after")
    def _check(self) -> "TrainRecipe":
        found = []
        if self.steps is not None and self.epochs is not None:
            found.append(Problem("steps", "steps and epochs are both given; keep one (the other: null)"))
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            found.append(Problem("warmup_steps", "warmup_steps and warmup_ratio are both given; keep one"))
        if self.steps is not None and (self.warmup_steps or 0) > self.steps:
            run = f"the run's {counted(self.steps, 'step')}"
            found.append(Problem("warmup_steps", f"{self.warmup_steps} is more than {run}; lower it"))
        if self.final_learning_rate > self.learning_rate:
            found.append(Problem("final_learning_rate", f"{self.final_learning_rate} is above learning_rate"))
        if found:
            raise problems_error(*found)
        return self


class EvalRecipe(Section):
    """What each evaluation (`output.eval_every`) does: the loss over the same rows, and generations for `prompts`."""

    at_start: bool = True  # also before the first update: what the model does without the adapter
    rows: Annotated[Any, BeforeValidator(lambda value: _all_or_rows(value))] = "all"  # 0: no evaluation
    prompts: Texts = ()
    max_tokens: int = Field(default=100, ge=1)


class OutputRecipe(Section):
    """Where the run goes and how often it writes. Intervals count optimiser updates; 0: at the end only."""

    dir: Annotated[str, AfterValidator(os.path.expanduser)] = Field(default="runs/run", min_length=1)
    save_every: int = Field(default=100, ge=0)
    eval_every: int = Field(default=100, ge=0)
    report_every: int = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=3, ge=1)
    final: Literal["last", "best"] = "last"  # the adapter that stands in `dir` when the run is done
    report_to: Annotated[
        tuple[Literal["wandb", "tensorboard", "trackio"], ...], BeforeValidator(_listed), Strict(False)
    ] = ()
    project: str | None = None


class Recipe(Section):
    """All of it. `notices` are remarks for the user (say, on an mlx-lm key); they don't count in equality."""

    model: str = Field(min_length=1)
    quantize: Annotated[Any, _one_of(None, 4, 8, "mxfp4", "nvfp4")] = None  # a copy of a model that isn't quantised
    data: DataRecipe
    lora: LoraRecipe = LoraRecipe()
    engine: EngineRecipe = EngineRecipe()
    orpo: OrpoRecipe = OrpoRecipe()
    simpo: SimpoRecipe = SimpoRecipe()
    cpo: CpoRecipe = CpoRecipe()
    dpo: DpoRecipe = DpoRecipe()
    train: TrainRecipe = TrainRecipe()
    eval: EvalRecipe = EvalRecipe()
    output: OutputRecipe = OutputRecipe()
    trust_remote_code: bool = False

    def __init__(self, **sections: Any) -> None:
        """Sections by keyword: `Recipe(model="...", data={"train": rows}, train={"steps": 100})`.

        `data.train`, `valid` and `test` may be any iterable of mappings too (row_files.py). Raises UserError with every
        error at once.
        """
        translation = mlx_lm_keys.translate(row_files.plain(sections))
        with _all_at_once(translation, "recipe"):
            super().__init__(**translation.values)
        self._remark(translation)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # validation doesn't call it, as it validates

    _notices: tuple[str, ...] = PrivateAttr(())
    _source: Path | None = PrivateAttr(None)
    _asked_loss: str | None = PrivateAttr(None)

    @property
    def source(self) -> Path | None:
        """The file that it was read from."""
        return self._source

    @property
    def asked_loss(self) -> str | None:
        """The loss that the file names itself (`training_mode`), where it names one."""
        return self._asked_loss

    @property
    def files(self) -> list[str]:
        """Paths of what a run reads beside the model, where local: this recipe, the data, the first adapter."""
        data = self.data
        named = [source.path for part in (data.train, data.valid, data.test) for source in part]
        if self.lora.init_from:
            first = Path(self.lora.init_from).resolve()
            named += [str(path) for path in (first, first.parent, first / "adapters.safetensors")]
        return [str(one) for one in (self.source, data.chat_template, *named) if one]

    @property
    def notices(self) -> tuple[str, ...]:
        return self._notices

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.dump() == other.dump()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as plain YAML values; `from_mapping` makes an equal recipe of it."""
        plain: dict[str, Any] = json.loads(self.model_dump_json())
        if plain["lora"]["alpha"] is None and plain["lora"]["scale"] is None:
            plain["lora"]["alpha"] = DEFAULT_ALPHA
        return plain

    def to_yaml(self, packages: Sequence[str] = ("segtrain-mlx", "mlx", "mlx-lm", "transformers")) -> str:
        """The resolved recipe as a file, with the versions of `packages` in its first line as a comment."""
        return f"{RESOLVED_BY} {', '.join(_versions(packages))}\n{yaml_file.dump(self.dump())}"

    def training_view(self) -> dict[str, Any]:
        """The part that decides what is learnt.

        Left out: `engine` (exact whatever it says), `output` and `eval` (when to write and look), `data.valid` and
        `data.test`, `trust_remote_code`. Kept: all else, `train.steps` and `epochs` too, as schedules end with the run.
        """
        plain = self.dump()
        data = {name: value for name, value in plain["data"].items() if name not in ("valid", "test")}
        losses = [name for name, field in Recipe.model_fields.items() if isinstance(field.default, LossRecipe)]
        return {"data": data, **{name: plain[name] for name in ("model", "quantize", "lora", *losses, "train")}}

    def fingerprint(self) -> str:
        """sha256 of `training_view`: equal for two recipes that train the same adapter."""
        return hashlib.sha256(json.dumps(self.training_view(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "recipe") -> "Recipe":
        """Check `values`, this recipe's keys or mlx-lm's. Raises UserError with every error at once."""
        return _checked(mlx_lm_keys.translate(values), source)

    @classmethod
    def from_yaml(cls, path: str | Path, **sections: Any) -> "Recipe":
        """The recipe in a file, changed by sections as the constructor takes them: `train={"steps": 100}`.

        Raises UserError with every error at once.
        """
        typed = list(_assignments(row_files.plain(sections)))
        try:
            recipe = _loaded(Path(path), typed)
        except UserError as error:
            raise UserError(str(error).replace(MARK, "")) from None
        recipe._notices = tuple(text.replace(MARK, "") for text in recipe._notices)
        return recipe

    def _remark(self, translation: mlx_lm_keys.Translation) -> None:
        self._notices = (*translation.notices, *self._own_notices())
        self._asked_loss = translation.asked_loss

    def _own_notices(self) -> Iterator[str]:
        if self.data.test:
            yield "data.test is not read in training: `segtrain eval RUN` evaluates it"
        if self.trust_remote_code:
            yield (
                f"trust_remote_code runs Python code that comes with {self.model}, its tokenizer's and its own; be "
                "sure that you trust its author"
            )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with `overrides` such as `train.steps=5`; relative paths start at the working
    directory.

    Raises UserError, with every error at once. `output.dir` is runs/<file name> where it isn't given.
    """
    return _loaded(Path(path), yaml_file.assignments(overrides))


def _loaded(source: Path, typed: Sequence[Typed]) -> Recipe:
    translation = translated(yaml_file.read(source), typed)
    if translation.values.get("output") is None:
        translation.values["output"] = {}
    if isinstance(output := translation.values["output"], dict):
        output.setdefault("dir", f"runs/{source.stem}")
    recipe = _checked(translation, str(source))
    recipe._source = source
    return recipe


def _checked(translation: mlx_lm_keys.Translation, source: str) -> Recipe:
    with _all_at_once(translation, source):
        recipe = Recipe.model_validate(translation.values)
    recipe._remark(translation)
    return recipe


@contextmanager
def _all_at_once(translation: mlx_lm_keys.Translation, source: str) -> Iterator[None]:
    """Raises UserError with what translation found and what validation, the block, finds."""
    lines = [translation.blamed(line) for line in translation.problems]
    try:
        yield
    except ValidationError as error:
        lines += lines_of(error, Recipe, translation.origins)
    if lines:
        raise UserError(_listed_errors(list(dict.fromkeys(lines)), source))


def _assignments(sections: Mapping[str, Any]) -> Iterator[Typed]:
    """Each key of each section as its path and value."""
    for name, section in sections.items():
        if isinstance(section, dict):
            yield from (((name, key), value) for key, value in section.items())
        else:
            yield (name,), section


def _listed_errors(lines: list[str], source: str) -> str:
    """Those of the file under its name, those of `--set` for themselves."""
    typed = [line for line in lines if line.startswith(MARK)]
    own = [line for line in lines if line not in typed]
    return "\n".join([*([listing(own, source)] if own else []), *typed])


def differences(old: Recipe, new: Recipe, *, training_only: bool = False) -> list[str]:
    """What differs, as `path: old → new`; with `training_only`, only what `fingerprint` counts."""
    before, after = (dict(_leaves(r.training_view() if training_only else r.dump())) for r in (old, new))
    return [
        f"{path}: {_plain(before.get(path))} → {_plain(after.get(path))}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _targets(value: Any) -> str | tuple[str, ...]:
    """`all-linear` as it is, names and globs as a tuple."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(name and isinstance(name, str) for name in names):
        raise ValueError(f"must be {ALL_LINEAR} or a list of module names or globs, not {value!r}")
    return ALL_LINEAR if list(names) == [ALL_LINEAR] else tuple(names)


def _all_or_rows(value: Any) -> Any:
    if value == "all" or (type(value) is int and value >= 0):
        return value
    raise ValueError(f"must be all or a number of rows (0: no evaluation), not {value!r}")


def _versions(packages: Sequence[str]) -> Iterator[str]:
    for name in packages:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} (not installed)"
