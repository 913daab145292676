"""Recipes: YAML, `--set`, every error at once, mlx-lm's keys, fingerprint and dump."""

import json
import math
import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from segtrain.engine.objectives import OBJECTIVES
from segtrain.errors import UserError
from segtrain.recipe import mlx_lm_keys, yaml_file
from segtrain.recipe.scaffold import write_recipe
from segtrain.recipe.schema import LoraRecipe, Recipe, TrainRecipe, differences, load_recipe, parse_bytes

MINIMAL = "model: m\ndata: {train: a.jsonl}\n"
# The keys and values that mlx-lm's documentation shows in its example LoRA configuration.
MLX_LM = """
model: "mlx_model"
train: true
fine_tune_type: lora
training_mode: normal
optimizer: adamw
data: "/path/to/training/data"
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
"""


def load(tmp_path: Path, text: str | bytes, *overrides: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_recipe(path, overrides)


def refusal(tmp_path: Path, text: str | bytes, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    assert recipe.lora.effective_scale == 2.0  # alpha 16, rank 8
    assert (recipe.train.steps, recipe.train.epochs, recipe.train.seed) == (None, None, 0)
    assert recipe.output.dir == "runs/r"
    assert recipe.notices == ()
    assert recipe.engine.budget_bytes is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        (".5e-3", 0.0005),
        ("1.e-3", 1e-3),
        ("5E-05", 5e-5),
        ("+2e-4", 2e-4),
        ("1.0e-4", 1e-4),
    ],
)
def test_numbers_with_exponents(tmp_path: Path, text: str, value: float) -> None:
    assert load(tmp_path, MINIMAL + f"train: {{learning_rate: {text}}}").train.learning_rate == value
    assert load(tmp_path, MINIMAL, f"train.learning_rate={text}").train.learning_rate == value


def test_yaml_itself_is_left_alone(tmp_path: Path) -> None:
    """Control for the resolvers: PyYAML's own loader still reads YAML 1.1, where `no` is a boolean."""
    load(tmp_path, MINIMAL)
    assert yaml.safe_load("[no, 2024-01-01]")[0] is False
    assert yaml_file.parse("[no, 2024-01-01, 1:30, 0x10, 0o17, 1_000]", "t") == [
        "no",
        "2024-01-01",
        "1:30",
        16,
        15,
        1000,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty; `segtrain init`"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "must hold a mapping such as `model: ...`, not a list"),
        (b"hello", "not the single value 'hello'"),
        (b"model: \xff\xfe", "isn't UTF-8 text (byte 7)"),
        (b"model: [a\ndata: b", "line 2: not valid YAML"),
        (b"model: a\nmodel: b\n", "line 2: the key 'model' is given twice"),
        (b"data:\n  train: a\n  split: x\n  train: b\n", "line 4: the key 'train' is given twice"),
        (b"1: a", "line 1: the key 1 must be text"),
        (b"model: !!python/object:os.system a", "has no meaning in a recipe"),
        (b"model: a\n---\nmodel: b", "not valid YAML"),
        (b"model: a\x00b", "not valid YAML"),
        (b"model: " + b"[" * 3000, "nested too deeply"),
        (b"a: &a [&b [*a]]", "nested too deeply"),
        (b"model: " + b"9" * 5000, "isn't a usable number"),
        (rb'model: "\ud83d"', "line 1: '\\ud83d' has half of a surrogate pair"),
        (rb'"\ude00\ud83d": 1', "half of a surrogate pair"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: bytes, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_data_given_as_the_recipe(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl holds data; name it as data.train"):
        load_recipe(rows)


def test_a_small_file_that_unfolds_to_a_large_one(tmp_path: Path) -> None:
    """Nine anchors of nine aliases each stand for 9^9 nodes."""
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    assert "too large" in refusal(tmp_path, "\n".join(lines))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="doesn't exist; `segtrain init`"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a directory; give a YAML file"):
        load_recipe(tmp_path)


def test_json_escapes_of_one_character_are_one(tmp_path: Path) -> None:
    """The recipe is written by a JSON library that escapes what isn't ASCII."""
    values = {"model": "📦", "data": {"train": "é.jsonl"}, "output": {"dir": "runs/😀"}}
    recipe = load(tmp_path, json.dumps(values))
    assert (recipe.model, recipe.output.dir) == ("📦", "runs/😀")


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    plain = load(tmp_path, MINIMAL)
    assert load(tmp_path, b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()) == plain


def test_every_error_at_once(tmp_path: Path) -> None:
    text = """
model: m
data: {train: a.jsonl, max_seq_length: 1, on_lng: drop}
lora: {rank: 0, dropout: 1.0, alpha: 1}
train: {learning_rte: 1e-4, epochs: yes, seed: -1}
engine: {segment_size: 0, head_chunk: none, memory_budget: lots, lookahead: true}
orpo: {beta: -1}
rank: 4
"""
    message = refusal(tmp_path, text)
    lines = message.splitlines()
    assert lines[0].endswith("has 13 errors:")
    assert len(lines) == 14
    for expected in [
        "data.max_seq_length must be at least 2, not 1",
        "data.on_lng: unknown key; did you mean on_long?",
        "lora.rank must be at least 1, not 0",
        "lora.dropout must be below 1",
        "train.learning_rte: unknown key; did you mean learning_rate?",
        "train.epochs must be a whole number, not 'yes'",
        "train.seed must be at least 0, not -1",
        "engine.segment_size must be auto or a whole number of at least 1, not 0",
        "engine.head_chunk must be auto or",
        "engine.memory_budget is wrong: 'lots' isn't a memory size",
        "engine.lookahead must be one of auto, 0, 1, 2, not true",
        "orpo.beta must be at least 0, not -1",
        "rank: unknown key; did you mean lora.rank?",
    ]:
        assert any(expected in line for line in lines), expected
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("lora: {alpha: 8, scale: 1}", "lora.alpha: alpha and scale are both given"),
        ("lora: {scale: 1.0, rslora: true}", "lora.rslora: rslora turns alpha into a scale"),
        ("lora: {layers: [4, 2]}", "lora.layers must be all, a number N"),
        ("lora: {layers: 0}", "lora.layers must be all"),
        ("lora: {layers: true}", "lora.layers must be all"),
        ("lora: {targets: []}", "lora.targets must be all-linear or a list of module names or globs, not []"),
        ("lora: {targets: [q_proj, 3]}", "lora.targets must be all-linear or a list"),
        ("lora: {targets: {q_proj: 1}}", "lora.targets must be all-linear or a list"),
        ("lora: {rank: true}", "lora.rank must be a whole number, not true"),
        ("lora: {rank: 8.0}", "lora.rank must be a whole number, not 8.0"),
        ("lora: [q_proj]", "lora must be a mapping of keys, not ['q_proj']"),
        ("lora:", "lora must be a mapping of keys, not empty"),
        ("train: {steps: 5, epochs: 1}", "train.steps: steps and epochs are both given"),
        ("train: {steps: 5, warmup_steps: 6}", "train.warmup_steps: 6 is more than the run's 5 steps"),
        ("train: {warmup_steps: 1, warmup_ratio: 0.1}", "train.warmup_steps: warmup_steps and warmup_ratio"),
        ("train: {learning_rate: 0}", "train.learning_rate must be above 0"),
        ("train: {learning_rate: .nan}", "train.learning_rate must be a finite number"),
        ("train: {learning_rate: 1e999}", "train.learning_rate must be a finite number"),
        ("train: {learning_rate: '1e-4'}", "train.learning_rate must be a number, not '1e-4'"),
        ("train: {optimizer: adamv}", "train.optimizer must be one of 'adamw', 'adam'"),
        ("output: {keep_checkpoints: 0}", "output.keep_checkpoints must be at least 1"),
        ("output: {dir: }", "output.dir must not be empty"),
        ("engine: {memory_budget: 10}", "'10' isn't a memory size; write one with a unit, such as 24GB"),
        ("train: {grad_accumulation_steps: 100000000}", "train.grad_accumulation_steps must be at most 65536"),
        ("output: {dir: 2024}", "output.dir must be text (put it in quotes), not 2024"),
        ("output: {report_to: swanlab}", "output.report_to[0] must be one of"),
        ("engine: {dequantize: 1}", "engine.dequantize must be one of auto, true, false, not 1"),
        ("eval: {prompts: [1]}", "eval.prompts[0] must be text"),
        ("eval: {rows: -1}", "eval.rows must be all or a number of rows"),
    ],
)
def test_one_error(tmp_path: Path, section: str, message: str) -> None:
    assert message in refusal(tmp_path, MINIMAL + section)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{}", "data.train is required"),
        ("{train: []}", "data.train must not be empty"),
        ("{train: ['']}", "data.train[0].path must not be empty"),
        ("{train: [{path: a, weight: 1}, b]}", "data.train: give every source a weight"),
        ("{train: [{path: a, wieght: 1}]}", "data.train[0].wieght: unknown key; did you mean weight?"),
        ("{train: {weight: 1}}", "data.train[0].path is required"),
    ],
)
def test_data_errors(tmp_path: Path, data: str, message: str) -> None:
    assert message in refusal(tmp_path, f"model: m\ndata: {data}")


def test_model_is_required(tmp_path: Path) -> None:
    assert refusal(tmp_path, "data: {train: a}").endswith("model is required")


def test_sources_inherit_from_the_section(tmp_path: Path) -> None:
    text = """
model: m
data:
  train: [{path: a, weight: 2}, {path: b, weight: 1, split: "train[:5]", columns: {prompt: q}}]
  valid: c
  subset: s
  split: train2
  columns: {prompt: p, completion: c}
"""
    data = load(tmp_path, text).data
    first, second = data.sources("train")
    assert (first.split, second.split, first.weight) == ("train2", "train[:5]", 2)
    assert second.columns == {"prompt": "q", "completion": "c"}
    (valid,) = data.sources("valid")
    assert (valid.subset, valid.split) == ("s", None)
    assert data.sources("test") == ()


def test_overrides(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL, "train.seed=3", "lora.targets=[q_proj, 'mlp.*']", "engine.memory_budget=24GB")
    assert (recipe.train.seed, recipe.lora.targets) == (3, ("q_proj", "mlp.*"))
    assert recipe.engine.budget_bytes == 24_000_000_000
    assert load(tmp_path, MINIMAL + "train: {steps: 5}", "train.steps=null", "train.epochs=2").train.epochs == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "must look like train.steps=100"),
        ("=3", "must look like"),
        ("train..steps=3", "must look like"),
        ("model.name=3", "--set model.name: model is 'm', which has no keys"),
        ("train.stepz=3", "train.stepz: unknown key; did you mean steps?"),
        ("lora.targets=[a", "--set lora.targets, line 1: not valid YAML"),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 gib", 3 * 2**29),
        ("16g", 16 * 10**9),
        ("2TB", 2 * 10**12),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["24", "", "GB", "-1GB", "0GB", "1e3GB", "24GBs", "24 G B", "nanGB", "9999999999TB"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(UserError, match="isn't a memory size"):
        parse_bytes(text)


def test_scale_and_layer_range() -> None:
    assert LoraRecipe(rank=16, alpha=32, rslora=True).effective_scale == pytest.approx(32 / math.sqrt(16))
    assert LoraRecipe(rank=4, scale=20.0).effective_scale == 20.0
    assert LoraRecipe(layers=[2, 5]).layer_range(8) == (2, 5)
    assert LoraRecipe(layers=3).layer_range(8) == (5, 8)
    assert LoraRecipe().layer_range(8) == (0, 8)
    for layers in (9, [2, 9]):
        with pytest.raises(UserError, match="the model's 8 layers"):
            LoraRecipe(layers=layers).layer_range(8)


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("all-linear", "all-linear"),
        (["all-linear"], "all-linear"),
        ("q_proj", ("q_proj",)),
        (["a", "b.*"], ("a", "b.*")),
    ],
)
def test_targets(given: Any, targets: Any) -> None:
    assert LoraRecipe(targets=given).targets == targets


def test_warmup_is_counted_in_updates() -> None:
    assert TrainRecipe(warmup_ratio=0.1, grad_accumulation_steps=32).warmup(200) == 20
    assert TrainRecipe(warmup_steps=7).warmup(200) == 7
    assert TrainRecipe().warmup(200) == 0


def test_documented_mlx_lm_recipe_runs_unchanged(tmp_path: Path) -> None:
    """Expected values: what mlx_lm/lora.py does with the same file."""
    recipe = load(tmp_path, MLX_LM)
    assert recipe.model == "mlx_model"
    assert [source.path for source in recipe.data.train] == ["/path/to/training/data"]
    assert (recipe.data.supervise, recipe.data.max_seq_length, recipe.data.on_long) == ("all", 2048, "truncate")
    assert (recipe.lora.rank, recipe.lora.effective_scale, recipe.lora.layers) == (8, 20.0, 16)
    assert recipe.lora.targets == ("self_attn.q_proj", "self_attn.v_proj")
    train = recipe.train
    assert (train.steps, train.learning_rate, train.lr_schedule) == (1000, 1e-5, "constant")
    assert (train.optimizer, train.weight_decay, train.max_grad_norm) == ("adamw", 0.01, None)
    assert (train.grad_accumulation_steps, train.seed) == (4, 0)
    output = recipe.output
    assert (output.dir, output.save_every, output.eval_every, output.report_every) == ("adapters", 100, 200, 10)
    assert recipe.eval.rows == 100  # 25 batches of 4
    assert any("batch_size 4" in notice for notice in recipe.notices)


def test_mlx_lm_defaults_are_mlx_lms() -> None:
    lora = pytest.importorskip("mlx_lm.lora")
    assert {key: lora.CONFIG_DEFAULTS[key] for key in mlx_lm_keys.DEFAULTS} == mlx_lm_keys.DEFAULTS
    unknown = lora.CONFIG_DEFAULTS.keys() - mlx_lm_keys.KEYS - {"model", "data", "train", "trust_remote_code"}
    assert not unknown
    assert pytest.importorskip("mlx.optimizers").AdamW(1.0).weight_decay == mlx_lm_keys.ADAMW_WEIGHT_DECAY


def test_mlx_lm_file_that_says_little_gets_its_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, "model: m\ndata: d\niters: 10\n")
    assert (recipe.train.optimizer, recipe.train.learning_rate, recipe.lora.layers) == ("adam", 1e-5, 16)
    assert "num_layers 16" in recipe.notices[0]
    assert "iters" not in recipe.notices[0].partition("silent")[2]


def test_an_alias_in_a_segtrain_recipe_changes_nothing_else(tmp_path: Path) -> None:
    plain = load(tmp_path, MINIMAL)
    assert differences(plain, load(tmp_path, MINIMAL + "iters: 7")) == ["train.steps: null → 7"]


def test_iterations_are_batches_and_steps_are_updates(tmp_path: Path) -> None:
    recipe = load(tmp_path, MLX_LM + "grad_accumulation_steps: 8\n")
    assert (recipe.train.steps, recipe.train.grad_accumulation_steps) == (125, 32)
    assert (recipe.output.save_every, recipe.output.eval_every, recipe.output.report_every) == (13, 25, 2)
    assert "no update of 8" in refusal(tmp_path, MLX_LM + "grad_accumulation_steps: 8\n", "iters=7")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            "{name: cosine_decay, warmup: 10, warmup_init: 1e-7, arguments: [1e-3, 990, 1e-7]}",
            ("cosine", 1e-3, 1e-7, 10),
        ),
        ("{name: cosine_decay, arguments: [1e-3, 1000]}", ("cosine", 1e-3, 0.0, None)),
        ("{name: linear_schedule, arguments: [1e-3, 1e-6, 1000]}", ("linear", 1e-3, 1e-6, None)),
    ],
)
def test_mlx_lm_schedules(tmp_path: Path, schedule: str, expected: tuple[Any, ...]) -> None:
    train = load(tmp_path, MLX_LM + f"lr_schedule: {schedule}\n").train
    assert (train.lr_schedule, train.learning_rate, train.final_learning_rate, train.warmup_steps) == expected


def test_mlx_lm_optimizer_options(tmp_path: Path) -> None:
    options = "optimizer_config: {adam: {}, adamw: {betas: [0.9, 0.98], weight_decay: 0.05}, sgd: {momentum: 0.9}}\n"
    recipe = load(tmp_path, MLX_LM + options)
    expected = {"betas": [0.9, 0.98], "bias_correction": False}
    assert (recipe.train.weight_decay, recipe.train.optimizer_config) == (0.05, expected)
    assert any("optimizer_config.sgd has no effect" in notice for notice in recipe.notices)


def test_mlx_lm_recipes_have_mlx_lms_adam(tmp_path: Path) -> None:
    """`mlx.optimizers.Adam` corrects no bias unless told to, and mlx-lm passes it the recipe's options alone."""
    bare = "model: m\ndata: d\niters: 10\n"
    optimizers = pytest.importorskip("mlx.optimizers")
    assert not optimizers.Adam(1.0).bias_correction
    assert load(tmp_path, bare).train.optimizer_config == {"bias_correction": False}
    asked = bare + "optimizer_config: {adam: {bias_correction: true}}\n"
    assert load(tmp_path, asked).train.optimizer_config == {"bias_correction": True}
    assert load(tmp_path, bare + "optimizer: sgd\n").train.optimizer_config == {}
    assert load(tmp_path, MINIMAL + "iters: 7\n").train.optimizer_config == {}  # a recipe of segtrain


def test_mlx_lm_hub_data(tmp_path: Path) -> None:
    text = """
model: m
iters: 5
hf_dataset:
  - {path: a/b, train_split: "train[:90%]", valid_split: "train[-10%:]", prompt_feature: q, completion_feature: r}
  - {path: c, chat_feature: turns, config: {name: en}}
"""
    data = load(tmp_path, text).data
    first, second = data.sources("train")
    assert (first.path, first.split, first.columns) == ("a/b", "train[:90%]", {"prompt": "q", "completion": "r"})
    assert (second.split, second.subset, second.columns) == ("train[:80%]", "en", {"messages": "turns"})
    assert [source.split for source in data.sources("valid")] == ["train[-10%:]", "train[-10%:]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "fine_tune_type=full",
            "fine_tune_type: full isn't supported (only adapters are trained here); use lora or dora",
        ),
        ("train=false", "train: false leaves nothing to do"),
        ("train=3", "train must be a mapping of keys (or true"),
        ("config=x", "config: a recipe doesn't name another one"),
        ("report_to='wandb,swanlab'", "swanlab isn't supported"),
        ("num_layers=-2", "--set num_layers must be a whole number of at least 0, not -2"),
        ("iters=many", "iters must be a whole number of at least 1, not 'many'"),
        ("mask_prompt=1", "mask_prompt must be true or false"),
        ("lora_parameters.alpha=16", "has no effect beside scale"),
        ("lora_parameters.rnak=16", "lora_parameters.rnak: unknown key; did you mean rank?"),
        ("learning_rate=-1", "learning_rate must be above 0, not -1"),
        ("lora_parameters.rank=0", "lora_parameters.rank must be at least 1, not 0"),
        ("lr_schedule={name: step_decay, arguments: [1, 2, 3]}", "step_decay isn't available"),
        ("lr_schedule={name: cosine_decay}", "lr_schedule.arguments must list"),
        ("optimizer_config=[a]", "optimizer_config must be a mapping"),
        ("train.steps=5", None),
    ],
)
def test_mlx_lm_keys_without_meaning_here(tmp_path: Path, change: str, message: str | None) -> None:
    """Refused by name, or said in a notice; the last case is the control, a change that is fine."""
    if message is None or "no effect" in message:
        recipe = load(tmp_path, MLX_LM, change)
        assert message is None or any(message in notice for notice in recipe.notices)
    else:
        assert message in refusal(tmp_path, MLX_LM, change)


def test_mlx_lm_zeros_mean_what_they_do_there(tmp_path: Path) -> None:
    """`min(rows, val_batches)` batches are evaluated, and the layers adapted are `layers[-num_layers:]`."""
    recipe = load(tmp_path, MLX_LM, "val_batches=0", "num_layers=0")
    assert (recipe.eval.rows, recipe.lora.layers) == (0, "all")


def test_the_loss_that_a_recipe_names_is_remembered(tmp_path: Path) -> None:
    assert load(tmp_path, MLX_LM).asked_loss is None
    assert load(tmp_path, MLX_LM, "training_mode=orpo").asked_loss == "orpo"


@pytest.mark.parametrize(
    ("change", "path", "other", "value"),
    [
        ("train.steps=50", "train.steps", "train.epochs", 50),
        ("train.epochs=2", "train.epochs", "train.steps", 2),
        ("iters=50", "train.steps", "train.epochs", 50),
        ("train.warmup_steps=3", "train.warmup_steps", "train.warmup_ratio", 3),
        ("train.warmup_ratio=0.1", "train.warmup_ratio", "train.warmup_steps", 0.1),
        ("lora.scale=2.0", "lora.scale", "lora.alpha", 2.0),
        ("lora.alpha=2.0", "lora.alpha", "lora.scale", 2.0),
    ],
)
def test_of_alternatives_the_one_set_wins(tmp_path: Path, change: str, path: str, other: str, value: float) -> None:
    text = f"{MINIMAL}{other.replace('.', ': {')}: 1}}\n"
    recipe = load(tmp_path, text, change)
    values = recipe.dump()
    section, key = path.split(".")
    assert values[section][key] == value
    assert values[section][other.split(".")[1]] is None
    assert [notice for notice in recipe.notices if "--set" in notice] == [
        f"--set {path} takes the place of {other} (1)"
    ]


def test_of_two_alternatives_set_the_last_wins(tmp_path: Path) -> None:
    train = load(tmp_path, MINIMAL, "train.steps=5", "train.epochs=2").train
    assert (train.steps, train.epochs) == (None, 2)
    train = load(tmp_path, MINIMAL, "train.epochs=2", "train.steps=5").train
    assert (train.steps, train.epochs) == (5, None)
    assert load(tmp_path, MINIMAL + "train: {steps: 5}", "train.epochs=null").train.steps == 5


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_the_documented_change_works_on_the_recipe_of_init(tmp_path: Path, loss: str) -> None:
    path = tmp_path / "recipe.yaml"
    write_recipe(path, loss)
    assert load_recipe(path, ["train.steps=50"]).train.steps == 50


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("", "train.steps=0", "--set train.steps must be at least 1, not 0"),
        ("", "data.train=[{path: a, weight: 0}]", "--set data.train[0].weight must be above 0, not 0"),
        ("", "rank=4", "--set rank: unknown key; did you mean lora.rank?"),
        ("", "iters=0", "--set iters must be a whole number of at least 1, not 0"),
        (
            "train: {learning_rate: 0.1}",
            "learning_rate=0.2",
            "--set learning_rate: train.learning_rate is given too; type --set train.learning_rate=...",
        ),
    ],
)
def test_what_was_typed_is_not_blamed_on_the_file(tmp_path: Path, text: str, change: str, message: str) -> None:
    assert refusal(tmp_path, MINIMAL + text, change) == message
    both = refusal(tmp_path, f"{MINIMAL}seed: -1\n{text}", change)
    assert both == f"{tmp_path / 'r.yaml'}: seed must be at least 0, not -1\n{message}"


def test_alias_and_key_together_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "iters: 5\ntrain: {steps: 6}")
    assert message.endswith("iters: train.steps is given too; keep one of them")


def test_dump_reloads_to_an_equal_recipe(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + 'train: {learning_rate: 3e-5, steps: 9}\noutput: {dir: "1e-4"}\neval: {prompts: ["no", "0x1", "é🙂", "a: b"]}'
    )
    for recipe in (load(tmp_path, text), load(tmp_path, MLX_LM), load(tmp_path, MINIMAL)):
        again = load(tmp_path, recipe.to_yaml())
        assert again == recipe
        assert again.fingerprint() == recipe.fingerprint()
        assert again.notices == ()
    assert "# resolved by segtrain-mlx" in recipe.to_yaml()


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ("train.seed=1", True),
        ("train.steps=9", True),
        ("lora.rank=4", True),
        ("data.supervise=all", True),
        ("data.train=b.jsonl", True),
        ("orpo.beta=0.2", True),
        ("simpo.gamma=0.2", True),
        ("cpo.alpha=0.2", True),
        ("dpo.loss=ipo", True),
        ("model=other", True),
        ("output.dir=elsewhere", False),
        ("output.save_every=7", False),
        ("engine.segment_size=3", False),
        ("data.valid=v.jsonl", False),
        ("eval.rows=3", False),
    ],
)
def test_fingerprint(tmp_path: Path, change: str, counts: bool) -> None:
    before, after = load(tmp_path, MINIMAL), load(tmp_path, MINIMAL, change)
    assert before != after
    assert (before.fingerprint() != after.fingerprint()) == counts
    assert bool(differences(before, after, training_only=True)) == counts
    assert len(differences(before, after)) == 1


def test_differences_name_path_and_values(tmp_path: Path) -> None:
    before = load(tmp_path, MINIMAL + "lora: {targets: [a]}")
    changed = load(tmp_path, MINIMAL, "train.seed=1", "data.train=[a.jsonl, b.jsonl]")
    assert differences(before, changed) == [
        'data.train: ["a.jsonl"] → ["a.jsonl", "b.jsonl"]',
        'lora.targets: ["a"] → all-linear',
        "train.seed: 0 → 1",
    ]


def test_recipes_are_frozen(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    with pytest.raises(Exception, match="frozen"):
        recipe.train.seed = 3  # type: ignore[misc]


def test_a_test_set_is_said_to_be_left_alone(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL, "data.test=t.jsonl").notices == (
        "data.test is not read in training: `segtrain eval RUN` evaluates it",
    )


def test_trusting_remote_code_is_said(tmp_path: Path) -> None:
    assert any("runs Python code" in notice for notice in load(tmp_path, MINIMAL, "trust_remote_code=true").notices)


NAMES = sorted({*Recipe.model_fields, *mlx_lm_keys.KEYS, "steps", "rank", "train_split", "path"})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.text(string.printable + "é\u2028\x85🙂", max_size=8),
    st.sampled_from(["auto", "all", "cosine", "1e-4", "adamw", "no", "24GB", "lora", "cosine_decay"]),
)
KEYS = st.sampled_from(NAMES) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8), st.lists(st.text(max_size=12), max_size=2))
@example({"model": "m", "data": {"train": "a"}}, [])
@example({"lora_parameters": {"rank": {}}, "optimizer_config": {"adam": 3}, "data": []}, [])
@example({"output": 3, "train": True, "iters": 1, "data": "x", "model": "m"}, ["output.dir=3"])
def test_any_mapping_gives_a_recipe_or_one_message(values: dict[str, Any], overrides: list[str]) -> None:
    _either(yaml_file.dump(values), overrides)


@given(st.text(max_size=60) | st.text(":{}[]&*!|>-'\"# \n\tab1.", max_size=60))
@example("? : ?")
@example("a: &x {b: *x}")
@example("<<: {model: m}\nmodel: m")
def test_any_text_gives_a_recipe_or_one_message(text: str) -> None:
    _either(text, [])


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=5))
def test_dumped_yaml_reads_back(values: dict[str, Any]) -> None:
    read = yaml_file.parse(yaml_file.dump(values), "t")
    assert repr(read) == repr(values)  # NaN equals itself in repr


def _either(text: str, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        message, recipe = _outcome(path, overrides)
    assert (recipe is None) == bool(message)
    assert "pydantic" not in message
    if recipe is not None:
        assert Recipe.from_mapping(recipe.dump()) == recipe


def _outcome(path: Path, overrides: list[str]) -> tuple[str, Recipe | None]:
    try:
        return "", load_recipe(path, overrides)
    except UserError as error:
        return str(error), None


def test_a_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    recipe = Recipe.model_validate({"model": "m", "data": {"train": "t"}, "output": {"dir": "~/runs/a"}})
    assert recipe.output.dir == "/somewhere/runs/a"
