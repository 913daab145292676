"""`open_data`: from a recipe to endless training rows, a fixed validation set and the accounting of both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, overload

from segtrain.data.accounting import Tally
from segtrain.data.chat import ChatTemplate
from segtrain.data.encode import BLANK, Dropped, Encoded, Encoder
from segtrain.data.feeds import Chained, Feed, Mixed, Shuffled, Table, Windowed
from segtrain.data.formats import Reader
from segtrain.data.permutation import Permutation
from segtrain.data.raw import Raw
from segtrain.data.rows import Row
from segtrain.data.sources import Located, locate
from segtrain.data.tokenizer import Codec, Tokenizer
from segtrain.errors import UserError
from segtrain.recipe import DataRecipe, Recipe

Loss: TypeAlias = Literal["sft", "orpo"]

EXACT_ROWS = 2_000  # sets up to this size are counted in full when they are opened
SAMPLE_ROWS = 500


class TrainRows:
    """Endless training rows. `next` gives this rank's row of the next `world` rows that can be used.

    All ranks walk the same rows, so a saved place is the same for all and a run may go on with another `world`.
    """

    def __init__(
        self, feed: Feed, pipeline: "Pipeline", rank: int = 0, world: int = 1, rows: int | None = None
    ) -> None:
        assert 0 <= rank < world
        self._feed, self._pipeline, self.rank, self.world = feed, pipeline, rank, world
        self._patience = max(rows or 0, 10_000) * 2
        self.dropped = 0

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        group = [self._usable() for _ in range(self.world)]
        return group[self.rank]

    @property
    def epoch(self) -> int:
        """The epoch that the last row given belongs to, from 0."""
        return self._feed.epoch

    def _usable(self) -> Row:
        misses = 0
        while isinstance(result := self._pipeline.encode(self._feed.next()), Dropped):
            self.dropped += 1
            misses += 1
            if misses > self._patience:
                raise UserError(f"none of the last {misses} rows can be used ({result.origin}: {result.reason})")
        return result.row

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "dropped": self.dropped, "feed": self._feed.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly after the row at which `state` was taken. Raises UserError where the data is another."""
        self._feed.load_state_dict(state["feed"])
        self.dropped = state["dropped"]


class FixedRows(Sequence[Row]):
    """Rows that are the same in every pass; only where they stand is kept, and each is encoded when it is asked for."""

    def __init__(self, raws: Sequence[Raw] | Table, numbers: Sequence[int], pipeline: "Pipeline") -> None:
        self._raws, self._numbers, self._pipeline = raws, numbers, pipeline

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return FixedRows(self._raws, self._numbers[index], self._pipeline)
        result = self._pipeline.encode(self._raws[self._numbers[index]])
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


class Pipeline:
    """Raw rows to encoded ones. Each source has its own form and columns; `owners` maps a row's source to its reader."""

    def __init__(self, recipe: DataRecipe, loss: str | None, tokenizer: Tokenizer) -> None:
        self.recipe, self.loss = recipe, loss
        codec = Codec(tokenizer)
        template = ChatTemplate(codec, recipe.chat_template)
        self.encoder = Encoder(codec, template, recipe.max_seq_length, recipe.on_long, recipe.supervise)
        self.readers: dict[str, Reader] = {}
        self.columns: dict[str, dict[str, str]] = {}

    def encode(self, raw: Raw) -> Encoded | Dropped:
        if raw.blank:
            return Dropped(BLANK, raw.origin)
        return self.encoder.encode(self.reader(raw).read(raw), raw.origin)

    def reader(self, raw: Raw) -> Reader:
        """The reader of the row's file."""
        name = raw.origin.file
        if name not in self.readers:
            self.readers[name] = Reader(self.recipe.format, self.columns.get(name, self.recipe.columns), self.loss)
        return self.readers[name]


def open_data(recipe: Recipe, loss: Loss, tokenizer: Tokenizer, *, rank: int = 0, world: int = 1) -> Data:
    """Open what `recipe.data` names for training with `loss`; rank r of `world` gets rows r, r + world, ... of one order.

    Sets of up to 2,000 rows are counted in full, larger ones by a seeded sample (`counts["sampled"]`).
    Raises UserError, with file and line where there is one, for anything wrong with the data.
    """
    return _Opening(recipe, loss, tokenizer).data(rank, world)


class _Opening:
    def __init__(self, recipe: Recipe, loss: Loss, tokenizer: Tokenizer) -> None:
        self.recipe, self.section, self.loss = recipe, recipe.data, loss
        self.pipeline = Pipeline(recipe.data, loss, tokenizer)
        self.seed = recipe.train.seed
        self.notices: list[str] = []

    def data(self, rank: int, world: int) -> Data:
        located = locate(self.section, "train")
        if self.section.streaming:
            feed, counts, rows = self._streamed(located)
        else:
            feed, counts, rows = self._tabled(located)
        train = TrainRows(feed, self.pipeline, rank, world, rows)
        valid = self._valid()
        if valid is not None:
            counts["valid_rows"] = len(valid)
        return Data(train, valid, counts, rows, self.notices)

    def _tabled(self, located: list[Located]) -> tuple[Feed, dict[str, Any], int]:
        tables = [self._table(one) for one in located]
        whole = Chained(tables)
        name = _names(located)
        tally = Tally()
        numbers, sampled = _to_count(len(whole), self.seed)
        for number in numbers:
            tally.add(self.pipeline.encode(whole[number]))
        counts, rows = self._judged(tally, name, len(whole), sampled)
        weights = [one.source.weight for one in located]
        if any(weights):
            feeds = [Shuffled(table, self.seed + i) for i, table in enumerate(tables)]
            return Mixed(feeds, [float(weight or 1) for weight in weights], len(whole)), counts, rows
        return Shuffled(whole, self.seed), counts, rows

    def _table(self, located: Located) -> Table:
        table = located.table()
        if not len(table):
            raise UserError(f"{located.name}: the data holds no row")
        self._settle_columns(located, table[0])
        for part in getattr(table, "tables", []):
            if len(part):
                self._settle_columns(located, part[0])
        return table

    def _settle_columns(self, located: Located, raw: Raw) -> None:
        self.pipeline.columns[raw.origin.file] = dict(located.source.columns)

    def _streamed(self, located: list[Located]) -> tuple[Feed, dict[str, Any], None]:
        feeds, tally = [], Tally()
        for number, one in enumerate(located):
            source = one.in_order()
            feed = Windowed(source, self.seed + number, self.section.shuffle_window)
            first, _ = source.read(source.start(), max(1, SAMPLE_ROWS // len(located)))
            if not first:
                raise UserError(f"{one.name}: the data holds no row")
            for path in one.paths:
                self.pipeline.columns[str(path)] = dict(one.source.columns)
            self._settle_columns(one, first[0])
            for raw in first:
                tally.add(self.pipeline.encode(raw))
            feeds.append(feed)
        counts, _ = self._judged(tally, _names(located), tally.seen, True)
        window = self.section.shuffle_window
        self.notices.append(
            f"streaming: rows are shuffled within windows of {window:,}; the counts are of the first rows"
        )
        weights = [float(one.source.weight or 1) for one in located]
        return (feeds[0] if len(feeds) == 1 else Mixed(feeds, weights, None)), counts, None

    def _judged(self, tally: Tally, name: str, rows: int, sampled: bool) -> tuple[dict[str, Any], int]:
        """The counts scaled to all rows; raises UserError where nothing can be learnt from them."""
        limit = self.section.max_seq_length
        tally.require_rows(name, limit)
        preference = self.loss == "orpo"
        if preference:
            tally.require_difference(name)
        self.notices += tally.notices(name, limit)
        counts = tally.counts(preference)
        if not sampled:
            return counts, tally.rows
        factor = rows / tally.seen
        for key in counts.keys() - {"median", "p95", "longest"}:
            counts[key] = round(counts[key] * factor)
        return {**counts, "sampled": True}, counts["rows"]

    def _valid(self) -> FixedRows | None:
        located = locate(self.section, "valid")
        if not located:
            return None
        limit = None if self.recipe.eval.rows == "all" else int(self.recipe.eval.rows)
        raws = self._valid_raws(located, limit)
        tally, kept = Tally(), []
        for number in range(len(raws)):
            result = self.pipeline.encode(raws[number])
            tally.add(result)
            if isinstance(result, Encoded):
                kept.append(number)
            if limit is not None and len(kept) == limit:
                break
        name = _names(located)
        tally.require_rows(name, self.section.max_seq_length)
        self.notices += tally.notices(name, self.section.max_seq_length)
        return FixedRows(raws, kept, self.pipeline)

    def _valid_raws(self, located: list[Located], limit: int | None) -> Sequence[Raw] | Table:
        if not self.section.streaming:
            return Chained([self._table(one) for one in located])
        rows: list[Raw] = []
        for one in located:
            source = one.in_order()
            found, _ = source.read(source.start(), 2 * limit if limit else 1 << 62)
            if found:
                self._settle_columns(one, found[0])
            rows += found
        return rows


def _to_count(rows: int, seed: int) -> tuple[Sequence[int], bool]:
    """Which rows to encode for the accounting, in file order, and whether they are only a sample."""
    if rows <= EXACT_ROWS:
        return range(rows), False
    order = Permutation(rows, seed, 0xC0)
    return sorted(order[i] for i in range(SAMPLE_ROWS)), True


def _names(located: list[Located]) -> str:
    return ", ".join(one.name for one in located)
