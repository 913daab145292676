"""Small tokenizers and chat templates for the tests of the data side, built in code."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from segtrain.recipe.schema import Recipe

FILES = Path(__file__).parent / "data"

SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>",
]  # fmt: skip
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# What ends an assistant turn in each template.
CLOSINGS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "reasoning": "<|im_end|>",
    "forced_thought": "<|eot_id|>",
    "tools": "<|im_end|>",
    "marks": "<|eot_id|>",
}


def template(name: str) -> str:
    return (FILES / "templates" / f"{name}.jinja").read_text()


def byte_level(chat: str | None = "chatml", *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges, among them some across line ends, and the template `chat`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("ĊĊ", "Ċ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    core = Tokenizer(models.BPE(vocab, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    return _finished(core, chat, adds_bos)


def spaced(chat: str | None = "mistral", *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Of the SentencePiece kind: words with a space mark, one put before the whole text, bytes as fallback."""
    letters = [chr(i) for i in range(33, 127)] + ["▁", "▁a", "▁the", "in", "▁Q", "▁A"]
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    pairs = [("▁", "a"), ("i", "n"), ("▁", "Q"), ("▁", "A")]
    core = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, pairs, unk_token="<unk>", byte_fallback=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(core, chat, adds_bos)


def _finished(core: Tokenizer, chat: str | None, adds_bos: bool) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=CLOSINGS.get(chat or "", "</s>"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template(chat) if chat else None
    return tokenizer


def saved(home: Path, special: list[str], eos: str, chat: str, stops: list[str] = []) -> Path:  # noqa: B006
    """A model directory without weights: a byte-level tokenizer with `special` tokens, and the model's end tokens."""
    tokenizer = byte_level(None)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token, tokenizer.chat_template = eos, chat
    tokenizer.save_pretrained(home)
    ends = [tokenizer.convert_tokens_to_ids(stop) for stop in stops] or tokenizer.eos_token_id
    (home / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ends}))
    return home


def recipe(seed: int = 0, valid_rows: int | str = "all", **data: object) -> Recipe:
    given = {"model": "toy", "data": data, "train": {"seed": seed}, "eval": {"rows": valid_rows}}
    return Recipe.model_validate(given)
