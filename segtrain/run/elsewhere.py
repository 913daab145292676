"""`segtrain export` for llama.cpp and Ollama: `--format gguf`, `gguf-model` and `ollama`.

An adapter becomes a GGUF LoRA file by the `gguf` package. A whole model is merged first and then converted by
llama.cpp's own script, or imported by Ollama, which reads published models' names: those of mlx-lm are the same in most
families, and the others are refused.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segtrain.data.chat import MARK, ChatTemplate
from segtrain.data.tokenizer import Codec, load_tokenizer
from segtrain.errors import RunFailed, UserError, reason
from segtrain.lora import adapters, gguf_file
from segtrain.lora.adapters import Adapter
from segtrain.lora.peft import FAMILIES, type_of
from segtrain.memory.source import described
from segtrain.models.load import located
from segtrain.recipe.schema import Recipe
from segtrain.run.merging import export_merged
from segtrain.storage.fresh import beside, fresh, put, refuse_existing

SCRIPT = "convert_hf_to_gguf.py"
GET = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp; pip install -r "
    f"llama.cpp/requirements/requirements-convert_hf_to_gguf.txt; then --converter llama.cpp/{SCRIPT}"
)
# What `ollama create` imports from safetensors, of the families that keep published names here.
IMPORTED = (
    "LlamaForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "CohereForCausalLM",
    "Olmo3ForCausalLM",
)
MODELFILE, ADAPTER, MODEL = "Modelfile", "adapter.gguf", "model"
TAIL = 4  # lines of a converter's complaint


def export_gguf(run: Path, out: Path, *, model: str | None = None) -> list[str]:
    """Write the adapter as a GGUF LoRA file `out`. Raises UserError."""
    adapter = adapters.read(run, model)
    gguf_file.write(adapter.params, adapter.config, out)
    return []


def export_gguf_model(
    run: Path, out: Path, *, recipe: Recipe | None, model: str | None = None, converter: Path | None = None
) -> list[str]:
    """Write the merged model as one GGUF file by llama.cpp's converter (`converter`, or the one on the path).

    Raises UserError where there is none or it can't know the names, RunFailed where it fails.
    """
    refuse_existing(out, "--out")
    command = _command(converter)
    _require_published_names(adapters.read(run, model))
    with beside(out, "--out") as folder:
        notices = export_merged(run, folder / MODEL, recipe=recipe, model=model)
        made = folder / out.name
        done = subprocess.run(
            [*command, str(folder / MODEL), "--outfile", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode or not made.is_file():
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-TAIL:]
            raise RunFailed(f"{command[-1]} ended with {done.returncode}: {' '.join(lines) or 'it said nothing'}")
        put(made, out, "--out")
    return notices


def export_ollama(
    run: Path, out: Path, *, recipe: Recipe | None, model: str | None = None, from_: str | None = None
) -> list[str]:
    """Write a directory for `ollama create`: a Modelfile, with the adapter or, where Ollama can't use it, the model.

    `from_`: what the Modelfile's FROM names instead of the base model's directory. Raises UserError.
    """
    refuse_existing(out, "--out")
    adapter = adapters.read(run, model)
    trust = bool(recipe and recipe.trust_remote_code)
    name = adapter.config.get("segtrain", {}).get("made_from") if model is None else model
    source, config = located(str(name or adapter.config.get("model") or ""), trust_remote_code=trust)
    stops = stop_texts(source, recipe)
    if from_ is None:
        _require_import(config, adapter)
    alone = from_ is None and (described(config) != "" or not gguf_file.knows(adapter.config, config))
    with fresh(out, "--out") as folder:
        if alone:
            notices = export_merged(run, folder / MODEL, recipe=recipe, model=model)
        else:
            notices = export_gguf(run, folder / ADAPTER, model=model)
        lines = [f"FROM ./{MODEL}"] if alone else [f"FROM {from_ or source.resolve()}", f"ADAPTER ./{ADAPTER}"]
        lines += [f"PARAMETER stop {_quoted(text)}" for text in stops]
        (folder / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*notices, f"import it with: ollama create NAME -f {out / MODELFILE}"]


def stop_texts(source: Path, recipe: Recipe | None) -> list[str]:
    """The tokens at which generation ends, and the one with which the chat template ends a turn."""
    codec = Codec(load_tokenizer(str(source), bool(recipe and recipe.trust_remote_code)))
    template = ChatTemplate(codec, recipe.data.chat_template if recipe else None)
    texts = set(codec.end_texts)
    if template.exists:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        try:
            after = template.render(turns).rpartition(MARK)[2]
        except Exception as error:  # a template raises what it likes
            raise UserError(f"the chat template can't show a question and its answer: {reason(error)}") from error
        texts |= {after[: codec.leading_special(after)].strip()}
    return sorted(filter(None, texts))


def _command(converter: Path | None) -> list[str]:
    """How llama.cpp's converter is run. Raises UserError where there is none."""
    found = str(converter) if converter else shutil.which(SCRIPT)
    if found is None or not Path(found).is_file():
        where = f"--converter {converter} isn't a file" if converter else f"there is no {SCRIPT} on the path"
        raise UserError(f"--format gguf-model runs llama.cpp's converter, and {where}; get it: {GET}")
    return [found] if os.access(found, os.X_OK) else [sys.executable, found]


def _require_published_names(adapter: Adapter) -> None:
    """Raise UserError unless mlx-lm's names of the model's weights are those of the published model."""
    model_type = type_of(adapter.config, str(adapter.config.get("model", "")))
    family = FAMILIES.get(model_type)
    if family is None or family.mlx != family.hf or family.experts or family.renamed or family.routers:
        raise UserError(
            f"mlx-lm keeps the weights of {model_type} under other names than the published model, which llama.cpp and "
            "Ollama can't read; export --format peft and merge it into the published model with PEFT"
        )


def _require_import(config: Mapping[str, Any], adapter: Adapter) -> None:
    """Raise UserError for a model that Ollama doesn't import from safetensors."""
    names = config.get("architectures") or ["(config.json names none)"]
    if names[0] not in IMPORTED:
        raise UserError(
            f"Ollama doesn't import {names[0]} from safetensors; name the same model in Ollama or as a GGUF file, such "
            "as --from qwen3:8b, or export --format gguf-model and write FROM with that file"
        )
    _require_published_names(adapter)


def _quoted(text: str) -> str:
    return f'"""{text}"""' if '"' in text else f'"{text}"'
