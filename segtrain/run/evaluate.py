"""Evaluation of a run's adapter on rows that were not trained on, beside the models that it is to be better than.

By the planner's choice for a row's length, short rows together as in training, so memory is that of the longest row
without backward; ranks share the rows. The loss is the run's own. What compares any two models on any loss: perplexity,
and for pairs how often and by how much the chosen response is likelier per token.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from segtrain.data.dataset import open_fixed
from segtrain.engine import objectives
from segtrain.engine.backward import Backward, reference_sums
from segtrain.engine.layouts import CHOSEN, REJECTED, RESPONSE, Layout
from segtrain.engine.objectives import LossValue, Objective, Scores
from segtrain.errors import UserError
from segtrain.lora import adapters
from segtrain.memory.meter import Meter, allocator_as_it_was
from segtrain.models.positions import check_positions
from segtrain.parallel.ranks import Ranks, join
from segtrain.recipe.schema import Recipe
from segtrain.run.base import load_base
from segtrain.run.passes import Passes
from segtrain.run.planning import Planner
from segtrain.run.session import Session, open_session
from segtrain.run.streaming import streams
from segtrain.storage import checkpoint
from segtrain.storage.run_directory import best

Progress = Callable[[int, int | None], None]
ADAPTER, START, BASE = "adapter", "start", "base"
LIKELIER, LEAD = "chosen_likelier", "chosen_lead"


@dataclass(frozen=True)
class Evaluation:
    """`models`: figures by name: `adapter`; where they were asked for, `start` (what it began with) and `base`."""

    run: str
    command: str
    adapter: str
    data: str
    rows: int
    tokens: int  # scored ones
    models: dict[str, dict[str, float]]
    notices: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(run: Path, recipe: Recipe, *, base: bool, last: bool, progress: Progress) -> Evaluation:
    """Evaluate on the recipe's `data.test`. Raises UserError."""
    with allocator_as_it_was() as held:
        return _evaluate(run, recipe, Meter(held=held), base=base, last=last, progress=progress)


def _evaluate(run: Path, recipe: Recipe, meter: Meter, *, base: bool, last: bool, progress: Progress) -> Evaluation:
    ranks = join()
    adapter, command = _adapter(run, last)
    objective = objectives.of_recipe(command, recipe)
    params = adapters.read(adapter).params
    loaded = load_base(recipe, partial(streams, recipe, sharing=ranks.local))
    rows, longest, notices = open_fixed(recipe, loaded.tokenizer, "test", pairs=objective.pairs)
    notices += check_positions(loaded.config, longest)
    session = open_session(recipe, objective, loaded)
    _require_fit(adapter, params, session)
    session.lora.set(params)
    sums = {name: _Sums(objective) for name in _compared(session, base)}
    planner = Planner(session, meter, sharing=ranks.local)
    for layout, backward, number in Passes(session, planner.backward, planner.cut).over(rows, ranks):
        for name, scores in _scored(session, backward, layout, sums):
            sums[name].add(scores, objective.loss(scores), layout.rows)
        progress(number, len(rows))
    for one in sums.values():
        one.exchange(ranks)
    ranks.leave()
    models = {name: one.figures() for name, one in sums.items()}
    data = ", ".join(source.path for source in recipe.data.test) or "test rows beside data.train"
    tokens = round(sums[ADAPTER].totals["tokens"])
    return Evaluation(str(run), command, str(adapter), data, len(rows), tokens, models, notices)


def _compared(session: Session, base: bool) -> list[str]:
    """Names of the models: the adapter; with `base`, the one that `lora.init_from` gave, and none."""
    begun = [START] if session.lora.start is not None else []
    return [ADAPTER, *begun, BASE] if base else [ADAPTER]


def _scored(session: Session, backward: Backward, layout: Layout, names: Iterable[str]) -> Iterator[tuple[str, Scores]]:
    """Each model's scores of one row, or of several together."""
    lora = session.lora
    models: dict[str, Callable[[], AbstractContextManager[None]]] = {
        ADAPTER: nullcontext,
        START: lora.as_at_start,
        BASE: lora.disabled,
    }
    reference = reference_sums(backward, layout)
    for name in names:
        with models[name]():
            yield name, replace(backward.score(layout), reference=reference)


@dataclass
class _Sums:
    """What one model's figures are made of, summed over rows."""

    objective: Objective
    totals: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("rows", "loss", "weight", "logp", "count", "tokens", LIKELIER, LEAD, *self.objective.metrics)
        self.totals = dict.fromkeys(names, 0.0)

    def add(self, scores: Scores, value: LossValue, rows: int) -> None:
        answer = CHOSEN if self.objective.pairs else RESPONSE
        found: dict[str, Any] = {"rows": 1.0, "loss": value.total, "weight": value.weight, **value.metrics}
        found |= {"logp": scores.sums[answer], "count": scores.counts[answer]}
        found["tokens"] = scores.counts[answer] + scores.counts.get(REJECTED, 0)
        if self.objective.pairs:
            lead = scores.sums[CHOSEN] / scores.counts[CHOSEN] - scores.sums[REJECTED] / scores.counts[REJECTED]
            found |= {LIKELIER: lead > 0, LEAD: lead}
        for name, number in found.items():
            self.totals[name] += _summed(number, rows)

    def exchange(self, ranks: Ranks) -> None:
        _, summed = ranks.sum({}, list(self.totals.values()))
        self.totals = dict(zip(self.totals, summed, strict=True))

    def figures(self) -> dict[str, float]:
        """Loss by its weight, perplexity by tokens (of pairs: of chosen), the rest by rows."""
        total = self.totals
        nats = -total["logp"] / total["count"]
        found = {"loss": total["loss"] / total["weight"], "perplexity": math.exp(min(nats, 700.0))}
        names = [LIKELIER, LEAD] * self.objective.pairs + list(self.objective.metrics)
        return found | {name: total[name] / total["rows"] for name in names}


def _summed(number: mx.array | float, rows: int) -> float:
    """The sum over rows of what is one number for each of them, or one for them all."""
    if not isinstance(number, mx.array):
        return float(number) * rows
    return float(cast(float, mx.broadcast_to(number.astype(mx.float32), (rows,)).sum().item()))


def _adapter(run: Path, last: bool) -> tuple[Path, str]:
    """The directory of the adapter to take, and the command that trained it. Raises UserError."""
    newest = checkpoint.newest_path(run)
    if newest is None:
        raise UserError(f"{run} holds no checkpoint; give the directory of a run that has saved one")
    try:
        command = str(checkpoint.read_manifest(newest)["state"]["loss"])
    except (checkpoint.Unreadable, KeyError, TypeError) as error:
        raise UserError(f"{newest} doesn't say which loss its run had: {error}") from error
    return (None if last else best(run)) or newest, command


def _require_fit(adapter: Path, params: Mapping[str, mx.array], session: Session) -> None:
    """Raises UserError where the adapter has other names or shapes than the recipe's."""
    expected = {name: tuple(value.shape) for name, value in session.lora.values().items()}
    found = {name: tuple(value.shape) for name, value in params.items()}
    odd = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    if odd:
        raise UserError(
            f"the adapter in {adapter} doesn't fit the run's recipe ({min(odd)}: {found.get(min(odd))}, the recipe's "
            f"is {expected.get(min(odd))}); put model and lora in the recipe back as they were"
        )
