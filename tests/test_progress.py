"""Progress and terminal tables: what is printed, that it fits 80 columns, and that it carries no control characters."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from segtrain.data.check import CheckReport, Reason
from segtrain.data.samples import Sample
from segtrain.event import (
    DataRead,
    Evaluated,
    Memory,
    Notice,
    PlanChosen,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    TrainStep,
)
from segtrain.models.support import Row
from segtrain.run.bench import Report as BenchReport
from segtrain.run.preview import Preview
from segtrain.run.verify import ModuleError, VerifyReport
from segtrain.terminal.check import PLAIN_MARKS, WIDE_MARKS, sample_lines
from segtrain.terminal.console import is_live
from segtrain.terminal.format import clean, clipped, compact, count, duration, gib, wrapped
from segtrain.terminal.progress import (
    make_progress,
    print_bench,
    print_check,
    print_models,
    print_preview,
    print_verify,
)
from segtrain.terminal.table import bar, stacked, table_lines

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
HOSTILE = "\x1b[2Jgone\r\n\x07 [bold]not bold[/bold] \u202eright-to-left"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def step(number, loss=2.0, supervised=10, metrics=None, peak=12.0):
    memory = Memory(peak, 5.0, 0.5, 13.0)
    return TrainStep(number, loss, 1e-4, 0.5, 8000, supervised, 2.0, memory, metrics or {})


def started(steps=10, first_step=0):
    return RunStarted(
        "sft", Path("runs/my-run"), "org/Model-8B", "llama", 32, 20_971_520, 8_030_261_248, steps, first_step
    )


def console(terminal, width=80):
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system="standard" if terminal else None
    )


def rendered(events, *, terminal=False, every=1, width=80, seconds=2.0):
    out, clock = console(terminal, width), Clock()
    with make_progress(console=out, every=every, clock=clock) as show:
        for event in events:
            clock.now += seconds if isinstance(event, TrainStep) else 0.0
            show(event)
    return out.file.getvalue()


ORPO = {
    "nll": 1.2345,
    "log_odds": -11.5,
    "accuracy": 0.75,
    "chosen_logp": -10.91,
    "rejected_logp": -11.32,
    "shared_tokens": 102400,
}
EVERYTHING = [
    started(),
    DataRead({f"long_name_of_a_count_{i}": 1_234_567 for i in range(9)}),
    PlanChosen({"segment_size": 1, "backward": "segmented", "peak_gib": 12.5, "head_chunk": 256}),
    Notice("a sentence that goes on and on " * 6),
    Notice(HOSTILE, "warning"),
    *(step(i, metrics=ORPO) for i in range(1, 11)),
    Evaluated(10, 1.5, 50, 3.0, True, {"accuracy": 0.5}),
    Saved(10, Path("runs/my-run/checkpoints/step-0000010")),
    Sampled(10, HOSTILE, HOSTILE * 20),
    RunEnded("done", 10, 70.0, Path("runs/my-run/adapters.safetensors"), {"rows": 10}),
]


def test_plain_output_fits_80_columns_without_control_characters():
    text = rendered(EVERYTHING)
    assert not CONTROL.search(text)
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_control_check_would_find_what_a_terminal_gets():
    assert CONTROL.search(rendered(EVERYTHING, terminal=True))


def test_plain_lines_say_what_the_events_say():
    text = rendered(EVERYTHING)
    for words in (
        "org/Model-8B",
        "training 21M of 8.03B parameters (0.26 %)",
        "plan  segment_size 1  head_chunk 256  predicted peak 12.5 GiB",
        "warning: \\x1b[2Jgone\\r\\n\\x07 [bold]not bold[/bold]",
        "step 4/10  loss 2.0000  lr 1.00e-04  4,000 tok/s  12.0 GiB  12.0 s left",
        "nll 1.234  log-odds -11.50  acc 0.75  chosen -10.91  rejected -11.32",
        "shared 102,400",
        "eval step 10: loss 1.5000  acc 0.50  over 50 rows in 3.0 s  (best so far)",
        "saved step 10: runs/my-run/checkpoints/step-0000010",
        "done  10 steps in 1:10",
        "MLX's peak 12.0 GiB (predicted 12.5 GiB)",
        "the process ",
        "loss 2.0000 to 2.0000 (mean of the last 5 updates)",
        "best eval loss 1.5000 at step 10",
        "adapter  runs/my-run/adapters.safetensors",
        "next  mlx_lm.generate --model org/Model-8B \\\n        --adapter-path runs/my-run",
        "      segtrain report runs/my-run",
    ):
        assert words in text, words


def test_the_loss_at_the_end_is_a_mean_of_few_updates():
    """A long average would lag: of ten losses 10, 9, ..., 1 the last five have the mean 3."""
    ended = RunEnded("done", 10, 70.0, Path("runs/a/adapters.safetensors"))
    losses = (step(i, loss=11.0 - i) for i in range(1, 11))
    assert "loss 10.0000 to 3.0000 (mean of the last 5 updates)" in rendered([started(), *losses, ended])
    assert "(one update)" in rendered([started(1), step(1), RunEnded("done", 1, 7.0, ended.adapter)])


def test_the_evaluation_before_training_is_shown_beside_the_best():
    before = Evaluated(0, 3.25, 50, 3.0, False)
    ended = RunEnded("done", 10, 70.0, Path("runs/my-run/adapters.safetensors"))
    text = rendered([started(), before, step(10), Evaluated(10, 1.5, 50, 3.0, True), ended])
    assert "eval step 0: loss 3.2500  over 50 rows in 3.0 s  (before training)" in text
    assert "best eval loss 1.5000 at step 10 (3.2500 before training)" in text


def test_a_finished_run_that_is_resumed_counts_no_step_backwards():
    assert "25 steps done" in rendered([started(25, first_step=25)])
    assert "steps 25 to 25" in rendered([started(25, first_step=24)])


def test_a_run_that_stopped_before_its_first_step_claims_no_checkpoint():
    stopped = RunEnded("interrupted", 0, 7.0, Path("runs/my-run/adapters.safetensors"))
    text = rendered([started(), stopped])
    assert "nothing to save yet" in text
    assert "checkpoint is complete" not in text
    resumed = RunEnded("done", 30, 9.0, stopped.adapter, first_step=10)
    assert "20 steps in 9.0 s, 30 in all" in rendered([started(30), step(11), resumed]).replace("\n", " ")
    assert "checkpoint is complete" in rendered([started(), step(1), RunEnded("interrupted", 1, 7.0, stopped.adapter)])


def test_every_reports_means_over_supervised_tokens_and_the_rest_at_the_end():
    steps = [step(1, loss=1.0, supervised=30), step(2, loss=2.0, supervised=10), step(3, loss=7.0)]
    text = rendered([started(3), *steps], every=2)
    reported = [line for line in text.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[:2] for line in reported] == [
        ["step 2/3", "loss 1.2500"],  # (30 * 1 + 10 * 2) / 40, not 1.5
        ["step 3/3", "loss 7.0000"],
    ]


def test_an_interrupted_run_reports_its_last_steps_and_says_how_to_go_on():
    text = rendered([started(9), step(1), step(2), step(3), RunEnded("interrupted", 3, 5.0, Path("a"))], every=2)
    assert "step 3/9" in text
    assert "--resume" in text


def test_a_dry_run_claims_no_steps_and_no_adapter():
    text = rendered([started(9), RunEnded("done", 0, 0.5, Path("runs/a/adapters.safetensors"))])
    assert "nothing was trained  step 0 of 9" in text
    assert "adapter" not in text


def test_time_left_counts_the_steps_of_this_session_only():
    text = rendered([started(10, first_step=6), step(7), step(8)])
    assert "step 8/10" in text
    assert "4.0 s left" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("environment", "live"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"CI": "true"}, False),
        ({"CI": "false"}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_what_makes_a_terminal_plain(environment, live, monkeypatch):
    for name, setting in environment.items():
        monkeypatch.setenv(name, setting)
    assert is_live(console(True)) is live
    assert not is_live(console(False))
    assert bool(CONTROL.search(rendered(EVERYTHING, terminal=True))) is live


def test_force_color_does_not_make_a_pipe_live(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with make_progress() as show:
        show(started())
        show(step(1))
    assert not CONTROL.search(capsys.readouterr().out)


def test_the_live_area_is_repainted_at_most_four_times_a_second():
    text = rendered([started(1000), *(step(i) for i in range(1, 901))], terminal=True, seconds=0.01)
    paints = text.count("/1,000 ") - text.count("stopped after")
    assert 30 <= paints <= 37  # 9 s of steps


def test_the_live_area_is_short_and_erased_at_the_end():
    text = rendered([started(4), step(1, metrics=ORPO), step(2, metrics=ORPO)], terminal=True)
    assert "━" in text
    assert "smoothed 2.0000" in text
    moves = re.findall(r"(?:\x1b\[1A\x1b\[2K)+", text)
    assert max(move.count("\x1b[1A") for move in moves) <= 3
    assert moves
    assert text.rstrip().splitlines()[-3].endswith("stopped after step 2/4")


def test_the_cursor_comes_back_when_a_run_raises():
    out = console(True)

    def interrupted():
        with make_progress(console=out, clock=Clock()) as show:
            show(started())
            show(step(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert out.file.getvalue().rindex("\x1b[?25h") > out.file.getvalue().rindex("\x1b[?25l")


def test_an_output_that_knows_only_ascii_gets_escapes_instead_of_an_error():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    out = Console(file=stream, force_terminal=False, width=80)
    with make_progress(console=out, clock=Clock()) as show:
        show(Notice("größer"))
    print_preview(PREVIEW, console=out)
    stream.flush()
    assert b"gr\\xf6\\xdfer" in stream.buffer.getvalue()


def test_numbers_that_are_not_finite_are_shown():
    assert "loss nan" in rendered([started(), step(1, loss=float("nan"))])


def test_every_must_be_positive():
    with pytest.raises(ValueError, match="at least 1, not 0"), make_progress(every=0):
        pass


# Formatting


def test_formats():
    assert [count(n) for n in (1234567, 3.0, 0.123456, True)] == ["1,234,567", "3", "0.1235", "yes"]
    assert [compact(n) for n in (512, 20_971_520, 999_999_999, 8.19e9)] == ["512", "21M", "1B", "8.19B"]
    assert [duration(s) for s in (3.21, 125, 3753, 200_000, float("inf"))] == [
        "3.2 s",
        "2:05",
        "1:02:33",
        "2 d 7 h",
        "?",
    ]
    assert [gib(x) for x in (0.0042, 9.876, 123.4)] == ["0.0042 GiB", "9.88 GiB", "123.4 GiB"]


def test_cleaning_leaves_text_alone_and_breaks_controls():
    assert clean("naïve 日本語 👩‍🚀") == "naïve 日本語 👩‍🚀"
    assert clean("a\x1b]0;title\x07\u2028\x9b") == "a\\x1b]0;title\\x07\\u2028\\x9b"
    assert clipped("abcdefgh", 6) == "abc..."


def test_wrapping_keeps_long_pieces_whole():
    assert wrapped("head", ["one", "two", "x" * 30, "three"], 16) == [
        "head  one  two",
        "      " + "x" * 30,
        "      three",
    ]


# Tables

PREVIEW = Preview(
    model="org/Model-8B",
    seq=8192,
    budget_gib=18.0,
    fits=True,
    recommended={"segment_size": 2, "head_chunk": 256, "peak_gib": 12.0},
    options=[
        {"segment_size": s, "head_chunk": 256, "peak_gib": p, "relative_time": 1.3, "longest": 65536 // s,
         "fits": p <= 18.0, "phases": {"model": 4.0, "segment": p - 4.0}}
        for s, p in ((1, 8.0), (2, 12.0), (4, 20.0), (32, 90.0))
    ],
)  # fmt: skip


def printed(render, *args, **options):
    out = console(False)
    render(*args, console=out, **options)
    text = out.file.getvalue()
    assert not CONTROL.search(text)
    assert max(map(len, text.splitlines())) <= 80, text
    return text


def test_preview_marks_the_recommended_row_and_what_fits():
    lines = printed(print_preview, PREVIEW).splitlines()
    rows = [line.split() for line in lines if " GiB " in line and "x " in line]
    assert [row[0] for row in rows] == ["1", ">", "4", "32"]
    assert [("yes" in row, "no" in row) for row in rows] == [(True, False), (True, False), (False, True), (False, True)]
    assert "65,536" in rows[0]
    assert "32,768" in rows[1]
    assert lines[-1] == "> recommended: segment_size 2, predicted peak 12.0 GiB"


def test_preview_bars_are_in_proportion():
    lines = printed(print_preview, PREVIEW).splitlines()
    one, two, four, all_ = (line for line in lines if " GiB " in line and "x " in line)
    width = 29  # columns of a bar: 1.5 times the budget, 27 GiB
    assert one.count("█") == two.count("█") == round(width * 4 / 27)
    assert one.count("▓") == round(width * 8 / 27) - round(width * 4 / 27)
    assert two.count("▓") == round(width * 12 / 27) - round(width * 4 / 27)
    assert four.count("|") == 1
    assert four.index("|") == one.index("|")
    assert all_.endswith(">")


def test_preview_where_nothing_fits():
    options = [option | {"fits": False} for option in PREVIEW.options]
    nothing = replace(PREVIEW, fits=False, recommended=None, budget_gib=4.0, options=options)
    text = printed(print_preview, nothing)
    assert "nothing fits in 4.00 GiB" in text
    assert "yes" not in text


SAMPLE = Sample("train.jsonl:1", ["user", "\n", "Hi", "\x1b[31m", "."], [False, False, False, True, True])
CHECK = CheckReport(
    counts={"rows": 1234},
    histogram=[(1, 127, 10), (128, 255, 40)],
    percentiles={"median": 200},
    dropped={"too_long": Reason(12, [f"{'d' * 30}/train.jsonl:{i}" for i in range(5)])},
    truncated={"truncate_prompt": Reason(1, ["train.jsonl:7"])},
    duplicates={},
    split_prompts={},
    shown=[SAMPLE],
    suggestions=[],
)


def test_check_shows_lengths_reasons_and_a_sample_with_marks():
    text = printed(print_check, CHECK)
    bars = [line.count("█") for line in text.splitlines() if " to " in line]
    assert bars == [10, 40]
    assert "too long  12" in text
    assert "train.jsonl:0" in text
    assert "..." in text
    assert "truncate prompt  1  train.jsonl:7" in text
    assert "duplicates" not in text
    assert "2 of 5 tokens are supervised, between ⟦ and ⟧" in text
    assert "user·\\n·\nHi⟦\\x1b[31m·.⟧" in text


def test_check_of_pairs_shows_both_answers_and_says_what_its_counts_mean():
    answers = [replace(SAMPLE, answer=name) for name in ("chosen", "rejected")]
    counts = {"rows": 2, "identical": 0, "fallbacks": 1, "prompt_share": 0.5, "shared_share": 0.25}
    text = printed(print_check, replace(CHECK, shown=answers, counts=counts))
    assert "sample train.jsonl:1, the chosen answer" in text
    assert "sample train.jsonl:1, the rejected answer" in text
    assert "fallbacks: pairs whose prompts differ" in text
    assert "fallbacks:" not in printed(print_check, CHECK)


def test_a_text_can_not_look_supervised():
    pieces = ["[INST]", "⟦", "a|b", "·", "\\<x"]
    sample = Sample("x:1", pieces, [False] * 4 + [True])
    wide, plain = ("".join(map(str, sample_lines(sample, 80, marks)[3:])) for marks in (WIDE_MARKS, PLAIN_MARKS))
    assert wide == r"[INST]·\u27e6·a|b·\u00b7⟦\<x⟧"
    assert plain == r"[INST]\.⟦\.a|b\.·\<\\<x\>"


def test_check_on_a_terminal_marks_supervised_tokens_by_underline_too():
    out = console(True)
    print_check(CHECK, console=out)
    assert "\x1b[4;32m" in out.file.getvalue()
    assert "\x1b[31m" not in out.file.getvalue()


def test_verify_lists_the_worst_first_and_counts_nan_as_failed():
    errors = {f"layers.{i}.q_proj": 1e-7 * i for i in range(50)} | {"bad": 0.5, "worse": float("nan")}
    report = VerifyReport(False, 1e-4, [ModuleError(*error) for error in errors.items()], 2.0, 2.0)
    lines = printed(print_verify, report, rows=4).splitlines()
    names = [line.split()[0] for line in lines[2:6]]
    assert names == ["worse", "bad", "layers.49.q_proj", "layers.48.q_proj"]
    assert [line.endswith("TOO LARGE") for line in lines[2:6]] == [True, True, False, False]
    assert "FAIL: 52 modules, 2 above tolerance" in lines[-2]


def test_models_wraps_its_notes():
    row = Row("llama", True, False, True, True, None, "word " * 30)
    text = printed(print_models, [row])
    assert "llama       yes  no     yes     yes        -" in text
    assert text.count("word") == 30


def test_bench_shows_times_and_choices():
    results = [{"name": "attention, fused", "seconds": 0.0123, "peak_gib": 0.4}, {"name": "mask", "seconds": 1.5}]
    report = BenchReport("a chip", "cpu", results, {"attention": "fused"}, "x")
    text = printed(print_bench, report)
    assert "12.3 ms  0.40 GiB" in text
    assert "1.5 s" in text
    assert "attention:  fused" in text


def test_table_shortens_long_names_in_front():
    lines = table_lines([("module", "left"), ("n", "right")], [["a" * 30 + ".down_proj", "1"]], 24)
    assert lines[-1].plain == "..." + "a" * 8 + ".down_proj  1"


def test_bars():
    assert bar(0.5, 4) == "██"
    assert bar(1e-9, 4) == "▏"
    assert bar(0, 4) == ""
    assert bar(0.5, 4, unicode=False) == "##"
    assert stacked([1, 1, 1], 3, 10) == [3, 4, 3]  # edges at 3.33 and 6.67
    assert stacked([1.0], 0.0, 10) == [0]


def test_check_shows_suggestions() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_check(replace(CHECK, suggestions=["max_seq_length 900 would lose nothing"]), console=console)
    assert "note  max_seq_length 900 would lose nothing" in console.file.getvalue()  # type: ignore[attr-defined]
