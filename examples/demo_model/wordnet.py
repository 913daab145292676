"""Dictionary entries from WordNet's data files (the format is described in wndb(5WN))."""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeAlias

Reader: TypeAlias = Callable[[str], str]  # file name, such as data.noun -> its text
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
NAMES = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
# A demo model should not be taught slurs or obscenities; WordNet says in the gloss which words are.
UNFIT = re.compile(
    r"offensive|obscen|slur|disparag|derogat|vulgar|taboo|profan|sexual|coit|genital|copulat|prostitut|incest|rapist|"
    r"\brape|\bsex\b|erotic|penis|vagina|breast|ethnic|\brace\b|negro|jew\b|homosexual|lesbian|suicide|masturb|feces|excre|"
    r"\bviolat",
    re.IGNORECASE,
)
WORD = re.compile(r"[a-z]{2,}(?: [a-z]{2,})?")


@dataclass(frozen=True)
class Entry:
    """A word in its first (most frequent) sense. `uses`: how often that sense was tagged in WordNet's corpora."""

    word: str
    part: str
    gloss: str
    examples: tuple[str, ...]
    synonyms: tuple[str, ...]
    kind: str | None
    opposite: str | None
    uses: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Synset:
    """One line of a data file. A pointer is (symbol, offset, part, numbers of the source and target word)."""

    words: tuple[str, ...]
    pointers: tuple[tuple[str, str, str, str], ...]
    gloss: str


def parse_synset(line: str) -> Synset:
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    count = int(fields[3], 16)
    words = tuple(clean_lemma(fields[4 + 2 * i]) for i in range(count))
    start = 4 + 2 * count
    pointers = fields[start + 1 : start + 1 + 4 * int(fields[start])]
    return Synset(words, tuple(zip(*[iter(pointers)] * 4, strict=True)), gloss.strip())


def clean_lemma(lemma: str) -> str:
    return re.sub(r"\([a-z]+\)$", "", lemma).replace("_", " ")


def split_gloss(gloss: str) -> tuple[str, tuple[str, ...]]:
    """The definition (its first clause) and the quoted example sentences."""
    definition = gloss.partition('; "')[0].split(";")[0].strip().rstrip(".:")
    examples = re.findall(r'"([^"]+)"', gloss)
    return definition, tuple(example.strip() for example in examples)


def entries(read: Reader) -> Iterator[Entry]:
    """Every fit word of one or two lower-case parts, in its first sense, in WordNet's order."""
    synsets = {
        (PARTS[part], line[:8]): parse_synset(line)
        for part in PARTS
        for line in read(f"data.{part}").splitlines()
        if not line.startswith("  ")
    }
    uses = tag_counts(read("cntlist.rev"))
    for part, letter in PARTS.items():
        for line in read(f"index.{part}").splitlines():
            if line.startswith("  "):
                continue
            word, offset = clean_lemma(line.split(" ", 1)[0]), first_offset(line)
            entry = make_entry(word, part, synsets[letter, offset], synsets, uses.get((word, letter), 0))
            if entry:
                yield entry


def first_offset(index_line: str) -> str:
    fields = index_line.split()
    return fields[6 + int(fields[3])]  # lemma pos synsets n_pointers [pointers] senses tagged offset...


def tag_counts(text: str) -> dict[tuple[str, str], int]:
    """Tag count of each (word, part letter) in its first sense, from cntlist.rev."""
    letters = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}
    counts: dict[tuple[str, str], int] = {}
    for line in text.splitlines():
        key, sense, count = line.split()
        lemma, _, rest = key.partition("%")
        if sense == "1":
            counts[lemma.replace("_", " "), letters[rest[0]]] = int(count)
    return counts


def make_entry(word: str, part: str, synset: Synset, synsets: dict[tuple[str, str], Synset], uses: int) -> Entry | None:
    gloss, examples = split_gloss(synset.gloss)
    if (
        not WORD.fullmatch(word)
        or word not in synset.words
        or UNFIT.search(synset.gloss)
        or not 12 <= len(gloss) <= 160
    ):
        return None
    number = synset.words.index(word) + 1
    kinds = [synsets[p, o].words[0] for symbol, o, p, _ in synset.pointers if symbol == "@"]
    opposites = [
        synsets["a" if p == "s" else p, o].words[int(ends[2:], 16) - 1]
        for symbol, o, p, ends in synset.pointers
        if symbol == "!" and int(ends[:2], 16) == number
    ]
    return Entry(
        word,
        NAMES[part],
        gloss,
        tuple(e for e in examples if re.search(rf"\b{re.escape(word)}", e, re.IGNORECASE) and len(e) <= 160),
        tuple(w for w in synset.words if w != word and WORD.fullmatch(w)),
        next((k for k in kinds if WORD.fullmatch(k)), None),
        next((o for o in opposites if WORD.fullmatch(o)), None),
        uses,
    )
