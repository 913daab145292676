"""`check_data`: all of the data encoded once and counted; nothing is trained and no model weights are read."""

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from segtrain.data.accounting import EXAMPLES, Tally
from segtrain.data.batches import BATCH, Batch, can_travel, count_rows
from segtrain.data.dataset import Pipeline
from segtrain.data.feeds import Table
from segtrain.data.limits import Encoded
from segtrain.data.raw import Raw
from segtrain.data.rows import Origin, PreferenceRow, Row
from segtrain.data.samples import Sample, Sought, samples_of
from segtrain.data.sources import Located, locate
from segtrain.data.tokenizer import Tokenizer, load_tokenizer
from segtrain.errors import UserError, counted
from segtrain.recipe.schema import Recipe

Progress: TypeAlias = Callable[[int, int | None], None]  # rows done, rows in all (None: not known)

IN_PROCESS_ROWS = 10_000  # below this, starting workers costs more than it saves
STREAMED_ROWS = 100_000  # a stream may have no end


@dataclass(frozen=True)
class Reason:
    """How many rows, and where the first of them stand."""

    count: int
    examples: list[str]


@dataclass(frozen=True)
class CheckReport:
    """The accounting of `segtrain check`. Lengths are tokens a row, before any limit."""

    counts: dict[str, Any]
    histogram: list[tuple[int, int, int]]  # (shortest, longest, rows), both ends included
    percentiles: dict[str, int]
    dropped: dict[str, Reason]
    truncated: dict[str, Reason]
    duplicates: dict[str, Reason]
    split_prompts: dict[str, Reason]
    shown: list[Sample]  # one row to look at; of a pair, both answers
    suggestions: list[str]
    form: str = ""  # what the rows are in, as recognised: chat, completion, ...
    samples: list[Sample] = field(default_factory=list)  # the first rows, as many as were asked for

    @property
    def sample(self) -> Sample | None:
        return self.shown[0] if self.shown else None

    def as_json(self) -> dict[str, Any]:
        """`{"counts": ..., "rows": ...}`, as `segtrain check --json` prints it."""
        dropped = {f"dropped: {name}": reason.count for name, reason in self.dropped.items()}
        return {"counts": {**self.counts, **dropped}, "rows": [sample.as_json() for sample in self.samples]}


def check_data(
    recipe: Recipe,
    *,
    pairs: bool | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    rows: int = 0,
) -> CheckReport:
    """Encode every training and validation row of `recipe` and count what would be learnt of them.

    `pairs` says whether the rows must be preference pairs or must not (None: whatever they are); the tokenizer is the
    model's unless it is given.
    `workers` processes tokenise (default: one for each CPU, none for small sets).
    `rows`: how many of the first rows made of the data the report shows.
    Raises UserError for malformed rows, the first of them named, and where nothing is left to learn.
    """
    tokenizer = tokenizer or load_tokenizer(recipe.model, recipe.trust_remote_code)
    checker = _Checker(recipe, pairs, tokenizer, progress or (lambda done, total: None), workers, rows)
    return checker.report()


class Places:
    """Origins of many rows, 12 bytes each."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._file, self._line = array("I"), array("q")

    def append(self, origin: Origin) -> None:
        self._file.append(self._files.setdefault(origin.file, len(self._files)))
        self._line.append(origin.line)

    def __len__(self) -> int:
        return len(self._line)

    def __getitem__(self, number: int) -> Origin:
        return Origin(list(self._files)[self._file[number]], self._line[number])


@dataclass
class _Seen:
    """One part of the data (train or valid), counted."""

    tally: Tally = field(default_factory=Tally)
    digests: "array[int]" = field(default_factory=lambda: array("Q"))
    places: "Places" = field(default_factory=lambda: Places())
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    truncated: list[Origin] = field(default_factory=list)
    split_prompts: list[Origin] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        self.tally.merge(batch.tally)
        self.digests += batch.digests
        for origin in batch.places:
            self.places.append(origin)
        self.faults += batch.faults
        self.fault_count += batch.fault_count
        self.truncated += batch.truncated
        self.split_prompts += batch.split_prompts

    @property
    def done(self) -> int:
        return self.tally.seen + self.fault_count

    def require_sound(self) -> None:
        """Raises UserError where rows are malformed: the first in full, and where the next ones stand."""
        if not self.faults:
            return
        others = counted(self.fault_count - 1, "more row is", "more rows are")
        more = f" ({others} refused" if self.fault_count > 1 else ""
        then = f", the next: {self.faults[1]})" if len(self.faults) > 1 else ")" if more else ""
        raise UserError(self.faults[0] + more + then)


class _Checker:
    def __init__(
        self,
        recipe: Recipe,
        pairs: bool | None,
        tokenizer: Tokenizer,
        progress: Progress,
        workers: int | None,
        rows: int,
    ) -> None:
        self.recipe, self.section, self.progress = recipe, recipe.data, progress
        self.pipeline = Pipeline(recipe.data, pairs, tokenizer)
        self.workers = workers
        self.sought = Sought()
        self.first: list[Row] = []
        self.wanted = rows
        self.notes: list[str] = []

    def report(self) -> CheckReport:
        located = locate(self.section, "train")
        train = self._count(located)
        self.wanted = 0  # of the validation rows none is shown
        name = ", ".join(one.name for one in located)
        train.require_sound()
        train.tally.require_rows(name, self.section.max_seq_length)
        preference = isinstance(self.sought.row, PreferenceRow)
        if preference:
            train.tally.require_difference(name)
        counts = train.tally.counts(preference, reasons=False)
        duplicates = _duplicates(train)
        counts |= self._valid(train, duplicates)
        codec = self.pipeline.encoder.codec
        return CheckReport(
            counts=counts,
            histogram=histogram(train.tally.lengths),
            percentiles={f"p{share}": train.tally.percentile(share / 100) for share in (50, 75, 90, 95, 99, 100)},
            dropped={reason: Reason(n, train.tally.examples[reason]) for reason, n in train.tally.reasons.items()},
            truncated=_reasons(self._cut(preference), train.truncated),
            duplicates=duplicates,
            split_prompts=_reasons("prompts of chosen and rejected differ", train.split_prompts),
            shown=samples_of(codec, self.sought.row) if self.sought.row else [],
            suggestions=self._suggestions(train, duplicates, name),
            form=self.pipeline.forms,
            samples=[sample for row in self.first for sample in samples_of(codec, row)],
        )

    def _cut(self, preference: bool) -> str:
        """What happens to a row that is cut."""
        if self.section.on_long == "truncate_prompt":
            return "prompt cut from the left"
        return "answers cut from the right" if preference else "cut from the right"

    def _valid(self, train: _Seen, duplicates: dict[str, Reason]) -> dict[str, Any]:
        """Counts of the validation rows; those that are among the training rows are noted with the duplicates."""
        located = locate(self.section, "valid")
        if not located:
            return {}
        valid = self._count(located)
        valid.require_sound()
        valid.tally.require_rows(", ".join(one.name for one in located), self.section.max_seq_length)
        known = np.isin(_array(valid.digests), _array(train.digests))
        leaked = [valid.places[int(number)] for number in np.flatnonzero(known)]
        duplicates |= _reasons("validation rows that are training rows", leaked)
        return {
            "valid_rows": valid.tally.rows,
            "valid_dropped": valid.tally.dropped,
            "valid_longest": valid.tally.longest_kept[0],
        }

    def _count(self, located: list[Located]) -> _Seen:
        seen = _Seen()
        tables = None if self.section.streaming else [(one, one.table()) for one in located]
        total = sum(len(table) for _, table in tables) if tables else None
        rows = self._streamed(located) if tables is None else self._tabled(tables)
        for batch in count_rows(self.pipeline, rows, self._workers(total)):
            seen.add(batch)
            self.progress(seen.done, total)
        return seen

    def _workers(self, total: int | None) -> int:
        if self.workers is not None:
            return self.workers
        if (total is not None and total < IN_PROCESS_ROWS) or not can_travel(self.pipeline):
            return 0
        return min(16, os.cpu_count() or 1)

    def _tabled(self, tables: list[tuple[Located, Any]]) -> Iterator[list[Raw]]:
        for one, whole in tables:
            for table in whole.tables:
                for lo in range(0, len(table), BATCH):
                    yield self._settled(_rows(table, lo), one)

    def _streamed(self, located: list[Located]) -> Iterator[list[Raw]]:
        for one in located:
            source, left = one.in_order(), STREAMED_ROWS
            cursor = source.start()
            while cursor is not None and left > 0:
                rows, cursor = source.read(cursor, min(BATCH, left))
                left -= len(rows)
                yield self._settled(rows, one)
            if cursor is not None:
                self.notes.append(
                    f"only the first {STREAMED_ROWS:,} rows of {one.name} were read, since streaming is on"
                )

    def _settled(self, rows: list[Raw], located: Located) -> list[Raw]:
        """The same rows, after the form of each file that begins among them is settled and a sample is sought."""
        for raw in rows:
            if raw.origin.file not in self.pipeline.readers:
                try:
                    self.pipeline.settle(raw, located.source.columns)
                except UserError:
                    continue  # counted, with all others, where the rows are encoded
        self.sought.look(rows, self.pipeline.encode)
        self._seek_first(rows)
        return rows

    def _seek_first(self, rows: list[Raw]) -> None:
        """The first rows made of the data, as many as were asked for."""
        for raw in rows:
            if len(self.first) >= self.wanted:
                return
            try:
                results = self.pipeline.encode(raw)
            except UserError:
                continue
            kept = [result.row for result in results if isinstance(result, Encoded)]
            self.first += kept[: self.wanted - len(self.first)]

    def _suggestions(self, train: _Seen, duplicates: dict[str, Reason], name: str) -> list[str]:
        tally, limit = train.tally, self.section.max_seq_length
        found = self.notes + tally.notices(name, limit)
        longest = max(tally.lengths, default=0)
        if longest > limit:
            found.append(
                f"max_seq_length {longest} would lose nothing; {tally.percentile(0.99)} covers 99 % of the rows"
            )
        elif longest <= limit // 2:
            found.append(f"the longest row has {counted(longest, 'token')}: max_seq_length {limit} is never reached")
        found += [f"{what}: {reason.count:,}, e.g. {reason.examples[0]}" for what, reason in duplicates.items()]
        return found


def histogram(lengths: "array[int]") -> list[tuple[int, int, int]]:
    """Rows by length in bins that double: (first, last, rows) for 1, 2 to 3, 4 to 7, ..."""
    rows = Counter(length.bit_length() for length in lengths)
    bits = range(min(rows), max(rows) + 1) if rows else range(0)
    return [(1 << (b - 1) if b else 0, (1 << b) - 1, rows[b]) for b in bits]


def _rows(table: Table, lo: int) -> list[Raw]:
    return [table[number] for number in range(lo, min(lo + BATCH, len(table)))]


def _reasons(name: str, origins: list[Origin]) -> dict[str, Reason]:
    return {name: Reason(len(origins), [str(origin) for origin in origins[:EXAMPLES]])} if origins else {}


def _duplicates(seen: _Seen) -> dict[str, Reason]:
    """Rows whose tokens an earlier row has too."""
    values = _array(seen.digests)
    order = np.argsort(values, kind="stable")
    again = order[1:][values[order[1:]] == values[order[:-1]]]
    return _reasons("rows with the same tokens as an earlier one", [seen.places[int(i)] for i in np.sort(again)])


def _array(digests: "array[int]") -> np.ndarray:
    return np.frombuffer(digests, np.uint64) if digests else np.zeros(0, np.uint64)
