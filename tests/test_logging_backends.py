"""Live loggers, against fakes of the trackers' modules."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from segtrain.errors import UserError
from segtrain.event import Evaluated, Memory, Notice, RunEnded, TrainStep
from segtrain.run.logging_backends import make_loggers

EVENTS = [
    Notice("not a figure"),
    TrainStep(3, 1.5, 1e-4, 0.2, 100, 50, 2.0, Memory(1.0, 0.5, 0.1, 2.0), {"accuracy": 0.75}),
    Evaluated(3, 1.25, 8, 1.0, True, {"nll": 1.0}),
    RunEnded("done", 3, 10.0, Path("adapters.safetensors")),
]


class Fake:
    """Records every call of a tracker's functions, by name, under the name of each tracker's module."""

    def __init__(self):
        self.calls = []

    def record(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self.namespace()

        return call

    def namespace(self):
        names = ("init", "log", "finish", "SummaryWriter", "add_scalar", "close")
        return SimpleNamespace(**{name: self.record(name) for name in names})

    def named(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def fake(monkeypatch):
    tracker = Fake()
    for name in ("wandb", "trackio", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, tracker.namespace())
    return tracker


def replay(names):
    (logger,) = make_loggers(names, Path("runs/my-run"), "my-project")
    for event in EVENTS:
        logger(event)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_figures_go_out_with_their_step_and_the_run_is_closed(fake, name):
    replay([name])
    assert fake.named("init")[0][1].items() >= {"project": "my-project", "name": "my-run"}.items()
    (train, at_train), (evaluated, at_eval) = fake.named("log")
    assert at_train == at_eval == {"step": 3}
    assert train[0]["train/loss"] == 1.5
    assert train[0]["train/accuracy"] == 0.75
    assert train[0]["train/tokens_per_second"] == 50.0
    assert evaluated[0] == {"eval/loss": 1.25, "eval/rows": 8, "eval/nll": 1.0}
    assert len(fake.named("finish")) == 1


def test_tensorboard_writes_scalars_into_the_run_directory(fake):
    replay(["tensorboard"])
    assert fake.named("SummaryWriter") == [(("runs/my-run/tensorboard",), {})]
    assert (("train/loss", 1.5, 3), {}) in fake.named("add_scalar")
    assert (("eval/loss", 1.25, 3), {}) in fake.named("add_scalar")
    assert len(fake.named("close")) == 1


def test_a_tracker_that_fails_does_not_end_the_run(fake, monkeypatch, capsys):
    def refuse(values, step):
        raise ConnectionError("the network\nis gone")

    monkeypatch.setattr(sys.modules["trackio"], "log", refuse)
    replay(["trackio"])
    assert capsys.readouterr().err.count("a tracker failed (the network is gone); the run goes on") == 1
    assert not fake.named("finish")


def test_nothing_is_named_nothing_is_imported(fake):
    assert make_loggers([], Path("run"), "p") == []
    assert fake.calls == []


def test_a_missing_package_is_named_before_any_tracker_starts(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r'pip install "segtrain-mlx\[trackio\]"'):
        make_loggers(["wandb", "trackio"], Path("run"), "p")
    assert fake.calls == []


def test_an_unknown_tracker_is_refused():
    with pytest.raises(UserError, match="unknown tracker 'mlflow'; choose from wandb, tensorboard, trackio"):
        make_loggers(["mlflow"], Path("run"), "p")
