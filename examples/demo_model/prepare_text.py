"""The demo model's text, from four Debian packages (licences: examples/demo-model/LICENSES).

    apt-get download wordnet-base bible-kjv bible-kjv-text python3.11-doc     # in the folder DEBS, on Debian 12
    python prepare_text.py --packages DEBS --out .demo-text

Writes OUT/corpus.jsonl ({"text"} or {"messages"} a line, shuffled) and OUT/entries.jsonl (the dictionary).
Needs `dpkg-deb`.
"""

import argparse
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from dialogues import dialogues
from wordnet import entries

Row: TypeAlias = dict[str, object]
DOCS = ("tutorial", "faq", "howto", "reference", "using", "extending", "glossary.rst.txt")


def unpack(packages: Path, out: Path) -> None:
    """Unpack every .deb of a folder; raises SystemExit where one of the four is missing."""
    for name in ("wordnet-base", "bible-kjv", "bible-kjv-text", "python3*-doc"):
        found = sorted(packages.glob(f"{name}_*.deb"))
        if not found:
            raise SystemExit(f"no {name}_*.deb in {packages}; fetch it there with apt-get download")
        subprocess.run(["dpkg-deb", "-x", str(found[-1]), str(out)], check=True)


def bible_chapters(root: Path) -> Iterator[str]:
    """The King James text, one chapter at a time; the package's own program decompresses it."""
    command = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-f", "gen1:1-rev22:21"]
    verses = subprocess.run(command, check=True, capture_output=True, text=True, encoding="latin-1").stdout
    chapters: dict[str, list[str]] = {}
    for line in verses.splitlines():
        reference, _, verse = line.partition(" ")
        chapters.setdefault(reference.partition(":")[0], []).append(verse)
    yield from ("\n".join(verses) for verses in chapters.values())


def python_pages(root: Path) -> Iterator[str]:
    """Pages of Python's documentation, without link targets and role names."""
    sources = next(root.glob("usr/share/doc/python3.*/html/_sources"))
    for name in DOCS:
        place = sources / name
        for page in sorted(place.rglob("*.txt")) if place.is_dir() else [place]:
            yield clean_page(page.read_text(encoding="utf-8"))


def clean_page(text: str) -> str:
    text = re.sub(r"^\s*\.\. (_|index::|highlight|moduleauthor|sectionauthor).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r":[\w:+-]+:`~?([^`<]+?)(?: *<[^`]*>)?`", r"\1", text)
    text = re.sub(r"([*=\-#~^\"])\1{4,}", r"\1\1\1\1", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(".demo-text"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        unpack(arguments.packages, root)
        words = list(entries(lambda name: (root / "usr/share/wordnet" / name).read_text(encoding="utf-8")))
        prose: list[Row] = [{"text": text} for text in (*bible_chapters(root), *python_pages(root))]
    chats: list[Row] = [{"messages": messages} for entry in words for messages in dialogues(entry, rng)]
    rows = [*prose, *chats]
    rng.shuffle(rows)
    write_rows(arguments.out / "entries.jsonl", (entry.as_dict() for entry in words))
    write_rows(arguments.out / "corpus.jsonl", rows)
    print(f"{len(words)} dictionary entries, {len(chats)} dialogues, {len(prose)} texts")


if __name__ == "__main__":
    main()
