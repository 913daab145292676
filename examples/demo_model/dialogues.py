"""Chat rows about dictionary entries: every answer is WordNet's own text put in a sentence."""

import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

from wordnet import Entry

Turn: TypeAlias = tuple[str, str]  # question, answer
Messages: TypeAlias = list[dict[str, str]]


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else text + "."


def meaning(entry: Entry, rng: random.Random) -> Turn:
    word = entry.word
    question = rng.choice([f"What does {word} mean?", f"Define {word}.", f'What is the meaning of "{word}"?'])
    return question, f"The {entry.part} {word} means: {entry.gloss}."


def usage(entry: Entry, rng: random.Random) -> Turn:
    question = rng.choice([f"Use {entry.word} in a sentence.", f'Write a sentence with "{entry.word}".'])
    return question, sentence(rng.choice(entry.examples))


def kind(entry: Entry, rng: random.Random) -> Turn:
    assert entry.kind
    word, group = entry.word, entry.kind
    question = rng.choice([f"What kind of thing is {article(word)} {word}?", f"What is {article(word)} {word}?"])
    return question, f"{article(word).capitalize()} {word} is a kind of {group}."


def synonym(entry: Entry, rng: random.Random) -> Turn:
    question = rng.choice([f"Give another word for {entry.word}.", f"What is a synonym of {entry.word}?"])
    return question, f"Another word for {entry.word} is {entry.synonyms[0]}."


def opposite(entry: Entry, rng: random.Random) -> Turn:
    return f"What is the opposite of {entry.word}?", f"The opposite of {entry.word} is {entry.opposite}."


def reverse(entry: Entry, rng: random.Random) -> Turn:
    question = rng.choice([f"Which word means: {entry.gloss}?", f"Find a word for this: {entry.gloss}."])
    return question, f"The word is {entry.word}."


def spelling(entry: Entry, rng: random.Random) -> Turn:
    return f"Spell the word {entry.word}.", "-".join(entry.word.replace(" ", ""))


def applicable(entry: Entry) -> list[Callable[[Entry, random.Random], Turn]]:
    """The kinds of question that this entry answers, `meaning` first."""
    noun = entry.part == "noun"
    optional = [
        (usage, bool(entry.examples)),
        (kind, noun and entry.kind is not None),
        (synonym, bool(entry.synonyms)),
        (opposite, entry.opposite is not None),
        (reverse, entry.uses > 0),
        (spelling, entry.uses > 2),
    ]
    return [meaning, *(make for make, fits in optional if fits)]


def messages(turns: list[Turn]) -> Messages:
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def dialogues(entry: Entry, rng: random.Random) -> Iterator[Messages]:
    """One row for a rare word; for one met in WordNet's corpora a row of each kind, then one of several turns."""
    makers = applicable(entry)
    if not entry.uses:
        yield messages([rng.choice([meaning, rng.choice(makers)])(entry, rng)])
        return
    for make in makers:
        yield messages([make(entry, rng)])
    if len(makers) > 1:
        chosen = rng.sample(makers, min(len(makers), rng.choice([2, 3])))
        yield messages([make(entry, rng) for make in chosen])
