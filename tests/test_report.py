"""The HTML report: complete, self-contained, inert to hostile text, tolerant of unfinished runs."""

import base64
import gzip
import html
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from statistics import fmean

import pytest

from segtrain.errors import UserError
from segtrain.report.run_files import read_run, smoothed, thinned, worst_step

pytest.importorskip("plotly")
from segtrain.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</pre></script><script>pwned = 1</script><img src=x onerror=\"pwned = 1\"> & 'quoted' {{style}}"
PREFERENCE = {
    "nll": 1.0,
    "log_odds": 0.5,
    "chosen_logp": -1.0,
    "rejected_logp": -1.5,
    "accuracy": 1.0,
    "shared_tokens": 9,
}


def lines(path, records, end="\n"):
    path.write_text("\n".join(json.dumps(record) for record in records) + end)


def train(step, **more):
    values = {"loss": 3.0 / step, "learning_rate": 1e-4, "grad_norm": 0.5, "tokens": 1000, "supervised_tokens": 100}
    values |= {"tokens_per_second": 500.0, "step_seconds": 2.0}
    values |= {"peak_gib": 4.0 + step / 100, "active_gib": 2.0, "cache_gib": 0.5, "rss_gib": 6.0}
    return {"event": "train", "step": step, **values, **more}


def phases(step, peak, stream=0):
    names = ["forward[0:2]", "forward[2:4]", "head", "backward[2:4]", "backward[0:2]", "optimizer"]
    common = {"step": step, "stream": stream, "seconds": 0.1, "active_gib": 2.0, "cache_gib": 0.0}
    return [common | {"phase": name, "peak_gib": peak - i / 10} for i, name in enumerate(names)]


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "my-run"
    path.mkdir()
    events = [
        {"event": "data", "rows": 1234, "dropped": {"too_long": 5}, f"key {HOSTILE}": HOSTILE},
        {"event": "plan", "backward": "segmented", "segment_size": 2, "peak_gib": 4.2},
        {"event": "notice", "level": "warning", "text": f"memory creeps {HOSTILE}"},
        {"event": "notice", "level": "info", "text": "told twice"},
        {"event": "notice", "level": "info", "text": "told twice"},
        *(train(step, **PREFERENCE) for step in range(1, 41)),
        *({"event": "eval", "step": step, "loss": 4.0 / step, "rows": 5, "accuracy": 0.5} for step in (10, 20, 40)),
    ]
    lines(path / "metrics.jsonl", events)
    lines(path / "memory.jsonl", [*phases(1, 4.0), *phases(2, 5.0), *phases(3, 4.5)])
    lines(path / "samples.jsonl", [{"step": s, "prompt": HOSTILE, "text": f"text {s} {HOSTILE}"} for s in (10, 20)])
    (path / "recipe.yaml").write_text(f"model: {json.dumps(HOSTILE)}\ntrain:\n  steps: 50\n# {HOSTILE}\n")
    return path


class Page(HTMLParser):
    """The elements of a page, its visible text, and the content of its scripts by id."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.scripts, self.attributes, self._open = [], [], {}, [], None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._open = (tag, dict(attrs).get("id")) if tag in ("script", "style", "title") else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open is None:
            self.text.append(data)
        elif self._open[0] == "script":
            self.scripts[self._open[1]] = data

    @property
    def figures(self):
        return json.loads(self.scripts["figures"])

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def traces(page, name):
    return [trace for figure in page.figures.values() for trace in figure["data"] if trace.get("name") == name]


def test_the_evaluation_before_training_is_no_best_one(run):
    assert "evaluation before training" not in Page(write_report(run)).words
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "eval", "step": 0, "loss": 0.05, "rows": 5}) + "\n")
    words = Page(write_report(run)).words
    assert "0.0500 evaluation before training" in words
    assert "0.1000 best evaluation" in words


def test_the_first_tile_is_the_loss_of_the_last_few_updates(run):
    """A smoothed loss would lag ten updates behind: 3 / step over steps 36 to 40."""
    words = Page(write_report(run)).words
    assert f"{fmean(3 / step for step in range(36, 41)):.4f} loss, mean of the last 5 updates" in words
    assert "6.00 GiB the whole process" in words


def test_the_page_needs_nothing_from_outside(run):
    page = Page(write_report(run))
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "action") or a[1].startswith("on")]
    assert ("meta", "http-equiv", "Content-Security-Policy") in page.attributes
    from plotly.offline import get_plotlyjs

    assert gzip.decompress(base64.b64decode(page.scripts["plotly"])).decode() == get_plotlyjs()


def test_hostile_strings_are_text(run):
    page = Page(write_report(run))
    assert page.tags.count("script") == 3  # figures, plotly, the page's own
    assert page.tags.count("style") == 1
    shown = " ".join(HOSTILE.split())
    assert page.words.count(shown) >= 6  # model, data key and value, notice, recipe, prompt, texts
    assert not [data for name, data in page.scripts.items() if "pwned" in data]


def test_the_hostile_control_would_be_found(run):
    """The same page, unescaped, fails the test above."""
    path = write_report(run)
    path.write_text(html.unescape(path.read_text()))
    assert Page(path).tags.count("script") > 3


def test_the_curves_are_the_logged_values(run):
    page = Page(write_report(run))
    (loss,) = (t for t in traces(page, "each step") if t["y"][0] == 3.0)
    assert loss["x"] == list(range(1, 41))
    assert loss["y"] == [3.0 / step for step in range(1, 41)]
    evals = next(t for t in traces(page, "evaluation") if t["y"][0] == 0.4)
    assert evals["x"] == [10, 20, 40]
    assert traces(page, "margin")[0]["y"][0] == pytest.approx(0.5)
    assert traces(page, "predicted peak")[0]["y"] == [4.2, 4.2]


def test_memory_by_phase_is_of_the_worst_step_in_order(run):
    (peak,) = (t for t in traces(Page(write_report(run)), "peak") if t["type"] == "bar")
    assert peak["x"] == ["forward[0:2]", "forward[2:4]", "head", "backward[2:4]", "backward[0:2]", "optimizer"]
    assert peak["y"] == pytest.approx([5.0 - i / 10 for i in range(6)])


def test_the_tables_say_what_was_logged(run):
    words = Page(write_report(run)).words
    for text in ("step 40 of 50", "predicted peak 4.20 GiB", "measured peak 4.40 GiB (step 40)", "-4.5 %",
                 "rows 1,234", "dropped too_long 5", "info: told twice (2 times)", "tokens trained"):  # fmt: skip
        assert text in words, text
    assert words.index("warning: memory creeps") < words.index("info: told twice")


def test_a_run_without_preferences_has_no_preference_charts(run):
    lines(run / "metrics.jsonl", [train(1), train(2)])
    words = Page(write_report(run)).words
    assert "Preference" not in words
    assert "There is no evaluation in this run" in words


def test_a_torn_last_line_is_normal_and_a_bad_one_is_told(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + '{"event": "train", "st')
    assert read_run(run).problems == []
    path.write_text("not json\n[1]\n" + path.read_text())
    assert read_run(run).problems == ["metrics.jsonl: 2 unreadable line(s), the first is line 1"]
    assert len(read_run(run).train) == 40


@pytest.mark.parametrize("gone", ["metrics.jsonl", "memory.jsonl", "samples.jsonl", "recipe.yaml"])
def test_missing_files_are_told_not_fatal(run, gone):
    (run / gone).unlink()
    words = Page(write_report(run)).words
    assert (f"{gone} is missing" in words) is (gone != "samples.jsonl")  # samples are optional


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: m\n")
    (tmp_path / "metrics.jsonl").write_text("")
    words = Page(write_report(tmp_path)).words
    assert "no step yet" in words
    assert "No training step has been logged yet" in words


def test_odd_values_become_gaps(run):
    bad = [train(1, loss=math.nan, peak_gib="a lot"), train(2, loss=None, grad_norm=math.inf), train(3, loss=True)]
    lines(run / "metrics.jsonl", [*bad, train(4), {"event": "train", "step": "x"}, {"event": "plan", "peak_gib": {}}])
    page = Page(write_report(run))
    losses = next(t for t in traces(page, "each step") if t["y"][-1] == 0.75)
    assert losses["y"] == [None, None, None, 0.75]


def test_after_a_resume_the_later_line_of_a_step_counts(run):
    lines(run / "metrics.jsonl", [train(1), train(2, loss=9.0), train(3), train(2, loss=1.0)])
    assert [(r["step"], r["loss"]) for r in read_run(run).train] == [(1, 3.0), (2, 1.0), (3, 1.0)]


def test_a_phase_that_is_no_phase_never_becomes_a_label(run):
    lines(run / "memory.jsonl", [{"step": 1, "stream": 0, "phase": "<b>head</b>", "peak_gib": 1.0, "seconds": 1}])
    (peak,) = (t for t in traces(Page(write_report(run)), "peak") if t["type"] == "bar")
    assert peak["x"] == ["phase 1"]


def test_two_streams_are_told_apart(run):
    lines(run / "memory.jsonl", [*phases(1, 4.0, 0), *phases(1, 4.0, 1)])
    (peak,) = (t for t in traces(Page(write_report(run)), "peak") if t["type"] == "bar")
    assert len(set(peak["x"])) == 12


def test_rows_of_one_step_show_their_highest_phase():
    rows = [{"step": 1, "phase": "head", "stream": 0, "peak_gib": peak} for peak in (1.0, 3.0, 2.0)]
    assert worst_step(rows) == [rows[1]]


def test_long_runs_stay_small(run):
    lines(run / "metrics.jsonl", [train(step) for step in range(1, 20_001)])
    curve = next(t for t in traces(Page(write_report(run)), "each step") if len(t["y"]) > 100)
    assert len(curve["y"]) == len(curve["x"]) <= 1500
    assert curve["x"][-1] == 20_000


def test_thinning_and_smoothing_against_naive_sums():
    assert thinned([1.0, 3.0, None, 5.0, None, None, 7.0], 4, fmean) == [2.0, 5.0, None, 7.0]
    values = [4.0, None, 1.0, 2.0] * 25
    weights = [0.9**i for i in range(3)]  # newest first
    naive = (2.0 * weights[0] + 1.0 * weights[1] + 4.0 * weights[2]) / sum(weights)
    assert smoothed(values)[1] is None
    assert smoothed(values)[3] == pytest.approx(naive)


def test_a_short_curve_is_smoothed_over_a_tenth_of_it():
    """Of 20 values each counts half as much as the next one; of 10 or fewer nothing is smoothed."""
    values = [float(number) for number in range(20)]
    naive = sum(value * 0.5 ** (19 - value) for value in values) / sum(0.5**i for i in range(20))
    assert smoothed(values)[-1] == pytest.approx(naive)
    assert smoothed(values[:10]) == values[:10]


def test_a_row_of_the_data_is_shown_with_what_is_learnt_marked(run):
    row = {
        "origin": f"x{HOSTILE}:1",
        "pieces": ["ask ", HOSTILE, " yes", "."],
        "supervised": [False, False, True, True],
    }
    (run / "data_row.json").write_text(json.dumps(row))
    text = write_report(run).read_text()
    assert f"<pre>ask {html.escape(HOSTILE)}<mark> yes.</mark></pre>" in text
    assert "2 of 4 tokens are learnt" in text
    (run / "data_row.json").write_text('{"pieces": 3}')
    assert "data_row.json can't be read" in write_report(run).read_text()


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no run directory"):
        write_report(tmp_path / "absent")


def test_without_plotly_the_error_names_the_extra(run, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly" or name == "segtrain.report.charts"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UserError, match=re.escape('pip install "segtrain-mlx[report]"')):
        write_report(run)


def test_writing_again_replaces_the_page_and_leaves_no_scraps(run):
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert sorted(p.name for p in run.iterdir() if "report" in p.name) == ["report.html"]


# In a real browser


def browse(page, *options):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += ["--window-size=1280,2600", "--virtual-time-budget=20000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
class TestBrowser:
    def test_charts_are_drawn_without_a_console_message(self, run):
        done = browse(write_report(run), "--dump-dom")
        assert "CONSOLE" not in done.stderr
        assert 'data-charts="drawn"' in done.stdout
        assert done.stdout.count('class="main-svg"') >= 8
        curves = re.findall(r'class="js-line" d="(M[^"]+)"', done.stdout)
        assert sum("L" in curve for curve in curves) >= 12  # the others are the legends' samples
        assert not [curve for curve in curves if "NaN" in curve]
        assert max(len(curve) for curve in curves) > 150  # the loss bends: its points can't be merged
        assert not re.search(r"<(img|script)[^>]*(onerror|pwned)", done.stdout)

    def test_a_broken_page_would_be_noticed(self, run):
        page = write_report(run)
        page.write_text(page.read_text().replace("Plotly.react", "Plotly.wrecked"))
        done = browse(page, "--dump-dom")
        assert "CONSOLE" in done.stderr
        assert 'data-charts="drawn"' not in done.stdout
        assert "could not be drawn" in done.stdout

    @pytest.mark.parametrize(("scheme", "dark"), [(0, True), (1, False)])
    def test_the_picture_has_charts_in_both_schemes(self, run, tmp_path, scheme, dark):
        image = pytest.importorskip("PIL.Image", reason="pillow reads the screenshot")
        shot = tmp_path / "shot.png"
        browse(write_report(run), f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}")
        picture = image.open(shot).convert("RGB")
        data = picture.tobytes()
        pixels = list(zip(data[::3], data[1::3], data[2::3], strict=True))
        assert (sum(pixels[0]) < 3 * 64) is dark  # the page's corner
        blue = sum(b > 150 and b > r + 80 and b > g + 40 for r, g, b in pixels)
        assert blue > 2000  # the curves and bars: nothing else on the page is blue
