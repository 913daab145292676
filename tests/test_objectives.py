"""Losses against naive formulas in double precision, TRL's published definition, and finite differences."""

import math
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segtrain.engine.layouts import CHOSEN, PROMPT, REJECTED, RESPONSE, pair
from segtrain.engine.objectives import (
    OBJECTIVES,
    Scores,
    for_rows,
    log1mexp,
    log_odds,
    of_recipe,
    orpo,
    sft,
    value_and_grad,
)

COUNTS = {PROMPT: 4, CHOSEN: 5, REJECTED: 3}


def pair_scores(prompt: float, chosen: float, rejected: float) -> Scores:
    return Scores({PROMPT: mx.array(prompt), CHOSEN: mx.array(chosen), REJECTED: mx.array(rejected)}, COUNTS)


def naive_orpo(sums: dict[str, float], counts: dict[str, int], beta: float, scope: str) -> float:
    """The formula of the paper, in Python's double precision, for log-probs well inside (-inf, 0)."""
    chosen, rejected = sums[CHOSEN] / counts[CHOSEN], sums[REJECTED] / counts[REJECTED]
    odds = math.log((math.exp(chosen) / (1 - math.exp(chosen))) / (math.exp(rejected) / (1 - math.exp(rejected))))
    nll = -chosen
    if scope == "full":
        nll = -(sums[PROMPT] + sums[CHOSEN]) / (counts[PROMPT] + counts[CHOSEN])
    return nll + beta * math.log(1 + math.exp(-odds))


def test_sft_sums_and_counts():
    value, grads = value_and_grad(sft, Scores({RESPONSE: mx.array(-6.0)}, {RESPONSE: 4}))
    assert (value.total.item(), value.weight) == (6.0, 4.0)
    assert grads[RESPONSE].item() == -1.0


@pytest.mark.parametrize("scope", ["full", "response"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 2.5])
@given(st.floats(-40, 0), st.floats(-40, -0.05), st.floats(-40, -0.05))
def test_orpo_is_the_formula(scope, beta: float, prompt: float, chosen: float, rejected: float):
    value = orpo(beta, scope).loss(pair_scores(prompt, chosen, rejected))
    expected = naive_orpo({PROMPT: prompt, CHOSEN: chosen, REJECTED: rejected}, COUNTS, beta, scope)
    assert value.total.item() == pytest.approx(expected, rel=3e-6, abs=3e-6)
    assert value.weight == 1.0


@pytest.mark.parametrize("scope", ["full", "response"])
def test_orpo_gradient_by_finite_differences(scope):
    at = {PROMPT: -7.0, CHOSEN: -4.0, REJECTED: -5.5}
    _, grads = value_and_grad(orpo(0.7, scope), pair_scores(**at))
    for name in at:
        step = 1e-5
        up, down = at | {name: at[name] + step}, at | {name: at[name] - step}
        slope = (naive_orpo(up, COUNTS, 0.7, scope) - naive_orpo(down, COUNTS, 0.7, scope)) / (2 * step)
        assert grads[name].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_beta_zero_is_the_nll_and_gives_the_rejected_response_no_gradient():
    value, grads = value_and_grad(orpo(0.0), pair_scores(-3.0, -4.0, -5.0))
    assert value.total.item() == pytest.approx(7 / 9)
    assert value.total.item() == value.metrics["nll"].item()
    assert grads[REJECTED].item() == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_reports_the_metrics_that_it_names(name: str):
    objective = of_recipe(name)
    sums = {span: mx.array(-1.0) for span in (CHOSEN, PROMPT, REJECTED, RESPONSE)}
    assert set(objective.loss(Scores(sums, dict.fromkeys(sums, 1), sums)).metrics) == set(objective.metrics)


def test_an_objective_of_a_recipe_has_its_sections_settings():
    section = SimpleNamespace(beta=2.0, sft_scope="response")
    scores, made = pair_scores(-4.0, -2.0, -3.0), of_recipe("orpo", SimpleNamespace(orpo=section))
    assert made.loss(scores).total.item() == orpo(2.0, "response").loss(scores).total.item()
    assert (made.scores_prompt, orpo().scores_prompt) == (False, True)
    assert [for_rows(pairs=pairs).name for pairs in (False, True)] == ["sft", "orpo"]


def test_negative_beta_is_refused():
    with pytest.raises(ValueError, match=r"orpo.beta must be 0 or more, not -0.1"):
        orpo(-0.1)


def test_metrics():
    metrics = orpo(0.1).loss(pair_scores(-4.0, -2.0, -3.0)).metrics
    assert metrics["chosen_logp"].item() == pytest.approx(-2 / 5)
    assert metrics["rejected_logp"].item() == pytest.approx(-1.0)
    assert metrics["accuracy"].item() == 1.0
    assert orpo(0.1).loss(pair_scores(-4.0, -9.0, -3.0)).metrics["accuracy"].item() == 0.0


EXTREMES = [0.0, -0.0, -1e-45, -1e-9, -1e-7, -1e-6, -1e-5, -0.6931472, -50.0, -1e3, -1e30]


@pytest.mark.parametrize("chosen", EXTREMES)
@pytest.mark.parametrize("rejected", EXTREMES)
def test_no_nan_and_finite_gradients_at_the_ends(chosen: float, rejected: float):
    """Responses of probability 1 (log-prob 0), of probability 0, and all between."""
    value, grads = value_and_grad(orpo(0.1), pair_scores(-1.0, chosen, rejected))
    assert all(math.isfinite(x.item()) for x in (value.total, *value.metrics.values(), *grads.values()))


def test_a_log_prob_that_rounds_above_zero_is_finite_too():
    value, grads = value_and_grad(orpo(0.1), pair_scores(-1.0, 1e-6, 2e-7))
    assert all(math.isfinite(x.item()) for x in (value.total, *grads.values()))


@given(st.floats(-80, -1e-5))
def test_log1mexp_and_log_odds_match_double_precision(x: float):
    x = float(np.float32(x))
    exact = math.log(-math.expm1(x)) if x > -0.5 else math.log1p(-math.exp(x))
    assert log1mexp(mx.array(x)).item() == pytest.approx(exact, rel=1e-5, abs=1e-35)
    assert log_odds(mx.array(x)).item() == pytest.approx(x - exact, rel=2e-6, abs=2e-7)


def trl_orpo(chosen_logits, chosen_ids, rejected_logits, rejected_ids, prompt: int, beta: float) -> float:
    """TRL's ORPOTrainer restated: average log-probs over response labels, NLL over every label of prompt + chosen.

    losses = logsigmoid(log_odds), loss = nll - beta * losses. [T, V] logits and [T] ids, in double precision.
    """

    def token_logps(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
        logps = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return logps[np.arange(len(ids) - 1), ids[1:]]

    def average(logits: np.ndarray, ids: np.ndarray) -> float:
        mask = np.arange(1, len(ids)) >= prompt
        return (token_logps(logits, ids) * mask).sum() / mask.sum()

    chosen, rejected = average(chosen_logits, chosen_ids), average(rejected_logits, rejected_ids)
    odds = (chosen - rejected) - (np.log1p(-np.exp(chosen)) - np.log1p(-np.exp(rejected)))
    return -token_logps(chosen_logits, chosen_ids).mean() - beta * -np.log1p(np.exp(-odds))


@pytest.mark.parametrize("sizes", [(4, 3, 5), (1, 2, 1), (2, 1, 1)])
def test_full_scope_is_trls_definition(sizes: tuple[int, int, int]):
    prompt, Rc, Rr = sizes
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 11, prompt + n) for n in (Rc, Rr)]
    ids[1][:prompt] = ids[0][:prompt]
    logits = [rng.normal(size=(len(x), 11)) for x in ids]
    layout = pair(ids[0][:prompt].tolist(), ids[0][prompt:].tolist(), ids[1][prompt:].tolist())
    sums = {}
    for name, span in layout.spans.items():
        z = logits[span.stream][np.array(span.rows.tolist())]
        logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
        sums[name] = mx.array(float(logp[np.arange(len(z)), span.targets.tolist()].sum()))
    value = orpo(0.3).loss(Scores(sums, {name: len(span) for name, span in layout.spans.items()}))
    assert value.total.item() == pytest.approx(trl_orpo(logits[0], ids[0], logits[1], ids[1], prompt, 0.3), rel=2e-6)
