"""What quantising a merged model again costs: the loss of base, base with adapter, and result, on the same rows."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import mlx.core as mx

from segtrain.data import open_data
from segtrain.data.rows import Row
from segtrain.engine import objectives
from segtrain.engine.layouts import CHOSEN, RESPONSE
from segtrain.engine.objectives import Objective
from segtrain.errors import UserError, counted
from segtrain.memory.meter import Meter
from segtrain.recipe.schema import Recipe
from segtrain.run.base import load_base
from segtrain.run.planning import Planner
from segtrain.run.session import Session, open_session
from segtrain.storage import checkpoint

ROWS = 32  # at most
HALF = 0.5  # of what training gained, below which dense is advised


def compared(run: Path, recipe: Recipe, params: Mapping[str, mx.array], result: Path) -> str:
    """What to say of the model in `result`, beside the run's base with the adapter `params`."""
    try:
        objective = _objective(run, recipe)
        session = _session(recipe, objective)
        rows, kind = _rows(recipe, session, objective)
        base = mean_loss(session, rows)
        session.lora.set(dict(params))
        before = mean_loss(session, rows)
        del session
        after = mean_loss(_session(recipe.model_copy(update={"model": str(result), "quantize": None}), objective), rows)
    except (UserError, KeyError) as error:
        return f"the loss before and after quantising could not be measured: {error}; compare it before you rely on it"
    return said(base, before, after, counted(len(rows), f"{kind} row"))


def said(base: float, before: float, after: float, rows: str) -> str:
    """The three losses in words, with what is left of the gain."""
    text = f"loss on {rows}: {base:.4f} base, {before:.4f} with the adapter, {after:.4f} merged and quantised"
    if base <= before:
        return text
    kept = (base - after) / (base - before)
    advice = "; a dense model keeps all of it: leave --quantize out" if kept < HALF else ""
    return f"{text} ({kept:.0%} of what training gained{advice})"


def _objective(run: Path, recipe: Recipe) -> Objective:
    """Of the loss that the run was trained with."""
    newest = checkpoint.newest_path(run)
    if newest is None:
        raise UserError(f"{run} holds no checkpoint, which would say what kind of rows it has")
    try:
        return objectives.of_recipe(str(checkpoint.read_manifest(newest)["state"]["loss"]), recipe)
    except (checkpoint.Unreadable, KeyError, TypeError) as error:
        raise UserError(f"{newest} doesn't say which loss its run had ({error})") from error


def _session(recipe: Recipe, objective: Objective) -> Session:
    """With a new adapter, which does nothing yet."""
    plain = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"init_from": None})})
    return open_session(plain, objective, load_base(plain))


def _rows(recipe: Recipe, session: Session, objective: Objective) -> tuple[Sequence[Row], str]:
    """Validation rows, or training rows where there are none."""
    data = open_data(recipe, session.loaded.tokenizer, pairs=objective.pairs)
    if data.valid is not None:
        return data.valid[:ROWS], "validation"
    number = ROWS if data.rows_per_epoch is None else min(ROWS, data.rows_per_epoch)
    return list(islice(data.train, number)), "training"


def mean_loss(session: Session, rows: Sequence[Row]) -> float:
    """Nats a token of the (chosen) responses."""
    answer = CHOSEN if session.objective.pairs else RESPONSE
    planner, nats, tokens = Planner(session, Meter()), 0.0, 0
    for row in rows:
        layout = session.layout(row)
        scores = planner.backward(layout).score(layout)
        nats -= float(scores.sums[answer].item())  # type: ignore[arg-type]  # a scalar
        tokens += int(scores.counts[answer])
    return nats / tokens
