"""Text with supervised spans to token ids with a mask, the way generation will see it.

The prompt of a supervised span is tokenised by itself, as it is when the model is asked; tokens that would straddle
the seam never form. Where texts tokenised apart don't join (tokenizers that put a space before each text), the whole
text is tokenised and each prompt's tokens must be its prefix; a token that straddles a seam then counts as
supervised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from segtrain.data.tokenizer import Codec

SLACK = 4  # tokens by which a prompt's end may be tokenised otherwise within the whole text


class SeamError(ValueError):
    """Why the prompts of a text can't be tokenised as they are when the model is asked."""


@dataclass
class Tokens:
    """Token ids, whether each is supervised, and the [start, end) of each supervised span among them.

    `weights`: what each token counts in the loss; None: every supervised one 1.
    """

    ids: list[int]
    supervised: list[bool]
    spans: list[tuple[int, int]]
    weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, *ranges: tuple[int, int]) -> "Tokens":
        """The tokens of `ranges`, one after another; spans are dropped."""
        ids = [token for lo, hi in ranges for token in self.ids[lo:hi]]
        supervised = [on for lo, hi in ranges for on in self.supervised[lo:hi]]
        weights = None if self.weights is None else [weight for lo, hi in ranges for weight in self.weights[lo:hi]]
        return Tokens(ids, supervised, [], weights)

    def shifted(self, count: int) -> "Tokens":
        """Without the first `count` tokens."""
        found = self.part((count, len(self)))
        found.spans = [(max(0, lo - count), max(0, hi - count)) for lo, hi in self.spans]
        return found

    def weigh(self, weights: Sequence[float]) -> None:
        """Give each span its weight; nothing is stored where all are 1."""
        if all(weight == 1 for weight in weights):
            return
        self.weights = [0.0] * len(self)
        for (lo, hi), weight in zip(self.spans, weights, strict=True):
            self.weights[lo:hi] = [float(weight)] * (hi - lo)


def encode_spans(codec: Codec, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
    """Tokens of `text` with those of the character ranges `spans` (in order) supervised. Raises SeamError."""
    cuts = [0, *(edge for span in spans for edge in span), len(text)]
    if codec.pieces_join:
        return _by_pieces(codec, [text[a:b] for a, b in pairwise(cuts)])
    return _by_prefix(codec, text, cuts)


def _by_pieces(codec: Codec, pieces: list[str]) -> Tokens:
    tokens = Tokens([], [], [])
    for number, piece in enumerate(pieces):
        ids = codec.ids(piece)
        inside = number % 2 == 1
        if inside:
            tokens.spans.append((len(tokens), len(tokens) + len(ids)))
        tokens.ids += ids
        tokens.supervised += [inside] * len(ids)
    return tokens


def _by_prefix(codec: Codec, text: str, cuts: list[int]) -> Tokens:
    ids = codec.ids(text)
    at = [0, *(_shared(ids, codec.ids(text[:cut])) for cut in cuts[1:-1]), len(ids)]
    supervised = [False] * len(ids)
    spans = list(zip(at[1::2], at[2::2], strict=False))
    for start, end in spans:
        supervised[start:end] = [True] * (end - start)
    return Tokens(ids, supervised, spans)


def _shared(whole: list[int], start: list[int]) -> int:
    """How many of the ids of a text's beginning begin the whole text's. Raises SeamError where that is far from all."""
    if whole[: len(start)] == start:
        return len(start)
    count = next((i for i, (x, y) in enumerate(zip(whole, start, strict=False)) if x != y), min(len(whole), len(start)))
    if count < len(start) - SLACK:
        raise SeamError(
            f"the tokenizer splits a prompt otherwise when its response follows (from token {count} of {len(start)} on)"
        )
    return count
