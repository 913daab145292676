"""A short hash that tells whether a model directory is the one that a checkpoint was made with."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

SAMPLE = 1 << 16  # bytes
SAMPLES = 8  # per file, evenly spread, the first (the header of a safetensors file) and the last bytes among them
_WHOLE = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # configuration, tokenizer, chat template
_SAMPLED = ("*.safetensors",)


def model_fingerprint(directory: Path) -> str:
    """SHA-256 over the names and contents of a model's files; of weights, their sizes and a sample of their bytes.

    Reads at most 0.5 MiB a weight file, so it takes milliseconds where a hash of the whole would take minutes. Another
    model, another quantisation or a re-trained one differ; where the directory lies doesn't matter. Raises OSError.
    """
    digest = hashlib.sha256()
    for patterns, limit in ((_WHOLE, None), (_SAMPLED, SAMPLES)):
        for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}, key=lambda p: p.name):
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name}\0{size}\0".encode())
                for block in _blocks(file, size, limit):
                    digest.update(block)
    return digest.hexdigest()


def _blocks(file: BinaryIO, size: int, samples: int | None) -> list[bytes]:
    if samples is None or size <= samples * SAMPLE:
        return [file.read()]
    blocks = []
    for number in range(samples):
        file.seek(number * (size - SAMPLE) // (samples - 1))
        blocks.append(file.read(SAMPLE))
    return blocks
