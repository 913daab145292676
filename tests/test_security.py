"""Models and data from strangers: nothing of them is executed, followed out of its place, or printed unescaped."""

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from segtrain.errors import UserError
from segtrain.models.load import load
from segtrain.report import write_report
from segtrain.run.trainer import Trainer
from segtrain.storage.checkpoint import Unreadable
from segtrain.storage.checkpoint import load as load_checkpoint


class Harmful:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_run.model(tmp_path / "model")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused(model: Path, tmp_path: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Harmful(tmp_path / "harmed")))
    with pytest.raises(UserError, match=r"pickle|no weights"):
        load(str(model))
    assert not (tmp_path / "harmed").exists()
    pickle.loads((model / name).read_bytes())
    assert (tmp_path / "harmed").exists()  # the control: it does harm when it is read


def test_a_pickle_named_safetensors_is_not_run(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(pickle.dumps(Harmful(tmp_path / "harmed")))
    with pytest.raises(UserError):
        load(str(model))
    assert not (tmp_path / "harmed").exists()


def test_a_pickle_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step-0000001"
    path.mkdir(parents=True)
    for name in ("state.json", "adapters.safetensors", "optimizer.safetensors"):
        (path / name).write_bytes(pickle.dumps(Harmful(tmp_path / "harmed")))
    with pytest.raises(Unreadable):
        load_checkpoint(path)
    assert not (tmp_path / "harmed").exists()


def test_model_code_needs_consent(model: Path, tmp_path: Path) -> None:
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'harmed')!r})\n")
    change(model / "config.json", model_file="evil.py")
    with pytest.raises(UserError, match="trust_remote_code"):
        load(str(model))
    assert not (tmp_path / "harmed").exists()


def test_tokenizer_code_needs_consent(model: Path, tmp_path: Path) -> None:
    code = f"import os\nos.mkdir({str(tmp_path / 'harmed')!r})\nclass Evil: pass\n"
    (model / "tokenization_evil.py").write_text(code)
    change(model / "config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    path = model / "tokenizer_config.json"
    change(path, tokenizer_class="Evil", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    with contextlib.suppress(UserError):
        load(str(model))
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}"]
)
def test_chat_templates_run_in_the_sandbox(tmp_path: Path, template: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}]
    data = tiny_run.written(tmp_path / "chat.jsonl", rows)
    template = template.replace("MARK", str(tmp_path / "harmed"))
    recipe = tiny_run.recipe(tmp_path, data__train=str(data), data__chat_template=template)
    with pytest.raises(UserError, match="template"):
        list(Trainer(recipe).events())
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("prompts", [False, True])
def test_a_models_own_template_runs_in_the_sandbox(model: Path, tmp_path: Path, place: str, prompts: bool) -> None:
    """In training, and in sampling, which lets transformers render it."""
    template = "{{ cycler.__init__.__globals__.os.mkdir('" + str(tmp_path / "harmed") + "') }}"
    if place.endswith(".json"):
        change(model / place, chat_template=template)
    else:
        (model / place).write_text(template)
    rows = [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}]
    data = tiny_run.written(tmp_path / "chat.jsonl", rows)
    changes = {"eval__prompts": ["w1"], "data__valid": str(tmp_path / "sft-valid.jsonl"), "output__eval_every": 1}
    recipe = tiny_run.recipe(tmp_path, **(changes if prompts else {"data__train": str(data)}))
    with pytest.raises(UserError, match="chat template refuses"):
        list(Trainer(recipe).events())
    assert not (tmp_path / "harmed").exists()


def test_the_template_control_would_do_harm(tmp_path: Path) -> None:
    """Outside of a sandbox the same template runs its code."""
    jinja2 = pytest.importorskip("jinja2")
    mark = tmp_path / "harmed"
    jinja2.Template("{{ cycler.__init__.__globals__.os.mkdir('" + str(mark) + "') }}").render()
    assert mark.exists()


def test_weights_outside_the_model_directory_are_not_read(model: Path, tmp_path: Path) -> None:
    """An index that names ../x is no way out: only files of the directory itself are read."""
    (model / "model.safetensors").rename(tmp_path / "model-outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model-outside.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError):
        load(str(model))


@pytest.mark.parametrize("name", ["../model-outside.safetensors", "/etc/passwd", "sub/model.safetensors", ".."])
def test_an_index_that_names_files_elsewhere_is_refused(model: Path, name: str) -> None:
    """Though the directory's own weights are complete."""
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "x": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside of the directory"):
        load(str(model))


def test_no_secret_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_" + "s3cr3t" * 5
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SEGTRAIN_ANYTHING"):
        monkeypatch.setenv(name, secret)
    recipe = tiny_run.recipe(tmp_path, train__steps=2)
    shown = [repr(event) for event in Trainer(recipe).events()]
    assert secret not in "".join(shown)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_the_report_escapes_its_text(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    folder = tmp_path / attack.replace("/", "∕")
    folder.mkdir()
    recipe = tiny_run.recipe(folder, train__steps=2, output__project=attack)
    list(Trainer(recipe).events())
    run = folder / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "notice", "level": "warning", "text": attack}) + "\n")
    page = write_report(run).read_text()
    assert "alert(1)" in page or "notice" not in page
    assert attack not in page
