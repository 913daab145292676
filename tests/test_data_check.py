"""`check_data`: counts against a naive recount, in one process and in several."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from data_toys import byte_level, recipe, saved
from data_toys import template as chat_template

from segtrain import cli
from segtrain.data.check import CheckReport, check_data
from segtrain.errors import UserError

BASE = byte_level(None, adds_bos=True)
SEVERAL = [0, pytest.param(2, marks=pytest.mark.slow)]  # starting processes takes seconds; one test does it each time


def write(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def texts(count: int) -> list[dict]:
    """Documents of 2 to 41 letters, every seventh empty, some twice."""
    return [{"text": "" if i % 7 == 0 else f"{i % 30:02}" + "x" * (i % 40)} for i in range(count)]


def checked(path: str, workers: int = 0, **options) -> CheckReport:
    return check_data(recipe(train=path, **options), tokenizer=BASE, workers=workers)


def test_counts_are_those_of_a_naive_recount(tmp_path):
    rows = texts(300)
    report = checked(write(tmp_path / "a.jsonl", rows), max_seq_length=32)
    lengths = [len(row["text"]) + 2 for row in rows if row["text"]]
    short = [length for length in lengths if length <= 32]
    assert report.counts["rows"] == len(short)
    assert report.counts["tokens"] == sum(short)
    assert report.counts["supervised_tokens"] == sum(short) - len(short)
    assert {name: reason.count for name, reason in report.dropped.items()} == {
        "empty text": 43,
        "longer than max_seq_length": len(lengths) - len(short),
    }
    assert report.dropped["empty text"].examples == [f"{tmp_path}/a.jsonl:{line}" for line in (1, 8, 15)]
    assert report.percentiles["p100"] == max(lengths)
    assert sum(count for _, _, count in report.histogram) == len(lengths)
    for low, high, count in report.histogram:
        assert count == sum(low <= length <= high for length in lengths)
    seen = Counter(row["text"] for row in rows if row["text"] and len(row["text"]) <= 30)
    assert report.duplicates["rows with the same tokens as an earlier one"].count == sum(n - 1 for n in seen.values())
    assert any(f"max_seq_length {max(lengths)} would lose nothing" in text for text in report.suggestions)


def test_processes_give_the_same_report_and_tell_how_far_they_are(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(700))
    done: list[tuple[int, int | None]] = []
    several = check_data(recipe(train=path), tokenizer=BASE, workers=2, progress=lambda n, of: done.append((n, of)))
    assert several == checked(path)
    assert done == [(256, 700), (512, 700), (700, 700)]


def test_streaming_gives_the_same_report(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(300))
    assert checked(path, streaming=True) == checked(path)


def test_the_sample_is_a_row_token_by_token(tmp_path):
    report = checked(write(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}]))
    assert report.sample is not None
    assert report.sample.origin == f"{tmp_path}/a.jsonl:1"
    expected = [("<s>", False), ("a", False), ("b", False), ("c", True), ("d", True), ("</s>", True)]
    assert report.sample.tokens == expected


def test_of_a_pair_both_answers_are_shown(tmp_path):
    report = checked(write(tmp_path / "a.jsonl", [{"prompt": "ab", "chosen": "c", "rejected": "d"}]))
    assert [(sample.answer, "".join(sample.pieces)) for sample in report.shown] == [
        ("chosen", "<s>abc</s>"),
        ("rejected", "<s>abd</s>"),
    ]


@pytest.mark.parametrize("workers", SEVERAL)
def test_all_malformed_rows_are_counted_and_the_first_one_told(tmp_path, workers):
    rows = [*texts(10), "{broken", {"text": 3}, *texts(300), {"text": 4}]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as error:
        checked(path, workers)
    message = str(error.value)
    assert message.startswith(f"{path}:11: not valid JSON")
    assert message.endswith(f"(2 more rows are refused, the next: {path}:12: text must be a string, not a number)")


@pytest.mark.parametrize("workers", SEVERAL)
def test_a_form_is_settled_by_the_files_first_row_in_every_process(tmp_path, workers):
    rows = [{"text": f"row {i}"} for i in range(600)] + [{"prompt": "x", "completion": "y"}]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=rf"{path}:601: this row is in prompt/completion form, but {path}:1 is in text"):
        checked(path, workers)


def test_validation_rows_that_are_trained_on(tmp_path):
    train = write(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(10)])
    valid = write(tmp_path / "b.jsonl", [{"text": "row 3"}, {"text": "new"}, {"text": ""}])
    report = checked(train, valid=valid)
    leak = report.duplicates["validation rows that are training rows"]
    assert (leak.count, leak.examples) == (1, [f"{valid}:1"])
    assert (report.counts["valid_rows"], report.counts["valid_dropped"]) == (2, 1)


def asked(tokenizer, messages) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def test_pairs_report_what_is_shared_and_what_falls_back(tmp_path):
    tokenizer = byte_level("llama3")
    ask = [{"role": "user", "content": "q"}]
    other = [{"role": "user", "content": "another q"}]
    yes, no = [{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]
    rows = [{"chosen": ask + yes, "rejected": ask + no}, {"chosen": ask + yes, "rejected": other + no}]
    report = check_data(recipe(train=write(tmp_path / "a.jsonl", rows)), pairs=True, tokenizer=tokenizer)
    assert report.counts["fallbacks"] == 1
    p, q = (len(asked(tokenizer, question)) for question in (ask, other))
    both = (2 * p + 4 + 3) + (p + q + 4 + 3)  # "yes" and "no" are 3 and 2 tokens, and end with one
    assert report.counts["shared_share"] == round(p / both, 3)
    assert [reason.examples for reason in report.split_prompts.values()] == [[f"{tmp_path}/a.jsonl:2"]]
    assert any("different prompts" in text for text in report.suggestions)


def test_nothing_left_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 50}] * 4)
    with pytest.raises(UserError, match=r"max_seq_length 16 leaves no response tokens in 4 of 4 rows.*raise it to 52"):
        checked(path, max_seq_length=16)


INTERRUPTED = """
import sys
from data_toys import byte_level, recipe, saved
from data_toys import template as chat_template
from segtrain.data.check import check_data

if __name__ == "__main__":
    told = lambda done, of: print(done, flush=True)
    check_data(recipe(train=sys.argv[1]), tokenizer=byte_level(None), workers=2, progress=told)
"""


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ctrl_c_ends_it_and_leaves_no_process(tmp_path):
    """SIGINT to the whole process group, as a terminal sends it, while the workers tokenise."""
    script = tmp_path / "run.py"
    script.write_text(INTERRUPTED)
    path = write(tmp_path / "a.jsonl", texts(60_000))
    here = Path(__file__).parent
    run = subprocess.Popen(
        [sys.executable, str(script), path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}"},
    )
    assert run.stdout is not None
    run.stdout.readline()  # the first batch is counted
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode in (-signal.SIGINT, 1, 130)
    assert "KeyboardInterrupt" in errors
    assert "Process SpawnProcess" not in errors, "a worker had a traceback of its own"
    deadline = time.monotonic() + 20
    while alive(run.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(run.pid)


def test_the_recognised_form_is_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "one", "completion": "two"}\n' * 3)
    assert check_data(recipe(train=str(path)), tokenizer=byte_level("chatml")).form == "prompt/completion"


def as_command(home: Path, rows: list[dict], *options: str, template: str = "", stops: list[str] = []) -> tuple:  # noqa: B006
    """(exit code, what `segtrain check --json` prints) for rows with a model directory's tokenizer."""
    special = ["<|im_start|>", "<|im_end|>"]
    saved(home / "model", special, "<|im_end|>", template or chat_template("chatml"), stops)
    path = write(home / "rows.jsonl", rows)
    (home / "recipe.yaml").write_text(f"model: {home / 'model'}\ndata: {{train: {path}}}\n")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.run(["check", str(home / "recipe.yaml"), "--json", *options])
    return code, out.getvalue()


def test_json_has_counts_and_the_first_rows(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "漢 a", "weight": 0.5}]
    code, text = as_command(
        tmp_path, [{"messages": turns}, {"messages": turns * 2}, {"messages": turns}], "--rows", "2"
    )
    found = json.loads(text)
    assert code == 0
    assert set(found) == {"counts", "rows"}
    assert found["counts"]["rows"] == 3
    first, second = found["rows"]
    assert first["origin"] == f"{tmp_path}/rows.jsonl:1"
    assert first["weight"] == 0.5
    assert "".join(first["pieces"]) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n漢 a<|im_end|>\n"
    assert "".join(p for p, on in zip(first["pieces"], first["supervised"], strict=True) if on) == "漢 a<|im_end|>"
    assert second["origin"].endswith(":2")
    assert sum(second["supervised"]) == 2 * sum(first["supervised"])


def test_json_shows_weights_that_differ_and_both_answers_of_a_pair(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x", "weight": 0.5}]
    _, text = as_command(tmp_path, [{"messages": [*turns, *turns[:1], {"role": "assistant", "content": "y"}]}])
    (row,) = json.loads(text)["rows"]
    weights = [w for w, on in zip(row["weights"], row["supervised"], strict=True) if on]
    assert weights == [0.5, 0.5, 1.0, 1.0]
    _, text = as_command(tmp_path, [{"prompt": "q", "chosen": "yes", "rejected": "no"}])
    assert [row["answer"] for row in json.loads(text)["rows"]] == ["chosen", "rejected"]


def test_a_row_that_is_refused_ends_check_with_both_texts(tmp_path, capsys):
    counted = "{{ messages | length }}" + chat_template("chatml")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    code, _ = as_command(tmp_path, [{"messages": turns}], template=counted)
    said = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert "inference shows '1<|im_start|>user" in said
    assert "the conversation '2<|im_start|>user" in said


def test_several_rows_of_one_conversation_say_what_they_cost(tmp_path):
    turns = [{"role": role, "content": "word"} for _ in range(3) for role in ("user", "assistant")]
    path = write(tmp_path / "a.jsonl", [{"messages": turns}])
    report = check_data(recipe(train=path), tokenizer=byte_level("reasoning"), rows=9)
    lengths = [len(sample.pieces) for sample in report.samples]
    whole = byte_level("reasoning").apply_chat_template(turns, tokenize=False)
    unsplit = len(byte_level("reasoning").encode(whole, add_special_tokens=False))
    assert len(lengths) == report.counts["rows"] == report.counts["split_rows"] == 3
    assert (report.counts["split_tokens"], report.counts["unsplit_tokens"]) == (sum(lengths), unsplit)
    assert any("becomes 3 rows, one a turn" in text for text in report.suggestions)
