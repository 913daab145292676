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
from segtrain.data.turns import MaskError

SLACK = 4  # tokens by which a prompt's end may be tokenised otherwise within the whole text


@dataclass
class Tokens:
    """Token ids, whether each is supervised, and where each supervised span begins (a token index)."""

    ids: list[int]
    supervised: list[bool]
    starts: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def encode_spans(codec: Codec, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
    """Tokens of `text` with those of the character ranges `spans` (in order) supervised."""
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
            tokens.starts.append(len(tokens))
        tokens.ids += ids
        tokens.supervised += [inside] * len(ids)
    return tokens


def _by_prefix(codec: Codec, text: str, cuts: list[int]) -> Tokens:
    ids = codec.ids(text)
    at = [0, *(_shared(ids, codec.ids(text[:cut])) for cut in cuts[1:-1]), len(ids)]
    supervised = [False] * len(ids)
    for start, end in zip(at[1::2], at[2::2], strict=False):
        supervised[start:end] = [True] * (end - start)
    return Tokens(ids, supervised, at[1:-1:2])


def _shared(whole: list[int], start: list[int]) -> int:
    """How many of the ids of a text's beginning begin the whole text's. Raises MaskError where that is far from all."""
    if whole[: len(start)] == start:
        return len(start)
    count = next((i for i, (x, y) in enumerate(zip(whole, start, strict=False)) if x != y), min(len(whole), len(start)))
    if count < len(start) - SLACK:
        raise MaskError(
            f"the tokenizer splits a prompt otherwise when its response follows (from token {count} of {len(start)} on)"
        )
    return count
