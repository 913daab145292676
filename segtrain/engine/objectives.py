"""Objectives: what is minimised, one entry each. The rest of segtrain asks the entry and knows no loss by name.

A loss is a pure function of the spans' log-probabilities. It sees each span's *sum* of token log-probs (float32
scalar) and its token count, or of B rows that run together all of theirs, [B]: it works element by element. So its
gradient is one number per span, and the head needs a single pass: it keeps each span's unit gradient d(sum)/dh and
scales it afterwards.

A value is a total with a weight: an update divides the totals (and gradients) of its rows by the sum of their
weights. For `sft` the weight is the number of supervised tokens, so accumulation gives the mean over tokens, not a
mean of means; for pairs it is one each. Where a span's targets have weights of their own, its sum is of weighted
log-probs and its count is the sum of the weights.

ORPO (Hong et al. 2024, arXiv:2403.07691), with l the *mean* log-prob of a response:

    L        = NLL + beta * softplus(-log_odds)
    log_odds = (lw - lr) - (log(1 - exp lw) - log(1 - exp lr))
    dL/dlog_odds = -beta * sigmoid(-log_odds),   dlog_odds/dl = 1 / (1 - exp l)

`1 - exp l` vanishes as l -> 0, when the model is sure of a whole response; l is held below -EPSILON there, with zero
gradient, so that neither log_odds nor its slope overflows.

The other losses of pairs have a reward of each response, a multiple of its log-prob, and -log sigmoid of the difference
of the rewards, their margin, computed as softplus(-margin): exact for a margin near 0, finite for any. The metrics are
TRL's by meaning: `rewards_chosen` is its `rewards/chosen`, and so on.
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
    """`total` / `weight` is the loss; `metrics` are float32 scalars, averaged over rows. [B] for B rows together."""

    total: mx.array
    weight: float | mx.array  # as the counts are
    metrics: dict[str, mx.array]


@dataclass(frozen=True)
class Scores:
    """By span: the sum of its tokens' log-probs, float32, and their number; `reference`: the sums at the start."""

    sums: Sums
    counts: Counts
    reference: Sums = field(default_factory=dict)


Loss: TypeAlias = Callable[[Scores], LossValue]


@dataclass(frozen=True)
class Objective:
    """A loss and what it asks of the rows.

    `metrics`: names of what it reports beside its total. `pairs`: rows are a chosen and a rejected response to one
    prompt, else examples. `scores_prompt`: a pair's prompt is a span too. `needs_reference`: the loss sees the sums
    of the model with its adapter as at the start. `keeps_reference`: these are computed once a row and kept.
    """

    name: str
    loss: Loss
    metrics: tuple[str, ...] = ()
    pairs: bool = False
    scores_prompt: bool = False
    needs_reference: bool = False
    keeps_reference: bool = False


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
        return LossValue(nll + beta * softplus(-odds), 1.0, metrics)

    metrics = ("accuracy", "chosen_logp", "log_odds", "nll", "rejected_logp")
    return Objective("orpo", loss, metrics, pairs=True, scores_prompt=sft_scope == "full")


REWARDS = ("accuracy", "chosen_logp", "rejected_logp", "rewards_chosen", "rewards_margins", "rewards_rejected")


def _rewarded(loss: Callable[[mx.array], mx.array], scores: Scores, chosen: mx.array, rejected: mx.array) -> LossValue:
    """A pair's loss by its margin, with the rewards of its responses among the metrics.

    The margin is computed once: mlx's compiler raises IndexError where a result is computed a second time elsewhere.
    """
    margin = chosen - rejected
    metrics = {
        "accuracy": (chosen > rejected).astype(mx.float32),
        "chosen_logp": scores.sums[CHOSEN] / scores.counts[CHOSEN],
        "rejected_logp": scores.sums[REJECTED] / scores.counts[REJECTED],
        "rewards_chosen": chosen,
        "rewards_margins": margin,
        "rewards_rejected": rejected,
    }
    return LossValue(loss(margin), 1.0, metrics)


def softplus(x: mx.array) -> mx.array:
    """log(1 + exp x), that is -log sigmoid(-x)."""
    return mx.logaddexp(mx.array(0.0), x)


def smoothed(margin: mx.array, smoothing: float) -> mx.array:
    """-log sigmoid(margin), where a share `smoothing` of the pairs is taken to be labelled the wrong way round."""
    return (1 - smoothing) * softplus(-margin) + smoothing * softplus(margin)


def simpo(beta: float = 2.0, gamma: float = 0.5, label_smoothing: float = 0.0) -> Objective:
    """SimPO (Meng et al. 2024, arXiv:2405.14734): the reward is beta times the mean log-prob.

    L = -log sigmoid(reward of chosen - reward of rejected - gamma); smoothed with gamma in the margin, as in TRL.
    """

    def loss(scores: Scores) -> LossValue:
        chosen, rejected = (beta * scores.sums[name] / scores.counts[name] for name in (CHOSEN, REJECTED))
        return _rewarded(lambda margin: smoothed(margin - gamma, label_smoothing), scores, chosen, rejected)

    return Objective("simpo", loss, REWARDS, pairs=True)


def cpo(beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0) -> Objective:
    """CPO (Xu et al. 2024, arXiv:2401.08417): the reward is beta times the sum of log-probs.

    L = -log sigmoid(reward of chosen - reward of rejected) + alpha * NLL, the NLL a mean over the chosen response's
    tokens as in TRL, where the paper has their sum.
    """

    def loss(scores: Scores) -> LossValue:
        chosen, rejected = beta * scores.sums[CHOSEN], beta * scores.sums[REJECTED]
        nll = -scores.sums[CHOSEN] / scores.counts[CHOSEN]
        value = _rewarded(lambda margin: smoothed(margin, label_smoothing) + alpha * nll, scores, chosen, rejected)
        return replace(value, metrics=value.metrics | {"nll": nll})

    return Objective("cpo", loss, ("nll", *REWARDS), pairs=True)


def dpo(
    beta: float = 0.1,
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid",
    label_smoothing: float = 0.0,
    reference: Literal["pass", "cached"] = "pass",
) -> Objective:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290): the reward is beta times the log-ratio to the model at the start.

    With the margin, the reward of chosen less that of rejected: `sigmoid` -log sigmoid(margin); `hinge`
    max(0, 1 - margin) (Zhao et al. 2023, arXiv:2305.10425); `ipo` (margin / beta - 1 / (2 beta))^2 of log-ratios that
    are means over tokens, as in TRL (Azar et al. 2023, arXiv:2310.12036, has sums).
    """

    def compared(scores: Scores) -> LossValue:
        ratios = (scores.sums[name] - scores.reference[name] for name in (CHOSEN, REJECTED))
        if loss == "ipo":
            ratios = (ratio / scores.counts[name] for name, ratio in zip((CHOSEN, REJECTED), ratios, strict=True))
        chosen, rejected = (beta * ratio for ratio in ratios)
        return _rewarded(forms[loss], scores, chosen, rejected)

    forms: dict[str, Callable[[mx.array], mx.array]] = {
        "sigmoid": lambda margin: smoothed(margin, label_smoothing),
        "hinge": lambda margin: mx.maximum(1 - margin, 0.0),
        "ipo": lambda margin: mx.square(margin / beta - 1 / (2 * beta)),
    }

    kept = reference == "cached"
    return Objective("dpo", compared, REWARDS, pairs=True, needs_reference=True, keeps_reference=kept)


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "sft": lambda: sft,
    "orpo": orpo,
    "simpo": simpo,
    "cpo": cpo,
    "dpo": dpo,
}
"""By the name of command and recipe section; a section's keys are the arguments."""


def of_recipe(name: str, recipe: Any = None) -> Objective:
    """The objective of that name, with the settings of the recipe's section of the same name."""
    section = getattr(recipe, name, None)
    return OBJECTIVES[name](**vars(section) if section else {})


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
        return objective.loss(replace(scores, sums=sums)).total.sum()

    return objective.loss(scores), mx.grad(total)(dict(scores.sums))
