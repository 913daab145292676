"""The length limit: what becomes of a row longer than `max_seq_length`, under `on_long`.

- `drop`: it is left out and counted;
- `truncate_prompt`: the prompt is cut from the left (a leading BOS stays) and the last response is kept whole; in a
  conversation the prompt is everything before its last supervised turn, system message included. A row whose response
  alone doesn't fit is dropped. A plain document, which has no prompt, loses its end;
- `truncate`: it is cut from the right, and dropped if no supervised token is left;
- `error`: it is an error, when the data is opened or, in a set too large to be counted then, when the row is reached.

Of a preference row `truncate_prompt` cuts the same from both prompts, so that they can still be shared, and `truncate`
cuts the ends of the answers; the prompt stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from segtrain.data.rows import Origin, PreferenceRow, Row
from segtrain.data.spans import Tokens
from segtrain.errors import UserError, counted

OnLong: TypeAlias = Literal["drop", "truncate_prompt", "truncate", "error"]

TOO_LONG = "longer than max_seq_length"
NO_TARGETS_LEFT = "no supervised token within max_seq_length"
RESPONSE_TOO_LONG = "the response alone exceeds max_seq_length"


@dataclass(frozen=True)
class Dropped:
    """Why a row is left out. `length` is the tokens it would have had, `needed` the limit at which it would stay."""

    reason: str
    origin: Origin
    length: int = 0
    needed: int = 0


@dataclass(frozen=True)
class Split:
    """A conversation in several rows: their tokens in all, and those of one row with the whole rendering."""

    rows: int
    tokens: int
    whole: int


@dataclass(frozen=True)
class Encoded:
    """A row, its length before the limit was applied, and what was noticed about it.

    `split` is set on the first row of a conversation that became several.
    """

    row: Row
    length: int
    truncated: bool = False
    remarks: frozenset[str] = frozenset()
    split: Split | None = None


@dataclass(frozen=True)
class Limit:
    """`max_seq_length`, what happens beyond it, and the BOS that a cut prompt keeps."""

    tokens: int
    on_long: OnLong
    bos: int | None

    def fit(self, tokens: Tokens, document: bool, origin: Origin) -> Tokens | Dropped:
        """A row within the limit (a document has no prompt and loses its end). Raises UserError."""
        length, limit = len(tokens), self.tokens
        if length <= limit:
            return tokens
        if self.on_long == "error":
            raise _too_long(origin, length, limit)
        if self.on_long == "drop":
            return Dropped(TOO_LONG, origin, length, length)
        if self.on_long == "truncate_prompt" and not document:
            return self._cut_prompt(tokens, origin)
        if not any(tokens.supervised[:limit]):
            return Dropped(NO_TARGETS_LEFT, origin, length, tokens.supervised.index(True) + 1)
        return tokens.part((0, limit))

    def _cut_prompt(self, tokens: Tokens, origin: Origin) -> Tokens | Dropped:
        """The last tokens up to the end of the last response, with BOS kept in front.

        Where everything is supervised there is no last response to keep whole, and the row just loses its beginning.
        """
        end = len(tokens) - tokens.supervised[::-1].index(True)
        response = end - tokens.spans[-1][0] if tokens.spans else 1
        bos = self._leading_bos(tokens.ids)
        needed = response + max(1, bos)
        if needed > self.tokens:
            return Dropped(RESPONSE_TOO_LONG, origin, len(tokens), needed)
        first = max(bos, end - (self.tokens - bos))
        cut = tokens.part((0, bos), (first, end))
        cut.supervised[0] = False
        return cut

    def _leading_bos(self, ids: Sequence[int]) -> int:
        return 1 if self.bos is not None and ids[:1] == [self.bos] else 0

    def fit_pair(
        self, prompt: list[int], other: list[int], chosen: list[int], rejected: list[int], origin: Origin
    ) -> PreferenceRow | Dropped:
        """A preference row within the limit; `other` is the prompt of `rejected`. Raises UserError."""
        length = max(len(prompt) + len(chosen), len(other) + len(rejected))
        fitted = (prompt, other, chosen, rejected)
        if length > self.tokens:
            match self.on_long:
                case "error":
                    raise _too_long(origin, length, self.tokens)
                case "drop":
                    return Dropped(TOO_LONG, origin, length, length)
                case "truncate":
                    fits = self._cut_answers(fitted)
                    needed, reason = max(len(prompt), len(other)) + 1, NO_TARGETS_LEFT
                case "truncate_prompt":
                    fits = self._cut_prompts(fitted)
                    least = max(1, self._leading_bos(prompt))
                    needed, reason = max(len(chosen), len(rejected)) + least, RESPONSE_TOO_LONG
            if fits is None:
                return Dropped(reason, origin, length, needed)
            fitted = fits
        shorter, beside, good, bad = fitted
        return PreferenceRow(shorter, good, bad, origin, beside if prompt != other else None)

    def _cut_answers(self, pair: "_Pair") -> "_Pair | None":
        """The answers without their ends; None where a prompt leaves no room for any of its answer."""
        prompt, other, chosen, rejected = pair
        if max(len(prompt), len(other)) >= self.tokens:
            return None
        return prompt, other, chosen[: self.tokens - len(prompt)], rejected[: self.tokens - len(other)]

    def _cut_prompts(self, pair: "_Pair") -> "_Pair | None":
        """Both prompts without their beginnings; None where an answer leaves no room for a prompt token."""
        prompt, other, chosen, rejected = pair
        room = self.tokens - max(len(chosen), len(rejected))
        if room < max(1, self._leading_bos(prompt)):
            return None
        return self._tail(prompt, room), self._tail(other, room), chosen, rejected

    def _tail(self, prompt: list[int], room: int) -> list[int]:
        """The last `room` tokens of a prompt, BOS kept in front."""
        if len(prompt) <= room:
            return prompt
        bos = self._leading_bos(prompt)
        keep = room - bos
        return prompt[:bos] + (prompt[-keep:] if keep else [])


_Pair: TypeAlias = tuple[list[int], list[int], list[int], list[int]]


def _too_long(origin: Origin, length: int, limit: int) -> UserError:
    return UserError(
        f"{origin}: this row has {counted(length, 'token')}, more than max_seq_length {limit}, and on_long is error; "
        f"raise max_seq_length to {length} or choose drop, truncate_prompt or truncate"
    )
