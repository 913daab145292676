"""Counting a data set: rows, tokens, what is learnt, what is cut or left out and why."""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segtrain.data import encode, hidden
from segtrain.data.limits import NO_TARGETS_LEFT, RESPONSE_TOO_LONG, TOO_LONG, Dropped, Encoded
from segtrain.data.rows import PreferenceRow, Row
from segtrain.errors import UserError, counted

LENGTH_REASONS = (TOO_LONG, NO_TARGETS_LEFT, RESPONSE_TOO_LONG)
EXAMPLES = 3
REMARKS = {
    encode.DOUBLED_BOS: "began with a doubled BOS; one was removed",
    encode.IDENTICAL: "have identical chosen and rejected responses and teach no preference",
    encode.PROMPTS_DIFFER: "have different prompts for chosen and rejected; their prefix can't be shared",
    encode.OPEN_TURN: "end assistant turns without a special token, so the model may not learn to stop",
    encode.CONTROLS: "spell out special tokens in their text, which then act as such",
    encode.UNASKED: "hold turns before any user's turn, which the template can't ask for; those are context only",
    hidden.THOUGHT: "hold thoughts that the chat template doesn't show, so that they aren't learnt",
    hidden.CONTENT: "hold text beside a tool call that the chat template doesn't show, so that it isn't learnt",
    hidden.CALL: "hold a tool call of which the chat template shows only a part",
    hidden.MESSAGE: "hold a message that the chat template doesn't show to the model",
    hidden.TOOLS: "have tools that the chat template doesn't show to the model",
    "switch": "are rendered with the chat template's thinking switch set as their turns need it",
    "marks": "are masked by the chat template's own marks, since its generation prompt doesn't begin its turns",
    "graft": "are the prompt as inference shows it and the turn's text after it, which no rendering joins",
}


_SUMS = (
    "seen",
    "rows",
    "tokens",
    "supervised",
    "truncated",
    "prompt_tokens",
    "pair_tokens",
    "shared_tokens",
    "fallbacks",
    "split",
    "split_rows",
    "split_tokens",
    "unsplit_tokens",
)


@dataclass
class Tally:
    """Running counts over encoded rows. Lengths are tokens before any limit."""

    seen: int = 0  # examples, each of which gives one row or several
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    prompt_tokens: int = 0
    pair_tokens: int = 0  # of both branches of preference rows
    shared_tokens: int = 0  # computed once instead of twice
    fallbacks: int = 0
    split: int = 0  # conversations that became several rows
    split_rows: int = 0
    split_tokens: int = 0  # of those rows, and of one row with the whole rendering
    unsplit_tokens: int = 0
    longest_kept: tuple[int, int] = (0, 0)  # tokens of the longest row as it is trained, and of a pair's prompt
    longest_known: tuple[int, str] = (
        0,
        "",
    )  # of rows that weren't counted: tokens before any limit, and where it stands
    lengths: "array[int]" = field(default_factory=lambda: array("q"))
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    remarks: Counter[str] = field(default_factory=Counter)
    noted: dict[str, str] = field(default_factory=dict)  # the first row of each remark
    needed: int = 0  # the max_seq_length at which no row would be lost for its length

    def add(self, results: Sequence[Encoded | Dropped]) -> None:
        """Count what became of one example."""
        self.seen += 1
        for result in results:
            if isinstance(result, Dropped):
                self._drop(result)
            else:
                self._keep(result)

    def merge(self, other: "Tally") -> None:
        """Add the counts of the rows that follow."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lengths += other.lengths
        self.reasons += other.reasons
        self.remarks += other.remarks
        self.noted = {**other.noted, **self.noted}
        self.needed = max(self.needed, other.needed)
        self.longest_kept = max(self.longest_kept, other.longest_kept)
        for reason, places in other.examples.items():
            self.examples[reason] = [*self.examples.get(reason, []), *places][:EXAMPLES]

    def _drop(self, dropped: Dropped) -> None:
        self.reasons[dropped.reason] += 1
        shown = self.examples.setdefault(dropped.reason, [])
        if len(shown) < EXAMPLES:
            shown.append(str(dropped.origin))
        if dropped.length:
            self.lengths.append(dropped.length)
        self.needed = max(self.needed, dropped.needed)

    def _keep(self, encoded: Encoded) -> None:
        row = encoded.row
        self.rows += 1
        self.tokens += len(row)
        self.supervised += row.targets
        self.truncated += encoded.truncated
        self.lengths.append(encoded.length)
        self.longest_kept = max(self.longest_kept, _length(row))
        self._note(encoded)
        if isinstance(row, PreferenceRow):
            self.prompt_tokens += len(row.prompt)
            self.pair_tokens += len(row.prompt) + len(row.rejected_prompt or row.prompt) + row.targets
            if row.rejected_prompt is None:
                self.shared_tokens += len(row.prompt)
            else:
                self.fallbacks += 1

    def _note(self, encoded: Encoded) -> None:
        for remark in encoded.remarks:
            self.remarks[remark] += 1
            self.noted.setdefault(remark, str(encoded.row.origin))
        if encoded.split:
            self.split += 1
            self.split_rows += encoded.split.rows
            self.split_tokens += encoded.split.tokens
            self.unsplit_tokens += encoded.split.whole

    @property
    def dropped(self) -> int:
        return sum(self.reasons.values())

    def percentile(self, share: float) -> int:
        """The length that `share` of the rows don't exceed (nearest rank)."""
        if not self.lengths:
            return 0
        rank = max(1, math.ceil(share * len(self.lengths)))
        return int(np.partition(np.frombuffer(self.lengths, np.int64), rank - 1)[rank - 1])

    def counts(self, preference: bool, reasons: bool = True) -> dict[str, Any]:
        """Flat, for metrics.jsonl and the terminal; with `reasons`, why rows were dropped too."""
        found: dict[str, Any] = {
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "truncated": self.truncated,
            "dropped": self.dropped,
            "median": self.percentile(0.5),
            "p95": self.percentile(0.95),
            "longest": self.longest_kept[0],
        }
        if self.split:
            found |= {
                "split": self.split,
                "split_rows": self.split_rows,
                "split_tokens": self.split_tokens,
                "unsplit_tokens": self.unsplit_tokens,
            }
        found |= {how: self.remarks[how] for how in ("switch", "marks", "graft") if self.remarks[how]}
        if reasons:
            found |= {f"dropped: {reason}": count for reason, count in self.reasons.items()}
        if preference:
            found |= {
                "identical": self.remarks[encode.IDENTICAL],
                "fallbacks": self.fallbacks,
                "prompt_tokens": self.prompt_tokens,
                "prompt_share": round(self.longest_kept[1] / max(1, self.longest_kept[0]), 3),  # of the longest row
                "shared_share": round(self.shared_tokens / max(1, self.pair_tokens), 3),
            }
        return found

    def know(self, results: Sequence[Encoded | Dropped]) -> None:
        """Take in the lengths of an example that isn't counted, since it was not drawn by chance."""
        for result in results:
            if isinstance(result, Encoded):
                self.longest_kept = max(self.longest_kept, _length(result.row))
            origin = result.row.origin if isinstance(result, Encoded) else result.origin
            self.longest_known = max(self.longest_known, (result.length, str(origin)))

    def require_rows(self, name: str, limit: int) -> None:
        """Raises UserError with the fix where no row is left."""
        if self.rows:
            return
        if not self.seen:
            raise UserError(f"{name}: the data holds no row")
        if self.too_long:
            raise UserError(
                f"{name}: max_seq_length {limit} leaves no response tokens in {self.too_long} of "
                f"{counted(self.seen, 'row')}, and no row is left ({self._reasons()}); raise it to {self.needed}, or "
                "see data.on_long"
            )
        rows = "the only row has no" if self.seen == 1 else f"none of the {self.seen} rows has a"
        raise UserError(f"{name}: {rows} supervised token ({self._reasons()})")

    @property
    def too_long(self) -> int:
        """Rows lost for their length."""
        return sum(self.reasons[reason] for reason in LENGTH_REASONS)

    def require_difference(self, name: str) -> None:
        """Raises UserError where chosen and rejected are the same in every row."""
        if self.rows and self.remarks[encode.IDENTICAL] == self.rows:
            raise UserError(
                f"{name}: chosen and rejected are identical in every row ({self.rows}), so there is nothing to prefer"
            )

    def _reasons(self) -> str:
        return "; ".join(
            f"{count} × {reason}, e.g. {self.examples[reason][0]}" for reason, count in self.reasons.most_common()
        )

    def notices(self, name: str, limit: int, sampled: bool = False) -> list[str]:
        """What the user should hear once about these rows, which may be a sample of more."""
        looked = "sampled from" if sampled else "of"
        rows = max(self.seen, self.rows + self.dropped)
        found, of = [], f"of {counted(rows, 'row')} {looked} {name}"
        if self.dropped:
            fix = f"; max_seq_length {self.needed} would keep the {self.too_long} too long" if self.too_long else ""
            found.append(f"{self.dropped} {of} {agreeing('are left out', self.dropped)} ({self._reasons()}){fix}")
        if self.truncated:
            found.append(
                f"{self.truncated} {of} {agreeing('are cut', self.truncated)} to max_seq_length {limit} "
                f"(the longest has {max(self.lengths)})"
            )
        length, origin = self.longest_known
        if length > limit and not (self.too_long or self.truncated):
            found.append(
                f"the longest rows of {name} exceed max_seq_length {limit}, e.g. {origin} with {length:,} tokens; none "
                "of those sampled does (data.on_long says what becomes of them)"
            )
        if self.split:
            times = self.split_tokens / self.unsplit_tokens
            split = counted(self.split, f"conversation of {name} becomes", f"conversations of {name} become")
            found.append(
                f"{split} {counted(self.split_rows, 'row')}, one a turn, since the chat "
                f"template rewrites earlier turns: {self.split_tokens:,} tokens, {times:.2f} times those of one row "
                "each (data.turns)"
            )
        found += [
            f"{self.remarks[key]} {of} {agreeing(text, self.remarks[key])}, e.g. {self.noted[key]}"
            for key, text in REMARKS.items()
            if self.remarks[key]
        ]
        return found


def agreeing(text: str, number: int) -> str:
    """`text`, which begins with a verb in the plural, for so many rows."""
    verb, _, rest = text.partition(" ")
    one = {"have": "has", "are": "is", "began": "began"}.get(verb, f"{verb}s")
    return f"{one} {rest}" if number == 1 else text


def _length(row: Row) -> tuple[int, int]:
    """The tokens of a row, and of its prompt where it is a pair."""
    return len(row), len(row.prompt) if isinstance(row, PreferenceRow) else 0
