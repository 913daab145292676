"""GGUF files read back by the `gguf` package, Modelfiles, and llama.cpp's converter as a stand-in.

Expected values: mlx-lm's own reordering of Llama's rows for GGUF, and attention computed with pairs rotated either way.
llama.cpp and Ollama themselves are not run.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_run
from mlx_lm.gguf import permute_weights
from test_merging import adapted, distance, logits, saved

from segtrain import cli
from segtrain.errors import RunFailed, UserError
from segtrain.lora import gguf_file
from segtrain.run import elsewhere
from segtrain.run.elsewhere import export_gguf, export_gguf_model, export_ollama, stop_texts
from segtrain.storage.checkpoint import write_adapters

PLAIN = ("single_word", "lstrip", "rstrip", "normalized")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def gguf() -> Any:
    return pytest.importorskip("gguf")


def read(gguf: Any, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    **{
        f"{outer}.switch_mlp.{leaf}_proj": f"ffn_{leaf}_exps"
        for outer in ("mlp", "block_sparse_moe")
        for leaf in ("gate", "up", "down")
    },
}
"""llama.cpp's names of the modules."""


@pytest.mark.parametrize(
    ("name", "architecture", "reordered"),
    [
        ("llama", "llama", True),
        ("granite", "granite", True),
        ("mixtral", "llama", True),
        ("qwen2", "qwen2", False),
        ("qwen3", "qwen3", False),
        ("qwen3_moe", "qwen3moe", False),
        ("gemma2", "gemma2", False),
        ("gemma3_text", "gemma3", False),
        ("gemma3", "gemma3", False),
        ("phi3", "phi3", False),
    ],
)
def test_an_adapter_read_back(name: str, architecture: str, reordered: bool, gguf: Any, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", name, mlp_only_layers=[])
    run = adapted(base, tmp_path / "run")
    export_gguf(run, tmp_path / "adapter.gguf")
    fields, tensors = read(gguf, tmp_path / "adapter.gguf")
    kinds = ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha")
    assert [fields[kind] for kind in kinds] == [architecture, "adapter", "lora", 8.0]  # scale 2, rank 4
    params = mx.load(str(run / "adapters.safetensors"))
    prefix = "language_model.model.layers." if name == "gemma3" else "model.layers."
    places = {name.removeprefix(prefix).rsplit(".", 1)[0] for name in params}
    assert len(tensors) == len(params) == 2 * len(places)
    for place in places:
        layer, path = place.split(".", 1)
        a, b = (params[f"{prefix}{place}.lora_{side}"] for side in "ab")
        delta = b @ a if a.ndim == 3 else (a @ b).T
        if reordered and PLACES[path] in ("attn_q", "attn_k"):
            delta = permute_weights(delta, 4, 2 if PLACES[path] == "attn_k" else 4)
        found_a, found_b = (tensors[f"blk.{layer}.{PLACES[path]}.weight.lora_{side}"] for side in "ab")
        np.testing.assert_allclose(found_b @ found_a, np.array(delta), atol=1e-5)


def test_reordered_rows_are_what_rotated_pairs_need() -> None:
    """Scores of neighbouring pairs rotated equal those of halves rotated, and without reordering they don't."""
    heads, dim, width = 4, 8, 16
    mx.random.seed(0)
    x = mx.random.normal((1, 7, width))

    def scores(weights: list[mx.array], traditional: bool) -> mx.array:
        q, k = (
            mx.fast.rope(
                (x @ w.T).reshape(1, 7, heads, dim).swapaxes(1, 2),
                dim,
                traditional=traditional,
                base=1e4,
                scale=1.0,
                offset=0,
            )
            for w in weights
        )
        return q @ k.swapaxes(-1, -2)

    factors = [(mx.random.normal((heads * dim, 3)), mx.random.normal((3, width))) for _ in range(2)]
    plain = [b @ a for b, a in factors]
    wanted = np.array(scores(plain, False))
    assert distance(np.array(scores([gguf_file._reordered(b, heads) @ a for b, a in factors], True)), wanted) < 1e-5
    assert distance(np.array(scores(plain, True)), wanted) > 0.1  # the control


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lfm2", {}, r"how llama.cpp lays out the matrices of lfm2 isn't known here \(it is for .*qwen3"),
        ("llama", {"targets": ["q_proj"], "lost": True}, "isn't on this machine, and GGUF needs its numbers of heads"),
        ("llama", {"dora": True}, "a GGUF adapter is LoRA, and this one is DoRA; export --format merged"),
    ],
)
def test_what_gguf_cannot_say_is_refused(
    name: str, options: dict[str, Any], message: str, gguf: Any, tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", name)
    lost, dora = options.pop("lost", False), options.pop("dora", False)
    run = adapted(base, tmp_path / "run", **options)
    config = json.loads((run / "adapter_config.json").read_text())
    config["segtrain"]["model_type"] = name
    if dora:
        config["fine_tune_type"] = "dora"
    if lost:
        config["model"] = str(tmp_path / "gone")
    (run / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        export_gguf(run, tmp_path / "adapter.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = adapted(saved(tmp_path / "base", "llama"), tmp_path / "run")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r'isn.t installed: pip install "segtrain-mlx\[gguf\]"'):
        export_gguf(run, tmp_path / "adapter.gguf")


# --- whole models -----------------------------------------------------------------------------------------------------

STAND_IN = """
import pathlib, sys
source, option, out = sys.argv[1:]
assert option == "--outfile"
print((pathlib.Path(source) / "config.json").read_text())
pathlib.Path(out).write_bytes((pathlib.Path(source) / "model.safetensors").read_bytes())
"""


def test_a_model_by_the_converter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved(tmp_path / "base", "llama", packed="4")
    run = adapted(base, tmp_path / "run")
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(STAND_IN)
    options = ["--format", "gguf-model", "--converter", str(script), "--out", str(tmp_path / "model.gguf")]
    assert cli.run(["export", str(run), *options]) == 0
    assert "the merged model is dense" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", script.name, "model.gguf", "run"]
    merged = tmp_path / "again"
    merged.mkdir()
    (merged / "model.safetensors").write_bytes((tmp_path / "model.gguf").read_bytes())
    config = json.loads((base / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("quant")}))
    assert distance(logits(merged), logits(base, run)) < 1e-4


def test_a_converter_that_fails(tmp_path: Path) -> None:
    run = adapted(saved(tmp_path / "base", "llama"), tmp_path / "run")
    script = tmp_path / "convert.py"
    script.write_text("import sys\nprint('loading', file=sys.stderr)\nsys.exit('no tokenizer here')")
    with pytest.raises(RunFailed, match=r"convert.py ended with 1: loading no tokenizer here"):
        export_gguf_model(run, tmp_path / "model.gguf", recipe=None, converter=script)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "convert.py", "run"]


def test_where_no_converter_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = adapted(saved(tmp_path / "base", "llama"), tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    message = "there is no convert_hf_to_gguf.py on the path; get it: git clone .*; then --converter llama.cpp"
    with pytest.raises(UserError, match=message):
        export_gguf_model(run, tmp_path / "model.gguf", recipe=None)
    with pytest.raises(UserError, match=r"--converter .*none.py isn't a file"):
        export_gguf_model(run, tmp_path / "model.gguf", recipe=None, converter=tmp_path / "none.py")


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4", "lfm2_moe"])
def test_other_names_than_published_ones_are_refused(name: str, tmp_path: Path) -> None:
    run = adapted(saved(tmp_path / "base", name), tmp_path / "run", targets=["q_proj"])
    (tmp_path / "convert.py").write_text("")
    with pytest.raises(UserError, match=f"mlx-lm keeps the weights of {name} under other names"):
        export_gguf_model(run, tmp_path / "model.gguf", recipe=None, converter=tmp_path / "convert.py")


# --- Ollama -----------------------------------------------------------------------------------------------------------


def chat_model(folder: Path, **changes: Any) -> Path:
    """A tiny llama whose tokenizer has ChatML's tokens."""
    path = tiny_run.model(folder / "model", vocab_size=66, **changes)
    file = json.loads((path / "tokenizer.json").read_text())
    file["added_tokens"] += [
        {"id": 64 + number, "content": text, "special": True, **dict.fromkeys(PLAIN, False)}
        for number, text in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    (path / "tokenizer.json").write_text(json.dumps(file))
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def test_stop_tokens(tmp_path: Path) -> None:
    path = chat_model(tmp_path)
    assert stop_texts(path, None) == ["</s>", "<|im_end|>"]
    (path / "chat_template.jinja").unlink()
    assert stop_texts(path, None) == ["</s>"]
    (path / "chat_template.jinja").write_text("{% if messages[1] %}{{ raise_exception('users only') }}{% endif %}")
    with pytest.raises(UserError, match="can't show a question and its answer: users only"):
        stop_texts(path, None)


def test_a_modelfile_with_an_adapter(gguf: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = chat_model(tmp_path, architectures=["LlamaForCausalLM"])
    run = adapted(base, tmp_path / "run")
    for out, from_ in ((tmp_path / "plain", None), (tmp_path / "named", "llama3.2:1b")):
        options = ["--from", from_] if from_ else []
        assert cli.run(["export", str(run), "--format", "ollama", "--out", str(out), *options]) == 0
        assert f"ollama create NAME -f {out}/Modelfile" in capsys.readouterr().err
        assert (out / "Modelfile").read_text() == (
            f'FROM {from_ or base}\nADAPTER ./adapter.gguf\nPARAMETER stop "</s>"\nPARAMETER stop "<|im_end|>"\n'
        )
        assert len(read(gguf, out / "adapter.gguf")[1]) == 3 * 7 * 2


def test_a_modelfile_with_the_model_where_the_base_is_quantised_for_mlx(tmp_path: Path) -> None:
    base = chat_model(tmp_path, architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=64)
    packed = cli_quantised(base, tmp_path / "packed")
    run = adapted(packed, tmp_path / "run")
    notices = export_ollama(run, tmp_path / "out", recipe=None)
    assert "the merged model is dense" in notices[0]
    assert (tmp_path / "out/Modelfile").read_text().startswith("FROM ./model\nPARAMETER stop")
    assert distance(logits(tmp_path / "out/model"), logits(packed, run)) < 1e-4


def test_a_modelfile_with_the_model_where_the_adapter_is_dora(tmp_path: Path) -> None:
    base = chat_model(tmp_path, architectures=["LlamaForCausalLM"])
    run = adapted(base, tmp_path / "run")
    config = json.loads((run / "adapter_config.json").read_text())
    params = mx.load(str(run / "adapters.safetensors"))
    lengths = {n.replace("lora_b", "m"): mx.ones(v.shape[-1]) for n, v in params.items() if n.endswith("lora_b")}
    write_adapters(run, params | lengths, {**config, "fine_tune_type": "dora"})
    export_ollama(run, tmp_path / "out", recipe=None)
    assert (tmp_path / "out/Modelfile").read_text().startswith("FROM ./model\n")
    assert distance(logits(tmp_path / "out/model"), logits(base, run)) < 1e-4


def cli_quantised(source: Path, out: Path) -> Path:
    """By mlx-lm's own conversion."""
    from mlx_lm import convert

    convert(str(source), str(out), quantize=True, q_group_size=64, q_bits=4)
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, r"Ollama doesn't import Qwen3ForCausalLM .* name .*--from qwen3"),
        ({}, r"Ollama doesn't import \(config.json names none\)"),
    ],
)
def test_what_ollama_does_not_import(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = chat_model(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        export_ollama(adapted(base, tmp_path / "run"), tmp_path / "out", recipe=None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--format gguf --converter x --out y", "--converter is for --format gguf-model, not gguf; leave it out"),
        ("--format merged --from x --out y", "--from is for --format ollama, not merged; leave it out"),
        ("--format gguf --out {0}/file", "--out {0}/file: there is a file of that name"),
    ],
)
def test_bad_requests(
    arguments: str, message: str, tmp_path: Path, gguf: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = adapted(saved(tmp_path / "base", "llama"), tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    assert cli.run(["export", str(run), *arguments.format(tmp_path).split()]) == 2
    assert message.format(tmp_path) in capsys.readouterr().err


def test_quoting() -> None:
    assert (elsewhere._quoted("</s>"), elsewhere._quoted('a"b')) == ('"</s>"', '"""a"b"""')


def test_every_architecture_is_one_of_the_package(gguf: Any) -> None:
    names = set(gguf.MODEL_ARCH_NAMES.values())
    assert {one.name for one in gguf_file.ARCHITECTURES.values()} <= names
