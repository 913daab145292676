"""The check that users and unknown models get: it passes right gradients and fails wrong ones."""

import gc
import io
import json
from collections.abc import Callable
from pathlib import Path

import data_toys
import mlx.core as mx
import pytest
import tiny_configs
from mlx.utils import tree_flatten
from rich.console import Console

from segtrain.data.rows import Origin, PreferenceRow, SupervisedRow
from segtrain.engine import objectives
from segtrain.errors import UserError
from segtrain.models import support
from segtrain.models.load import load
from segtrain.models.stack import LayerStack
from segtrain.models.stream_ops import StreamCache
from segtrain.recipe.schema import Recipe
from segtrain.run import verify
from segtrain.run.session import Session, open_session
from segtrain.run.verify import check_unproven, compare, verify_gradients
from segtrain.terminal.verify import print_verify

HERE = Origin("row", 1)
TOKENIZER = data_toys.byte_level()
WORDS = "the quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp("models") / name
            changes = {"vocab_size": len(TOKENIZER), "vocab_size_per_layer_input": len(TOKENIZER)}
            made[name] = tiny_configs.save(name, path, **changes)
            TOKENIZER.save_pretrained(path)
        return made[name]

    return model


def recipe(model: Path, data: Path = Path("none"), **engine: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model),
            "data": {"train": str(data)},
            "lora": {"rank": 3},
            "train": {"steps": 1},
            "engine": engine,
        }
    )


def session(model: Path, loss: str = "sft", **engine: object) -> Session:
    return open_session(recipe(model, **engine), objectives.of_recipe(loss), load(str(model)))


def lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def supervised(count: int) -> SupervisedRow:
    return SupervisedRow([(5 * i * i + i) % 97 for i in range(count)], [i > 3 for i in range(count)], HERE)


PAIR = PreferenceRow(list(range(5, 30)), list(range(40, 52)), list(range(60, 75)), HERE)


def test_on_the_users_rows(models: Callable[[str], Path], tmp_path: Path):
    data = lines(tmp_path / "rows.jsonl", {"text": WORDS * 3}, {"text": WORDS}, {"text": WORDS * 2})
    report = verify_gradients(recipe(models("llama"), data, segment_size=2))
    assert report.passed
    assert report.tolerance == verify.EXACT
    assert report.segment_size == 2
    assert report.row.endswith("rows.jsonl:2"), "the shortest row"
    assert len(report.rows) == 4 * 7
    assert {row.module for row in report.rows} >= {"model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj"}
    assert all(0 <= row.relative_error < 1e-5 for row in report.rows)
    assert report.loss_error < 1e-5


def test_preference_rows_are_found_out(models: Callable[[str], Path], tmp_path: Path):
    data = lines(tmp_path / "rows.jsonl", {"prompt": WORDS, "chosen": "yes, the fox", "rejected": "no"})
    report = verify_gradients(recipe(models("llama"), data))
    assert report.passed
    assert report.loss_full != 0


def test_data_that_can_not_be_read(models: Callable[[str], Path], tmp_path: Path):
    with pytest.raises(UserError):
        verify_gradients(recipe(models("llama"), lines(tmp_path / "rows.jsonl", {"nothing": 1})))


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "gemma3n", "mamba"])
def test_right_gradients_pass_and_leave_nothing_behind(models: Callable[[str], Path], name: str):
    opened = session(models(name))
    before = [(k, v) for k, v in tree_flatten(opened.loaded.model.parameters()) if "coefs" not in k]
    report = compare(opened, supervised(20))
    assert report.passed, max(report.rows, key=lambda row: row.relative_error)
    after = dict(tree_flatten(opened.loaded.model.parameters()))
    assert all(mx.array_equal(value, after[key]) and value.dtype == after[key].dtype for key, value in before)


def test_a_shared_prompt_is_compared_with_two_streams(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    opened = session(models("llama"), "orpo")
    assert len(opened.layout(PAIR).streams) == 1
    assert compare(opened, PAIR).passed
    monkeypatch.setattr("segtrain.engine.layouts.Stream.runs", property(lambda self: ((0, len(self)),)))
    assert not compare(opened, PAIR).passed, "positions of the second response not reset"


def test_a_lost_cotangent_fails(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    """Keys and values handed on without their gradient."""
    opened = session(models("gemma4_text"))
    handed_on = StreamCache.keys_and_values
    opened.stack.run = without_gradient(opened.stack)  # type: ignore[method-assign]
    report = compare(opened, supervised(20))
    assert handed_on is StreamCache.keys_and_values
    assert not report.passed
    assert max(row.relative_error for row in report.rows) > 0.1
    assert report.loss_error < 1e-5, "the loss alone does not show it"


def without_gradient(stack: LayerStack) -> Callable:
    run = stack.run

    def cut(tape, carry, lo, hi):
        return run(tape, {k: v if k == "h" else mx.stop_gradient(v) for k, v in carry.items()}, lo, hi)

    return cut


def test_half_precision_is_compared_in_float32(models: Callable[[str], Path]):
    opened = session(models("qwen3"))
    model = opened.loaded.model
    for (module, key), value in verify._floats(model):
        if not key.startswith("lora"):
            module[key] = value.astype(mx.bfloat16)
    report = compare(opened, supervised(20))
    assert report.passed
    assert report.tolerance == verify.EXACT
    assert model.model.embed_tokens.weight.dtype == mx.bfloat16


def test_half_precision_where_float32_does_not_fit(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "default_budget", lambda backend: 1000)
    opened = session(models("qwen3"))
    for (module, key), value in verify._floats(opened.loaded.model):
        if not key.startswith("lora"):
            module[key] = value.astype(mx.bfloat16)
    report = compare(opened, supervised(20))
    assert report.tolerance == verify.HALF
    assert report.passed


def test_an_unproven_model_is_trained_if_its_gradients_agree(models: Callable[[str], Path]):
    check_unproven(session(models("llama")))
    check_unproven(session(models("llama"), "orpo"))


def test_an_unproven_model_is_refused_if_they_do_not(models: Callable[[str], Path]):
    opened = session(models("gemma4_text"))
    opened.stack.run = without_gradient(opened.stack)  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=r"the segmented gradients of .*gemma4_text differ from plain ones \(by .* at model.layers"
    ):
        check_unproven(opened)


def test_rows_are_shortened_around_what_is_supervised():
    row = SupervisedRow(list(range(1000)), [i >= 700 for i in range(1000)], HERE)
    short = verify.shortened(row)
    assert isinstance(short, SupervisedRow)
    assert short.tokens == list(range(572, 828))
    assert short.supervised.index(True) == 128
    pair = verify.shortened(PreferenceRow(list(range(900)), list(range(500)), list(range(10)), HERE))
    assert isinstance(pair, PreferenceRow)
    assert (pair.prompt[0], len(pair.prompt), len(pair.chosen), len(pair.rejected)) == (772, 128, 64, 10)


def test_the_error_is_relative_and_per_module():
    full = {"m.lora_a": mx.array([3.0, 0.0]), "m.lora_b": mx.array([0.0, 4.0]), "n.lora_a": mx.zeros((2,))}
    other = {"m.lora_a": mx.array([3.0, 0.3]), "m.lora_b": mx.array([0.4, 4.0]), "n.lora_a": mx.zeros((2,))}
    errors = {error.module: error.relative_error for error in verify.module_errors(full, other)}
    assert errors == {"m": pytest.approx(0.5 / 5), "n": 0.0}
    other["n.lora_a"] = mx.ones((2,))
    assert verify.module_errors(full, other)[1].relative_error == 1


def test_the_table_says_what_is_proven():
    assert not support.why_unproven({"model_type": "llama"})
    assert support.why_unproven({"model_type": "brand_new"}) == "no test of segtrain covers brand_new"


@pytest.mark.parametrize("version", ["0.32.3", "0.33.0"])
def test_another_mlx_lm_proves_nothing(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(support.importlib.metadata, "version", lambda name: version)
    why = support.why_unproven({"model_type": "llama"})
    assert why == f"segtrain was tested with mlx-lm {support.MLX_LM}, and this is mlx-lm {version}"


def test_rounding_of_a_deep_model_is_judged_by_float64(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    """The tolerance is one that right gradients of this model miss; a wrong gradient misses the truth's by far."""
    monkeypatch.setattr(verify, "EXACT", 1e-9)
    opened = session(models("gemma4_text"))
    report = compare(opened, supervised(20))
    assert report.passed
    assert 1e-9 < report.tolerance < 1e-4
    assert all(value.dtype == mx.float32 for _, value in verify._floats(opened.loaded.model))
    opened.stack.run = without_gradient(opened.stack)  # type: ignore[method-assign]
    assert not compare(opened, supervised(20)).passed


@pytest.mark.parametrize("reference", ["the whole model", "a layer at a time"])
def test_the_longest_rows_are_looked_at(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
):
    """A rotary embedding that follows the row's length, and rows that are padded all the same."""
    path = tmp_path / "internlm"
    scaling = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    tiny_configs.save("internlm2", path, vocab_size=len(TOKENIZER), max_position_embeddings=64, rope_scaling=scaling)
    TOKENIZER.save_pretrained(path)
    data = lines(tmp_path / "rows.jsonl", {"text": WORDS[:20]}, {"text": WORDS * 4})
    if reference == "a layer at a time":
        monkeypatch.setattr(verify, "_most", lambda session: 64)
    report = verify_gradients(recipe(path, data))
    assert report.passed
    assert report.tokens < 64 < report.long_tokens == report.longest
    assert reference in report.long_reference
    monkeypatch.setattr("segtrain.run.session.pads", lambda model, config: True)
    monkeypatch.setattr("segtrain.run.session.align", lambda backend: 128)
    padded = verify_gradients(recipe(path, data))
    assert padded.long_error > 1e-3 > 1e-5 > report.long_error
    assert not padded.passed


def test_pairs_as_long_as_the_longest(models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    short = {"prompt": WORDS[:20], "chosen": "yes, the fox", "rejected": "no"}
    data = lines(tmp_path / "rows.jsonl", short, {**short, "prompt": WORDS * 3})
    monkeypatch.setattr(verify, "_most", lambda session: 64)
    report = verify_gradients(recipe(models("gemma4_text"), data))
    assert report.passed
    assert 200 < report.longest == report.long_tokens
    assert report.long_error < 1e-5


def test_the_long_row_is_as_long_as_there_is_memory_for(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = lines(tmp_path / "rows.jsonl", {"text": WORDS[:20]}, {"text": WORDS * 8})
    opened = session(models("llama"))
    row = supervised(40)
    monkeypatch.setattr(verify, "default_budget", lambda backend: 1 << 30)
    plenty = verify._most_layerwise(opened, row)
    monkeypatch.setattr(verify, "default_budget", lambda backend: 1 << 28)
    less = verify._most_layerwise(opened, row)
    assert plenty > 3 * less > 0
    monkeypatch.setattr(verify, "_most", lambda session: 64)
    monkeypatch.setattr(verify, "_most_layerwise", lambda session, row: 150)
    report = verify_gradients(recipe(models("llama"), data))
    assert (report.passed, report.long_tokens) == (True, 150)
    assert report.longest > 400
    shown = io.StringIO()
    print_verify(report, console=Console(file=shown, width=100))
    assert f"long row: 150 of {report.longest} tokens, as many as there is memory for" in shown.getvalue()
    assert "against autodiff a layer at a time" in shown.getvalue()


def streamed_recipe(folder: Path, dtype: mx.Dtype, rows: list[str], layers: int = 4, **changes: object) -> Recipe:
    """Of a llama with untied ends that are large enough to stay on disk."""
    path = folder / f"model-{dtype.__str__().rpartition('.')[2]}"
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": layers, "vocab_size": 4096}
    if not path.exists():
        tiny_configs.save("llama", path, num_attention_heads=4, num_key_value_heads=2, **sizes)
        arrays: dict[str, mx.array] = mx.load(str(path / "model.safetensors"))  # type: ignore[assignment]
        cast = {name: array.astype(dtype) for name, array in arrays.items()}
        mx.save_safetensors(str(path / "model.safetensors"), cast, {"format": "mlx"})
        TOKENIZER.save_pretrained(path)
    data = lines(folder / "streamed.jsonl", *({"text": text} for text in rows))
    return recipe(path, data, weights="streamed", **changes)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_streamed_weights_are_never_held_as_a_whole(dtype: mx.Dtype, tmp_path: Path):
    """The reference too goes a layer at a time, in float32."""
    asked = streamed_recipe(tmp_path, dtype, [WORDS[:10], WORDS[:30]], layers=12, keep_layers=0)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    report = verify_gradients(asked)
    peak = mx.get_peak_memory() - before
    assert report.passed
    assert report.tolerance == verify.EXACT
    assert report.long_tokens == report.longest > report.tokens
    assert report.long_reference == "autodiff a layer at a time"
    weights = Path(asked.model, "model.safetensors").stat().st_size * 4 // dtype.size
    assert peak < 0.6 * weights, f"{peak:,} of {weights:,} bytes, in float32"


@pytest.mark.parametrize("loss", ["sft", "orpo", "dpo"])
def test_an_unproven_model_is_checked_streamed(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = streamed_recipe(tmp_path, mx.float32, [WORDS])
    loaded = load(asked.model, stream=lambda path: True)
    opened = open_session(asked, objectives.of_recipe(loss, asked), loaded)
    assert loaded.weights is not None
    assert loaded.weights.ends
    check_unproven(opened)
    assert loaded.weights.ends, "the ends were read for the check alone"
    run = LayerStack.run

    def shifted(self, tape, carry, lo, hi):
        made = run(self, tape, carry, lo, hi)
        return made | {"h": made["h"] + 0.01 * carry["h"]} if lo == 1 else made

    monkeypatch.setattr(LayerStack, "run", shifted)  # the reference has one of its own
    with pytest.raises(UserError, match="differ from plain ones"):
        check_unproven(opened)


def test_rounding_of_streamed_weights_is_judged_by_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "EXACT", 1e-9)
    report = verify_gradients(streamed_recipe(tmp_path, mx.float32, [WORDS]))
    assert report.passed
    assert 1e-9 < report.tolerance < 1e-4
