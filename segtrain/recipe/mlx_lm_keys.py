"""The keys of an mlx-lm LoRA recipe, translated to this recipe's, so that such a file runs as it is.

A file that has only such keys (no `lora`, `train` or `data` section) is taken as mlx-lm's: what it leaves out gets
mlx-lm's defaults, so that it trains the same thing here. In another file each key is just an alias. What means nothing
here is a problem that names the reason, or a notice. Values: mlx_lm/lora.py of mlx-lm 0.32.2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segtrain.recipe.problems import suggestion

Values = dict[str, Any]

RENAMED = {
    "max_seq_length": "data.max_seq_length",
    "learning_rate": "train.learning_rate",
    "seed": "train.seed",
    "adapter_path": "output.dir",
    "project_name": "output.project",
    "resume_adapter_file": "lora.init_from",
}
FEATURES = {
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "text_feature": "text",
    "chat_feature": "messages",
    "chosen_feature": "chosen",
    "rejected_feature": "rejected",
}
DEFAULTS: Values = {
    "adapter_path": "adapters",
    "batch_size": 4,
    "iters": 1000,
    "learning_rate": 1e-5,
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "mask_prompt": False,
    "max_seq_length": 2048,
    "num_layers": 16,
    "optimizer": "adam",
    "save_every": 100,
    "steps_per_eval": 200,
    "steps_per_report": 10,
    "val_batches": 25,
}
IMPLIED: Values = {"train.lr_schedule": "constant", "train.max_grad_norm": None, "data.on_long": "truncate"}
ADAMW_WEIGHT_DECAY = 0.01
SECTIONS = ("lora", "train", "data")


@dataclass
class Translation:
    """This recipe's values, remarks for the user, errors, and which alias a path came from."""

    values: Values
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    typed: frozenset[str] = frozenset()  # what `--set` named
    asked_loss: str | None = None

    def blamed(self, problem: str) -> str:
        """The problem, with `--set` before a key that was typed."""
        key = problem.split(":")[0].split(" ")[0]
        return f"--set {problem}" if key.split(".")[0] in self.typed or key in self.typed else problem

    def put(self, path: str, value: Any, alias: str) -> None:
        """Set `section.key`, unless the file gives both it and the alias."""
        section, _, key = path.rpartition(".")
        target = self.values.setdefault(section, {}) if section else self.values
        if target is None:
            target = self.values[section] = {}
        if not isinstance(target, dict):
            return  # the section's own type is reported by validation
        if key in target:
            fix = f"type --set {path}=..." if alias in self.typed else "keep one of them"
            self.problems.append(f"{alias}: {path} is given too; {fix}")
            return
        target[key] = value
        self.origins[path] = alias

    def imply(self, path: str, value: Any) -> None:
        """Set `section.key` where nothing has."""
        section, _, key = path.partition(".")
        inner = self.values.get(section)
        if inner is None:
            inner = self.values[section] = {}
        if isinstance(inner, dict):  # what else stands there is reported by the recipe's own check
            inner.setdefault(key, value)


def is_alias(path: Sequence[str]) -> bool:
    """Whether `--set` with this path speaks of an mlx-lm key."""
    return path[0] in KEYS or (len(path) == 1 and path[0] in ("train", "data"))


def translate(values: Mapping[str, Any], typed: frozenset[str] = frozenset()) -> Translation:
    """Move every mlx-lm key of `values` to where it belongs in this recipe. `typed`: the keys that `--set` named."""
    native = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    given = {key: native.pop(key) for key in list(native) if key in KEYS}
    for key in ("train", "data"):
        if key in native and not isinstance(native[key], dict | None):
            given[key] = native.pop(key)
    result = Translation(native, typed=typed)
    if not given:
        return result
    theirs = not any(isinstance(native.get(section), dict) for section in SECTIONS)
    if theirs:
        given = _with_defaults(given, result)
    reader = _Reader(given, result)
    for key in given:
        reader.handle(key)
    if theirs:
        _leave_moments(result)
    return result


def _leave_moments(result: Translation) -> None:
    """Their Adam doesn't correct the bias of its moments: its first updates are several times what the rate says."""
    train = result.values.get("train")
    if not isinstance(train, dict) or train.get("optimizer") not in ("adam", "adamw"):
        return
    options = train.get("optimizer_config") or {}
    if isinstance(options, dict):
        train["optimizer_config"] = {"bias_correction": False, **options}


def _with_defaults(given: Values, result: Translation) -> Values:
    missing = {key: value for key, value in DEFAULTS.items() if key not in given}
    if "lora_layers" in given:
        missing.pop("num_layers", None)
    for path, value in IMPLIED.items():
        if path.rpartition(".")[2] not in given:
            result.imply(path, value)
    options = given.get("optimizer_config")
    options = options.get("adamw") if isinstance(options, dict) else None
    if given.get("optimizer") == "adamw" and not (isinstance(options, dict) and "weight_decay" in options):
        result.imply("train.weight_decay", ADAMW_WEIGHT_DECAY)
    shown = ", ".join(f"{key} {_words(value)}" for key, value in missing.items())
    result.notices.append(
        "read as an mlx-lm recipe: no clipping, rows over max_seq_length truncated, Adam without bias correction, a "
        "constant learning rate unless lr_schedule says otherwise"
        f"{'; its defaults where the file is silent: ' + shown if shown else ''}"
    )
    return {**given, **missing}


class _Reader:
    """One handler for each key; `given` is all of them, since some are read together."""

    def __init__(self, given: Values, result: Translation) -> None:
        self.given, self.result = given, result
        self.batch = self._whole("batch_size", 1) or 1
        self.accumulation = self._whole("grad_accumulation_steps", 1) or 1

    def handle(self, key: str) -> None:
        if key in RENAMED:
            replaced = key == "learning_rate" and isinstance(self.given.get("lr_schedule"), dict)  # by its arguments
            if self.given[key] is not None and not replaced:
                self.result.put(RENAMED[key], self.given[key], key)
        elif key in FEATURES:
            self._column(FEATURES[key], self.given[key], key)
        else:
            HANDLERS[key](self, key)

    def length(self, key: str) -> None:
        """`iters` counts batches in mlx-lm; an update takes `grad_accumulation_steps` of them."""
        iters = self._whole(key, 1)
        if iters is not None and iters < self.accumulation:
            self.result.problems.append(f"iters: {iters} batches make no update of {self.accumulation}; raise it")
        elif iters is not None:
            self.result.put("train.steps", iters // self.accumulation, key)

    def rows(self, key: str) -> None:
        if key == "grad_accumulation_steps" and "batch_size" in self.given:
            return  # handled with batch_size
        rows = self.batch * self.accumulation
        self.result.put("train.grad_accumulation_steps", rows, key)
        if rows > 1:
            self.result.notices.append(
                f"an update takes {rows} rows (batch_size {self.batch} × grad_accumulation_steps {self.accumulation}) "
                "and averages over all their supervised tokens; engine.rows_together says how many run at a time"
            )

    def interval(self, key: str) -> None:
        path = {"save_every": "save_every", "steps_per_eval": "eval_every", "steps_per_report": "report_every"}[key]
        batches = self._whole(key, 1)
        if batches is not None:
            self.result.put(f"output.{path}", math.ceil(batches / self.accumulation), key)

    def validation_rows(self, key: str) -> None:
        batches = self._all_or_whole(key, 0)
        if batches is not None:
            self.result.put("eval.rows", batches * self.batch if isinstance(batches, int) else batches, key)

    def layers(self, key: str) -> None:
        count = self._all_or_whole(key, 0)
        if count is not None:
            self.result.put("lora.layers", count or "all", key)  # 0: all, as mlx-lm slices

    def lora(self, key: str) -> None:
        given = self.given[key]
        if not isinstance(given, dict):
            self.result.problems.append(f"{key} must be a mapping of rank, scale, dropout and keys")
            return
        known = {"rank": "rank", "scale": "scale", "dropout": "dropout", "keys": "targets"}
        values = {name: value for name, value in {**DEFAULTS[key], **given}.items() if value is not None}
        for name, value in values.items():
            if name in known:
                self.result.put(f"lora.{known[name]}", value, f"{key}.{name}")
            elif name == "alpha" and "scale" in given:
                self.result.notices.append("lora_parameters.alpha has no effect beside scale, as in mlx-lm")
            elif name == "alpha":
                self.result.problems.append(
                    f"{key}.alpha: mlx-lm takes scale (= alpha / rank); give that, or lora.alpha"
                )
            else:
                self.result.problems.append(f"{key}.{name}: unknown key{suggestion(name, list(known))}")

    def mask(self, key: str) -> None:
        if not isinstance(self.given[key], bool):
            self.result.problems.append(f"{key} must be true or false, not {self.given[key]!r}")
        self.result.put("data.supervise", "last" if self.given[key] is True else "all", key)

    def optimizer(self, key: str) -> None:
        name = self.given[key]
        self.result.put("train.optimizer", name.lower() if isinstance(name, str) else name, key)

    def optimizer_options(self, key: str) -> None:
        """mlx-lm keys the options by optimiser; the weight decay has a key of its own here."""
        options = self.given[key]
        name = self.given.get("optimizer") or (self.result.values.get("train") or {}).get("optimizer", "adamw")
        if not isinstance(options, dict) or not all(isinstance(value, dict | None) for value in options.values()):
            self.result.problems.append(f"{key} must be a mapping such as `{name}: {{betas: [0.9, 0.98]}}`")
            return
        unused = [other for other, value in options.items() if value and other != name]
        if unused:
            self.result.notices.append(f"{key}.{unused[0]} has no effect, since the optimizer is {name}")
        chosen = dict(options.get(name) or {})
        if "weight_decay" in chosen:
            self.result.put("train.weight_decay", chosen.pop("weight_decay"), f"{key}.{name}.weight_decay")
        if chosen:
            self.result.put("train.optimizer_config", chosen, f"{key}.{name}")

    def schedule(self, key: str) -> None:
        schedule = self.given[key]
        if schedule is None:
            schedule = "constant"
        if not isinstance(schedule, dict):
            self.result.put("train.lr_schedule", schedule, key)
            return
        unknown = [name for name in schedule if name not in ("name", "warmup", "warmup_init", "arguments")]
        self.result.problems.extend(f"{key}.{name}: unknown key" for name in unknown)
        if schedule.get("warmup"):
            self.result.put("train.warmup_steps", schedule["warmup"], f"{key}.warmup")
        if schedule.get("warmup_init"):
            self.result.notices.append(f"{key}.warmup_init is not used: warm-up starts at learning_rate / warmup")
        self._decay(key, schedule.get("name"), schedule.get("arguments"))

    def _decay(self, key: str, name: Any, arguments: Any) -> None:
        """cosine_decay(start, updates, end = 0) and linear_schedule(start, end, updates)."""
        order = {"cosine_decay": ("cosine", 1, 2), "linear_schedule": ("linear", 2, 1)}.get(str(name))
        if order is None:
            self.result.problems.append(
                f"{key}.name: {name} isn't available; use cosine_decay, linear_schedule or lr_schedule: null (constant)"
            )
        elif not isinstance(arguments, list) or not 2 <= len(arguments) <= 3 or (len(arguments) < 3 and order[1] == 2):
            self.result.problems.append(f"{key}.arguments must list the start, the updates and the end of {name}")
        else:
            kind, updates, end = order
            self.result.put("train.lr_schedule", kind, f"{key}.name")
            last = arguments[end] if end < len(arguments) else 0.0
            self.result.put("train.learning_rate", arguments[0], f"{key}.arguments[0]")
            self.result.put("train.final_learning_rate", last, f"{key}.arguments[{end}]")
            self.result.notices.append(
                f"{key}: the {kind} schedule ends with the run's last update (its arguments say {arguments[updates]})"
            )

    def reporting(self, key: str) -> None:
        names = self.given[key]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        if isinstance(names, list) and "swanlab" in names:
            self.result.problems.append("report_to: swanlab isn't supported; use wandb, tensorboard or trackio")
        elif names:
            self.result.put("output.report_to", names, key)

    def data(self, key: str) -> None:
        if self.given.get("hf_dataset"):
            self.result.notices.append("data is not read, since hf_dataset is given (as in mlx-lm)")
        else:
            self.result.put("data.train", self.given[key], key)

    def hub(self, key: str) -> None:
        records = self.given[key]
        if not records:
            return
        train, valid = [], []
        for number, record in enumerate(records if isinstance(records, list) else [records]):
            source = self._hub_source(record, f"{key}[{number}]" if isinstance(records, list) else key)
            train.append({**source, "split": _split(record, "train_split", "train[:80%]")})
            valid.append({**source, "split": _split(record, "valid_split", "train[-10%:]")})
        self.result.put("data.train", train, key)
        self.result.put("data.valid", valid, key)

    def _hub_source(self, record: Any, where: str) -> Values:
        if not isinstance(record, dict):
            self.result.problems.append(f"{where} must be a mapping with a path")
            return {}
        known = ("path", "name", "train_split", "valid_split", "test_split", "config", *FEATURES)
        unknown = [name for name in record if name not in known]
        self.result.problems.extend(f"{where}.{name}: unknown key{suggestion(name, known)}" for name in unknown)
        source: Values = {"path": record.get("path", record.get("name"))}
        config = record.get("config") or {}
        if isinstance(config, dict) and set(config) <= {"name"}:
            source |= {"subset": config["name"]} if config else {}
        else:
            self.result.problems.append(f"{where}.config: only `name` (the subset) is supported, not {config!r}")
        columns = {ours: record[name] for name, ours in FEATURES.items() if name in record}
        return source | ({"columns": columns} if columns else {})

    def method(self, key: str) -> None:
        value = self.given[key]
        if key == "training_mode" and value not in ("normal", None):
            self.result.asked_loss = str(value)
        if key == "fine_tune_type" and value == "dora":
            self.result.put("lora.kind", value, key)
        elif key == "fine_tune_type" and value not in ("lora", None):
            reason = {"full": "only adapters are trained here"}.get(str(value), "unknown")
            self.result.problems.append(f"{key}: {value} isn't supported ({reason}); use lora or dora")

    def train(self, key: str) -> None:
        if self.given[key] is False:
            self.result.problems.append("train: false leaves nothing to do; `segtrain check RECIPE` looks at the data")
        elif self.given[key] is not True:
            self.result.problems.append(
                f"train must be a mapping of keys (or true, as in mlx-lm), not {self.given[key]!r}"
            )

    def test(self, key: str) -> None:
        if self.given[key]:
            self.result.notices.append(f"{key} is not done here: use mlx_lm.lora --test with the adapter of the run")

    def without_effect(self, key: str) -> None:
        reasons = {
            "clear_cache_threshold": "the memory planner sets the allocator's cache",
            "grad_checkpoint": "activations are always recomputed where engine.backward is segmented",
            "test_batches": "no test set is evaluated",
        }
        if self.given[key] and (key != "test_batches" or self.given.get("test")):
            self.result.notices.append(f"{key} has no effect: {reasons[key]}")

    def refused(self, key: str) -> None:
        reasons = {
            "config": "a recipe doesn't name another one",
        }
        if self.given[key] is not None:
            self.result.problems.append(f"{key}: {reasons[key]}")

    def _column(self, ours: str, theirs: Any, alias: str) -> None:
        data = self.result.values.setdefault("data", {})
        if isinstance(data, dict) and isinstance(data.setdefault("columns", {}), dict):
            data["columns"][ours] = theirs
            self.result.origins[f"data.columns.{ours}"] = alias

    def _whole(self, key: str, minimum: int) -> int | None:
        """The key's value, or 1 where it is absent; None, and a problem, where it is wrong."""
        value = self.given.get(key, 1)
        if type(value) is int and value >= minimum:
            return value
        self.result.problems.append(f"{key} must be a whole number of at least {minimum}, not {value!r}")
        return None

    def _all_or_whole(self, key: str, minimum: int) -> int | str | None:
        """`all` for -1, else as `_whole`."""
        return "all" if self.given[key] == -1 else self._whole(key, minimum)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {inner}' for key, inner in value.items())})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _split(record: Any, name: str, default: str) -> Any:
    return record.get(name, default) if isinstance(record, dict) else default


HANDLERS: dict[str, Callable[[_Reader, str], None]] = {
    "batch_size": _Reader.rows,
    "clear_cache_threshold": _Reader.without_effect,
    "config": _Reader.refused,
    "data": _Reader.data,
    "fine_tune_type": _Reader.method,
    "grad_accumulation_steps": _Reader.rows,
    "grad_checkpoint": _Reader.without_effect,
    "hf_dataset": _Reader.hub,
    "iters": _Reader.length,
    "lora_layers": _Reader.layers,
    "lora_parameters": _Reader.lora,
    "lr_schedule": _Reader.schedule,
    "mask_prompt": _Reader.mask,
    "num_layers": _Reader.layers,
    "optimizer": _Reader.optimizer,
    "optimizer_config": _Reader.optimizer_options,
    "report_to": _Reader.reporting,
    "save_every": _Reader.interval,
    "steps_per_eval": _Reader.interval,
    "steps_per_report": _Reader.interval,
    "test": _Reader.test,
    "test_batches": _Reader.without_effect,
    "train": _Reader.train,
    "training_mode": _Reader.method,
    "val_batches": _Reader.validation_rows,
}
KEYS = frozenset((*RENAMED, *FEATURES, *HANDLERS)) - {"train", "data"}
