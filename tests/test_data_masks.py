"""Whole rows with the chat templates that they failed with, from a model directory to what is learnt of them."""

import json
from pathlib import Path

import pytest
from data_toys import FILES, recipe, saved

from segtrain.data.dataset import Pipeline
from segtrain.data.limits import Encoded
from segtrain.data.raw import Raw
from segtrain.data.rows import Origin, SupervisedRow
from segtrain.data.tokenizer import Codec, load_tokenizer
from segtrain.errors import UserError

GIVEN = Path(__file__).parents[2] / "shared" / "cases" / "masks.json"  # beside the checkout, where it is kept


def cases(path: Path) -> list:
    found = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []
    return [pytest.param(case, id=case["name"]) for case in found]


def learnt(home: Path, case: dict) -> list[str] | str:
    """The supervised texts in order, over all rows of the conversation, or `refused`."""
    saved(home, case["special"], case["eos"], case["template"], case.get("stops", []))
    tokenizer = load_tokenizer(str(home))
    pipeline = Pipeline(recipe(train="x", **case.get("data", {})).data, None, tokenizer)
    try:
        results = pipeline.encode(Raw(json.dumps(case["row"]).encode(), Origin("x", 1)))
    except UserError:
        return "refused"
    rows = [result.row for result in results if isinstance(result, Encoded)]
    return [run for row in rows if isinstance(row, SupervisedRow) for run in runs(Codec(tokenizer), row)]


def runs(codec: Codec, row: SupervisedRow) -> list[str]:
    found, before = [], False
    for piece, on in zip(codec.pieces(row.tokens), row.supervised, strict=True):
        if on and not before:
            found.append("")
        if on:
            found[-1] += piece
        before = on
    return found


@pytest.mark.parametrize("case", cases(FILES / "masks.json"))
def test_own_cases(tmp_path, case):
    assert learnt(tmp_path, case) in case["right"]


@pytest.mark.skipif(not GIVEN.exists(), reason="there are no cases beside this checkout")
@pytest.mark.parametrize("case", cases(GIVEN))
def test_given_cases(tmp_path, case):
    assert learnt(tmp_path, case) in case["right"]
