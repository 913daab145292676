"""What the data side needs of a tokenizer, and what it finds out about one.

mlx-lm's `TokenizerWrapper` and the tokenizers of transformers both fit `Tokenizer`.
"""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from segtrain.errors import UserError, reason
from segtrain.hub import advice, hub


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
    local = path.exists()
    with nullcontext("") if local else hub() as unreachable:
        try:
            name = str(path) if local else model
            return cast(Tokenizer, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code))
        except Exception as error:  # transformers raises whatever the tokenizer's class does
            why = advice(model, unreachable) if unreachable else reason(error)
            raise UserError(f"model {model}: its tokenizer can't be loaded: {why}") from error


class Codec:
    """Text to token ids, with what is peculiar to one tokenizer worked out once.

    Nothing here adds special tokens by itself: `begins` and `ends` say which ids a plain text gets around it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        _silence_length_warning(tokenizer)

    def ids(self, text: str) -> list[int]:
        if not text:
            return []
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return self._slow_ids(text)

    def _slow_ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _backend(self) -> Any:
        """The `tokenizers` object behind a fast tokenizer, where it gives the same ids: it costs half the time."""
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode") or backend.truncation is not None or backend.padding is not None:
            return None
        sample = " ".join(["Ab c\n\n 12,3é\t", *list(self.special_texts)[:4]])
        return backend if backend.encode(sample, add_special_tokens=False).ids == self._slow_ids(sample) else None

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

    def leading_special(self, text: str) -> int:
        """The length of the special token at the start of `text`, white space before it included; 0: there is none."""
        space = len(text) - len(text.lstrip())
        found = self._any_special.match(text, space)
        return found.end() if found else 0

    def ends_special(self, text: str) -> bool:
        return text.endswith(self._special_tuple)

    def trailing_specials(self, text: str) -> list[tuple[int, int]]:
        """[start, end) of the special tokens after which nothing but white space and special tokens follows."""
        found: list[tuple[int, int]] = []
        end = len(text.rstrip())
        while text.endswith(self._special_tuple, 0, end):
            length = max(len(special) for special in self._special_tuple if text.endswith(special, 0, end))
            found.append((end - length, end))
            end = len(text[: end - length].rstrip())
        return found[::-1]

    @cached_property
    def _special_tuple(self) -> tuple[str, ...]:
        return tuple(self.special_texts)

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find_special(self, text: str) -> str | None:
        """A special token that `text` spells out, if any."""
        found = self._any_special.search(text)
        return found[0] if found else None


def _silence_length_warning(tokenizer: Tokenizer) -> None:
    """transformers warns of texts longer than a limit of its own; here lengths are counted and shown."""
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
