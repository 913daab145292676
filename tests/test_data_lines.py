"""The index of a JSONL file against splitting the whole file at newlines."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segtrain.data import line_index
from segtrain.data.jsonl import JsonLines
from segtrain.data.line_index import LineIndex

pieces = st.sampled_from(["{}", '{"a": 1}', '{"text": "é漢"}', "", " ", "\t", "x" * 150])


def naive(data: bytes) -> list[tuple[int, bytes]]:
    """(line number, stripped bytes) of each line that isn't blank."""
    return [(number, line.strip()) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@given(lines=st.lists(pieces, max_size=200), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans())
def test_rows_are_the_lines_that_are_not_blank(tmp_path_factory, chunk, lines, end, last):
    path: Path = tmp_path_factory.mktemp("index") / "x.jsonl"
    path.write_bytes((end.join(lines) + end * last).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_index, "CHUNK", chunk)
        table = JsonLines(path)
    found = [(raw.origin.line, raw.payload) for raw in map(table.__getitem__, range(len(table)))]
    assert [(line, payload.strip()) for line, payload in found] == naive(path.read_bytes())  # type: ignore[union-attr]


def test_it_costs_about_4_bytes_a_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n' * 100_000)
    with open(path, "rb", buffering=0) as file:
        index = LineIndex(file)
    held = sum(value.nbytes for value in vars(index).values() if isinstance(value, np.ndarray))
    assert held < 4.2 * 100_000
    assert index.span(99_999) == (9 * 99_999, 9)


def test_a_line_that_32_bits_can_not_count_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(line_index, "LONGEST", 10)
    path = tmp_path / "x.jsonl"
    path.write_text("123456789\n1234567890\n")
    with pytest.raises(ValueError, match=r"x.jsonl: can't be read: it has a line of 4 GiB or more"):
        JsonLines(path)
    path.write_text("12345678\n12345678\n")
    assert len(JsonLines(path)) == 2
