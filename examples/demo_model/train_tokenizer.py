"""A byte-level BPE tokenizer with a chat template for the demo model, and the corpus as token ids.

    python train_tokenizer.py --text .demo-text --data .demo

Reads TEXT/corpus.jsonl; writes DATA/tokenizer/ (loads with transformers and mlx-lm), DATA/train.npy and DATA/valid.npy
(uint16, one long row each). Every document ends with <|endoftext|>; one in a hundred goes to the validation part.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(row: dict) -> str:
    """A corpus row as text; for messages the same as CHAT_TEMPLATE (a test compares them)."""
    if "text" in row:
        return row["text"]
    return "".join(f"{TURN}{turn['role']}\n{turn['content']}{END_OF_TURN}\n" for turn in row["messages"])


def contents(rows: list[dict]) -> Iterator[str]:
    """What the vocabulary is learnt from: the texts without roles and marks."""
    for row in rows:
        yield from [row["text"]] if "text" in row else (turn["content"] for turn in row["messages"])


def train(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(mark, special=True) for mark in (END_OF_TEXT, TURN, END_OF_TURN)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, rows: list[dict]) -> np.ndarray:
    """All rows one after another as uint16 ids, shape [tokens]."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch_fast([render(row) for row in rows], add_special_tokens=False)
    return np.concatenate([np.array([*row.ids, end], dtype=np.uint16) for row in encoded])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(".demo-text"))
    parser.add_argument("--data", type=Path, default=Path(".demo"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    lines = (arguments.text / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = train(contents(rows), arguments.vocabulary)
    save(tokenizer, arguments.data / "tokenizer", arguments.context)
    parts = {"valid": rows[::100], "train": [row for number, row in enumerate(rows) if number % 100]}
    for name, part in parts.items():
        ids = encode(tokenizer, part)
        np.save(arguments.data / f"{name}.npy", ids)
        print(f"{name}: {len(part)} documents, {ids.size} tokens")


if __name__ == "__main__":
    main()
