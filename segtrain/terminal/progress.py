"""A run's events as text on stdout: a short live area on a terminal, plain lines everywhere else.

`make_progress` yields the function that renders events. The renderers of the other commands live in
`segtrain.terminal` and are re-exported here.
"""

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from segtrain.errors import counted
from segtrain.event import (
    DataRead,
    Evaluated,
    Event,
    Notice,
    PlanChosen,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    TrainStep,
)
from segtrain.terminal.bench import print_bench
from segtrain.terminal.check import print_check
from segtrain.terminal.console import is_live, line_width, make_console, silence, unicode_bars, write
from segtrain.terminal.doctor import print_doctor
from segtrain.terminal.evaluation import print_evaluation
from segtrain.terminal.format import (
    clean,
    clipped,
    compact,
    count,
    duration,
    gib,
    listed,
    paragraph,
    wrapped,
)
from segtrain.terminal.models import print_models
from segtrain.terminal.plan import plan_pieces
from segtrain.terminal.preview import print_preview
from segtrain.terminal.verify import print_verify

__all__ = [
    "make_progress",
    "print_bench",
    "print_check",
    "print_doctor",
    "print_evaluation",
    "print_models",
    "print_preview",
    "print_verify",
]

Clock = Callable[[], float]

REFRESH_SECONDS = 0.25  # the live area is never repainted more often: it stays calm over ssh
SMOOTHING = 0.9  # weight of the past in the smoothed loss
LAST = 5  # updates whose mean loss stands for a run's end
SAMPLE_CHARACTERS = 300

_METRICS = {  # metric: (name shown, format)
    "nll": ("nll", ".3f"),
    "log_odds": ("log-odds", ".2f"),
    "accuracy": ("acc", ".2f"),
    "rewards_margins": ("margin", ".2f"),
    "rewards_chosen": ("reward chosen", ".2f"),
    "rewards_rejected": ("reward rejected", ".2f"),
    "chosen_logp": ("chosen", ".2f"),
    "rejected_logp": ("rejected", ".2f"),
    "shared_tokens": ("shared", ",.0f"),
}


@contextmanager
def make_progress(
    *, console: Console | None = None, every: int = 1, clock: Clock = time.monotonic
) -> Iterator[Callable[[Event], None]]:
    """The function that renders events; what it keeps on screen is put in order when the context ends.

    Where the output is closed (`| head`, a terminal that hung up) it renders nothing more, and the run goes on. Plain
    output has one line for every `every` steps (and for the last one), with means over those steps.
    """
    if every < 1:
        raise ValueError(f"report_every must be at least 1, not {every}")
    console = console or make_console()
    view = _Live(console, clock) if is_live(console) else _Plain(console, clock, every)
    screen = _Screen(view)
    try:
        yield screen.show
    finally:
        screen.close()


class _Screen:
    """A view until its output is closed."""

    def __init__(self, view: "_Live | _Plain") -> None:
        self.view: _Live | _Plain | None = view

    def show(self, event: Event) -> None:
        if self.view is not None:
            self._do(lambda view: view.show(event))

    def close(self) -> None:
        if self.view is not None:
            self._do(lambda view: view.close())

    def _do(self, act: "Callable[[_Live | _Plain], None]") -> None:
        assert self.view is not None
        try:
            act(self.view)
        except (OSError, SystemExit):  # rich makes an exit of a broken pipe
            self.view = None
            silence()


@dataclass
class _Run:
    """What the rendering of one event needs to know of the events before it."""

    clock: Clock
    started: float = 0.0
    model: str = ""
    steps: int = 0
    first_step: int = 0
    predicted_gib: float | None = None
    peak_gib: float = 0.0
    process_gib: float = 0.0
    tokens: int = 0
    step_seconds: float = 0.0
    first_loss: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    last: TrainStep | None = None
    before: Evaluated | None = None  # the evaluation ahead of the first update
    best: Evaluated | None = None
    _average: float = 0.0
    _weight: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.clock()

    def note(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.steps, self.first_step, self.started = event.steps, event.first_step, self.clock()
                self.model = event.base or event.model
            case PlanChosen():
                peak = event.plan.get("peak_gib")
                self.predicted_gib = float(peak) if isinstance(peak, (int, float)) else None
            case Evaluated() if event.step == 0:
                self.before, self.started = event, self.clock()  # the pace is that of what follows
            case Evaluated() if event.best:
                self.best = event
            case TrainStep():
                self._note_step(event)

    def _note_step(self, event: TrainStep) -> None:
        self.last = event
        self.first_loss = event.loss if self.first_loss is None else self.first_loss
        self.losses.append(event.loss)
        self.peak_gib = max(self.peak_gib, event.memory.peak_gib)
        self.process_gib = max(self.process_gib, event.memory.rss_gib)
        self.tokens += event.tokens
        self.step_seconds += event.step_seconds
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * event.loss
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)

    @property
    def smoothed(self) -> float:
        """The exponential average of the loss, without the pull towards its start at 0."""
        return self._average / self._weight

    @property
    def left(self) -> float | None:
        """Seconds to the end at the pace so far, evaluations and saves included; None before the first step."""
        done = self.last.step - self.first_step if self.last else 0
        if done < 1 or self.last is None:
            return None
        return (self.clock() - self.started) / done * (self.steps - self.last.step)


@dataclass
class _Interval:
    """The steps since the last plain line; the loss is the mean over their supervised tokens."""

    steps: list[TrainStep] = field(default_factory=list)

    def summary(self) -> TrainStep:
        last, weights = self.steps[-1], [step.supervised_tokens for step in self.steps]
        total = sum(weights) or 1
        return TrainStep(
            last.step,
            sum(step.loss * weight for step, weight in zip(self.steps, weights, strict=True)) / total,
            last.learning_rate,
            last.grad_norm,
            sum(step.tokens for step in self.steps),
            sum(weights),
            sum(step.step_seconds for step in self.steps),
            max((step.memory for step in self.steps), key=lambda memory: memory.peak_gib),
            {name: _mean([s.metrics[name] for s in self.steps if name in s.metrics]) for name in last.metrics},
            sum(step.padding_tokens for step in self.steps),
        )


class _Plain:
    """One line a report, no control characters."""

    def __init__(self, console: Console, clock: Clock, every: int) -> None:
        self.console, self.every = console, every
        self.run, self.interval = _Run(clock), _Interval()

    def show(self, event: Event) -> None:
        self.run.note(event)
        if isinstance(event, TrainStep):
            self.interval.steps.append(event)
            if event.step % self.every == 0 or event.step == self.run.steps:
                self._report()
            return
        if isinstance(event, RunEnded):
            self._report()
        write(self.console, *permanent(event, self.run, line_width(self.console)), styled=False)

    def close(self) -> None:
        self._report()

    def _report(self) -> None:
        if self.interval.steps:
            step, self.interval = self.interval.summary(), _Interval()
            write(self.console, *_plain_step(step, self.run, line_width(self.console)), styled=False)


class _Live:
    """A live area of two or three lines below the permanent ones; repainted when steps come, not by a timer."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self.console, self.clock, self.run = console, clock, _Run(clock)
        self.painted = float("-inf")
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.live.start()

    def show(self, event: Event) -> None:
        self.run.note(event)
        if isinstance(event, TrainStep):
            self._paint()
            return
        if isinstance(event, RunEnded):
            self.live.stop()
        write(self.console, *permanent(event, self.run, line_width(self.console)), styled=True)

    def close(self) -> None:
        """Leave a terminal as it was; a run that broke off leaves its last figures."""
        if self.live.is_started:
            self.live.stop()
            if self.run.last is not None:
                write(self.console, f"stopped after step {self.run.last.step:,}/{self.run.steps:,}", styled=True)
            write(self.console, *_figures(self.run), styled=True)

    def _paint(self) -> None:
        now = self.clock()
        if now - self.painted < REFRESH_SECONDS and self.run.last and self.run.last.step < self.run.steps:
            return
        self.painted = now
        lines = [_bar(self.run, self.console), *_figures(self.run)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        self.live.update(Group(*lines), refresh=True)


def permanent(event: Event, run: _Run, width: int) -> list[Text]:
    """The lines an event leaves on screen for good; steps leave none."""
    match event:
        case RunStarted():
            return _started(event, width)
        case DataRead():
            return _styled(wrapped("data", listed(event.counts), width), "cyan", 4)
        case PlanChosen():
            return _styled(wrapped("plan", plan_pieces(event.plan), width), "cyan", 4)
        case Evaluated():
            return [_evaluated(event)]
        case Saved():
            return [Text(f"saved step {event.step}: {clean(event.path)}", "dim")]
        case Sampled():
            return _sampled(event, width)
        case Notice(level="warning"):
            return _styled(paragraph("warning: ", event.text, width), "bold yellow", 8)
        case Notice():
            return _styled(paragraph("note: ", event.text, width), "bold", 5)
        case RunEnded():
            return _ended(event, run, width)
    return []


def _started(event: RunStarted, width: int) -> list[Text]:
    share = 100 * event.trainable_parameters / max(event.total_parameters, 1)
    sizes = f"{compact(event.trainable_parameters)} of {compact(event.total_parameters)} parameters"
    pieces = [
        clean(event.model),
        f"({clean(event.model_type)}, {counted(event.layers, 'layer')})",
        f"training {sizes} ({share:.2g} %)",
    ]
    left = event.first_step < event.steps
    done = f"{counted(event.first_step, 'step')} done"
    steps = f"steps {event.first_step + 1:,} to {event.steps:,}" if left else done
    head = wrapped(event.command, pieces, width)
    return [
        *_styled(head, "bold", len(event.command)),
        *map(Text, wrapped("run", [clean(event.directory), steps], width)),
    ]


def _evaluated(event: Evaluated) -> Text:
    extra = "".join(f"  {name} {number}" for name, number in _metrics(event.metrics))
    over = f"over {counted(event.rows, 'row')} in {duration(event.seconds)}"
    text = f"eval step {event.step}: loss {event.loss:.4f}{extra}  {over}"
    remark = "  (best so far)" if event.best else "" if event.step else "  (before training)"
    return Text(text + remark, "green" if event.best else "")


def _sampled(event: Sampled, width: int) -> list[Text]:
    prompt = Text(f"sample step {event.step}: {clipped(event.prompt, width - 20)}", "magenta")
    return [prompt, *map(Text, paragraph("  ", clipped(event.text, SAMPLE_CHARACTERS), width))]


def _ended(event: RunEnded, run: _Run, width: int) -> list[Text]:
    if run.last is None:
        far = f"step {event.step:,} of {run.steps:,}"
        pieces = ["nothing was trained", far if event.step < run.steps else f"{counted(event.step, 'step')} done"]
    else:
        whole = f", {event.step:,} in all" if event.first_step else ""
        pieces = [f"{counted(event.step - event.first_step, 'step')} in {duration(event.seconds)}{whole}"]
    if run.last is not None and run.first_loss is not None:
        several = f"mean of the last {counted(len(run.losses), 'update')}"
        updates = several if len(run.losses) > 1 else "one update"
        pieces.append(f"loss {run.first_loss:.4f} to {_mean(list(run.losses)):.4f} ({updates})")
        pieces.append(f"{run.tokens / max(run.step_seconds, 1e-9):,.0f} tok/s")
        predicted = "" if run.predicted_gib is None else f" (predicted {gib(run.predicted_gib)})"
        pieces.append(f"MLX's peak {gib(run.peak_gib)}{predicted}")
        pieces.append(f"the process {gib(run.process_gib)}")
    if run.best is not None:
        before = "" if run.before is None else f" ({run.before.loss:.4f} before training)"
        pieces.append(f"best eval loss {run.best.loss:.4f} at step {run.best.step}{before}")
    done = event.reason == "done"
    more = {key: v for key, v in event.summary.items() if run.best is None or not key.startswith("best_")}
    lines = wrapped(event.reason, [*pieces, *listed(more)], width)
    if event.step:
        lines += wrapped("adapter", [clean(event.adapter)], width)
        lines += _next_commands(run.model, event.adapter.parent) if done else []
    if not done:
        lines.append(
            "the checkpoint is complete; the same command with --resume goes on from it"
            if event.step
            else "there was nothing to save yet; the same command with --resume starts the run"
        )
    return _styled(lines, "bold green" if done else "bold yellow", len(event.reason))


def _next_commands(model: str, run: Path) -> list[str]:
    """What to type next, in a form that can be copied."""
    model, directory = shlex.quote(clean(model)), shlex.quote(clean(run))
    return [
        f"next  mlx_lm.generate --model {model} \\",
        f'        --adapter-path {directory} --prompt "..."',
        f"      segtrain report {directory}",
    ]


def _bar(run: _Run, console: Console) -> Text:
    """`step 120/600 ━━━━━━─────────  20 %  12:05 left`, as wide as the figures below it."""
    step = run.last.step if run.last else run.first_step
    done = step / max(run.steps, 1)
    head = f"step {step:,}/{run.steps:,} "
    tail = f" {100 * done:3.0f} %  {_left(run)}"
    room = max(line_width(console) - len(head) - len(tail) - 1, 0)
    full = min(round(room * done), room)
    mark, rest = ("━", "─") if unicode_bars(console) else ("#", "-")
    return Text.assemble((head, "bold"), (mark * full, "green"), (rest * (room - full), "dim"), tail)


def _figures(run: _Run) -> list[Text]:
    """The live figures of the newest step; a second line where the loss brings metrics of its own."""
    if run.last is None:
        return []
    last = run.last
    first = Text.assemble(
        ("loss ", "dim"),
        (f"{last.loss:.4f}", "bold"),
        (f" smoothed {run.smoothed:.4f}", ""),
        ("  lr ", "dim"),
        f"{last.learning_rate:.2e}",
        ("  grad ", "dim"),
        f"{last.grad_norm:.3g}",
        ("  ", ""),
        f"{last.tokens_per_second:,.0f} tok/s",
        ("  peak ", "dim"),
        gib(last.memory.peak_gib),
    )
    metrics = _metrics(last.metrics)
    second = Text("  ").join(Text.assemble((f"{name} ", "dim"), number) for name, number in metrics)
    return [first, second] if metrics else [first]


def _plain_step(step: TrainStep, run: _Run, width: int) -> list[Text]:
    pieces = [
        f"step {step.step}/{run.steps}",
        f"loss {step.loss:.4f}",
        f"lr {step.learning_rate:.2e}",
        f"{step.tokens_per_second:,.0f} tok/s",
        gib(step.memory.peak_gib),
        _left(run),
    ]
    metrics = [f"{name} {number}" for name, number in _metrics(step.metrics)]
    return [Text("  ".join(pieces)), *(map(Text, wrapped("", metrics, width)) if metrics else [])]


def _metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    known = [(name, format(metrics[key], form)) for key, (name, form) in _METRICS.items() if key in metrics]
    return known + [(clean(key), count(metrics[key])) for key in metrics if key not in _METRICS]


def _left(run: _Run) -> str:
    return "" if run.left is None else f"{duration(run.left)} left"


def _styled(lines: list[str], style: str, length: int) -> list[Text]:
    """Lines whose first word is set off by a style; without colour they read the same."""
    texts = [Text(line) for line in lines]
    texts[0].stylize(style, 0, length)
    return texts


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
