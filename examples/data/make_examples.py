"""The example rows: chat.jsonl, chat-valid.jsonl, preferences.jsonl and preferences-valid.jsonl beside this script.

    python examples/data/make_examples.py --entries .demo-text/entries.jsonl

The entries are WordNet's (examples/demo_model/prepare_text.py writes them); their licence is in
examples/demo-model/LICENSES/WordNet.txt. The result is the same on every machine. No word is in both parts of a set.

chat         asks for a word's meaning as the demo model's own training did, and answers with a dictionary card.
preferences  prefer the meaning said shortly: over the long formula that the demo model learnt (every second pair), or
             over the meaning of another word, said as shortly.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT, CHAT_VALID, PAIRS, PAIRS_VALID = 300, 40, 320, 64
Entry = dict[str, Any]
Row = dict[str, Any]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def question(word: str, rng: random.Random) -> str:
    return rng.choice([f"What does {word} mean?", f"Define {word}.", f'What is the meaning of "{word}"?'])


def card(entry: Entry) -> str:
    """The style that fine-tuning teaches: a small Markdown card."""
    lines = [f"**{entry['word']}** ({entry['part']})", f"- Meaning: {entry['gloss']}"]
    lines += [f"- Example: {sentence(entry['examples'][0])}"] if entry["examples"] else []
    lines += [f"- See also: {entry['synonyms'][0]}"] if entry["synonyms"] else []
    return "\n".join(lines)


def chat_row(entry: Entry, rng: random.Random) -> Row:
    """One turn; where the word has a synonym and a hypernym, two in a third of the rows."""
    messages = [turn("user", question(entry["word"], rng)), turn("assistant", card(entry))]
    if entry["synonyms"] and entry["kind"] and rng.random() < 1 / 3:
        synonym = entry["synonyms"][0]
        messages += [turn("user", f"Give another word for {entry['word']}."), turn("assistant", f"**{synonym}**")]
    return {"messages": messages}


def pair_row(entry: Entry, other: Entry, long_winded: bool, rng: random.Random) -> Row:
    """A short right answer, preferred to the long formula or to the short meaning of the `other` word."""
    formula = f"The {entry['part']} {entry['word']} means: {entry['gloss']}."
    return {
        "prompt": [turn("user", question(entry["word"], rng))],
        "chosen": [turn("assistant", sentence(entry["gloss"]))],
        "rejected": [turn("assistant", formula if long_winded else sentence(other["gloss"]))],
    }


def well_known(entries: Sequence[Entry]) -> list[Entry]:
    """Single words met at least five times in WordNet's corpora, each once, with a meaning of at most 80 characters."""
    fit = [e for e in entries if e["uses"] >= 5 and len(e["gloss"]) <= 80 and " " not in e["word"]]
    best = sorted(fit, key=lambda e: (e["word"], -e["uses"]))
    return list({e["word"]: e for e in reversed(best)}.values())


def build(entries: Sequence[Entry], seed: int = 0) -> dict[str, list[Row]]:
    """All four sets, from entries in any order."""
    rng = random.Random(seed)
    words = sorted(well_known(entries), key=lambda entry: entry["word"])
    rng.shuffle(words)
    talks = [chat_row(entry, rng) for entry in words[: CHAT + CHAT_VALID]]
    judged = words[CHAT + CHAT_VALID :][: PAIRS + PAIRS_VALID]
    pairs = [
        pair_row(entry, other, number % 2 == 0, rng)
        for number, (entry, other) in enumerate(zip(judged, judged[1:] + judged[:1], strict=True))
    ]
    return {
        "chat": talks[:CHAT],
        "chat-valid": talks[CHAT:],
        "preferences": pairs[:PAIRS],
        "preferences-valid": pairs[PAIRS:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--entries", type=Path, default=Path(".demo-text/entries.jsonl"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    entries = [json.loads(line) for line in arguments.entries.read_text(encoding="utf-8").splitlines()]
    for name, rows in build(entries).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (arguments.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(rows)} rows, {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
