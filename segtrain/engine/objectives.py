"""Objectives: what is minimised, one entry each. The rest of segtrain asks the entry and knows no loss by name.

A loss is a pure function of the spans' log-probabilities. It sees each span's *sum* of token log-probs (float32
scalar) and its token count. So its gradient is one number per span, and the head needs a single pass: it keeps each
span's unit gradient d(sum)/dh and scales it afterwards.

A value is a total with a weight: an update divides the totals (and gradients) of its rows by the sum of their
weights. For `sft` the weight is the number of supervised tokens, so accumulation gives the mean over tokens, not a
mean of means; for `orpo` it is one a pair. Where a span's targets have weights of their own, its sum is of weighted
log-probs and its count is the sum of the weights.

ORPO (Hong et al. 2024, arXiv:2403.07691), with l the *mean* log-prob of a response:

    L        = NLL + beta * softplus(-log_odds)
    log_odds = (lw - lr) - (log(1 - exp lw) - log(1 - exp lr))
    dL/dlog_odds = -beta * sigmoid(-log_odds),   dlog_odds/dl = 1 / (1 - exp l)

`1 - exp l` vanishes as l -> 0, when the model is sure of a whole response; l is held below -EPSILON there, with zero
gradient, so that neither log_odds nor its slope overflows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import mlx.core as mx

from segtrain.engine.layouts import CHOSEN, PROMPT, REJECTED, RESPONSE

EPSILON = 1e-6  # nats a token: exp(-EPSILON) is the largest mean probability that is told apart from 1 in float32

Sums: TypeAlias = Mapping[str, mx.array]
Counts: TypeAlias = Mapping[str, float] | Mapping[str, mx.array]


@dataclass(frozen=True)
class LossValue:
    """`total` / `weight` is the loss; `metrics` are float32 scalars, averaged over rows."""

    total: mx.array
    weight: float | mx.array  # as the counts are
    metrics: dict[str, mx.array]


@dataclass(frozen=True)
class Scores:
    """By span: the sum of its tokens' log-probs, float32, and their number; `reference`: the base model's sums."""

    sums: Sums
    counts: Counts
    reference: Sums = field(default_factory=dict)


Loss: TypeAlias = Callable[[Scores], LossValue]


@dataclass(frozen=True)
class Objective:
    """A loss and what it asks of the rows.

    `metrics`: names of what it reports beside its total. `pairs`: rows are a chosen and a rejected response to one
    prompt, else examples. `scores_prompt`: a pair's prompt is a span too. `needs_reference`: the loss sees the sums
    of the model without adapter.
    """

    name: str
    loss: Loss
    metrics: tuple[str, ...] = ()
    pairs: bool = False
    scores_prompt: bool = False
    needs_reference: bool = False


def _cross_entropy(scores: Scores) -> LossValue:
    return LossValue(-scores.sums[RESPONSE], scores.counts[RESPONSE], {})


sft = Objective("sft", _cross_entropy)
"""Cross-entropy summed over the supervised tokens."""


def orpo(beta: float = 0.1, sft_scope: Literal["full", "response"] = "full") -> Objective:
    """The ORPO loss of one pair. `sft_scope: full` takes the NLL over prompt and chosen, as TRL does."""
    if beta < 0:
        raise ValueError(f"orpo.beta must be 0 or more, not {beta}")

    def loss(scores: Scores) -> LossValue:
        sums, counts = scores.sums, scores.counts
        chosen, rejected = sums[CHOSEN] / counts[CHOSEN], sums[REJECTED] / counts[REJECTED]
        nll = -chosen
        if sft_scope == "full" and PROMPT in sums:
            nll = -(sums[PROMPT] + sums[CHOSEN]) / (counts[PROMPT] + counts[CHOSEN])
        odds = log_odds(chosen) - log_odds(rejected)
        metrics = {
            "nll": nll,
            "log_odds": odds,
            "chosen_logp": chosen,
            "rejected_logp": rejected,
            "accuracy": (chosen > rejected).astype(mx.float32),
        }
        return LossValue(nll + beta * mx.logaddexp(mx.array(0.0), -odds), 1.0, metrics)

    metrics = ("accuracy", "chosen_logp", "log_odds", "nll", "rejected_logp")
    return Objective("orpo", loss, metrics, pairs=True, scores_prompt=sft_scope == "full")


OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "sft": lambda section: sft,
    "orpo": lambda section: orpo(section.beta, section.sft_scope) if section else orpo(),
}
"""By the name of command and recipe section: the objective that the section (None: its defaults) describes."""


def of_recipe(name: str, recipe: Any = None) -> Objective:
    """The objective of that name, with the settings of the recipe's section of the same name."""
    return OBJECTIVES[name](getattr(recipe, name, None))


def for_rows(*, pairs: bool, recipe: Any = None) -> Objective:
    """The first objective for such rows: where any will do, as in a check of gradients."""
    return next(found for name in OBJECTIVES if (found := of_recipe(name, recipe)).pairs == pairs)


def log_odds(logp: mx.array) -> mx.array:
    """log(p / (1 - p)) from log p, finite and with a finite slope for every log p <= 0."""
    logp = mx.minimum(logp, -EPSILON)
    return logp - log1mexp(logp)


def log1mexp(x: mx.array) -> mx.array:
    """log(1 - exp x) for x < 0 without cancellation (Mächler 2012): expm1 near 0, log1p far below.

    Each branch is fed a harmless argument where the other one is taken, so that no infinite slope times zero appears.
    """
    near = x > -0.6931472
    return mx.where(near, mx.log(-mx.expm1(mx.where(near, x, -1.0))), mx.log1p(-mx.exp(mx.where(near, -1.0, x))))


def value_and_grad(objective: Objective, scores: Scores) -> tuple[LossValue, dict[str, mx.array]]:
    """The loss, and its gradient with respect to each span's sum."""

    def total(sums: dict[str, mx.array]) -> mx.array:
        return objective.loss(replace(scores, sums=sums)).total

    return objective.loss(scores), mx.grad(total)(dict(scores.sums))
