"""`segtrain doctor` and what training checks by itself: each of five faults, put back, is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_configs

from segtrain import cli
from segtrain.attention import dispatch
from segtrain.errors import RunFailed
from segtrain.memory import machine
from segtrain.memory.backends import BACKENDS
from segtrain.models.quantized_check import Quantisation
from segtrain.recurrence import gated_delta
from segtrain.run import checks, doctor, readiness
from segtrain.run.checks import AttentionKind, Finding

METAL, CPU = dispatch.BACKENDS["metal"], dispatch.BACKENDS["cpu"]
KIND = AttentionKind(1, 64, 64, mx.float32)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA too, where checks have processes of their own, which a fault put back here wouldn't reach."""
    monkeypatch.setattr(readiness, "apart", lambda tasks, workers: [task() for task in tasks])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    dispatch.follow({})
    gated_delta.follow({})


@pytest.fixture
def fused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's backend as one with a fused kernel; memory is not compared (there is none that is linear)."""
    name = dispatch.backend().name
    monkeypatch.setitem(dispatch.BACKENDS, name, replace(METAL, name=name))
    monkeypatch.setattr(checks, "attention_is_linear", lambda kind, rows: Finding("memory", True, "linear"))


def wrong_gradient(q: mx.array, k: mx.array, v: mx.array, **rule: Any) -> mx.array:
    """MLX's attention with a dq that is half of what it should be."""
    plain = REAL

    @mx.custom_function
    def half(q: mx.array) -> mx.array:
        return q

    @half.vjp
    def backward(q: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return 0.5 * cotangent

    return plain(half(q), k, v, **rule)


REAL = dispatch._sdpa


def loaded(bits: int = 0) -> Any:
    model = nn.Sequential(nn.Linear(128, 64))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    return SimpleNamespace(config=CONFIG, model=model)


# --- five faults --------------------------------------------------------------------------------------------------


def test_a_wrong_gradient_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.attention_is_right(KIND, METAL).right
    monkeypatch.setattr(dispatch, "_sdpa", wrong_gradient)
    found = checks.attention_is_right(KIND, METAL)
    assert not found.right
    assert "fused" in found.found
    assert checks.attention_is_right(KIND, replace(METAL, head_dims=frozenset())).right  # the safe form


def test_attention_whose_memory_is_quadratic() -> None:
    """MLX's own on a CPU, where nothing is fused."""
    if dispatch.backend().name != "cpu":
        pytest.skip("a GPU's fused kernel is bounded")
    found = checks.attention_is_linear(KIND, METAL, 512)
    assert not found.right
    assert "grow with the square" in found.found
    assert checks.attention_is_linear(KIND, CPU, 512).right


def test_a_wrong_quantised_product_at_two_and_three_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, right = Quantisation(64, 4, "affine"), mx.quantized_matmul
    assert checks.quantised_products(kind, mx.float32).right
    monkeypatch.setattr(
        mx, "quantized_matmul", lambda x, *args, **rule: right(x, *args, **rule) * (0.5 if len(x) in (2, 3) else 1)
    )
    found = checks.quantised_products(kind, mx.float32)
    assert found.fatal
    assert "wrong at 2, 3 rows" in found.found
    with pytest.raises(RunFailed, match=r"4-bit weights.*wrong at 2, 3 rows.*install a newer mlx"):
        readiness.ready(loaded(bits=4))


@pytest.mark.parametrize("rule", checks.RECURRENCES)
def test_a_wrong_recurrence(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, entry, reference, inputs = checks.RECURRENCES[rule]
    assert checks.recurrence(rule).right

    def cut(x: mx.array, *rest: mx.array) -> Any:
        outputs, state = entry(x, *rest)
        return outputs, mx.stop_gradient(state)  # a state that lets no gradient through

    monkeypatch.setitem(checks.RECURRENCES, rule, (name, cut, reference, inputs))
    assert checks.recurrence(rule).fatal


@pytest.mark.parametrize(
    ("name", "rules"),
    [("qwen3_5", ("gated_delta",)), ("mamba", ("selective_scan",)), ("mamba2", ("ssd",)), ("rwkv7", ("rwkv7",)),
     ("llama", ())],
)  # fmt: skip
def test_the_recurrences_checked_are_the_models(name: str, rules: tuple[str, ...]) -> None:
    assert readiness.Subject.of(tiny_configs.CONFIGS[name], ()).recurrences == rules


@pytest.fixture
def delta_kernel_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This backend as one with MLX's kernel, at a small shape; as fast as `costs` says."""
    heads = {dispatch.backend().name: {(2, 2)}, "metal": {(2, 2)}}
    for module in (gated_delta, readiness):
        monkeypatch.setattr(module, "FUSED_HEADS", heads)
    monkeypatch.setattr(gated_delta, "FUSED_DIM", 16)
    monkeypatch.setattr(checks, "_costs", lambda f, _: (1.0, 10) if f is gated_delta.fused else (2.0, 20))


def test_a_kernel_that_is_right_and_faster_is_used(delta_kernel_here: None) -> None:
    subject = readiness.Subject(recurrences=(gated_delta.RULE,))
    found = readiness.checked(subject, dispatch.backend())
    assert readiness.keep(subject, found, {})["choices"] == {"gated_delta": "fused"}
    assert "used: error" in found[-1].found
    assert machine.measured(BACKENDS[dispatch.backend().name])["gated_delta"] == "fused"  # type: ignore[index]


@pytest.mark.parametrize("fault", ["wrong", "slow", "fails"])
def test_a_kernel_with_a_fault_is_not_used(
    fault: str, delta_kernel_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(q: mx.array, *rest: mx.array) -> Any:
        if fault == "fails":
            raise ValueError("no vjp")
        y, state = gated_delta.reference(q, *rest)
        return y, mx.stop_gradient(state) if fault == "wrong" else state

    monkeypatch.setattr(gated_delta, "fused", kernel)
    if fault == "slow":
        monkeypatch.setattr(checks, "_costs", lambda f, _: (3.0, 10) if f is gated_delta.fused else (2.0, 20))
    found = checks.delta_kernel()
    assert found.right, "chunks are used instead"
    assert found.found.startswith("not used")
    assert not found.choice


def test_a_memory_limit_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    if not checks.memory_limit().right:
        pytest.skip("this machine's limit has no effect")
    before = mx.get_memory_limit()
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: limit)
    found = checks.memory_limit()
    assert not found.right
    assert "no effect" in found.found
    assert mx.get_memory_limit() == before


# --- what follows -------------------------------------------------------------------------------------------------


def counting(monkeypatch: pytest.MonkeyPatch) -> list[AttentionKind]:
    """The kinds of attention that are checked from now on."""
    seen: list[AttentionKind] = []
    check: Callable[..., Finding] = checks.attention_is_right
    monkeypatch.setattr(checks, "attention_is_right", lambda kind, rows: [seen.append(kind), check(kind, rows)][1])
    return seen


@pytest.mark.usefixtures("fused_here")
def test_training_takes_blocks_where_the_kernel_is_wrong_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_sdpa", wrong_gradient)
    seen = counting(monkeypatch)
    name = dispatch.backend().name
    for first in (True, False):
        (notice,) = readiness.ready(loaded())
        assert "fused attention is wrong here" in notice
        assert dispatch.backend().head_dims == frozenset()
        assert bool(seen) == first  # the second time it is known
        seen.clear()
    planned = replace(BACKENDS["metal"], name=name)  # type: ignore[arg-type]
    assert machine.steered(planned).head_dims == frozenset()  # and the planner knows it


@pytest.mark.usefixtures("fused_here")
def test_a_right_kernel_is_checked_once_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting(monkeypatch)
    assert readiness.ready(loaded()) == []
    assert dispatch.backend().head_dims == METAL.head_dims
    assert len(seen) == 1
    assert readiness.ready(loaded()) == []
    assert len(seen) == 1


@pytest.mark.usefixtures("fused_here")
@pytest.mark.parametrize("changed", ["mlx", "device", "model"])
def test_another_mlx_machine_or_model_is_checked_again(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting(monkeypatch)
    readiness.ready(loaded())
    if changed == "mlx":
        monkeypatch.setattr(machine, "mlx_version", lambda: "99")
    elif changed == "device":
        monkeypatch.setattr(readiness, "device", lambda: "another")
    else:
        monkeypatch.setitem(CONFIG, "head_dim", 128)
    readiness.ready(loaded())
    assert len(seen) == 2


@pytest.mark.usefixtures("fused_here")
def test_a_kernel_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **rule: Any) -> mx.array:
        raise RuntimeError("no kernel of that name")

    monkeypatch.setattr(dispatch, "_sdpa", missing)
    assert "no kernel of that name" in readiness.ready(loaded())[0]


def test_a_machine_without_fused_attention_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    if dispatch.backend().name != "cpu":
        pytest.skip("it has")
    seen = counting(monkeypatch)
    assert readiness.ready(loaded()) == []
    assert not seen
    assert not machine.findings_path().exists()


@pytest.mark.usefixtures("fused_here")
def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(dispatch, "_sdpa", wrong_gradient)
    assert len(readiness.ready(loaded())) == 1
    assert dispatch.backend().head_dims == frozenset()


def test_wrong_in_blocks_too_has_no_safe_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.Blocks, "__call__", lambda self, q, k, v, sinks=None: 0 * q)
    finding = checks.with_safe_form(checks.attention_is_right, KIND, CPU)
    assert finding.fatal
    assert finding.can


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_on_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | {"quantization": {"bits": 4, "group_size": 64}}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {model}\ndata: {{train: {tmp_path / 'rows.jsonl'}, max_seq_length: 64}}\n")
    assert cli.run(["doctor", str(recipe), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in report["findings"]]
    assert names[:3] == [
        "attention, head dim 64, float32",
        "memory of attention, head dim 64, float32",
        "products with 4-bit weights (affine, groups of 64)",
    ]
    assert names[-4:] == ["memory limit", "wired limit", "speed of products", "memory against the plan"]
    assert report["passed"]


def test_a_fatal_finding_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Finding("products", False, "wrong", can="install a newer mlx", fatal=True)
    monkeypatch.setattr(doctor, "doctor", lambda recipe: doctor.Report("a machine", "cpu", "1", [wrong]))
    assert cli.run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "you can: install a newer mlx" in out


def test_quadratic_memory_in_blocks_steers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other form: said, not fatal, and fused attention stays where it is right."""
    monkeypatch.setattr(checks, "is_linear", lambda small, large: False)
    finding = checks.with_safe_form(checks.attention_is_linear, KIND, CPU)
    assert (finding.right, finding.fatal, finding.can) == (False, False, checks.NEWER_MLX)
    kept = readiness.keep(readiness.Subject(attention=(KIND,)), [finding], {})
    assert (kept["wrong"], kept["choices"]) == ("", {})
