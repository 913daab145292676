"""`plan-segments` from config.json alone: figures and errors."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from segtrain import cli
from segtrain.errors import UserError
from segtrain.memory import anatomy, choices, machine, source
from segtrain.memory.backends import BACKENDS, here
from segtrain.memory.choose import sparing
from segtrain.memory.corrections import Corrections, keep
from segtrain.memory.device import metal_recommended
from segtrain.recipe.schema import Recipe
from segtrain.run.preview import preview

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path / "model", CONFIG)


def written(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_options_for_every_segment_size(model: Path) -> None:
    found = preview(None, model=str(model), seq=4096, budget="2GB")
    assert [x["segment_size"] for x in found.options if x["backward"] == "segmented" and not x["keep"]] == [1, 2, 4, 6]
    assert found.fits
    assert found.recommended in found.options
    fitting = [x for x in found.options if x["fits"]]
    assert found.recommended == sparing(
        fitting, found.budget_gib, lambda x: x["relative_time"], lambda x: x["peak_gib"]
    )
    for option in found.options:
        assert sum(option["phases"].values()) == pytest.approx(option["peak_gib"], abs=2e-3)
        assert option["fits"] == (option["peak_gib"] <= found.budget_gib)
    plain = found.as_json()
    assert plain.keys() >= {"model", "seq", "budget_gib", "fits", "recommended", "options"}
    assert json.loads(json.dumps(plain)) == plain


def test_longest_is_the_longest(model: Path) -> None:
    """A row of `longest` tokens fits, one a fifth longer doesn't."""
    found = preview(None, model=str(model), seq=64, budget="30MB", device="cpu")
    for option in found.options:
        if option["backward"] == "segmented" and option["longest"] < 4096 * 5 / 6:
            size, far = option["segment_size"], option["longest"]
            for length, fits in ((far, True), (far * 6 // 5, False)):
                again = preview(None, model=str(model), seq=length, budget="30MB", device="cpu")
                assert any(x["fits"] for x in again.options if x["segment_size"] == size and not x["keep"]) == fits


def test_nothing_fits_says_what_would(model: Path) -> None:
    found = preview(None, model=str(model), seq=4096, budget="20MB", device="cpu")
    assert not found.fits
    assert found.recommended is None
    words = found.advice.split()
    far = int(words[words.index("to") + 1].replace(",", ""))
    assert preview(None, model=str(model), seq=far, budget="20MB", device="cpu").fits
    budget = words[words.index("budget") + 2]
    assert preview(None, model=str(model), seq=4096, budget=budget, device="cpu").fits
    assert cli.run(["plan-segments", "--model", str(model), "--seq", "4096", "--budget", "20MB"]) == 1
    assert cli.run(["plan-segments", "--model", str(model), "--seq", "4096", "--budget", budget]) == 0


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ["--seq", "64", "--budget", "24 potatoes"], "'24 potatoes' isn't a memory size"),
        ({}, ["--seq", "9000"], "rows of 9,000 tokens are longer than the model's 4,096 positions"),
        ({}, ["--seq", "64", "--budget", "1MB"], "is too small for"),
        ({}, [], "give --seq"),
        ({"model_type": "nonsense"}, ["--seq", "64"], "mlx-lm knows no model_type nonsense"),
        ({"model_type": "muse_spark"}, ["--seq", "64"], "can't be trained"),
        ({"model_type": None}, ["--seq", "64"], "names no model_type"),
        ({"hidden_size": None}, ["--seq", "64"], "config.json doesn't describe a llama model"),
        ({"num_hidden_layers": 0}, ["--seq", "64"], "doesn't describe a llama model"),
    ],
)
def test_bad_input_is_exit_code_2_with_the_fix(
    change: dict[str, Any],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(tmp_path / "m", {k: v for k, v in {**CONFIG, **change}.items() if v is not None})
    assert cli.run(["plan-segments", "--model", str(path), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("device", "words", "gigabytes"),
    [("mac-24gb", "a Mac with 24 GB", 15.46), ("mac-64gb", "a Mac with 64 GB", 46.39), ("h200", "H200", 135.7)],
)
def test_another_machine_is_planned_for(model: Path, device: str, words: str, gigabytes: float) -> None:
    found = preview(None, model=str(model), seq=256, device=device)
    assert words in found.planned_for
    assert found.budget_gib * 2**30 / 1e9 == pytest.approx(gigabytes, rel=0.001)
    assert "told otherwise" in preview(None, model=str(model), seq=256, budget="9GB", device=device).planned_for


@pytest.mark.parametrize("device", ["mac", "mac-0gb", "h100"])
def test_a_device_that_is_not_known(model: Path, device: str) -> None:
    with pytest.raises(UserError, match="give cpu, h200 or mac-24gb"):
        preview(None, model=str(model), seq=256, device=device)


def test_what_runs_measured_here_is_shown_beside_the_estimate(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = preview(None, model=str(model), seq=4096, budget="2GB")
    backend = here().name
    learnt = Corrections({"segmented": 1.2, "full": 1.2}, 0, {"segmented": 1e-9, "full": 2e-9})
    keep(anatomy.of_config(CONFIG, backend), backend, learnt)
    found = preview(None, model=str(model), seq=4096, budget="2GB")
    (before,) = [x for x in plain.options if x["backward"] == "full"]
    (after,) = [x for x in found.options if x["backward"] == "full"]
    assert after["estimated_gib"] == before["peak_gib"]
    fixed = before["phases"]["model"]
    assert 1.15 < (after["peak_gib"] - fixed) / (before["peak_gib"] - fixed) <= 1.2
    assert after["seconds"] > 0
    assert "seconds" not in before
    elsewhere = preview(None, model=str(model), seq=4096, device="h200")
    assert not any("seconds" in x for x in elsewhere.options)


def test_a_device_that_is_not_known_is_refused(model: Path) -> None:
    assert cli.run(["plan-segments", "--model", str(model), "--seq", "64", "--device", "toaster"]) == 2
    assert cli.run(["plan-segments", "--model", str(model), "--seq", "64", "--device", "h200", "--measure"]) == 2


def test_what_to_try_is_in_order(model: Path) -> None:
    recipe = Recipe.from_mapping(
        {"model": str(model), "data": {"train": "t"}, "engine": {"backward": "full"}, "lora": {"layers": "all"}}
    )
    chooser = choices.chooser(anatomy.of_config({**CONFIG, "num_hidden_layers": 20}, "cpu"), BACKENDS["cpu"], recipe)
    order = ["engine.backward", "quantised", "engine.weights: streamed", "lora.layers: 16"]
    assert [word in text for word, text in zip(order, choices.remedies(chooser), strict=True)] == [True] * 4
    packed = {**CONFIG, "quantization": {"bits": 4, "group_size": 64}}
    chooser = choices.chooser(anatomy.of_config(packed, "cpu"), BACKENDS["cpu"], None, streamed=True)
    assert not choices.remedies(chooser)


def test_what_is_read_of_streamed_weights_is_said_with_the_disks_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = Recipe.from_mapping({"model": str(model), "data": {"train": "t"}, "engine": {"weights": "streamed"}})
    (note,) = [text for text in preview(recipe, seq=128).notes if "GiB a row" in text]
    assert "segtrain bench" in note
    machine.write(
        machine.path(),
        {"backend": "cpu", "mlx": machine.mlx_version(), "choices": {"disk_bytes_a_second": 2 << 30}},
    )
    (note,) = [text for text in preview(recipe, seq=128).notes if "GiB a row" in text]
    assert "s at the disk's 2 GiB a second" in note


def test_a_budget_below_the_model_names_one_that_works(model: Path) -> None:
    with pytest.raises(UserError, match=r"rows of 128 tokens need (\d+)MB") as error:
        preview(None, model=str(model), seq=128, budget="2MB")
    assert preview(None, model=str(model), seq=128, budget=str(error.value).split()[-1]).fits


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "isn't a model directory"), ("[1]", "isn't a JSON object"), ("{", "can't be read")],
)
def test_broken_directories(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        source.find(str(tmp_path))


def test_a_hub_model_is_read_from_config_and_index_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetched(name: str, file: str) -> Path:
        asked.append(file)
        content = CONFIG if file == "config.json" else {"metadata": {"total_size": 12345}, "weight_map": {"a": "b"}}
        (tmp_path / file).write_text(json.dumps(content))
        return tmp_path / file

    monkeypatch.setattr(source, "_fetched", fetched)
    assert source.find("owner/name").weights == 12345
    assert asked == ["config.json", "model.safetensors.index.json"]


def test_a_directory_s_weights_are_counted_from_headers(model: Path) -> None:
    """Headers alone: the file ends where its arrays would begin. Vision towers don't count."""
    entries = {
        "model.a": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]},
        "vision_tower.b": {"dtype": "F32", "shape": [10], "data_offsets": [100, 140]},
    }
    header = json.dumps({"__metadata__": {}, **entries}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert source.find(str(model)).weights == 100


@pytest.mark.parametrize(("gigabytes", "share"), [(16, 2 / 3), (36, 2 / 3), (64, 3 / 4), (128, 3 / 4)])
def test_what_metal_recommends(gigabytes: int, share: float) -> None:
    """Apple's shares of unified memory, and the user's own limit."""
    total = gigabytes << 30
    assert metal_recommended(total) == int(share * total)
    assert metal_recommended(total, 1000) == 1000 << 20


def test_a_recipe_s_own_lengths(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths come from the data's accounting; they are capped at max_seq_length."""
    from segtrain.data import dataset, tokenizer

    counts = {"median": 100, "p95": 900, "longest": 5000, "tokens": 10}

    class Opened:
        def __init__(self) -> None:
            self.counts = counts

    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *_: object())
    monkeypatch.setattr(dataset, "open_data", lambda *_, **__: Opened())
    recipe = Recipe.from_mapping({"model": str(model), "data": {"train": "t.jsonl", "max_seq_length": 2000}})
    found = preview(recipe, budget="2GB")
    assert [(x["name"], x["tokens"]) for x in found.lengths] == [("median", 100), ("95 %", 900), ("longest", 2000)]
    assert found.seq == 2000


def test_unreadable_data_are_a_note_not_the_end(model: Path) -> None:
    recipe = Recipe.from_mapping({"model": str(model), "data": {"train": "missing.jsonl", "max_seq_length": 512}})
    found = preview(recipe, budget="2GB")
    assert found.seq == 512
    assert "planned by max_seq_length alone" in found.notes[0]


def test_measure_runs_a_real_step(tmp_path: Path) -> None:
    demo = Path(__file__).parents[1] / "examples" / "demo-model"
    if not (demo / "model.safetensors").exists():
        pytest.skip("the demo model isn't there")
    found = preview(None, model=str(demo), seq=128, budget="2GB", measure=True)
    assert found.measured is not None
    assert found.measured["peak_gib"] > 0
    assert found.measured["error"] == pytest.approx(
        found.measured["predicted_gib"] / found.measured["peak_gib"] - 1, abs=0.02
    )
    assert set(found.measured["phases"]) <= {"forward", "head", "backward", "step"}
