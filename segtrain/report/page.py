"""The report's page: HTML around the charts, with everything it needs inside and nothing fetched.

Every string that comes from a file passes through `_text` (escaped) or `_json` (inert inside a script element).
"""

import base64
import gzip
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from segtrain.errors import UserError, counted
from segtrain.report.run_files import Record, RunFiles, column, largest, number, read_run
from segtrain.terminal.format import count, duration, gib, named, value

if TYPE_CHECKING:
    from segtrain.report.charts import Chart

SAMPLES = 60  # the newest ones; all are in samples.jsonl
LAST = 5  # updates whose mean loss is shown first


def write_report(run: Path) -> Path:
    """Write `run`/report.html, replacing an older one at once, and return its path.

    Raises UserError where `run` is no run directory or plotly isn't installed.
    """
    text = render(run)
    target = Path(run) / "report.html"
    partial = target.with_name(".report.html.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)
    return target


def render(run: Path) -> str:
    """The page; nothing is written. Raises UserError as `write_report` does."""
    draw, library = require_plotly()
    found = read_run(Path(run))
    return _page(found, draw(found), library)


def require_plotly() -> tuple[Callable[[RunFiles], "list[Chart]"], str]:
    """The function that draws the charts, and plotly.js itself. Raises UserError where plotly isn't installed."""
    try:
        from plotly.offline import get_plotlyjs

        from segtrain.report.charts import charts
    except ImportError as error:
        if not (error.name or "").startswith("plotly"):
            raise
        fix = 'pip install "segtrain-mlx[report]"'
        raise UserError(f"segtrain report needs plotly, which isn't installed: {fix}") from None
    return charts, get_plotlyjs()


def _page(run: RunFiles, drawn: "list[Chart]", library: str) -> str:
    parts = {
        "title": _text(f"{run.path.resolve().name} · segtrain"),
        "style": asset("report.css"),
        "script": asset("report.js"),
        "plotly": _packed(library),
        "figures": _json({f"chart-{i}": chart.figure for i, chart in enumerate(drawn) if chart.figure is not None}),
        "body": "\n".join(_body(run, drawn)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("report.html"))


@cache  # most of a page's time, and the same for each page
def _packed(library: str) -> str:
    return base64.b64encode(gzip.compress(library.encode(), 9, mtime=0)).decode()


def _body(run: RunFiles, drawn: "list[Chart]") -> Iterable[str]:
    yield _header(run)
    yield _tiles(run)
    if run.problems:
        yield _section("Absent or unreadable", _list(run.problems))
    if run.notices:
        yield _section("Notices", _notices(run.notices))
    yield f'<div class="charts">{"".join(_chart(i, chart) for i, chart in enumerate(drawn))}</div>'
    yield _section("Predicted against measured", _prediction(run))
    yield _section("Data", _table(run.data) if run.data else "<p>No data accounting has been logged yet.</p>")
    if run.row:
        yield _section("A row, what is learnt of it marked", _row(run.row))
    yield _section("Plan", _table(run.plan) if run.plan else "<p>No plan has been logged yet.</p>")
    if run.samples:
        yield _section("Samples", _samples(run.samples))
    recipe = f"<pre>{_text(run.recipe)}</pre>" if run.recipe is not None else "<p>recipe.yaml is missing.</p>"
    yield _section("Resolved recipe", recipe)


def _header(run: RunFiles) -> str:
    settings = run.settings
    model = settings.get("model")
    model = value(model) if model is not None else "unknown model"
    return f"<header><h1>{_text(run.path.resolve().name)}</h1><p>{_text(model)} · {_text(_state(run))}</p></header>"


def _state(run: RunFiles) -> str:
    """How far the run is. Nothing marks a run's end in its files but its last step."""
    if not run.train:
        return "no step yet"
    step = int(run.train[-1]["step"])
    train = run.settings.get("train")
    steps = number(train.get("steps")) if isinstance(train, dict) else None
    if steps is None:
        return f"step {step:,}"
    return (
        f"{counted(step, 'step')} done" if step >= steps else f"step {step:,} of {steps:,.0f}: in progress or stopped"
    )


def _tiles(run: RunFiles) -> str:
    losses = [loss for loss in column(run.train, "loss") if loss is not None][-LAST:]
    tokens, seconds = _total(run.train, "tokens"), _total(run.train, "step_seconds")
    before = next(iter(column(run.at_start, "loss")), None)
    evals = [loss for loss in column(run.evals[len(run.at_start) :], "loss") if loss is not None]
    peak, process = largest(run.train, "peak_gib"), largest(run.train, "rss_gib")
    tiles = {
        f"loss, mean of the last {counted(len(losses), 'update')}": f"{fmean(losses):.4f}" if losses else None,
        **({} if before is None else {"evaluation before training": f"{before:.4f}"}),
        "best evaluation": f"{min(evals):.4f}" if evals else None,
        "tokens trained": count(tokens) if tokens else None,
        "tokens a second": f"{tokens / seconds:,.0f}" if tokens and seconds else None,
        "time in steps": duration(seconds) if seconds else None,
        "MLX's peak memory": gib(peak) if peak is not None else None,
        "the whole process": gib(process) if process is not None else None,
    }
    shown = "".join(f"<div><b>{_text(v or '–')}</b><span>{_text(k)}</span></div>" for k, v in tiles.items())
    return f'<div class="tiles">{shown}</div>'


def _prediction(run: RunFiles) -> str:
    predicted, measured = number(run.plan.get("peak_gib")), largest(run.train, "peak_gib")
    if predicted is None:
        return "<p>No prediction has been logged: the plan has no peak.</p>"
    if measured is None:
        return f"<p>Predicted peak {_text(gib(predicted))}; nothing measured yet.</p>"
    step = next(record["step"] for record in run.train if number(record.get("peak_gib")) == measured)
    error = 100 * (predicted - measured) / measured if measured else 0.0
    return _table(
        {
            "predicted peak": gib(predicted),
            "measured peak": f"{gib(measured)} (step {int(step):,})",
            "error of the prediction": f"{error:+.1f} %",
        }
    )


def _chart(index: int, chart: "Chart") -> str:
    wide = " wide" if chart.wide else ""
    drawing = (
        f'<div class="plot" id="chart-{index}" style="min-height:{chart.figure.layout.height}px" role="img"'
        f' aria-label="{_text(chart.title)}"></div>'
        if chart.figure is not None
        else ""
    )
    return f'<section class="card{wide}"><h2>{_text(chart.title)}</h2><p>{_text(chart.caption)}</p>{drawing}</section>'


def _notices(notices: list[Record]) -> str:
    """Each text once, warnings first, with how often it came."""
    times: dict[tuple[str, str], int] = {}
    for notice in sorted(notices, key=lambda n: n.get("level") != "warning"):
        key = value(notice.get("level", "info")), value(notice.get("text", ""))
        times[key] = times.get(key, 0) + 1
    lines = [f"{level}: {text}" + (f" ({n} times)" if n > 1 else "") for (level, text), n in times.items()]
    return _list(lines)


def _row(row: Record) -> str:
    """A row of the data, what is learnt of it between marks and coloured."""
    pieces, flags = row.get("pieces"), row.get("supervised")
    if not isinstance(pieces, list) or not isinstance(flags, list):
        return "<p>data_row.json can't be read.</p>"
    runs = groupby(zip(flags, pieces, strict=False), itemgetter(0))
    texts = [(on, "".join(str(piece) for _, piece in run)) for on, run in runs]
    shown = "".join(f"<mark>{_text(text)}</mark>" if on else _text(text) for on, text in texts)
    said = f"{_text(value(row.get('origin')))}: {sum(map(bool, flags)):,} of {len(flags):,} tokens are learnt"
    return f'<div class="sample"><p>{said}</p><pre>{shown}</pre></div>'


def _samples(samples: list[Record]) -> str:
    prompts: dict[str, list[Record]] = {}
    for sample in samples[-SAMPLES:]:
        prompts.setdefault(str(sample.get("prompt", "")), []).append(sample)
    return "".join(_prompt(prompt, texts) for prompt, texts in prompts.items())


def _prompt(prompt: str, texts: list[Record]) -> str:
    """One prompt and what the adapter made of it over time: the newest in view, the older ones folded away."""
    shown = [
        f"<h3>step {_text(value(sample.get('step')))}</h3><pre>{_text(sample.get('text', ''))}</pre>"
        for sample in reversed(texts)
    ]
    older = f"<details><summary>earlier steps ({len(shown) - 1})</summary>{''.join(shown[1:])}</details>"
    return f'<div class="sample"><pre>{_text(prompt)}</pre>{shown[0]}{older if len(shown) > 1 else ""}</div>'


def _section(title: str, content: str) -> str:
    return f'<section class="card"><h2>{_text(title)}</h2>{content}</section>'


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _table(items: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(shown)}</td></tr>" for name, shown in named(items).items())
    return f"<table>{rows}</table>"


def _total(records: list[Record], key: str) -> float:
    return sum(v for v in column(records, key) if v is not None)


def _text(item: object) -> str:
    """`item` as HTML text or attribute value."""
    return html.escape(str(item), quote=True)


def _json(figures: Mapping[str, Any]) -> str:
    """Figures as JSON that no HTML parser can mistake for markup."""
    plain = {name: json.loads(figure.to_json()) for name, figure in figures.items()}
    text = json.dumps(plain, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def asset(name: str) -> str:
    """The text of a file of assets/."""
    return (files("segtrain.report") / "assets" / name).read_text(encoding="utf-8")
