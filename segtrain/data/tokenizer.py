"""What the data side needs of a tokenizer, and what it finds out about one.

mlx-lm's `TokenizerWrapper` and the tokenizers of transformers both fit `Tokenizer`.
"""

import json
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


ENDS = "model_end_ids"  # the attribute under which `load_tokenizer` leaves the model's end tokens
_CHARACTER = 4  # a character has no more bytes than that
_SHORT, _KNOWN = 4, 1024  # texts up to that many characters are tokenised once, up to that many of them
PYTHON_TEMPLATE = "model_python_template"  # and a chat template that is Python code of mlx-lm, by name


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a hub id or a local directory, without its weights and without mlx. Raises UserError.

    It carries the model's end tokens, as mlx-lm reads them, so that rows are those of training.
    """
    from transformers import AutoTokenizer

    path = Path(model).expanduser()
    local = path.exists()
    with nullcontext("") if local else hub() as unreachable:
        try:
            name = str(path) if local else model
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            setattr(tokenizer, ENDS, _end_ids(name))
            setattr(tokenizer, PYTHON_TEMPLATE, _model_file(name, "tokenizer_config.json").get("chat_template_type"))
            return cast(Tokenizer, tokenizer)
        except Exception as error:  # transformers raises whatever the tokenizer's class does
            why = advice(model, unreachable) if unreachable else reason(error)
            raise UserError(f"model {model}: its tokenizer can't be loaded: {why}") from error


def _end_ids(name: str) -> list[int]:
    """`eos_token_id` of the generation configuration, or else of the model's: one id or several."""
    found = _model_file(name, "generation_config.json").get("eos_token_id")
    found = found or _model_file(name, "config.json").get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return [value for value in ids if type(value) is int]


def _model_file(name: str, file: str) -> dict[str, Any]:
    """A JSON file of a model that was just read; empty where there is none."""
    from transformers.utils import cached_file

    try:
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        found = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def bare(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of transformers within mlx-lm's wrapper, or the same one."""
    inner: Any = getattr(tokenizer, "_tokenizer", None)
    return cast(Tokenizer, inner) if hasattr(inner, "apply_chat_template") else tokenizer


class Codec:
    """Text to token ids, with what is peculiar to one tokenizer worked out once.

    Nothing here adds special tokens by itself: `begins` and `ends` say which ids a plain text gets around it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.given, self.tokenizer = tokenizer, bare(tokenizer)
        self._known: dict[str, list[int]] = {}
        self._fast = False
        tokenizer = self.tokenizer
        _silence_length_warning(tokenizer)

    def ids(self, text: str) -> list[int]:
        if len(text) > _SHORT:
            return self._ids(text)
        found = self._known.get(text)  # what stands between turns, say a line end, comes again in every row
        if found is None:
            found = self._ids(text) if text else []
            if len(self._known) < _KNOWN:
                self._known[text] = found
        return found.copy()

    def leave_offsets(self) -> None:
        """Tokenise without working out offsets, a fifth faster: for a process that has tokenizers' threads off, which
        would else warn at each fork."""
        self._fast = hasattr(self._backend, "encode_batch_fast")

    def _ids(self, text: str) -> list[int]:
        if self._fast:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
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
        return frozenset(text for text in texts | self.end_texts if text)

    @cached_property
    def added_texts(self) -> tuple[str, ...]:
        """Every text that always is one token, special or not, the longest first."""
        added = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        texts = {str(getattr(token, "content", token)) for token in added.values()} | self.special_texts
        return tuple(sorted(filter(None, texts), key=len, reverse=True))

    @cached_property
    def end_texts(self) -> frozenset[str]:
        """The texts of the tokens at which generation ends: the tokenizer's and all of the model's configuration."""
        known = getattr(self.given, "eos_token_ids", None)  # mlx-lm's wrapper: a set
        known = known if isinstance(known, set | frozenset | list | tuple) else ()
        ends = {*self.ends, *known, *(getattr(self.tokenizer, ENDS, None) or ())}
        return frozenset(self.text([end]) for end in ends)

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

    def splits_token(self, text: str, at: int) -> bool:
        """Whether `at` lies inside the text of an added token."""
        lo = max(0, at - self._longest + 1)
        around = text[lo : at + self._longest - 1]
        return any(match.start() < at - lo < match.end() for match in self._any_added.finditer(around))

    @cached_property
    def _longest(self) -> int:
        """Of the added tokens' texts, in characters."""
        return len(self.added_texts[0]) if self.added_texts else 0

    @cached_property
    def _any_added(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.added_texts)) or "(?!)")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds to what the ones before it say; a character in parts comes with its last."""
        found: list[str] = []
        start = read = 0  # ids[start:read] is the context, ids[read:end] what isn't told yet
        for end in range(1, len(ids) + 1):
            known, now = self.text(ids[start:read]), self.text(ids[start:end])
            if now.endswith("\ufffd") and end - read < _CHARACTER and end < len(ids):
                found.append("")
                continue
            found.append(now[len(known) :])
            start, read = read, end
        return found

    def only_specials(self, text: str) -> bool:
        """Whether a text has nothing but special tokens and white space."""
        return not self._any_special.sub("", text).strip()

    def find_special(self, text: str) -> str | None:
        """A special token that `text` spells out, if any."""
        found = self._any_special.search(text)
        return found[0] if found else None


def _silence_length_warning(tokenizer: Tokenizer) -> None:
    """transformers warns of texts longer than a limit of its own; here lengths are counted and shown."""
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
