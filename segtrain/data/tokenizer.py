"""What the data side needs of a tokenizer, and what it finds out about one.

mlx-lm's `TokenizerWrapper` and the tokenizers of transformers both fit `Tokenizer`.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from segtrain.errors import UserError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    bos_token_id: Any
    eos_token_id: Any
    chat_template: Any

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a hub id or a local directory, without its weights and without mlx. Raises UserError."""
    from transformers import AutoTokenizer

    path = Path(model).expanduser()
    name = str(path) if path.exists() else model
    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code))
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model {model}: its tokenizer can't be loaded: {first}") from error


class Codec:
    """Text to token ids, with what is peculiar to one tokenizer worked out once.

    Nothing here adds special tokens by itself: `begins` and `ends` say which ids a plain text gets around it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def bos(self) -> int | None:
        return self.tokenizer.bos_token_id

    @cached_property
    def begins(self) -> list[int]:
        """[BOS] where the tokenizer itself puts one before a text, otherwise nothing."""
        with_special = list(self.tokenizer.encode("a"))
        return [with_special[0]] if self.bos is not None and with_special[:1] == [self.bos] else []

    @cached_property
    def ends(self) -> list[int]:
        """[EOS]: what a text must end with for the model to learn to stop."""
        eos = self.tokenizer.eos_token_id
        return [] if eos is None else [int(eos)]

    @cached_property
    def pieces_join(self) -> bool:
        """Whether texts tokenised apart decode to their concatenation (not so where a space is put before each)."""
        samples = [("Hi", "there"), ("a\n", "b"), ("x ", "1")]
        return all(self.text(self.ids(a) + self.ids(b)) == a + b for a, b in samples)

    @cached_property
    def specials(self) -> re.Pattern[str] | None:
        """Matches one special token's text, the longest first."""
        return _any_of(self.special_texts)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        texts = {str(getattr(token, "content", token)) for token in added.values() if getattr(token, "special", False)}
        return frozenset(text for text in texts | self.stop_texts if text)

    @cached_property
    def stop_texts(self) -> frozenset[str]:
        """The texts of the tokens at which generation stops."""
        known = getattr(self.tokenizer, "eos_token_ids", None)  # mlx-lm's wrapper: a set
        stops = {*self.ends, *(known if isinstance(known, set | frozenset | list | tuple) else ())}
        return frozenset(self.text([stop]) for stop in stops)


def _any_of(texts: frozenset[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))) if texts else None
