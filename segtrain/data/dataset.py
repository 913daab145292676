"""`open_data`: from a recipe to endless training rows, a fixed validation set and the accounting of both."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np

from segtrain.data.accounting import Tally
from segtrain.data.chat import ChatTemplate
from segtrain.data.encode import BLANK, Encoder
from segtrain.data.feeds import (
    WINDOW_BYTES,
    Chained,
    ChainedInOrder,
    Feed,
    InOrder,
    Mixed,
    Shuffled,
    Table,
    Windowed,
    read_window,
)
from segtrain.data.formats import Reader
from segtrain.data.limits import Dropped, Encoded
from segtrain.data.permutation import Permutation
from segtrain.data.raw import Raw
from segtrain.data.rows import Origin, Row
from segtrain.data.samples import Sample, Sought, samples_of
from segtrain.data.sources import Located, locate
from segtrain.data.tokenizer import Codec, Tokenizer
from segtrain.errors import UserError, counted
from segtrain.recipe.schema import DataRecipe, Part, Recipe

# Sets up to this size are counted in full when they are opened; of larger ones a sample is.
EXACT_ROWS, EXACT_BYTES = 2_000, 16 << 20
SAMPLE_ROWS, SAMPLE_TOKENS = 500, 2_000_000
LONGEST_ROWS = 20  # by bytes, encoded where the rest is sampled
STREAMED_VALID_ROWS = 1_000
_SAMPLE = 0xC0  # sets the sample's order apart from any epoch's


class TrainRows:
    """Endless training rows, of which those that can't be used are left out.

    An example may give several rows, which follow one another. All ranks walk the same rows, so a saved place is the
    same for all and a run may go on with another number of them.
    """

    def __init__(self, feed: Feed, pipeline: "Pipeline", rows: int | None = None) -> None:
        self._feed, self._pipeline = feed, pipeline
        self._patience = max(rows or 0, 10_000) * 2
        self.dropped = 0
        self._fates: list[Dropped | None] = []  # of the rows of the last example
        self._given = 0  # how many of those were passed
        self._raw: Raw | None = None

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        """The next row that isn't dropped."""
        misses = 0
        while isinstance(fate := self._step(), Dropped):
            self.dropped += 1
            misses += 1
            if misses > self._patience:
                raise UserError(f"none of the last {misses} rows can be used ({fate.origin}: {fate.reason})")
        assert self._raw is not None
        result = self._pipeline.encode(self._raw)[self._given - 1]
        assert isinstance(result, Encoded)
        return result.row

    def limit(self, tokens: int) -> None:
        """From here on rows above so many tokens are what `on_long` makes of them."""
        self._pipeline = self._pipeline.limited(tokens)

    @property
    def epoch(self) -> int:
        """The epoch that the last row given belongs to, from 0."""
        return self._feed.epoch

    def _step(self) -> Dropped | None:
        """Why the next row is dropped; None for one that can be used."""
        if self._given == len(self._fates):
            self._take(self._feed.next())
        self._given += 1
        return self._fates[self._given - 1]

    def _take(self, raw: Raw) -> None:
        self._raw, self._given = raw, 0
        self._fates = self._pipeline.fates(raw)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last row given; `given` rows of the example there were passed, where more are left."""
        given = self._given if self._given < len(self._fates) else 0
        state = {"version": 1, "dropped": self.dropped, "feed": self._feed.state_dict()}
        return {**state, "given": given} if given else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly after the row at which `state` was taken. Raises UserError where the data is another."""
        self._feed.load_state_dict(state["feed"])
        self.dropped = state["dropped"]
        self._raw, self._fates, self._given = None, [], 0
        if state.get("given"):
            self._take(self._feed.last())
            self._given = state["given"]


class FixedRows(Sequence[Row]):
    """Rows that are the same in every pass; only where they stand is kept, and each is encoded when it is asked for.

    `places`: the number of an example, and which of its rows.
    """

    def __init__(self, raws: Sequence[Raw] | Table, places: Sequence[tuple[int, int]], pipeline: "Pipeline") -> None:
        self._raws, self._places, self._pipeline = raws, places, pipeline

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return FixedRows(self._raws, self._places[index], self._pipeline)
        number, part = self._places[index]
        result = self._pipeline.encode(self._raws[number])[part]
        assert isinstance(result, Encoded)
        return result.row


@dataclass
class Data:
    """What a trainer needs: rows to train on, rows to evaluate on, and what the user should know of them."""

    train: TrainRows
    valid: Sequence[Row] | None
    counts: dict[str, Any]
    rows_per_epoch: int | None
    notices: list[str] = field(default_factory=list)
    sample: Sample | None = None  # the row that `segtrain check` shows


class Pipeline:
    """Raw rows to encoded ones; each file has its own form and columns."""

    def __init__(self, recipe: DataRecipe, pairs: bool | None, tokenizer: Tokenizer) -> None:
        self.recipe, self.pairs = recipe, pairs
        codec = Codec(tokenizer)
        template = ChatTemplate(codec, recipe.chat_template, recipe.chat_template_kwargs)
        self.encoder = Encoder(
            codec,
            template,
            recipe.max_seq_length,
            recipe.on_long,
            recipe.supervise,
            recipe.turns,
            recipe.supervise_reasoning,
        )
        self.readers: dict[str, Reader] = {}
        self.columns: dict[str, dict[str, str]] = {}
        self.known: dict[Origin, list[Dropped | None]] = {}  # fates of the rows of examples counted in full
        self._last: tuple[Raw, list[Encoded | Dropped]] | None = None

    def limited(self, tokens: int) -> "Pipeline":
        """The same with a lower length limit."""
        other = copy(self)
        other.encoder = replace(self.encoder, max_length=tokens, remarks=set())
        other.known, other._last = {}, None
        return other

    def encode(self, raw: Raw) -> list[Encoded | Dropped]:
        """What becomes of an example: one row, or several."""
        if self._last is None or self._last[0] is not raw:
            self._last = raw, self._encode(raw)
        return self._last[1]

    def _encode(self, raw: Raw) -> list[Encoded | Dropped]:
        if raw.blank:
            return [Dropped(BLANK, raw.origin)]
        return self.encoder.encode(self.reader(raw).read(raw), raw.origin)

    def fates(self, raw: Raw) -> list[Dropped | None]:
        """Why each row of an example is dropped, None for one that is kept; nothing is encoded where that is known."""
        if raw.origin in self.known:
            return self.known[raw.origin]
        return fates(self.encode(raw))

    def settle(self, raw: Raw, columns: dict[str, str]) -> None:
        """Take a file's columns, and its form from its first row."""
        self.columns[raw.origin.file] = columns
        if not raw.blank:
            self.reader(raw).read(raw)

    @property
    def forms(self) -> str:
        """The forms recognised so far, by name."""
        return ", ".join(sorted({reader.form.label for reader in self.readers.values() if reader.form}))

    def reader(self, raw: Raw) -> Reader:
        """The reader of the row's file."""
        name = raw.origin.file
        if name not in self.readers:
            self.readers[name] = Reader(self.recipe.format, self.columns.get(name, self.recipe.columns), self.pairs)
        return self.readers[name]


def fates(results: Sequence[Encoded | Dropped]) -> list[Dropped | None]:
    """Why each row is dropped; None for one that is kept."""
    return [result if isinstance(result, Dropped) else None for result in results]


def open_data(recipe: Recipe, tokenizer: Tokenizer, *, pairs: bool = False) -> Data:
    """Open what `recipe.data` names: preference `pairs`, or examples.

    Sets of up to 2,000 rows (and 16 MiB) are counted in full, others by a seeded sample (`counts["sampled"]`) and their
    longest rows.
    Raises UserError, with file and line where there is one, for anything wrong with the data.
    """
    return _Opening(recipe, pairs, tokenizer).data()


def open_fixed(
    recipe: Recipe, tokenizer: Tokenizer, part: Part, *, pairs: bool
) -> tuple[Sequence[Row], int, list[str]]:
    """All usable rows of `data.valid` or `data.test` alone, the tokens of the longest one, and notices.

    Raises UserError, as `open_data` does, and where the recipe names no such rows.
    """
    opening = _Opening(recipe, pairs, tokenizer)
    rows = opening.fixed(part, None)
    if rows is None:
        valid = recipe.data.valid[0].path if part == "test" and recipe.data.valid else ""
        instead = f", such as the validation rows: --data {valid}" if valid else ""
        raise UserError(
            f"data.{part} isn't set, and there is no {part} file beside data.train; give rows with --data FILE{instead}"
        )
    return rows, opening.fixed_longest, opening.notices


class _Opening:
    def __init__(self, recipe: Recipe, pairs: bool, tokenizer: Tokenizer) -> None:
        self.recipe, self.section, self.pairs = recipe, recipe.data, pairs
        self.pipeline = Pipeline(recipe.data, pairs, tokenizer)
        self.seed = recipe.train.seed
        self.notices: list[str] = []
        self.sought = Sought()
        self.fixed_longest = 0

    def data(self) -> Data:
        located = locate(self.section, "train")
        if self.section.streaming:
            feed, counts, rows = self._streamed(located)
        else:
            feed, counts, rows = self._tabled(located)
        train = TrainRows(feed, self.pipeline, rows)
        rows_of_each = self.recipe.eval.rows
        limit = None if rows_of_each == "all" else int(rows_of_each)
        valid = self.fixed("valid", limit) if limit != 0 else None
        if valid is not None:
            counts |= {"valid_rows": len(valid), "valid_longest": self.fixed_longest}
        shown = self.sought.row
        sample = samples_of(self.pipeline.encoder.codec, shown)[0] if shown else None
        return Data(train, valid, counts, rows, self.notices, sample)

    def _tabled(self, located: list[Located]) -> tuple[Feed, dict[str, Any], int]:
        tables = [self._table(one) for one in located]
        whole = Chained(tables)
        tally, sampled = self._counted(whole)
        self.sought.look((whole[number] for number in range(min(len(whole), EXACT_ROWS))), self.pipeline.encode)
        counts, rows = self._judged(tally, _names(located), len(whole), sampled)
        if located[0].source.weight is None:
            return Shuffled(whole, self.seed), counts, rows
        feeds = [Shuffled(table, self.seed + number) for number, table in enumerate(tables)]
        return Mixed(feeds, _weights(located), len(whole)), counts, rows

    def _table(self, located: Located) -> Chained:
        table = located.table()
        if not len(table):
            raise UserError(f"{located.name}: the data holds no row")
        for part in table.tables:
            if len(part):
                self.pipeline.settle(part[0], located.source.columns)
        return table

    def _counted(self, table: Table) -> tuple[Tally, bool]:
        """The accounting of a table, and whether only a sample of it was counted."""
        tally = Tally()
        if len(table) <= EXACT_ROWS and table.size <= EXACT_BYTES:
            for number in range(len(table)):
                raw = table[number]
                results = self.pipeline.encode(raw)
                tally.add(results)
                self.pipeline.known[raw.origin] = fates(results)
            return tally, False
        order = Permutation(len(table), self.seed, _SAMPLE)
        self._sample(tally, (table[order[position]] for position in range(min(SAMPLE_ROWS, len(table)))))
        if tally.seen == len(table):
            return tally, False
        for number in _largest(table.sizes(), LONGEST_ROWS):
            tally.know(self.pipeline.encode(table[number]))  # the plan must hold for them, whatever was drawn
        return tally, True

    def _sample(self, tally: Tally, raws: Iterable[Raw]) -> None:
        """Count rows until they are enough tokens for an estimate."""
        tokens = 0
        for raw in raws:
            results = self.pipeline.encode(raw)
            tally.add(results)
            tokens += sum(result.length for result in results)
            if tokens > SAMPLE_TOKENS:
                break

    def _streamed(self, located: list[Located]) -> tuple[Feed, dict[str, Any], None]:
        sources, tally = [one.in_order() for one in located], Tally()
        for one, source in zip(located, sources, strict=True):
            rows = self._first_rows(one, source, max(1, SAMPLE_ROWS // len(located)))
            self._sample(tally, rows)
            self.sought.look(rows, self.pipeline.encode)
        counts, _ = self._judged(tally, _names(located), tally.seen, True)
        window = self.section.shuffle_window
        self.notices.append(
            f"streaming: rows are shuffled in windows of {window:,}; the counts are of the first "
            f"{counted(tally.seen, 'row')}"
        )
        if located[0].source.weight is None:
            source = sources[0] if len(sources) == 1 else ChainedInOrder(sources)
            return Windowed(source, self.seed, window), counts, None
        feeds = [Windowed(source, self.seed + number, window) for number, source in enumerate(sources)]
        return Mixed(feeds, _weights(located), None), counts, None

    def _first_rows(self, located: Located, source: InOrder, limit: int) -> list[Raw]:
        rows, _ = read_window(source, source.start(), limit, WINDOW_BYTES)
        if not rows:
            raise UserError(f"{located.name}: the data holds no row")
        for path in located.paths:
            self.pipeline.columns[str(path)] = located.source.columns
        self.pipeline.settle(rows[0], located.source.columns)
        return rows

    def _judged(self, tally: Tally, name: str, rows: int, sampled: bool) -> tuple[dict[str, Any], int]:
        """The counts scaled to all rows; raises UserError where nothing can be learnt from them."""
        limit = self.section.max_seq_length
        tally.require_rows(name, limit)
        if self.pairs:
            tally.require_difference(name)
        self.notices += tally.notices(name, limit, sampled)
        counts = tally.counts(self.pairs)
        if not sampled:
            return counts, tally.rows
        factor = rows / tally.seen
        for key in counts.keys() - {"median", "p95", "longest", "shared_share", "prompt_share"}:
            counts[key] = round(counts[key] * factor)
        return {**counts, "sampled": True}, counts["rows"]

    def fixed(self, part: Part, limit: int | None) -> FixedRows | None:
        """The first `limit` rows of a part (None: all) that can be used; None where the recipe has no such part."""
        located = locate(self.section, part)
        if not located:
            return None
        raws = self._fixed_rows(located, limit)
        tally = Tally()
        kept: list[tuple[int, int]] = []
        for number in range(len(raws)):
            results = self.pipeline.encode(raws[number])
            tally.add(results)
            kept += [(number, part) for part, result in enumerate(results) if isinstance(result, Encoded)]
            if limit is not None and len(kept) >= limit:
                break
        name = f"{_names(located)} ({'validation' if part == 'valid' else part})"
        tally.require_rows(name, self.section.max_seq_length)
        self.notices += tally.notices(name, self.section.max_seq_length)
        self.fixed_longest = tally.longest_kept[0]
        return FixedRows(raws, kept[:limit], self.pipeline)

    def _fixed_rows(self, located: list[Located], limit: int | None) -> Sequence[Raw] | Table:
        """All rows by number; when streaming from the hub, the first ones, held in memory."""
        if not self.section.streaming or all(one.kind != "hub" for one in located):
            return Chained([self._table(one) for one in located])
        most = limit or STREAMED_VALID_ROWS
        self.notices.append(f"streaming: evaluation takes the first {counted(most, 'row')} of each source")
        return [raw for one in located for raw in self._first_rows(one, one.in_order(), most)]


def _largest(sizes: np.ndarray, count: int, block: int = 1 << 20) -> list[int]:
    """The numbers of the largest sizes; in blocks, so that no other array of that length exists."""
    found: list[tuple[int, int]] = []
    for lo in range(0, len(sizes), block):
        part = sizes[lo : lo + block]
        top = np.argsort(part)[max(0, len(part) - count) :] if count else np.zeros(0, int)
        found += [(int(part[number]), lo + int(number)) for number in top]
    return [number for _, number in sorted(found)[max(0, len(found) - count) :]]


def _weights(located: list[Located]) -> list[float]:
    return [float(one.source.weight or 1) for one in located]


def _names(located: list[Located]) -> str:
    return ", ".join(one.name for one in located)
