"""Feeds: coverage, shuffling, and that a resumed stream equals the uninterrupted one row for row, at any cut."""

import gzip
import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import datasets
import pytest
from data_toys import byte_level, recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from segtrain.data import open_data
from segtrain.data.arrow import DatasetInOrder, ParquetInOrder
from segtrain.data.feeds import WINDOW_BYTES, Chained, ChainedInOrder, Mixed, Shuffled, Windowed
from segtrain.data.jsonl import JsonLines, LinesInOrder
from segtrain.data.permutation import Permutation
from segtrain.errors import UserError

TOKENIZER = byte_level("chatml")
SIZES = {"a": 7, "b": 12, "c": 1}


def lines(name: str, count: int) -> list[str]:
    return [json.dumps({"text": f"{name} {i} " + "x" * (i % 3)}) for i in range(count)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """JSONL (with blank lines), gzip, Parquet and a saved data set with the same rows."""
    home = tmp_path_factory.mktemp("rows")
    for name, count in SIZES.items():
        rows = lines(name, count)
        (home / f"{name}.jsonl").write_text("\n\n".join(rows[:2]) + "\n" + "\n".join(rows[2:]) + "\n" * (count > 2))
        with gzip.open(home / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(rows))
        table = datasets.Dataset.from_list([json.loads(row) for row in rows])
        table.to_parquet(home / f"{name}.parquet", batch_size=5)
        table.save_to_disk(home / f"{name}.saved")
    return home


def feed(home, kind: str, seed: int = 0):
    """One of the feeds over the same rows."""
    jsonl = [home / f"{name}.jsonl" for name in sorted(SIZES)]
    match kind:
        case "table":
            return Shuffled(Chained([JsonLines(path) for path in jsonl]), seed)
        case "gz":
            return Shuffled(Chained([JsonLines(Path(f"{path}.gz")) for path in jsonl]), seed)
        case "window":
            return Windowed(LinesInOrder(jsonl), seed, 4)
        case "gz window":
            return Windowed(LinesInOrder([Path(f"{path}.gz") for path in jsonl]), seed, 4)
        case "one":
            return Windowed(LinesInOrder(jsonl), seed, 1)
        case "parquet":
            return Windowed(ParquetInOrder([path.with_suffix(".parquet") for path in jsonl]), seed, 6)
        case "chain":
            return Windowed(ChainedInOrder([LinesInOrder(jsonl[:2]), ParquetInOrder([home / "c.parquet"])]), seed, 3)
        case "hub":
            return Windowed(DatasetInOrder(streamed(home), "hub"), seed, 4)
        case "mix":
            parts = [Shuffled(JsonLines(jsonl[0]), seed), Windowed(LinesInOrder(jsonl[1:2]), seed, 5)]
            return Mixed(parts, [2.0, 1.0], 19)


def streamed(home):
    files = [str(home / f"{name}.jsonl") for name in sorted(SIZES)]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=home)


def texts(feed, count: int) -> list[tuple[str, int]]:
    return [(feed.next().value()["text"], feed.epoch) for _ in range(count)]


KINDS = ["table", "gz", "window", "gz window", "one", "parquet", "chain", "hub", "mix"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(cut=st.integers(0, 70), seed=st.integers(0, 3))
def test_a_resumed_stream_is_the_uninterrupted_one(home, kind, cut, seed):
    whole = texts(feed(home, kind, seed), 90)
    first = feed(home, kind, seed)
    before = texts(first, cut)
    state = json.loads(json.dumps(first.state_dict()))
    second = feed(home, kind, seed)
    second.load_state_dict(state)
    assert before + texts(second, 90 - cut) == whole
    assert before + texts(first, 90 - cut) == whole, "taking the state must not disturb the stream"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mix"])
def test_each_epoch_has_every_row_once_in_another_order(home, kind):
    every = sorted(json.loads(line)["text"] for name, count in SIZES.items() for line in lines(name, count))
    whole = feed(home, kind)
    epochs = [texts(whole, 20) for _ in range(4)]
    for number, epoch in enumerate(epochs):
        assert sorted(text for text, _ in epoch) == every
        assert {at for _, at in epoch} == {number}
    orders = {tuple(text for text, _ in epoch) for epoch in epochs}
    assert len(orders) == (1 if kind == "one" else 4)


def test_seed_0_is_a_seed_like_any_other(home):
    orders = [tuple(texts(feed(home, "table", seed), 20)) for seed in (0, 0, 1, 2)]
    assert orders[0] == orders[1]
    assert len(set(orders)) == 3


def test_a_mix_keeps_its_proportions_and_cycles_each_part(home):
    taken = [text.split()[0] for text, _ in texts(feed(home, "mix"), 300)]
    assert Counter(taken) == {"a": 200, "b": 100}
    assert all(abs(taken[:n].count("a") - 2 * n / 3) <= 1 for n in range(300))


def test_a_window_shuffles_within_itself_only(home):
    """With windows of 4, row k of the order comes from the rows of window k // 4."""
    order = sorted(SIZES)
    rows = [json.loads(line)["text"] for name in order for line in lines(name, SIZES[name])]
    got = [text for text, _ in texts(feed(home, "window"), 20)]
    for lo in range(0, 20, 4):
        assert sorted(got[lo : lo + 4]) == sorted(rows[lo : lo + 4])
    assert got != rows


def test_a_window_of_long_rows_holds_fewer_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("segtrain.data.feeds.WINDOW_BYTES", 10_000)
    monkeypatch.setattr("segtrain.data.feeds.READ_ROWS", 2)
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " + "x" * 3000}) + "\n" for i in range(12)))
    feed = Windowed(LinesInOrder([path]), 0, 100)
    got = [int(text.split()[0]) for text, _ in texts(feed, 12)]
    assert [sorted(got[lo : lo + 4]) for lo in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    state = feed.state_dict()
    after = texts(feed, 20)
    again = Windowed(LinesInOrder([path]), 0, 100)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert texts(again, 20) == after


def test_a_place_in_other_data_is_refused(home, tmp_path):
    state = feed(home, "table").state_dict()
    other = tmp_path / "a.jsonl"
    other.write_text("\n".join(lines("z", 20)))
    with pytest.raises(UserError, match="the data has changed since the checkpoint"):
        Shuffled(Chained([JsonLines(other)]), 0).load_state_dict(state)
    with pytest.raises(UserError, match="read in another way"):
        feed(home, "window").load_state_dict(state)
    with pytest.raises(UserError, match="shuffle_window is 4, but"):
        feed(home, "window").load_state_dict(feed(home, "window").state_dict() | {"size": [5, WINDOW_BYTES]})
    changed = feed(home, "mix").state_dict() | {"weights": [1.0, 1.0]}
    with pytest.raises(UserError, match="weights of the mix"):
        feed(home, "mix").load_state_dict(changed)


def test_one_changed_byte_is_noticed(home, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines("a", 20)))
    state = Shuffled(JsonLines(path), 0).state_dict()
    path.write_text(path.read_text().replace("a 19", "b 19"))
    with pytest.raises(UserError, match="the data has changed"):
        Shuffled(JsonLines(path), 0).load_state_dict(state)


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 5))
def test_permutation_is_a_bijection(n, seed, epoch):
    order = Permutation(n, seed, epoch)
    assert sorted(order[i] for i in range(n)) == list(range(n))


def test_permutation_is_the_same_everywhere_and_looks_random():
    assert [Permutation(10, 0, 0)[i] for i in range(10)] == [1, 7, 6, 0, 3, 9, 4, 5, 8, 2]
    n = 4096
    order = [Permutation(n, 7, 1)[i] for i in range(n)]
    assert sum(a < b for a, b in pairwise(order)) == pytest.approx(n / 2, rel=0.1)
    mean = sum(i * value for i, value in enumerate(order)) / n  # uncorrelated: (n/2)^2
    assert mean == pytest.approx(n * n / 4, rel=0.03)
    epochs = [tuple(Permutation(n, 7, epoch)[i] for i in range(8)) for epoch in range(50)]
    assert len(set(epochs)) == 50


# TrainRows: ranks and dropped rows.


@pytest.fixture(scope="module")
def spotted(tmp_path_factory):
    """40 rows, every fifth of them too long for max_seq_length 12."""
    path = tmp_path_factory.mktemp("spotted") / "train.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{i} " + "x" * (30 if i % 5 == 0 else i % 4)}) + "\n" for i in range(40))
    )
    return path


def opened(path, **more):
    return open_data(recipe(train=str(path), max_seq_length=12, **more), TOKENIZER)


@pytest.mark.parametrize("streaming", [False, True])
def test_dropped_rows_are_left_out(spotted, streaming):
    lines = [row.origin.line for row in islice(opened(spotted, streaming=streaming).train, 60)]
    assert not {line for line in lines if (line - 1) % 5 == 0}
    assert sorted(lines[:32]) == sorted(set(lines))


@pytest.mark.parametrize("streaming", [False, True])
def test_training_rows_resume_exactly(spotted, streaming):
    alone = [row.origin.line for row in islice(opened(spotted, streaming=streaming).train, 70)]
    for cut in (0, 1, 31, 32, 33, 50):
        data = opened(spotted, streaming=streaming).train
        before = [row.origin.line for row in islice(data, cut)]
        state = json.loads(json.dumps(data.state_dict()))
        again = opened(spotted, streaming=streaming).train
        again.load_state_dict(state)
        assert before + [row.origin.line for row in islice(again, 70 - cut)] == alone


def test_rows_per_epoch_and_counts_are_of_the_usable_rows(spotted):
    data = opened(spotted)
    assert data.rows_per_epoch == 32
    assert {name: data.counts[name] for name in ("rows", "dropped", "longest")} == {
        "rows": 32,
        "dropped": 8,
        "longest": 7,
    }
    first = [next(data.train) for _ in range(32)]
    assert len({row.origin for row in first}) == 32
    assert data.train.epoch == 0
    next(data.train)
    assert data.train.epoch == 1
    assert data.counts["tokens"] == sum(map(len, first))
    assert opened(spotted, streaming=True).rows_per_epoch is None


def test_a_large_set_is_sampled_and_says_so(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (20 if i % 10 == 0 else 5)}) + "\n" for i in range(3000)))
    data = opened(path)
    assert data.counts["sampled"] is True
    assert data.counts["rows"] == data.rows_per_epoch == pytest.approx(2700, rel=0.05)
    assert data.counts["tokens"] == pytest.approx(2700 * 6, rel=0.05)
    assert data.counts["longest"] == 6


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        "chat parquet",
        "over the limit",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("parquet", "two files")),
    ],
)
def test_the_longest_row_of_a_sampled_set_is_known(tmp_path, kind):
    """It stands at a line that no sample of 500 of 3,000 rows need draw; here it isn't drawn."""
    texts = ["xy" * 3] * 3000
    texts[1234] = "x" * (60 if kind == "over the limit" else 40)
    rows = [{"text": text} for text in texts]
    if kind == "chat parquet":
        roles = ("user", "assistant")
        rows = [{"messages": [{"role": role, "content": text} for role in roles]} for text in texts]
    path = tmp_path / ("train.parquet" if "parquet" in kind else "train.jsonl")
    if "parquet" in kind:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [str(path)]
    if kind == "two files":
        (tmp_path / "b.jsonl").write_text('{"text": "x"}\n' * 10)
        paths.append(str(tmp_path / "b.jsonl"))
    limit = 50 if kind == "over the limit" else 200
    tokenizer = TOKENIZER if kind == "chat parquet" else byte_level(None)
    data = open_data(recipe(train=paths, max_seq_length=limit), tokenizer)
    assert data.counts["sampled"]
    longest = max(len(next(data.train)) for _ in range(data.rows_per_epoch))
    assert data.counts["longest"] == longest
    said = [notice for notice in data.notices if "the longest rows" in notice]
    assert bool(said) == (kind == "over the limit")
    assert all("train.jsonl:1235 with 61 tokens" in notice for notice in said)


def conversations(path, count: int) -> str:
    """Conversations of 1 to 3 answers; the template `reasoning` makes a row of each answer."""
    rows = []
    for i in range(count):
        turns = [{"role": role, "content": f"{i} {n}"} for n in range(i % 3 + 1) for role in ("user", "assistant")]
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(rows))
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_one_conversation_survive_a_stop_between_them(tmp_path, streaming):
    path = conversations(tmp_path / "a.jsonl", 7)
    tokenizer = byte_level("reasoning")

    def opened():
        return open_data(recipe(train=path, streaming=streaming), tokenizer).train

    whole = list(islice(opened(), 36))
    assert len({tuple(row.tokens) for row in whole}) == 13, "7 conversations with 1, 2, 3, 1, 2, 3, 1 answers"
    for cut in range(26):
        first, again = opened(), opened()
        list(islice(first, cut))
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert list(islice(again, 10)) == whole[cut : cut + 10]


def test_validation_counts_rows_not_conversations(tmp_path):
    path = conversations(tmp_path / "a.jsonl", 7)
    data = open_data(recipe(train=path, valid=path, valid_rows=4), byte_level("reasoning"))
    assert data.valid is not None
    assert [row.origin.line for row in data.valid] == [1, 2, 2, 3]
    assert data.counts["rows"] == data.rows_per_epoch == 13
    assert (data.counts["split"], data.counts["split_rows"]) == (4, 10)
