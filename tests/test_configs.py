"""Every recipe that ships loads, and says what its comments and the documentation promise."""

import re
from pathlib import Path

import pytest
import yaml

from segtrain.engine.objectives import OBJECTIVES, of_recipe
from segtrain.memory import anatomy, choices
from segtrain.memory.device import device
from segtrain.recipe.scaffold import recipe_text, write_recipe
from segtrain.recipe.schema import Recipe, load_recipe

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_the_recipes_are_there() -> None:
    assert {path.stem for path in CONFIGS} == {"demo", "long-context-24gb", "mlx-lm-style", *OBJECTIVES}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.output.dir == f"runs/{path.stem.removesuffix('-24gb')}"
    assert bool(recipe.notices) == (path.stem == "mlx-lm-style")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_explains_itself(path: Path) -> None:
    """Comments on a good part of the keys, and the command that runs it."""
    text = path.read_text(encoding="utf-8")
    keys = re.findall(r"^\s*[\w]+:", text, re.MULTILINE)
    commented = re.findall(r"^\s*[\w]+:.*\s# ", text, re.MULTILINE)
    assert len(commented) * 7 >= len(keys)
    assert f"configs/{path.name}" in text


def test_demo_needs_nothing_but_the_repository() -> None:
    recipe = load_recipe(ROOT / "configs/demo.yaml")
    files = [source.path for part in ("train", "valid") for source in recipe.data.sources(part)]
    assert (ROOT / recipe.model / "config.json").is_file()
    assert all((ROOT / name).is_file() for name in files)


def test_long_context_stays_within_24_gb() -> None:
    recipe = load_recipe(ROOT / "configs/long-context-24gb.yaml")
    assert recipe.engine.budget_bytes is not None
    assert recipe.engine.budget_bytes < 24e9
    assert recipe.data.max_seq_length == 32768


def test_mlx_lm_style_has_only_keys_that_mlx_lm_knows() -> None:
    lora = pytest.importorskip("mlx_lm.lora")
    keys = yaml.safe_load((ROOT / "configs/mlx-lm-style.yaml").read_text(encoding="utf-8"))
    assert keys.keys() <= lora.CONFIG_DEFAULTS.keys()


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_init_writes_a_recipe_of_defaults_with_explanations(loss: str, tmp_path: Path) -> None:
    """Loads as it is; and each key that it shows with a default value shows the real default."""
    path = tmp_path / "recipe.yaml"
    write_recipe(path, loss)
    recipe = load_recipe(path)
    shown = yaml.safe_load(path.read_text(encoding="utf-8"))
    default = Recipe.from_mapping({"model": "m", "data": {"train": "a"}}).dump()
    chosen = {"train": {"epochs", "learning_rate", "warmup_ratio", "grad_accumulation_steps"}, "output": {"dir"}}
    chosen["data"] = {"train", "format"}
    for section in ("data", "lora", "engine", *OBJECTIVES, "train", "output"):
        for key in shown.get(section, {}).keys() - chosen.get(section, set()):
            assert recipe.dump()[section][key] == default[section][key], f"{section}.{key}"
    assert f"segtrain {loss} {path}" in recipe_text(loss, path)
    assert (recipe.data.format == "preference") == of_recipe(loss).pairs
    assert set(shown) & set(OBJECTIVES) == ({loss} if loss != "sft" else set())


def test_commented_out_keys_load_too(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(recipe_text("sft", path).replace("  # valid:", "  valid:"), encoding="utf-8")
    assert load_recipe(path).data.valid[0].path == "data/valid.jsonl"


def test_citation_and_changelog_follow_the_version() -> None:
    from segtrain import __version__

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", ["setup", "test", "nightly", "lint", "build", "quickstart"])
def test_make_targets(target: str) -> None:
    """Each target exists, and all but `setup` make the environment first."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^{target}:(.*)$", text, re.MULTILINE)
    assert found
    assert found[1].strip() == ("$(STAMP)" if target == "setup" else "setup")


def test_the_recipe_for_24_gb_fits_a_mac_of_24_gb(tmp_path: Path) -> None:
    """By the sizes of the model that it names, within what such a Mac gives by default."""
    recipe = load_recipe(ROOT / "configs/long-context-24gb.yaml")
    target = device("mac-24gb")
    assert recipe.engine.budget_bytes
    assert recipe.engine.budget_bytes <= target.budget
    config = {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "quantization": {"bits": 4, "group_size": 64},
    }
    model = anatomy.of_config(config, "metal", lambda layers: choices.adapter(recipe, layers))
    chooser = choices.chooser(model, target.backend, recipe)
    row = choices.row_of(recipe.data.max_seq_length, preference=False, shared=False)
    assert chooser.fastest(row, recipe.engine.budget_bytes)
