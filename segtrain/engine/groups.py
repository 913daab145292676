"""Training rows that run together, in one of two ways.

- `ragged`: one after the other in one stream, attention folded into a batch (`engine.ragged`): no filler but what makes
  stream lengths few. Rows of any kind go together. For models that look back by attention alone.
- `together`: a batch dimension, shorter rows padded on the right: filler follows the last real row of a run, where
  causal visibility hides it from all that is scored. Streams with branches go together where their prefixes are of one
  length: positions start again at `prefix`. For all models.

A gradient is a sum over rows, so which of them share a forward and backward pass changes no update. Cotangents of
filler are zero.

Which rows to put together is a question of cost. A pass takes the time of its tokens, filler included, and something
more that doesn't depend on them: launches, reading weights. Counted in tokens, that is `fixed`. Among rows sorted by
length the best groups are neighbours, so `cut` finds those of least cost by dynamic programming.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from segtrain.engine.layouts import Layout, Span, Stream
from segtrain.engine.ragged import batch_length, up
from segtrain.engine.ragged import ragged as places

RAGGED_FILLER = 1 / 8  # what a slot of attention alone costs, in tokens


def kind(layout: Layout) -> tuple:
    """Equal for layouts that can run together."""
    return tuple((stream.prefix, len(stream.branches)) for stream in layout.streams)


def together(layouts: Sequence[Layout], multiple: int = 1) -> Layout:
    """Layouts of one `kind` as one, in their order; its streams' lengths are multiples of `multiple`."""
    if len(layouts) == 1:
        return layouts[0]
    columns = list(zip(*(layout.streams for layout in layouts), strict=True))
    lengths = [_joint_lengths(column, multiple) for column in columns]
    names = dict.fromkeys(name for layout in layouts for name in layout.spans)
    return Layout(
        tuple(_stacked(column, runs) for column, runs in zip(columns, lengths, strict=True)),
        {name: _joined(layouts, name, lengths) for name in names},
        _reference(layouts),
    )


def ragged(layouts: Sequence[Layout], multiple: int = 1) -> Layout:
    """Layouts of any kinds as one of one stream, in their order; sequences in its batch are of a `multiple`.

    The streams must be without filler.
    """
    if len(layouts) == 1:
        return layouts[0]
    streams = [stream for layout in layouts for stream in layout.streams]
    starts = list(accumulate(map(len, streams), initial=0))
    sequences = [[at + n for n in one] for at, stream in zip(starts, streams, strict=False) for one in stream.sequences]
    total = up(starts[-1])
    tokens = [token for stream in streams for token in _listed(stream.tokens)[0]] + [0] * (total - starts[-1])
    length = batch_length(max(map(len, sequences)), multiple)
    whole = Stream(_ids([tokens]), 0, (), total - starts[-1], places(sequences, total, length), _parts(layouts))
    edges = accumulate((len(layout.streams) for layout in layouts), initial=0)
    at = [starts[number:] for number in edges]  # of each layout's streams
    names = dict.fromkeys(name for layout in layouts for name in layout.spans)
    spans = {name: _chained([layout.spans.get(name) for layout in layouts], at) for name in names}
    return Layout((whole,), spans, _reference(layouts))


def _parts(layouts: Sequence[Layout]) -> tuple[tuple[int, int, int], ...]:
    return tuple((b, n, len(s)) for b, layout in enumerate(layouts) for n, s in enumerate(layout.streams))


def alike(layouts: Sequence[Layout], multiple: int = 1) -> bool:
    """Whether a padded batch of these rows of one stream has no more filler than a ragged one, and nothing to fold."""
    if any(len(layout.streams) > 1 or layout.streams[0].branches for layout in layouts):
        return False
    lengths = [len(layout.streams[0]) for layout in layouts]
    return len(layouts) * -(-max(lengths) // multiple) * multiple <= up(sum(lengths))


def _chained(spans: Sequence[Span | None], starts: Sequence[Sequence[int]]) -> Span:
    """Spans of one name as one of stream 0, where each layout's streams begin at `starts`."""
    rows = [
        at[span.stream] + row for span, at in zip(spans, starts, strict=False) if span for row in _listed(span.rows)
    ]
    return _merged(spans, 0, rows)


def cut(
    lengths: Sequence[int], fixed: int, most_rows: int, most_tokens: int, filler: float = 1.0, *, any_size: bool = False
) -> list[int]:
    """Sizes of the groups of least cost, of rows with these lengths in ascending order.

    A group of n rows computes n times its longest one's length, and of that all that the rows don't have counts
    `filler` a token: at most `most_tokens` unless it is one row alone. Its size is `most_rows` or a power of two, so
    that compiled graphs, one for each size and length, are few, unless it may be `any_size`.
    """
    allowed = [n for n in range(1, most_rows + 1) if any_size or n == most_rows or n & (n - 1) == 0]
    before = list(accumulate(lengths, initial=0))
    best: list[tuple[float, int]] = [(0, 0)]  # cost of the first i rows, and the size of the last group of them
    for i, length in enumerate(lengths, 1):
        counted = [(n, (1 - filler) * (before[i] - before[i - n]) + filler * n * length) for n in allowed if n <= i]
        fitting = [(n, tokens) for n, tokens in counted if n == 1 or tokens <= most_tokens]
        best.append(min((best[i - n][0] + fixed + tokens, n) for n, tokens in fitting))
    found, i = [], len(lengths)
    while i:
        found.append(best[i][1])
        i -= found[-1]
    return found[::-1]


def grouped(
    layouts: Sequence[Layout], cut_up: Callable[[Sequence[int]], Sequence[int]], *, kinds_apart: bool = True
) -> list[list[int]]:
    """Numbers of the layouts that run together. `cut_up`: sizes of groups of rows, by their lengths in order."""
    kinds: dict[tuple, list[int]] = {}
    for number in sorted(range(len(layouts)), key=lambda n: _length(layouts[n])):
        kinds.setdefault(kind(layouts[number]) if kinds_apart else (), []).append(number)
    groups = []
    for numbers in kinds.values():
        edges = accumulate(cut_up([_length(layouts[n]) for n in numbers]), initial=0)
        groups += [numbers[lo:hi] for lo, hi in pairwise(edges)]
    return groups


def _length(layout: Layout) -> int:
    """Tokens of a layout; those of any group of it and shorter ones are at most as many for each."""
    return len(layout.streams) * max(map(_most, layout.streams))


def _most(stream: Stream) -> int:
    return stream.prefix + len(stream.branches) * max(stream.branches) if stream.branches else len(stream)


def _joint_lengths(streams: Sequence[Stream], multiple: int) -> list[int]:
    """Of each run of the streams, the longest one's length; the last run makes up the multiple."""
    lengths = [max(runs) for runs in zip(*(_run_lengths(stream) for stream in streams), strict=True)]
    lengths[-1] += -sum(lengths) % multiple
    return lengths


def _run_lengths(stream: Stream) -> list[int]:
    return [length for _, length in stream.runs]


def _stacked(streams: Sequence[Stream], lengths: Sequence[int]) -> Stream:
    """[1, T_i] each to [B, T]: every run has the length that `lengths` gives it."""
    rows = []
    for stream in streams:
        tokens, row, at = _listed(stream.tokens)[0], [], 0
        for own, length in zip(_run_lengths(stream), lengths, strict=True):
            row += [*tokens[at : at + own], *[0] * (length - own)]
            at += own
        rows.append(row)
    prefix, (first, *others) = streams[0].prefix, lengths
    branches = (first - prefix, *others) if streams[0].branches else ()
    real = sum(len(stream) - stream.padding for stream in streams)
    return Stream(_ids(rows), prefix, branches, len(rows) * sum(lengths) - real)


def _joined(layouts: Sequence[Layout], name: str, lengths: Sequence[Sequence[int]]) -> Span:
    """The spans called `name`, one after the other; a layout without one has no targets in it."""
    spans = [layout.spans.get(name) for layout in layouts]
    number = next(span.stream for span in spans if span is not None)
    T = sum(lengths[number])
    rows: list[int] = []
    for b, (layout, span) in enumerate(zip(layouts, spans, strict=True)):
        if span is not None:
            rows += [b * T + row for row in _moved(_listed(span.rows), layout.streams[number], lengths[number])]
    return _merged(spans, number, rows)


def _merged(spans: Sequence[Span | None], stream: int, rows: Sequence[int]) -> Span:
    """The spans' targets one after the other, scored on these rows of that stream."""
    found = [span for span in spans if span is not None]
    targets = _ids([target for span in found for target in _listed(span.targets)])
    weights = None
    if any(span.weights is not None for span in found):
        each = [[1.0] * len(span) if span.weights is None else _listed(span.weights) for span in found]
        weights = mx.array([weight for one in each for weight in one], dtype=mx.float32)
    sizes = tuple(0 if span is None else len(span) for span in spans)
    return Span(stream, _ids(list(rows)), targets, weights, sizes)


def _ids(values: list) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def _listed(array: mx.array) -> list:
    values: Any = array.tolist()
    return values


def _moved(rows: Sequence[int], stream: Stream, lengths: Sequence[int]) -> list[int]:
    """Where rows of `stream` are once its runs have these lengths."""
    own = list(accumulate(_run_lengths(stream), initial=0))
    new = list(accumulate(lengths, initial=0))
    return [next(n + row - o for o, n in reversed([*zip(own[:-1], new[:-1], strict=True)]) if row >= o) for row in rows]


def _reference(layouts: Sequence[Layout]) -> dict[str, mx.array] | None:
    known = [layout.reference for layout in layouts if layout.reference is not None]
    if len(known) < len(layouts):
        return None
    zero = mx.array(0.0)
    names = dict.fromkeys(name for sums in known for name in sums)
    return {name: mx.stack([sums.get(name, zero) for sums in known]) for name in names}
