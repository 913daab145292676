"""Rows of long real text for examples/long-documents.yaml: Python's language reference, from the running Python.

    python examples/long_documents.py [--out runs/long-documents-data] [--characters 36000]

The text is `pydoc_data.topics`, part of every Python installation, under the PSF licence
(examples/demo-model/LICENSES/Python.txt). It is cut between paragraphs into documents of about that many characters
(three make a token of the demo model); the last one is the validation part.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics


def documents(text: str, characters: int) -> list[str]:
    """The text cut between paragraphs into equal documents of about `characters` or somewhat more."""
    target = len(text) / max(1, len(text) // characters)
    done: list[list[str]] = []
    position = 0
    for paragraph in text.split("\n\n"):
        if position >= target * len(done):
            done.append([])
        done[-1].append(paragraph)
        position += len(paragraph) + 2
    return ["\n\n".join(paragraphs) for paragraphs in done]


def write(path: Path, texts: list[str]) -> None:
    rows = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/long-documents-data"))
    parser.add_argument("--characters", type=int, default=36_000)
    arguments = parser.parse_args()
    found = documents("\n\n".join(topics[name].strip() for name in sorted(topics)), arguments.characters)
    if len(found) < 2:
        raise SystemExit(f"only one document of {arguments.characters} characters; ask for fewer with --characters")
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "train.jsonl", found[:-1])
    write(arguments.out / "valid.jsonl", found[-1:])
    lengths = ", ".join(str(len(text)) for text in found)
    print(f"{len(found) - 1} training documents and 1 for validation; characters: {lengths}")


if __name__ == "__main__":
    main()
