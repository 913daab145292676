"""`lora.init_from`: the values of the named adapter, all of them, or an error that says what to write."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_run
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from segtrain.engine.objectives import of_recipe
from segtrain.errors import UserError
from segtrain.event import TrainStep
from segtrain.lora import adapters
from segtrain.models.load import load
from segtrain.recipe.schema import Recipe
from segtrain.run.session import Session, open_session
from segtrain.run.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a finished run, `run`, and the same adapter for PEFT, `peft`."""
    path = tmp_path_factory.mktemp("initial")
    list(Trainer(tiny_run.recipe(path, train__steps=2)).events())
    adapters.export(path / "run", path / "peft", "peft")
    return path


def further(folder: Path, source: str, **changes: Any) -> Recipe:
    options = {"lora": {"rank": 2, "init_from": str(folder / source)}, "output__dir": str(folder / "next"), **changes}
    return tiny_run.recipe(folder, **options)


def opened(recipe: Recipe) -> Session:
    return open_session(recipe, of_recipe("sft", recipe), load(recipe.model))


def refusal(recipe: Recipe) -> str:
    with pytest.raises(UserError) as caught:
        opened(recipe)
    return str(caught.value)


def changed(folder: Path, out: Path, change: Any) -> Path:
    """A copy of the run's adapter with other arrays."""
    out.mkdir()
    params = dict(mx.load(str(folder / "run/adapters.safetensors")))
    mx.save_safetensors(str(out / "adapters.safetensors"), change(params))
    (out / "adapter_config.json").write_text((folder / "run/adapter_config.json").read_text())
    return out


@pytest.mark.parametrize("source", ["run", "run/adapters.safetensors", "run/checkpoints/step-0000002", "peft"])
def test_values_are_those_of_the_adapter(folder: Path, source: str) -> None:
    expected = mx.load(str(folder / "run/adapters.safetensors"))
    found = opened(further(folder, source)).lora.values()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(np.array(value), np.array(expected[name]))
    assert any(np.array(value).any() for name, value in found.items() if name.endswith("lora_b"))


def test_half_precision_becomes_float32(folder: Path, tmp_path: Path) -> None:
    source = changed(folder, tmp_path / "half", lambda p: {n: v.astype(mx.bfloat16) for n, v in p.items()})
    assert {value.dtype for value in opened(further(folder, str(source))).lora.values().values()} == {mx.float32}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4}, "has rank 2, the recipe 4; write lora.rank: 2"),
        ({"rank": 2, "scale": 3.0}, "has scale 8.0, the recipe 3; write lora.scale: 8.0"),
        (
            {"rank": 2, "targets": ["q_proj"]},
            "the recipe's on [self_attn.q_proj]; write lora.targets: [mlp.down_proj, ",
        ),
        ({"rank": 2, "layers": 2}, "is on layers [0, 3], the recipe's on [1, 3]; write lora.layers: [0, 3]"),
    ],
)
def test_another_shape_is_refused_with_what_to_write(folder: Path, lora: dict[str, Any], message: str) -> None:
    assert message in refusal(further(folder, "run", lora=lora | {"init_from": str(folder / "run")}))


def _renamed(params: dict[str, mx.array]) -> dict[str, mx.array]:
    first, *rest = sorted(params)
    return {"lm_head.lora_a": params[first]} | {name: params[name] for name in rest}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {n: v for n, v in p.items() if n != min(p)}, "of shape None"),
        (lambda p: p | {min(p): mx.zeros((5, 2))}, "of shape (5, 2)"),
        (_renamed, "lm_head.lora_a, which is no LoRA of a layer"),
    ],
)
def test_an_adapter_is_taken_whole_or_not_at_all(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    assert message in refusal(further(folder, str(changed(folder, tmp_path / "odd", change))))


def test_a_directory_without_an_adapter_is_refused(folder: Path) -> None:
    assert refusal(further(folder, "nowhere")).startswith("lora.init_from: ")


def test_resume_goes_by_the_runs_own_checkpoint(folder: Path, tmp_path: Path) -> None:
    recipes = [further(folder, "run", output__dir=str(tmp_path / name)) for name in ("whole", "parts")]
    list(Trainer(recipes[0]).events())
    events = Trainer(recipes[1]).events()
    next(event for event in events if isinstance(event, TrainStep) and event.step == 3)
    events.close()  # type: ignore[attr-defined]
    list(Trainer(recipes[1], resume=True).events())
    assert tiny_run.result(tmp_path / "whole")[:2] == tiny_run.result(tmp_path / "parts")[:2]  # adapter, metrics


def test_the_adapter_counts_in_the_fingerprint_and_its_content_on_resume(folder: Path, tmp_path: Path) -> None:
    assert further(folder, "run").fingerprint() != further(folder, "peft").fingerprint()
    source = changed(folder, tmp_path / "source", lambda p: p)
    recipe = further(folder, str(source), output__dir=str(tmp_path / "run"), train__steps=2)
    list(Trainer(recipe).events())
    params = dict(mx.load(str(source / "adapters.safetensors")))
    mx.save_safetensors(str(source / "adapters.safetensors"), {name: value + 1 for name, value in params.items()})
    with pytest.raises(UserError, match="the adapter that the run began with"):
        list(Trainer(recipe, resume=True).events())


@pytest.mark.parametrize("source", ["run", "run/adapters.safetensors", "run/checkpoints/step-0000002"])
def test_a_run_never_replaces_the_adapter_that_it_begins_with(folder: Path, source: str) -> None:
    with pytest.raises(UserError, match="which this run reads"):
        list(Trainer(further(folder, source, output__dir=str(folder / "run")), overwrite=True).events())


def test_mlx_lms_key_is_the_same(tmp_path: Path) -> None:
    values = json.loads('{"model": "m", "data": "d", "iters": 5, "resume_adapter_file": "a/adapters.safetensors"}')
    assert Recipe.from_mapping(values).lora.init_from == "a/adapters.safetensors"


def test_dpo_begins_at_indifference_to_the_adapter_that_it_starts_from(folder: Path, tmp_path: Path) -> None:
    """At step 1 policy and reference are the same model, so the loss is log 2, whatever the adapter."""
    lora = {"rank": 2, "init_from": str(folder / "run")}
    recipe = tiny_run.recipe(folder, "dpo", lora=lora, output__dir=str(tmp_path / "dpo"), train__steps=1)
    losses = [event.loss for event in Trainer(recipe, "dpo").events() if isinstance(event, TrainStep)]
    np.testing.assert_allclose(losses, [np.log(2)], rtol=1e-5)


def test_an_adapter_that_mlx_lm_made(folder: Path, tmp_path: Path) -> None:
    """Its layers and file by mlx-lm itself, without `keys`: on every linear layer of the last two."""
    model, _ = load_model(folder / "model")
    parameters = {"rank": 2, "scale": 8.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters)
    made = {n: mx.random.normal(v.shape) for n, v in tree_flatten(model.parameters()) if "lora_" in n}
    mx.save_safetensors(str(tmp_path / "0000100_adapters.safetensors"), made)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    source = str(tmp_path / "0000100_adapters.safetensors")
    found = opened(further(folder, source, lora={"rank": 2, "layers": 2, "init_from": source})).lora.values()
    assert found.keys() == made.keys()
    assert all(mx.array_equal(found[name], made[name]) for name in made)
