"""Gradients checked with this model, on this machine: segmented against plain autodiff of mlx-lm's forward pass.

The reference uses nothing of segtrain's but LoRA: the model is called with mlx-lm's caches, masks, attention and
positions, a preference pair as two streams, all logits at once. Both run in float32 where memory allows, on the same
random B matrices (with B = 0, as training starts, the gradient of A would vanish).

Two right orders of summation differ more in a deep model than in a shallow one. Where they differ by more than the
tolerance of float32, both are compared with the plain pass in float64, and the segmented one passes if it is about as
near to that. A short row can't show what changes with the row's length (rotary embeddings that follow it, padding,
positions that end, attention and MLP in blocks), so a row as long as the longest one is compared too, run by the plan
that training would choose. Where plain autodiff of the whole model has no memory for it, the reference goes a layer at
a time (`run.layerwise`); where that has none either, the row is as long as there is memory for, and the report says so.
Where weights are streamed the model is never held, and every reference goes a layer at a time.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from segtrain.data import PreferenceRow, Row, SupervisedRow, open_data
from segtrain.data.rows import Origin
from segtrain.engine import objectives
from segtrain.engine.backward import Backward, FullBackward, SegmentedBackward, Step
from segtrain.engine.layouts import Layout
from segtrain.errors import RunFailed, UserError
from segtrain.lora.layers import Lora
from segtrain.memory.backends import here
from segtrain.memory.device import default_budget
from segtrain.memory.meter import Meter
from segtrain.models.load import Loaded
from segtrain.models.plain import PlainForward
from segtrain.models.positions import check_positions
from segtrain.recipe.schema import Recipe
from segtrain.run.base import load_base
from segtrain.run.layerwise import Layerwise
from segtrain.run.planning import Planner
from segtrain.run.session import Session, open_session
from segtrain.run.streaming import streams

EXACT, HALF = 1e-4, 0.2  # tolerances in float32 and in 16 bits, where two exact orders of summation differ by percents
SHORT = 256  # tokens of a row that are compared
TRUTH = 2.0  # times the plain gradients' distance from float64 that the segmented ones may have
COPIES = 4  # of the logits, and of each layer's attention scores, that plain autodiff holds
CANDIDATES = 32  # rows of which the shortest is taken
ROOM = 1.5  # times the memory a token that a short row takes a layer at a time, for a long one


class Reference(Protocol):
    """What gives the gradients that segmented ones are compared with."""

    def step(self, layout: Layout) -> Step: ...


@dataclass(frozen=True)
class ModuleError:
    """|segmented - full| / |full| of the LoRA gradients of one module."""

    module: str
    relative_error: float


@dataclass(frozen=True)
class VerifyReport:
    """The errors by module, and the losses of the row in its unit (summed for SFT)."""

    passed: bool
    tolerance: float
    rows: list[ModuleError]
    loss_full: float
    loss_segmented: float
    tokens: int = 0
    segment_size: int = 1
    row: str = ""
    long_tokens: int = 0  # of the longest row that was compared, its largest relative error, and with what
    long_error: float = 0.0
    long_reference: str = ""
    longest: int = 0  # tokens of the longest row there is

    @property
    def loss_error(self) -> float:
        return abs(self.loss_segmented - self.loss_full) / max(abs(self.loss_full), 1e-30)


def verify_gradients(recipe: Recipe) -> VerifyReport:
    """Compare on a short row of the recipe's data. Raises UserError for what is wrong with model or data."""
    loaded = load_base(recipe, partial(streams, recipe))
    row, longest = _short_row(recipe, loaded.tokenizer)
    check_positions(loaded.config, longest)
    objective = objectives.for_rows(pairs=isinstance(row, PreferenceRow), recipe=recipe)
    session = open_session(recipe, objective, loaded)
    report = compare(session, row)
    return _and_long(session, row, longest, replace(report, longest=longest))


def _and_long(session: Session, row: Row, longest: int, report: VerifyReport) -> VerifyReport:
    """`report` with what a row of `longest` tokens showed, or of as many as there is memory for."""
    planner = Planner(session, Meter())
    whole = min(longest, _most(session))
    tokens = min(longest, planner.fitting(longest))
    if tokens > whole:
        tokens = max(whole, min(tokens, _most_layerwise(session, row)))
    if tokens <= report.tokens:
        return report
    long = lengthened(row, tokens)
    running = _as_planned(session, planner, long)
    reference = Layerwise(session.stack, session.lora, session.objective) if tokens > whole else None
    found = _compared(session, long, running, reference)
    worst = max(error.relative_error for error in found.rows)
    how = "autodiff a layer at a time" if reference else "autodiff of the whole model"
    passed = report.passed and found.passed
    return replace(report, passed=passed, long_tokens=tokens, long_error=worst, long_reference=how)


def _as_planned(session: Session, planner: Planner, row: Row) -> Backward | None:
    """The backward pass with which training would run the row; None where it would refuse it."""
    try:
        return session.backward(planner.plan_for(session.layout(row)))
    except RunFailed:
        return None


def check_unproven(session: Session) -> None:
    """Raise UserError unless a model that no test covers with this mlx-lm gives the same gradients either way.

    Uses a row of made-up tokens. The model is as before afterwards.
    """
    tokens = [(7 * i * i + 3 * i) % min(session.loaded.vocabulary, 1000) for i in range(48)]
    origin = Origin("made-up tokens", 1)
    row = (
        PreferenceRow(tokens[:20], tokens[20:32], tokens[32:], origin)
        if session.objective.pairs
        else SupervisedRow(tokens, [True] * len(tokens), origin)
    )
    report = compare(session, row)
    if not report.passed:
        worst = max(report.rows, key=lambda row: row.relative_error)
        raise UserError(
            f"the segmented gradients of {session.recipe.model} differ from plain ones "
            f"(by {worst.relative_error:.1e} at {worst.module}), so it isn't trained"
        )


def compare(session: Session, row: Row) -> VerifyReport:
    """Segmented against full on the first tokens of `row`. The model and the adapter are as before afterwards."""
    return _compared(session, shortened(row))


def _compared(
    session: Session, row: Row, running: Backward | None = None, reference: Reference | None = None
) -> VerifyReport:
    """What runs (by default segmented backward) against a reference, by default autodiff of the whole model, or where
    weights are streamed, of a layer at a time."""
    lora = session.lora
    size = session.recipe.engine.segment_size
    size = 1 if size == "auto" else size
    running = running or SegmentedBackward(session.stack, lora, session.objective, segment_size=size)
    reference = reference or _reference(session)
    with lora.dropout_keys.disabled(), random_b(lora), widened(session.loaded):
        segmented = running.step(session.layout(row))
        with composed_attention():
            full = reference.step(replace(session, shares_prefix=False, align=1).layout(row))
        exact = all(p.dtype != mx.bfloat16 and p.dtype != mx.float16 for _, p in _resident(session.loaded))
        errors = module_errors(full.grads, segmented.grads)
        tolerance = EXACT if exact else HALF
        loss_full, loss_segmented = float(full.loss.total), float(segmented.loss.total)
        worst = max((error.relative_error for error in errors), default=0.0)
        if exact and EXACT < worst < HALF and (truth := _truth(session, row, reference)) is not None:
            errors, theirs = module_errors(truth, segmented.grads), module_errors(truth, full.grads)
            tolerance = max(EXACT, TRUTH * max(error.relative_error for error in theirs))
    close = abs(loss_segmented - loss_full) <= tolerance * abs(loss_full)
    passed = close and bool(errors) and all(error.relative_error <= tolerance for error in errors)
    return VerifyReport(passed, tolerance, errors, loss_full, loss_segmented, len(row), size, str(row.origin))


def _reference(session: Session) -> Reference:
    if session.loaded.weights:
        return Layerwise(session.stack, session.lora, session.objective)
    return FullBackward(PlainForward(session.stack), session.lora, session.objective)


@contextmanager
def composed_attention() -> Iterator[None]:
    """While the block runs, MLX differentiates its attention as composed operations, for any row and mask.

    On Metal its fused attention has no gradient for rows of few tokens. MLX reads the variable at each call.
    """
    name = "MLX_SDPA_VJP_FALLBACK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _truth(session: Session, row: Row, reference: Reference) -> Mapping[str, mx.array] | None:
    """The reference's gradients in float64, on the CPU; None where that has no memory or mlx no such operation.

    Weights are as before afterwards.
    """
    places = [(place, p.dtype) for place, p in _resident(session.loaded)]
    if 8 * sum(module[key].size for (module, key), _ in places) > default_budget(here()) // 2:
        return None
    device = mx.default_device()
    try:
        mx.set_default_device(mx.Device(mx.cpu))
        _cast([(place, mx.float64) for place, _ in places])
        with composed_attention(), _in_dtype(session.loaded, mx.float64):
            grads = reference.step(replace(session, shares_prefix=False, align=1).layout(row)).grads
        return {name: grad.astype(mx.float32) for name, grad in grads.items()}
    except RuntimeError:
        return None
    finally:
        _cast(places)
        mx.set_default_device(device)


def lengthened(row: Row, tokens: int) -> Row:
    """A row of so many tokens, made of this one's over and over."""

    def repeated(ids: list[int], count: int) -> list[int]:
        return (ids * (count // len(ids) + 1))[:count]

    if isinstance(row, PreferenceRow):
        prompt = repeated(row.prompt, max(1, tokens - max(len(row.chosen), len(row.rejected))))
        return replace(row, prompt=prompt, rejected_prompt=None)
    return replace(row, tokens=repeated(row.tokens, tokens), supervised=[True] * tokens, weights=None)


def _most(session: Session) -> int:
    """Tokens of the longest row whose logits and scores in plain autodiff take a quarter of what may be used each.

    0 where weights are streamed: plain autodiff has the whole model in memory.
    """
    if session.loaded.weights:
        return 0
    quarter = default_budget(here()) // 4
    scores = _score_bytes(session) * len(session.stack)
    return min(quarter // (COPIES * 4 * max(1, session.loaded.vocabulary)), int((quarter / scores) ** 0.5))


def _most_layerwise(session: Session, row: Row) -> int:
    """Tokens of the longest row whose gradients a layer at a time take half of what may be used.

    What grows with the row's length is measured on a short one. What grows with its square is counted: the scores of
    one layer of a model file that writes them out.
    """
    short, half = shortened(row), default_budget(here()) // 2
    with session.lora.dropout_keys.disabled(), widened(session.loaded), composed_attention():
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        layout = replace(session, shares_prefix=False, align=1).layout(short)
        Layerwise(session.stack, session.lora, session.objective).step(layout)
        linear = ROOM * (mx.get_peak_memory() - before) / len(short)
    square = _score_bytes(session) if session.stack.replaces else 0
    # The positive root of square * T^2 + linear * T = half.
    return int(2 * half / (linear + (linear * linear + 4 * square * half) ** 0.5))


def _score_bytes(session: Session) -> int:
    """Of one layer's attention scores in autodiff, for each pair of tokens."""
    return COPIES * 4 * int(session.loaded.config.get("num_attention_heads") or 32)


def module_errors(full: Mapping[str, mx.array], other: Mapping[str, mx.array]) -> list[ModuleError]:
    """Per module (a parameter's name without its last part), the norm-relative error over its parameters."""
    squares: dict[str, list[float]] = {}
    for name, grad in full.items():
        difference, size = squares.setdefault(name.rpartition(".")[0], [0.0, 0.0])
        squares[name.rpartition(".")[0]] = [difference + _square(other[name] - grad), size + _square(grad)]
    return [ModuleError(name, (d / n) ** 0.5 if n else float(d > 0)) for name, (d, n) in squares.items()]


def shortened(row: Row) -> Row:
    """At most about `SHORT` tokens of a row, supervised ones among them."""
    if isinstance(row, PreferenceRow):
        part = SHORT // 4
        other = row.rejected_prompt and row.rejected_prompt[-2 * part :]
        chosen, rejected = row.chosen[:part], row.rejected[:part]
        return replace(row, prompt=row.prompt[-2 * part :], rejected_prompt=other, chosen=chosen, rejected=rejected)
    first = next(i for i in range(1, len(row.tokens)) if row.supervised[i])
    lo = max(0, first - SHORT // 2)
    weights = row.weights and row.weights[lo : lo + SHORT]
    kept = slice(lo, lo + SHORT)
    return replace(row, tokens=row.tokens[kept], supervised=row.supervised[kept], weights=weights)


@contextmanager
def random_b(lora: Lora) -> Iterator[None]:
    """LoRA's B matrices random while the block runs."""
    before = lora.values()
    key = mx.random.key(0)
    try:
        for slot in lora.slots():
            if slot.key == "lora_b":
                key, draw = mx.random.split(key)
                slot.module[slot.key] = 0.02 * mx.random.normal(slot.value.shape, key=draw)
        yield
    finally:
        lora.set(before)


@contextmanager
def widened(loaded: Loaded) -> Iterator[None]:
    """16-bit weights in float32 while the block runs: those in memory where that takes at most half of what may be
    used, streamed ones whenever they are read.

    The way back is exact.
    """
    half = [(place, p.dtype) for place, p in _resident(loaded) if p.dtype in (mx.bfloat16, mx.float16)]
    fits = 4 * sum(module[key].size for (module, key), _ in half) <= default_budget(here()) // 2
    try:
        if fits:
            _cast([(place, mx.float32) for place, _ in half])
        with _in_dtype(loaded, mx.float32):
            yield
    finally:
        _cast(half)


def _in_dtype(loaded: Loaded, dtype: mx.Dtype) -> AbstractContextManager[None]:
    return loaded.weights.in_dtype(dtype) if loaded.weights else nullcontext()


def _short_row(recipe: Recipe, tokenizer: Any) -> tuple[Row, int]:
    """The shortest of the first training rows, and the tokens of the longest known row.

    Pairs where the recipe says so or the rows are nothing else.
    """
    kinds = {"preference": (True,), "auto": (False, True)}.get(recipe.data.format, (False,))
    failures = []
    for pairs in kinds:
        try:
            data = open_data(recipe, tokenizer, pairs=pairs)
            return min(islice(data.train, CANDIDATES), key=len), data.counts["longest"]
        except UserError as error:
            failures.append(error)
    raise failures[0]


def _floats(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], mx.array]]:
    for _, module in model.named_modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                yield (module, key), value


def _resident(loaded: Loaded) -> Iterator[tuple[tuple[nn.Module, str], mx.array]]:
    """The floating-point arrays that are in memory."""
    for place, value in _floats(loaded.model):
        if not (loaded.weights and loaded.weights.streams(*place)):
            yield place, value


def _cast(places: list[tuple[tuple[nn.Module, str], mx.Dtype]]) -> None:
    for (module, key), dtype in places:
        module[key] = module[key].astype(dtype)
        mx.eval(module[key])


def _square(array: mx.array) -> float:
    return float(mx.square(array.astype(mx.float32)).sum())
