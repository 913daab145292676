"""Counts before nouns: one row, two rows, in every message; and sizes as they were given."""

import ast
import io
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from segtrain.data.accounting import REMARKS, Tally, agreeing
from segtrain.errors import counted
from segtrain.event import RunEnded
from segtrain.run import preview
from segtrain.run.planning import _gib
from segtrain.terminal.progress import _ended, _Run

PACKAGE = Path(__file__).parents[1] / "segtrain"

COUNTS = re.compile(
    r"^ (?:more )?(?:rows|steps|updates|layers|modules|files|pairs|conversations|prompts|turns|checkpoints)\b"
)
"""What follows a value in an f-string where it was written for more than one."""

ALWAYS_MORE = {
    "attention/dispatch.py",  # of shapes that don't fit each other
    "data/accounting.py",  # "none of the 3 rows", where 1 is told apart
    "models/branches.py",
    "models/stream_ops.py",
    "recipe/mlx_lm_keys.py",  # where more than one
    "run/checks.py",  # of lengths that the checks choose
    "run/guards.py",  # of its warm-up
    "run/planning.py",  # of the window of steps
    "terminal/plan.py",  # where more than one
    "data/dataset.py",  # of the last thousand
    "data/check.py",
}


def test_a_count_before_its_noun() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 1262)] == ["0 rows", "1 row", "2 rows", "1,262 rows"]
    assert [counted(n, "more row is", "more rows are") for n in (1, 2)] == ["1 more row is", "2 more rows are"]


def test_messages_count_by_that_function() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        strings = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.JoinedStr)]
        pairs = [pair for string in strings for pair in pairwise(string.values)]
        texts = [str(b.value) for a, b in pairs if isinstance(a, ast.FormattedValue) and isinstance(b, ast.Constant)]
        found += [str(path.relative_to(PACKAGE)) for text in texts if COUNTS.match(text)]
    assert set(found) == ALWAYS_MORE, sorted(set(found) ^ ALWAYS_MORE)


def test_verbs_agree_with_the_number_of_rows() -> None:
    assert agreeing("are left out", 1) == "is left out"
    assert agreeing("are left out", 2) == "are left out"
    firsts = {agreeing(text, 1).split()[0] for text in REMARKS.values()}
    assert firsts == {"began", "has", "ends", "spells", "holds", "is"}


def test_one_conversation_becomes_rows() -> None:
    tally = Tally()
    tally.seen = tally.rows = 3
    tally.split, tally.split_rows, tally.split_tokens, tally.unsplit_tokens = 1, 3, 90, 40
    assert "1 conversation of x becomes 3 rows, one a turn" in tally.notices("x", 100)[0]


def test_budgets_are_shown_as_they_were_given() -> None:
    sizes = {100_000: "100KB", 1_500_000: "1.5MB", 24 * 10**9: "24GB", 2**30: "1.074GB", 999: "999B"}
    assert {size: preview._as_given(size) for size in sizes} == sizes
    assert _gib(100_000 / 2**30) == "98 KiB"


@pytest.mark.parametrize(("steps", "text"), [(12, "1,262 steps done"), (2000, "step 1,262 of 2,000")])
def test_a_run_that_is_further_than_its_steps(steps: int, text: str, tmp_path: Path) -> None:
    run = _Run(lambda: 0.0, steps=steps)
    lines = _ended(RunEnded("done", 1262, 0.0, tmp_path, {}, 1262), run, 100)
    out = io.StringIO()
    Console(file=out, width=100).print(*lines)
    assert f"nothing was trained  {text}" in out.getvalue()
