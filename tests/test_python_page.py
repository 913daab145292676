"""docs/python.md does what it says: its blocks run one after the other, as a reader would paste them."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_run

import segtrain
from segtrain.storage import checkpoint

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("rows", ["1", pytest.param(r"\g<0>", marks=pytest.mark.slow, id="as it stands")])
def test_the_blocks_of_the_page_run(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By day with one row an update instead of the recipe's."""
    tiny_run.examples(tmp_path / "examples")
    (tmp_path / "configs").mkdir()
    demo = (ROOT / "configs/demo.yaml").read_text(encoding="utf-8")
    accumulated = re.sub(r"(?<=grad_accumulation_steps: )\d+", rows, demo)
    (tmp_path / "configs/demo.yaml").write_text(accumulated, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), known)
    out = capsys.readouterr().out
    assert "train.step: unknown key; did you mean steps?" in out
    assert list(known["losses"]) == [1, 2, 3]
    assert {3, 6} <= set(checkpoint.steps(Path("runs/stream")))
    assert known["found"].models.keys() == {"adapter", "base"}
    assert len(known["lines"]) == 2


def test_every_name_is_on_the_page() -> None:
    table = set(re.findall(r"`(\w+)[`(]", "".join(re.findall(r"^\| `.*? \|", PAGE, re.MULTILINE))))
    assert table == set(segtrain.__all__)
