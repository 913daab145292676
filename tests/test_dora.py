"""DoRA. Expected values: the formula with V written out, mlx-lm's own layers differentiated by mlx, and mlx-lm loading
what was trained.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
import tiny_configs
import tiny_run
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear as Theirs
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_adapters, load_model

from segtrain import cli
from segtrain.engine import objectives
from segtrain.engine.backward import FullBackward, Step
from segtrain.engine.layouts import pair, shared_prefix
from segtrain.errors import UserError
from segtrain.event import TrainStep
from segtrain.lora import adapters
from segtrain.lora.dora import DoRALinear
from segtrain.lora.frozen import squared_norms
from segtrain.lora.layers import Lora, attach
from segtrain.lora.modules import Dropout, DropoutKeys, Slot
from segtrain.memory import anatomy
from segtrain.models.load import load
from segtrain.models.stack import Execution, LayerStack
from segtrain.recipe.schema import Recipe
from segtrain.run.merging import export_merged
from segtrain.run.session import open_session
from segtrain.run.trainer import Trainer
from segtrain.run.verify import verify_gradients

IDS, PROMPT = tiny.tokens(18), 6
TOLERANCE = 1e-5
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "4-bit": {"bits": 4, "group_size": 32},
    "8-bit": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}


def frozen(form: str, bias: bool = True) -> nn.Module:
    mx.random.seed(0)
    linear = nn.Linear(64, 24, bias=bias)
    return nn.QuantizedLinear.from_linear(linear, **FORMS[form]) if FORMS[form] else linear


def randomised(module: DoRALinear) -> list[mx.array]:
    """Values of A, B and m, as they might be after some training, in the module."""
    key = mx.random.split(mx.random.key(1), 3)
    values = [
        mx.random.normal(module.lora_a.shape, key=key[0]) / 8,
        mx.random.normal(module.lora_b.shape, key=key[1]) / 8,
        module.m * mx.random.uniform(0.5, 1.5, module.m.shape, key=key[2]),
    ]
    module.lora_a, module.lora_b, module.m = values
    return values


def ours(form: str, *, rank: int = 3, bias: bool = True, dropout: Dropout | None = None) -> DoRALinear:
    module = DoRALinear(frozen(form, bias), rank, 2.0, dropout)
    module.measure()
    return module


def theirs(form: str, *, rank: int = 3, bias: bool = True) -> Theirs:
    return Theirs.from_base(frozen(form, bias), rank, 0.0, 2.0)


@pytest.mark.parametrize("form", FORMS)
def test_magnitudes_begin_as_mlx_lms(form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("segtrain.lora.frozen.SQUARED_BYTES", 4 * 64 * 7)  # 7 of 24 rows at a time
    assert mx.allclose(ours(form).m, theirs(form).m, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_norms_are_those_of_the_weight_written_out(form: str, rank: int):
    module = ours(form, rank=rank)
    a, b, _ = randomised(module)
    written_out = theirs(form)._dequantized_weight() + 2.0 * (a @ b).T
    expected = mx.linalg.norm(written_out, axis=1)
    assert mx.abs(expected / module.norms(mx.float32) - 1).max().item() < 2e-6
    assert mx.abs(expected / mx.sqrt(module.squares) - 1).max().item() > 0.1  # B makes a difference


def test_norms_at_the_start_are_the_magnitudes_to_the_bit():
    module = ours("4-bit")
    module.lora_a = mx.random.normal(module.lora_a.shape)
    assert mx.array_equal(module.norms(mx.float32), module.m)
    x = mx.random.normal((5, 64))
    assert mx.allclose(module(x), module.linear(x), atol=1e-6)


def test_half_precision_loses_no_more_than_the_factor_that_is_rounded_to_it():
    module = ours("dense")
    a, b, _ = randomised(module)
    module.linear.set_dtype(mx.bfloat16)
    module.squares = squared_norms(module.linear)
    plain = mx.linalg.norm(module.linear.weight.astype(mx.float32) + 2.0 * (a @ b).T, axis=1)
    assert mx.abs(module.norms(mx.bfloat16) / plain - 1).max().item() < 2**-8
    assert module(mx.ones((3, 64), mx.bfloat16)).dtype == mx.bfloat16
    assert module.norms(mx.bfloat16).dtype == mx.float32


def test_a_row_of_zeros_stays_finite():
    linear = nn.Linear(64, 24)
    linear.weight[3] = 0.0
    module = DoRALinear(linear, 2, 2.0)
    module.measure()
    module.lora_a = mx.random.normal(module.lora_a.shape)

    def total(m: mx.array, b: mx.array) -> mx.array:
        module.m, module.lora_b = m, b
        return module(mx.ones((2, 64))).sum()

    values = module.m, module.lora_b
    assert all(mx.isfinite(grad).all() for grad in mx.grad(total, argnums=(0, 1))(*values))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_mlx_lms(form: str, bias: bool):
    x = mx.random.normal((5, 64), key=mx.random.key(2))
    module, reference = ours(form, bias=bias), theirs(form, bias=bias)
    values = randomised(module)

    def run(module: Any) -> list[mx.array]:
        def output(x: mx.array, *values: mx.array) -> list[mx.array]:
            module.lora_a, module.lora_b, module.m = values
            return [module(x)]

        out = output(x, *values)
        return out + mx.vjp(output, [x, *values], [mx.cos(out[0])])[1]

    for expected, actual in zip(run(reference), run(module), strict=True):
        assert tiny.norm(expected - actual) < TOLERANCE * tiny.norm(expected)
    assert ("bias" in module.linear) == bias


def test_dropout_is_on_the_branch_alone():
    keys = DropoutKeys(seed=1)
    dropout = Dropout(0.5, "m", keys)
    module = ours("dense", dropout=dropout)
    a, b, m = randomised(module)
    x = mx.random.normal((5, 64), key=mx.random.key(2))
    y = x @ module.linear.weight.T + 2.0 * dropout(x) @ a @ b
    expected = m / module.norms(mx.float32) * y + module.linear.bias
    assert mx.allclose(module(x), expected, atol=1e-5)
    assert not mx.allclose(dropout(x), x)


# --- whole models -----------------------------------------------------------------------------------------------------


def dora(model: nn.Module, **options: Any) -> Lora:
    """DoRA of rank 3, its B and magnitudes as they might be after some training."""
    lora = tiny.attach(model, kind="dora", **options)
    mx.random.seed(8)
    for slot in lora.slots():
        if slot.key == "m":
            slot.module.m = slot.value * mx.random.uniform(0.5, 1.5, slot.value.shape)
    mx.eval(lora.values())
    return lora


@cache
def setup(family: str, bits: int = 0, **options: Any) -> tuple[LayerStack, Lora]:
    model = tiny.build(family, bits=bits)
    lora = dora(model, **options)
    return LayerStack(model), lora


@cache
def full(family: str, bits: int = 0, **options: Any) -> Step:
    stack, lora = setup(family, bits, **options)
    return FullBackward(stack, lora, objectives.sft).step(tiny.row(len(IDS), PROMPT))


def check(expected: Step, actual: Step) -> None:
    assert actual.loss.total.item() == pytest.approx(expected.loss.total.item(), rel=2e-6)
    assert tiny.relative(expected.grads, actual.grads) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("bits", [0, 4])
def test_gradients_are_those_of_mlx_lms_own_model(family: str, bits: int):
    _, lora = setup(family, bits)
    model = tiny.build(family, bits=bits)
    model.freeze()
    parameters = {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0, "keys": lora.keys}
    linear_to_lora_layers(model, len(model.layers), parameters, use_dora=True)
    model.load_weights(list(lora.values().items()), strict=False)
    modules = dict(model.named_modules())
    slots = [Slot(slot.name, modules[slot.name.removesuffix(f".{slot.key}")], slot.key) for slot in lora.slots()]
    names = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert names == lora.values().keys()
    own = Lora([slots], lora.keys, lora.rank, lora.scale, 0.0)
    loss, grads = tiny.mlx_lm_gradients(model, own, IDS, PROMPT)
    step = full(family, bits)
    assert step.loss.total.item() == pytest.approx(loss, rel=2e-6)
    assert tiny.relative(grads, step.grads) < TOLERANCE


@pytest.mark.parametrize(
    "engine",
    [
        *({"segment_size": size} for size in (1, 2, 99)),
        {"keep": 2},
        {"leanest": True, "lookahead": 2},
        {"compiled": True, "keep": 2},
        {"execution": Execution(mlp_rows=5), "keep": 1},
        {"execution": Execution(dequantize=True), "compiled": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", [0, 4])
def test_every_way_to_run_gives_the_same(engine: dict[str, Any], bits: int):
    stack, lora = setup("qwen2", bits)
    check(full("qwen2", bits), tiny.segmented(stack, lora, objectives.sft, **engine).step(tiny.row(len(IDS), PROMPT)))


@pytest.mark.parametrize("bits", [0, 4])
def test_full_backward_compiled_gives_the_same(bits: int):
    stack, lora = setup("qwen2", bits)
    engine = FullBackward(stack, lora, objectives.sft, compiled=True)
    check(full("qwen2", bits), engine.step(tiny.row(len(IDS), PROMPT)))


@pytest.mark.parametrize("engine", [{}, {"segment_size": 2, "keep": 2}, {"execution": Execution(mlp_rows=5)}], ids=str)
def test_dropout_is_the_same_in_the_recomputation(engine: dict[str, Any]):
    stack, lora = setup("llama", dropout=0.3)
    row = tiny.row(len(IDS), PROMPT)
    check(full("llama", dropout=0.3), tiny.segmented(stack, lora, objectives.sft, **engine).step(row))
    assert tiny.relative(full("llama").grads, full("llama", dropout=0.3).grads) > 0.1


@pytest.mark.parametrize("layers", [(3, 5), (1, 3)])
def test_some_layers_alone(layers: tuple[int, int]):
    stack, lora = setup("llama", layers=layers)
    step = tiny.segmented(stack, lora, objectives.sft, segment_size=2).step(tiny.row(len(IDS), PROMPT))
    check(full("llama", layers=layers), step)


@pytest.mark.parametrize("objective", [objectives.orpo(0.5), objectives.dpo(0.5)], ids=lambda o: o.name)
def test_a_shared_prompt_gives_what_a_pair_gives(objective: objectives.Objective):
    stack, lora = setup("qwen2", 4)
    prompt, chosen, rejected = IDS[:8], IDS[8:13], IDS[13:]
    expected = FullBackward(stack, lora, objective).step(pair(prompt, chosen, rejected))
    for layout in (pair(prompt, chosen, rejected), shared_prefix(prompt, chosen, rejected)):
        check(expected, tiny.segmented(stack, lora, objective, segment_size=2).step(layout))


@pytest.mark.parametrize("bits", [0, 4])
def test_without_its_adapter_a_model_is_the_base_model_to_the_bit(bits: int):
    ids = mx.array([IDS])
    before = tiny.build("qwen2", bits=bits)(ids)
    model = tiny.build("qwen2", bits=bits)
    lora = dora(model)
    assert not mx.allclose(model(ids), before, atol=1e-3)
    with lora.disabled():
        without = model(ids)
    fresh = tiny.build("qwen2", bits=bits)
    attach(fresh, rank=3, scale=2.0, kind="dora")
    for same in (without, fresh(ids)):
        assert mx.allclose(same, before, atol=1e-5)
    assert mx.array_equal(without, fresh(ids))


def test_experts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"lora\.kind: dora isn't defined on the stacked experts .*switch_mlp"):
        attach(experts(), rank=2, scale=1.0, kind="dora")
    assert attach(experts(), rank=2, scale=1.0, kind="dora", targets="q_proj").keys == ["self_attn.q_proj"]


def experts() -> nn.Module:
    return tiny.build_module(
        "mixtral",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "vocab_size": 64,
        },
    )


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_counts_magnitudes_and_what_their_gradient_needs():
    config = {**tiny_run.CONFIG, "hidden_size": 64, "intermediate_size": 256}
    plain, dora = (
        anatomy.of_config(config, "cpu", lambda layers, kind=kind: {"rank": 8, "scale": 2.0, "kind": kind})
        for kind in ("lora", "dora")
    )
    outputs = sum(linear.outputs for linear in dora.layers[0].linears)
    assert dora.layers[0].adapter == plain.layers[0].adapter + outputs
    assert dora.bytes == plain.bytes + 3 * 4 * outputs  # |W|^2, kept
    held, less = dora.layers[0].whole.residual, plain.layers[0].whole.residual
    assert held.each - less.each == pytest.approx(4 * outputs, rel=0.5)  # what magnitudes multiply, for their gradient


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a finished run of DoRA, `run`."""
    path = tmp_path_factory.mktemp("dora")
    list(Trainer(recipe(path)).events())
    return path


def recipe(folder: Path, loss: str = "sft", **changes: Any) -> Recipe:
    lora = {"kind": "dora", "rank": 2, "dropout": 0.1, **changes.pop("lora", {})}
    return tiny_run.recipe(folder, loss, lora=lora, **changes)


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model.eval()(mx.array([[1, 5, 9, 2, 7, 40]])))


def trained(recipe: Recipe, source: Path) -> np.ndarray:
    """Logits of a model with the adapter of a run, as segtrain computes them."""
    session = open_session(recipe, objectives.of_recipe("sft"), load(recipe.model))
    session.lora.set(adapters.read(source).params)
    with session.lora.dropout_keys.disabled():
        return logits(session.loaded.model)


def test_mlx_lm_loads_what_was_trained(folder: Path):
    model, _ = load_model(folder / "model")
    bare = logits(model)
    load_adapters(model, str(folder / "run"))
    expected = trained(recipe(folder), folder / "run")
    np.testing.assert_allclose(logits(model), expected, atol=1e-5)
    assert np.abs(expected - bare).max() > 0.01
    found = mx.load(str(folder / "run/adapters.safetensors"))
    loaded = dict(tree_flatten(model.parameters()))
    assert any(name.endswith(".m") for name in found)
    assert all(mx.array_equal(loaded[name], value) for name, value in found.items())


def test_a_merged_model_computes_the_same(folder: Path, tmp_path: Path):
    export_merged(folder / "run", tmp_path / "merged", recipe=None)
    model, _ = load_model(tmp_path / "merged")
    np.testing.assert_allclose(logits(model), trained(recipe(folder), folder / "run"), atol=1e-5)


@pytest.mark.parametrize("layers", [2, [1, 2]])
def test_mlx_lm_loads_what_was_trained_on_some_layers(folder: Path, layers: Any):
    own = recipe(folder, lora={"layers": layers}, output__dir=str(folder / f"some-{layers}"), train__steps=2)
    list(Trainer(own).events())
    model, _ = load_model(folder / "model")
    load_adapters(model, own.output.dir)
    np.testing.assert_allclose(logits(model), trained(own, Path(own.output.dir)), atol=1e-5)


def test_a_trained_magnitude_is_another_than_the_first(folder: Path):
    session = open_session(recipe(folder), objectives.sft, load(str(folder / "model")))
    found = mx.load(str(folder / "run/adapters.safetensors"))
    names = [name for name in found if name.endswith(".m")]
    assert all(not mx.array_equal(found[name], session.lora.values()[name]) for name in names)


def test_peft_round_trip_is_exact(folder: Path, tmp_path: Path):
    adapters.export(folder / "run", tmp_path / "peft", "peft")
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    written = mx.load(str(tmp_path / "peft/adapter_model.safetensors"))
    original = mx.load(str(folder / "run/adapters.safetensors"))
    assert config["use_dora"] is True
    name = "model.layers.1.self_attn.q_proj"
    assert mx.array_equal(written[f"base_model.model.{name}.lora_magnitude_vector"], original[f"{name}.m"])
    assert sum(key.endswith(".lora_magnitude_vector") for key in written) == len(original) // 3
    back = adapters.read(tmp_path / "peft")
    assert back.config["fine_tune_type"] == "dora"
    assert back.params.keys() == original.keys()
    assert all(mx.array_equal(back.params[key], value) for key, value in original.items())


def test_peft_without_all_magnitudes_is_refused(folder: Path, tmp_path: Path):
    adapters.export(folder / "run", tmp_path / "peft", "peft")
    path = tmp_path / "peft/adapter_model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)
    del weights[max(name for name in weights if "magnitude" in name)]
    mx.save_safetensors(str(path), weights)
    with pytest.raises(UserError, match="no magnitudes beside"):
        adapters.read(tmp_path / "peft")


def test_magnitudes_of_plain_lora_are_refused(folder: Path, tmp_path: Path):
    adapters.export(folder / "run", tmp_path / "peft", "peft")
    path = tmp_path / "peft/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": False}))
    with pytest.raises(UserError, match="lora_magnitude_vector has no place"):
        adapters.read(tmp_path / "peft")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_a_resumed_run_ends_with_the_same_bytes(folder: Path, tmp_path: Path, loss: str):
    recipes = [recipe(folder, loss, output__dir=str(tmp_path / name)) for name in ("whole", "parts")]
    list(Trainer(recipes[0], loss).events())
    events = Trainer(recipes[1], loss).events()
    next(event for event in events if isinstance(event, TrainStep) and event.step == 3)
    events.close()  # type: ignore[attr-defined]
    list(Trainer(recipes[1], loss, resume=True).events())
    assert tiny_run.result(tmp_path / "whole")[:2] == tiny_run.result(tmp_path / "parts")[:2]  # adapter, metrics


def test_a_run_goes_on_from_a_dora_adapter_and_from_no_other_kind(folder: Path, tmp_path: Path):
    further = {"init_from": str(folder / "run")}
    own = recipe(folder, "dpo", lora=further, output__dir=str(tmp_path / "next"))
    session = open_session(own, objectives.of_recipe("dpo", own), load(own.model))
    expected = mx.load(str(folder / "run/adapters.safetensors"))
    assert all(mx.array_equal(value, expected[name]) for name, value in session.lora.values().items())
    plain = recipe(folder, lora=further | {"kind": "lora"}, output__dir=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"is of kind dora, the recipe's of kind lora; write lora\.kind: dora"):
        open_session(plain, objectives.sft, load(own.model))


def test_by_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tiny_run.recipe_file(tmp_path, lora={"kind": "dora", "rank": 2}, train__steps=2)
    assert cli.run(["sft", str(path)]) == 0
    assert cli.run(["sft", str(path), "--resume", "--set", "train.steps=3"]) == 0
    config = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert config["fine_tune_type"] == "dora"
    capsys.readouterr()
    arguments = ["eval", str(tmp_path / "run"), "--data", str(tmp_path / "sft-train.jsonl"), "--base", "--json"]
    assert cli.run(arguments) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert found["adapter"]["loss"] < found["base"]["loss"]
    assert cli.run(["export", str(tmp_path / "run"), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    assert (tmp_path / "peft/adapter_model.safetensors").exists()


def test_experts_are_refused_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny_configs.save("mixtral", tmp_path / "experts")
    tiny_run.mapping(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "model" / file, tmp_path / "experts")
    path = tiny_run.recipe_file(tmp_path, model=str(tmp_path / "experts"), lora={"kind": "dora"})
    for command in (["sft", str(path)], ["plan-segments", str(path), "--seq", "64"]):
        assert cli.run(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "lora.kind: dora isn't defined on the stacked experts" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_run_with_lora_plus_resumes_exactly_and_differs(folder: Path, tmp_path: Path, kind: str):
    def own(name: str, ratio: float) -> Recipe:
        return recipe(folder, lora={"kind": kind, "plus_ratio": ratio}, output__dir=str(tmp_path / name))

    for name, ratio in (("plain", 1.0), ("whole", 4.0)):
        list(Trainer(own(name, ratio)).events())
    events = Trainer(own("parts", 4.0)).events()
    next(event for event in events if isinstance(event, TrainStep) and event.step == 3)
    events.close()  # type: ignore[attr-defined]
    list(Trainer(own("parts", 4.0), resume=True).events())
    assert tiny_run.result(tmp_path / "whole")[:2] == tiny_run.result(tmp_path / "parts")[:2]  # adapter, metrics
    assert tiny_run.result(tmp_path / "whole")[0] != tiny_run.result(tmp_path / "plain")[0]


def test_verify_compares_it_with_plain_autodiff(folder: Path):
    report = verify_gradients(recipe(folder))
    assert report.passed
    assert max(error.relative_error for error in report.rows) < 1e-4


def test_mlx_lms_key_is_the_same():
    values = {"model": "m", "data": "d", "iters": 5, "fine_tune_type": "dora"}
    assert Recipe.from_mapping(values).lora.kind == "dora"
    assert Recipe.from_mapping(values | {"fine_tune_type": "lora"}).lora.kind == "lora"


def test_streamed_weights_have_the_same_magnitudes(folder: Path):
    own = recipe(folder)
    held, read = (
        open_session(own, objectives.sft, load(own.model, stream=lambda path, stream=stream: stream)).lora.values()
        for stream in (False, True)
    )
    assert all(mx.array_equal(value, read[name]) for name, value in held.items())
