"""The charts of a report, as plotly figures. Only numbers and this file's own words enter them.

Plotly reads markup in its texts, so no string of a data set, a model or a recipe may become a label here; a phase is
shown only where it looks like one that the trainer writes.
"""

import re
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from segtrain.report.run_files import Record, RunFiles, column, number, smoothed, thinned, worst_step

POINTS = 1500  # a longer curve is thinned to this many, so that the page stays small

# Readable on white and on near black; curves that share a chart also differ in dash or marker.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#3f83d8", "#d67b22", "#2f9e6e", "#9a6bd8", "#8b919c"

_PHASE = re.compile(r"[a-z_ ]{1,20}(\[\d{1,5}:\d{1,5}\])?")


@dataclass(frozen=True)
class Chart:
    """A titled figure and one sentence on how to read it; without a figure the sentence says what is absent."""

    title: str
    caption: str
    figure: go.Figure | None = None
    wide: bool = False


@dataclass
class _Curves:
    """The records of a run as curves over the step."""

    records: list[Record]
    x: list[float | None] = field(init=False)

    def __post_init__(self) -> None:
        self.x = thinned(column(self.records, "step"), POINTS, max)

    def has(self, *keys: str) -> bool:
        return all(any(value is not None for value in column(self.records, key)) for key in keys)

    def line(self, key: str, name: str, color: str, reduce: Any = fmean, **options: Any) -> go.Scatter:
        return self.curve(column(self.records, key), name, color, reduce, **options)

    def curve(
        self, values: list[float | None], name: str, color: str, reduce: Any = fmean, **options: Any
    ) -> go.Scatter:
        line = {"color": color, "width": 2, **options.pop("line", {})}
        y = thinned(values, POINTS, reduce)
        mode = "lines+markers" if len(y) < 2 else "lines"
        return go.Scatter(**{"x": self.x, "y": y, "name": name, "mode": mode, "line": line, **options})


def charts(run: RunFiles) -> list[Chart]:
    """Every chart, in the page's order; preference charts only where the run has such figures."""
    train = _Curves(run.train)
    found = [_loss(run, train)]
    if train.has("chosen_logp", "rejected_logp"):
        found += [_margins(train), _accuracy(run, train)]
    found += [
        _simple(train, "learning_rate", "Learning rate", "The rate of each update."),
        _simple(train, "grad_norm", "Gradient norm", "Before clipping. Spikes point at odd rows."),
        _simple(train, "tokens_per_second", "Throughput", "Tokens a second, prompt tokens included."),
        _memory(run, train),
        _phases(run),
    ]
    return found


def _figure(traces: list[Any], y: str, x: str = "step", **layout: Any) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(
        template="none",
        margin={"l": 58, "r": 14, "t": 8, "b": 44},
        height=layout.pop("height", 300),
        showlegend=len(traces) > 1,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        hovermode="x unified",
        xaxis={"title": {"text": x}, "zeroline": False, "automargin": True, **layout.pop("xaxis", {})},
        yaxis={"title": {"text": y, "standoff": 8}, "zeroline": False, "automargin": True, **layout.pop("yaxis", {})},
        **layout,
    )
    return figure


def _loss(run: RunFiles, train: _Curves) -> Chart:
    title = "Loss"
    if not train.has("loss"):
        return Chart(title, "No training step has been logged yet.", wide=True)
    values = column(run.train, "loss")
    traces = [
        train.curve(values, "each step", BLUE, line={"width": 1}, opacity=0.55),
        train.curve(smoothed(values), "smoothed", BLUE, line={"width": 2.5}),
    ]
    evals = _Curves(run.evals)
    if evals.has("loss"):
        traces.append(evals.line("loss", "evaluation", ORANGE, mode="lines+markers", marker={"size": 8}))
    else:
        return Chart(title, "Nats a token. There is no evaluation in this run.", _figure(traces, "nats a token"), True)
    return Chart(title, "Nats a token; the same validation rows each time.", _figure(traces, "nats a token"), True)


def _margins(train: _Curves) -> Chart:
    chosen, rejected = column(train.records, "chosen_logp"), column(train.records, "rejected_logp")
    margin = [None if a is None or b is None else a - b for a, b in zip(chosen, rejected, strict=True)]
    traces = [
        train.curve(smoothed(chosen), "chosen", GREEN),
        train.curve(smoothed(rejected), "rejected", ORANGE, line={"dash": "dash"}),
        train.curve(smoothed(margin), "margin", PURPLE, line={"dash": "dot"}),
    ]
    if train.has("log_odds"):
        traces.append(train.curve(smoothed(column(train.records, "log_odds")), "log odds", GREY))
    if train.has("rewards_margins"):
        traces.append(train.curve(smoothed(column(train.records, "rewards_margins")), "reward margin", GREY))
    caption = "Mean log-prob of a response token, smoothed; the margin is chosen minus rejected and should rise."
    return Chart("Preference margins", caption, _figure(traces, "nats"))


def _accuracy(run: RunFiles, train: _Curves) -> Chart:
    if not train.has("accuracy"):
        return Chart("Preference accuracy", "The run has logged no accuracy.")
    traces = [train.curve(smoothed(column(train.records, "accuracy")), "training, smoothed", BLUE)]
    evals = _Curves(run.evals)
    if evals.has("accuracy"):
        traces.append(evals.line("accuracy", "evaluation", ORANGE, mode="lines+markers", marker={"size": 8}))
    caption = "Share of pairs whose chosen response has the higher reward, or is the likelier one; 0.5 is chance."
    return Chart("Preference accuracy", caption, _figure(traces, "share", yaxis={"range": [0, 1.03]}))


def _simple(train: _Curves, key: str, title: str, caption: str) -> Chart:
    if not train.has(key):
        return Chart(title, "Not logged in this run.")
    unit = {"tokens_per_second": "tokens/s", "grad_norm": "norm", "learning_rate": "rate"}[key]
    layout = {"tickformat": ".1e", "rangemode": "tozero"} if key == "learning_rate" else {"rangemode": "tozero"}
    values = column(train.records, key)
    traces = [train.curve(values, "each step", BLUE)]
    if key == "tokens_per_second":
        traces = [
            train.curve(values, "each step", BLUE, line={"width": 1}, opacity=0.55),
            train.curve(smoothed(values), "smoothed", BLUE, line={"width": 2.5}),
        ]
    return Chart(title, caption, _figure(traces, unit, yaxis=layout))


def _memory(run: RunFiles, train: _Curves) -> Chart:
    title = "Memory"
    if not train.has("peak_gib"):
        return Chart(title, "Not logged in this run.")
    names = [("peak_gib", "peak", BLUE, "solid"), ("active_gib", "active", GREEN, "dash")]
    names += [("cache_gib", "cache", GREY, "dot"), ("rss_gib", "process", PURPLE, "dashdot")]
    traces = [train.line(k, name, c, max, line={"dash": dash}) for k, name, c, dash in names if train.has(k)]
    predicted = number(run.plan.get("peak_gib"))
    caption = "GiB after each step: the allocator's peak, what is in use, its cache, and the whole process."
    if predicted is not None:
        ends = [x for x in train.x if x is not None]
        line = {"color": ORANGE, "dash": "longdash", "width": 1.5}
        traces.append(
            go.Scatter(x=[ends[0], ends[-1]], y=[predicted] * 2, name="predicted peak", mode="lines", line=line)
        )
    return Chart(title, caption, _figure(traces, "GiB", yaxis={"rangemode": "tozero"}))


def _phases(run: RunFiles) -> Chart:
    title = "Memory by phase of the worst step"
    phases = worst_step(run.memory)
    if not phases:
        return Chart(title, "memory.jsonl has no phases.", wide=True)
    labels = [_phase_label(i, record, phases) for i, record in enumerate(phases)]
    seconds = [number(record.get("seconds")) for record in phases]
    traces = [
        go.Bar(x=labels, y=column(phases, "peak_gib"), name="peak", marker={"color": BLUE}, customdata=seconds,
               hovertemplate="%{y:.3f} GiB in %{customdata:.3f} s"),
        go.Scatter(x=labels, y=column(phases, "active_gib"), name="in use at the end", mode="markers",
                   marker={"color": ORANGE, "size": 7, "symbol": "diamond"}, hovertemplate="%{y:.3f} GiB"),
    ]  # fmt: skip
    step = number(phases[0].get("step"))
    caption = f"GiB in each phase of step {step or 0:,.0f}, in the order they ran: the step with the highest peak."
    ticks = {"type": "category", "tickangle": -60, "nticks": 24, "automargin": True, "range": [-0.6, len(labels) - 0.4]}
    layout = {"yaxis": {"rangemode": "tozero"}, "xaxis": ticks, "height": 380, "bargap": 0.15}
    return Chart(title, caption, _figure(traces, "GiB", "", **layout), True)


def _phase_label(index: int, record: Record, phases: list[Record]) -> str:
    name = str(record.get("phase", ""))
    label = name if _PHASE.fullmatch(name) else f"phase {index + 1}"
    streams = {str(other.get("stream")) for other in phases if number(other.get("stream")) is not None}
    stream = number(record.get("stream"))
    return label if len(streams) < 2 or stream is None else f"{label} stream {stream:.0f}"
