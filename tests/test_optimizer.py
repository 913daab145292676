"""Expected values: the formulas of the papers in NumPy, `mlx.optimizers` on the same arrays, and uninterrupted runs."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest

from segtrain.errors import RunFailed, UserError
from segtrain.recipe.schema import TrainRecipe
from segtrain.run.optimizer import Optimizer, clip_factor, global_norm

KINDS = ("adamw", "adam", "sgd", "adafactor", "muon")
SHAPES = {"layers.0.q.lora_a": (6, 2), "layers.0.q.lora_b": (2, 5), "layers.1.switch.lora_a": (3, 2, 4)}


def arrays(seed: int) -> dict[str, mx.array]:
    random = np.random.default_rng(seed)
    return {name: mx.array(random.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}


def optimizer(kind: str = "adamw", total: int = 10, **options: Any) -> Optimizer:
    return Optimizer(TrainRecipe(optimizer=kind, **options), total)


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(np.array(a[name]), np.array(b[name])) for name in a)


# --- schedule ---------------------------------------------------------------------------------------------------------


def rates(total: int, **options: Any) -> list[float]:
    chosen = optimizer(total=total, **options)
    return [chosen.learning_rate(step) for step in range(total + 1)]


def test_warmup_counts_updates_and_never_starts_at_zero() -> None:
    assert rates(10, learning_rate=1.0, lr_schedule="constant", warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warmup_does_not_depend_on_accumulation() -> None:
    options = {"learning_rate": 1.0, "warmup_steps": 4}
    assert rates(10, **options) == rates(10, **options, grad_accumulation_steps=32)


def test_linear_and_cosine_end_at_the_final_rate() -> None:
    assert rates(4, learning_rate=1.0, lr_schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    got = rates(4, learning_rate=1.0, final_learning_rate=0.1, lr_schedule="cosine")
    assert got == pytest.approx(expected)


def test_warmup_ratio_is_of_all_updates_and_the_decay_uses_the_rest() -> None:
    got = rates(10, learning_rate=1.0, lr_schedule="linear", warmup_ratio=0.2)
    assert got == pytest.approx([0.5, 1.0, *(1 - k / 8 for k in range(9))])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_update_of_a_run_has_a_positive_rate(schedule: str, total: int, warmup: int) -> None:
    got = rates(total, learning_rate=1e-4, lr_schedule=schedule, warmup_steps=warmup)
    assert all(0 < rate <= 1e-4 for rate in got[:total])


# --- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_b_learns_at_the_ratio_times_the_rate(kind: str, compiled: bool) -> None:
    """Each side against an optimiser of its own at its own rate."""
    rates = {"lora_a": 1e-3, "lora_b": 16e-3}
    start = {"x.lora_a": arrays(0)["layers.0.q.lora_a"], "x.lora_b": arrays(0)["layers.0.q.lora_b"], "x.m": mx.ones(5)}

    def train(rate: float, **options: Any) -> dict[str, mx.array]:
        values = dict(start)
        chosen = Optimizer(
            TrainRecipe(optimizer=kind, learning_rate=rate, lr_schedule="linear"), 10, compiled=compiled, **options
        )
        for step in range(3):
            values = dict(chosen.update(values, {n: mx.cos(v * (step + 1)) for n, v in start.items()}))
        return values

    found = train(rates["lora_a"], plus_ratio=16.0)
    for name, value in found.items():
        expected = train(rates.get(name.rpartition(".")[2], rates["lora_a"]))[name]
        np.testing.assert_allclose(np.array(value), np.array(expected), rtol=1e-4, atol=1e-5)
    assert not mx.allclose(found["x.lora_b"], train(rates["lora_a"])["x.lora_b"], atol=1e-3)


def test_adamw_is_the_papers_formula() -> None:
    """Loshchilov and Hutter, algorithm 2, in NumPy float64; three updates."""
    params = arrays(0)
    ours = optimizer(learning_rate=0.01, lr_schedule="constant", weight_decay=0.1)
    expected = {name: np.array(value, np.float64) for name, value in params.items()}
    m = {name: np.zeros_like(value) for name, value in expected.items()}
    v = {name: np.zeros_like(value) for name, value in expected.items()}
    for t in range(1, 4):
        grads = arrays(t)
        params = ours.update(params, grads)
        for name, value in expected.items():
            g = np.array(grads[name], np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            step = (m[name] / (1 - 0.9**t)) / (np.sqrt(v[name] / (1 - 0.999**t)) + 1e-8)
            expected[name] = value - 0.01 * (step + 0.1 * value)
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(params[name]), value, rtol=1e-5, atol=1e-6)


def test_bias_correction_can_be_turned_off() -> None:
    """Without it the first step is (0.1 / sqrt(0.001)) times the learning rate, as in mlx-lm."""
    chosen = optimizer("adam", learning_rate=0.01, lr_schedule="constant", optimizer_config={"bias_correction": False})
    params, grads = arrays(0), arrays(1)
    new = chosen.update(params, grads)
    for name in params:
        step = np.array(params[name] - new[name]) * np.sign(np.array(grads[name]))
        np.testing.assert_allclose(step, 0.01 * 0.1 / math.sqrt(0.001), rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_equal_mlx_on_matrices(kind: str) -> None:
    names = [name for name, shape in SHAPES.items() if len(shape) == 2]
    extra = {"bias_correction": True} if kind in ("adam", "adamw") else {}
    extra |= {"relative_step": False, "scale_parameter": False} if kind == "adafactor" else {}
    extra |= {} if kind == "adam" else {"weight_decay": 0.1}
    classes = {
        "adamw": mlx.optimizers.AdamW,
        "adam": mlx.optimizers.Adam,
        "sgd": mlx.optimizers.SGD,
        "adafactor": mlx.optimizers.Adafactor,
        "muon": mlx.optimizers.Muon,
    }
    theirs = classes[kind](learning_rate=0.01, **extra)
    ours = optimizer(kind, learning_rate=0.01, lr_schedule="constant", weight_decay=0.0 if kind == "adam" else 0.1)
    a = b = {name: arrays(0)[name] for name in names}
    for seed in (1, 2):
        grads = {name: arrays(seed)[name] for name in names}
        a, b = ours.update(a, grads), theirs.apply_gradients(grads, b)
    for name in names:
        np.testing.assert_allclose(np.array(a[name]), np.array(b[name]), rtol=1e-6)


def test_muon_treats_each_expert_as_a_matrix_of_its_own() -> None:
    """Expected: mlx's Muon run on every expert separately; on the stacked array it gives something else."""
    name = "layers.1.switch.lora_a"
    ours = optimizer("muon", learning_rate=0.01, lr_schedule="constant", weight_decay=0.1)
    stacked = {name: arrays(0)[name]}
    theirs = mlx.optimizers.Muon(learning_rate=0.01, weight_decay=0.1)
    mixed = mlx.optimizers.Muon(learning_rate=0.01, weight_decay=0.1)
    single = {str(e): stacked[name][e] for e in range(3)}
    wrong = dict(stacked)
    for seed in (1, 2):
        grad = arrays(seed)[name]
        stacked = ours.update(stacked, {name: grad})
        single = theirs.apply_gradients({str(e): grad[e] for e in range(3)}, single)
        wrong = mixed.apply_gradients({name: grad}, wrong)
    expected = np.stack([np.array(single[str(e)]) for e in range(3)])
    np.testing.assert_allclose(np.array(stacked[name]), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(np.array(wrong[name]) - expected).max() > 1e-3  # the control


@pytest.mark.parametrize("kind", KINDS)
def test_zero_gradients_and_zero_parameters_stay_finite(kind: str) -> None:
    """The first step of LoRA: B is zero, so A's gradient is zero."""
    zeros = {name: mx.zeros(shape) for name, shape in SHAPES.items()}
    new = optimizer(kind).update(zeros, zeros)
    assert all(np.isfinite(np.array(value)).all() for value in new.values())


def test_adafactor_moves_a_zero_matrix_at_the_learning_rate() -> None:
    """Relative to its size (mlx's default) a B of zeros would move by a thousandth of it."""
    zeros = {name: mx.zeros(shape) for name, shape in SHAPES.items()}
    new = optimizer("adafactor", learning_rate=0.01, lr_schedule="constant").update(zeros, arrays(1))
    size = math.sqrt(sum(float(mx.sum(value * value)) for value in new.values()) / 46)
    assert 0.003 < size < 0.011


def test_low_precision_gradients_update_float32_parameters() -> None:
    grads = {name: value.astype(mx.bfloat16) for name, value in arrays(1).items()}
    new = optimizer().update(arrays(0), grads)
    assert {value.dtype for value in new.values()} == {mx.float32}


def test_the_schedule_is_applied() -> None:
    ours = optimizer("sgd", total=4, learning_rate=0.5, lr_schedule="linear")
    params = {"w": mx.array([[1.0]])}
    moved = []
    for _ in range(4):
        new = ours.update(params, {"w": mx.array([[1.0]])})
        moved.append((params["w"] - new["w"]).item())
        params = new
    assert moved == pytest.approx([0.5, 0.375, 0.25, 0.125])


# --- save and load ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_resumed_run_is_equal_to_the_bit(kind: str, stop: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"learning_rate": 0.01, "warmup_steps": 2}
    whole, first, second = (optimizer(kind, total=6, **options) for _ in range(3))
    params = arrays(0)
    for step in range(6):
        params = whole.update(params, arrays(step + 1))

    part = arrays(0)
    for step in range(stop):
        part = first.update(part, arrays(step + 1))
    mx.save_safetensors(str(tmp_path / "state.safetensors"), first.state_dict())
    second.load_state_dict(mx.load(str(tmp_path / "state.safetensors")))
    assert second.step == stop
    assert same(second.state_dict(), first.state_dict())  # also before the next update
    for step in range(stop, 6):
        part = second.update(part, arrays(step + 1))
    assert same(part, params)
    assert same(second.state_dict(), whole.state_dict())


def test_control_without_the_state_the_run_differs() -> None:
    whole, fresh = optimizer(), optimizer()
    params = whole.update(arrays(0), arrays(1))
    assert not same(whole.update(params, arrays(2)), fresh.update(params, arrays(2)))


def test_state_of_another_optimiser_or_adapter_is_refused() -> None:
    source = optimizer("adamw")
    source.update(arrays(0), arrays(1))
    other = optimizer("sgd")
    other.load_state_dict(source.state_dict())
    with pytest.raises(RunFailed, match="another optimiser"):
        other.update(arrays(0), arrays(1))
    smaller = optimizer("adamw")
    smaller.load_state_dict(source.state_dict())
    with pytest.raises(RunFailed, match=r"layers\.1"):
        smaller.update({"layers.0.q.lora_a": arrays(0)["layers.0.q.lora_a"]}, {"layers.0.q.lora_a": mx.ones((6, 2))})
    without_moments = optimizer("adamw")
    without_moments.load_state_dict({"step": source.state_dict()["step"]})
    with pytest.raises(RunFailed, match="another optimiser"):
        without_moments.update(arrays(0), arrays(1))
    with pytest.raises(RunFailed, match="no step count"):
        optimizer().load_state_dict({})


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "adam", "weight_decay": 0.1}, "adamw"),
        ({"optimizer_config": {"betta": 1}}, "betas"),
        ({"optimizer_config": {"learning_rate": 1}}, r"train\.learning_rate"),
        ({"optimizer_config": {"weight_decay": 1}}, r"train\.weight_decay"),
        ({"optimizer_config": {"betas": [2.0, 0.9]}}, "beta1"),
        ({"kind": "adafactor", "optimizer_config": {"relative_step": True}}, "ignore learning_rate"),
        ({"total": 0}, "at least 1"),
    ],
)
def test_what_an_optimiser_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        optimizer(**options)


def test_weight_decay_zero_is_zero() -> None:
    """mlx's AdamW and Muon decay by 0.01 unless told otherwise."""
    for kind in ("adamw", "muon", "sgd", "adafactor"):
        params = {"w": mx.ones((4, 4))}
        new = optimizer(kind, learning_rate=0.1, weight_decay=0.0).update(params, {"w": mx.zeros((4, 4))})
        assert same(new, params), kind


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_update_is_the_same_and_its_state_goes_on(kind: str) -> None:
    """Five updates with changing learning rates and factors; after the third, a new optimiser takes over its state."""
    random = np.random.default_rng(1)
    params = {"w": mx.array(random.normal(size=(6, 4)).astype(np.float32))}
    steps = [({"w": mx.array(random.normal(size=(6, 4)).astype(np.float32))}, 0.1 * (i + 1)) for i in range(5)]
    found = []
    for compiled in (False, True):
        options = {"learning_rate": 0.05, "lr_schedule": "linear", "optimizer": kind}
        values, current = params, Optimizer(TrainRecipe(**options), 10, compiled=compiled)
        for number, (grads, factor) in enumerate(steps):
            if number == 3:
                state, current = current.state_dict(), Optimizer(TrainRecipe(**options), 10, compiled=compiled)
                current.load_state_dict(state)
            values = current.update(values, grads, factor)
        found.append((values, current.state_dict()))
    (plain, plain_state), (compiled_values, compiled_state) = found
    np.testing.assert_allclose(np.array(compiled_values["w"]), np.array(plain["w"]), rtol=2e-5, atol=1e-6)
    assert compiled_state.keys() == plain_state.keys()
    assert int(compiled_state["step"].item()) == 5
    for name, value in plain_state.items():
        np.testing.assert_allclose(np.array(compiled_state[name]), np.array(value), rtol=2e-5, atol=1e-6)


def test_a_factor_scales_the_gradient() -> None:
    params, grads = {"w": mx.array([1.0, 2.0])}, {"w": mx.array([0.5, -1.0])}
    new = optimizer("sgd", learning_rate=1.0, lr_schedule="constant").update(params, grads, 0.25)
    assert new["w"].tolist() == [1.0 - 0.125, 2.0 + 0.25]


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [(5.0, 1.0, 0.2), (5.0, 5.0, 1.0), (5.0, 100.0, 1.0), (5.0, None, 1.0), (5.0, 0, 1.0), (math.nan, 1.0, 1.0)],
)
def test_clipping_only_ever_shrinks(norm: float, limit: float | None, factor: float) -> None:
    assert clip_factor(norm, limit) == factor


def test_the_norm_is_over_all_arrays() -> None:
    assert global_norm({"a": mx.array([3.0, 0.0]), "b": mx.array([[4.0]])}) == 5.0
    assert global_norm({}) == 0.0


def test_the_norm_is_taken_in_float32() -> None:
    """300 squared is above float16's largest number."""
    assert global_norm({"a": mx.full((4,), 300.0, mx.float16)}) == pytest.approx(600.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_reported(value: float) -> None:
    assert not math.isfinite(global_norm({"a": mx.array([value]), "b": mx.array([2.0])}))


def test_the_norm_does_not_depend_on_the_order_of_names() -> None:
    random = np.random.default_rng(0)
    grads = {str(i): mx.array(random.normal(size=(7,)).astype(np.float32)) for i in range(50)}
    assert global_norm(grads) == global_norm(dict(reversed(grads.items())))
