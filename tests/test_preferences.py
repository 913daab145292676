"""Losses of pairs whose responses have rewards: their papers' formulas, TRL's definitions, and what they cost.

The formulas are written out in double precision, on sums and counts of log-probs; TRL's on logits and labels.
"""

import ast
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import get_args

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_configs
from hypothesis import given
from hypothesis import strategies as st

import segtrain
from segtrain.engine.backward import FullBackward
from segtrain.engine.layouts import CHOSEN, REJECTED, pair, shared_prefix
from segtrain.engine.objectives import OBJECTIVES, REWARDS, Objective, Scores, cpo, dpo, orpo, simpo, value_and_grad
from segtrain.lora.layers import Lora
from segtrain.models.stack import LayerStack
from segtrain.recipe import schema

Sums = dict[str, float]
COUNTS = {CHOSEN: 5, REJECTED: 3}


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def naive_simpo(sums: Sums, reference: Sums, beta: float, gamma: float, smoothing: float = 0.0) -> float:
    """Equation 6 of the paper, with TRL's smoothing."""
    margin = beta / COUNTS[CHOSEN] * sums[CHOSEN] - beta / COUNTS[REJECTED] * sums[REJECTED] - gamma
    return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)


def naive_cpo(sums: Sums, reference: Sums, beta: float, alpha: float, smoothing: float) -> float:
    """Equation 5 of the paper with TRL's weight, its smoothing and its mean over tokens."""
    margin = beta * sums[CHOSEN] - beta * sums[REJECTED]
    prefer = -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)
    return prefer - alpha * sums[CHOSEN] / COUNTS[CHOSEN]


def naive_dpo(sums: Sums, reference: Sums, beta: float, smoothing: float) -> float:
    """Equation 7 of the paper; smoothed as in equation 3 of its authors' note on conservative DPO."""
    margin = beta * ((sums[CHOSEN] - reference[CHOSEN]) - (sums[REJECTED] - reference[REJECTED]))
    return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)


def naive_ipo(sums: Sums, reference: Sums, beta: float) -> float:
    """Equation 17 of IPO's paper, with the means of log-probs that TRL takes."""
    chosen, rejected = ((sums[name] - reference[name]) / COUNTS[name] for name in (CHOSEN, REJECTED))
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def naive_hinge(sums: Sums, reference: Sums, beta: float) -> float:
    """SLiC's calibration loss on DPO's rewards."""
    return max(0.0, 1 - beta * ((sums[CHOSEN] - reference[CHOSEN]) - (sums[REJECTED] - reference[REJECTED])))


CASES: dict[str, tuple[Objective, Callable[[Sums, Sums], float]]] = {
    "simpo": (simpo(2.5, 1.1), lambda sums, reference: naive_simpo(sums, reference, 2.5, 1.1)),
    "simpo, smoothed": (simpo(2.5, 1.1, 0.2), lambda sums, reference: naive_simpo(sums, reference, 2.5, 1.1, 0.2)),
    "cpo": (cpo(0.3, 0.7), lambda sums, reference: naive_cpo(sums, reference, 0.3, 0.7, 0.0)),
    "cpo, smoothed": (cpo(0.3, 0.7, 0.2), lambda sums, reference: naive_cpo(sums, reference, 0.3, 0.7, 0.2)),
    "dpo": (dpo(0.4), lambda sums, reference: naive_dpo(sums, reference, 0.4, 0.0)),
    "dpo, smoothed": (dpo(0.4, label_smoothing=0.1), lambda sums, reference: naive_dpo(sums, reference, 0.4, 0.1)),
    "ipo": (dpo(0.4, "ipo"), lambda sums, reference: naive_ipo(sums, reference, 0.4)),
    "hinge": (dpo(0.4, "hinge"), lambda sums, reference: naive_hinge(sums, reference, 0.4)),
}
REFERENCE = {CHOSEN: -6.0, REJECTED: -4.5}


def scores(chosen: float, rejected: float, reference: Sums = REFERENCE) -> Scores:
    arrays = {name: mx.array(value) for name, value in reference.items()}
    return Scores({CHOSEN: mx.array(chosen), REJECTED: mx.array(rejected)}, COUNTS, arrays)


@pytest.mark.parametrize("name", CASES)
@given(st.floats(-60, 0), st.floats(-60, 0))
def test_the_value_is_the_papers(name: str, chosen: float, rejected: float) -> None:
    objective, naive = CASES[name]
    value = objective.loss(scores(chosen, rejected))
    assert value.total.item() == pytest.approx(
        naive({CHOSEN: chosen, REJECTED: rejected}, REFERENCE), rel=5e-6, abs=5e-6
    )
    assert value.weight == 1.0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", [(-4.0, -5.5), (-9.0, -2.0), (-30.0, -28.5)])
def test_the_gradient_is_the_papers_by_finite_differences(name: str, at: tuple[float, float]) -> None:
    objective, naive = CASES[name]
    _, grads = value_and_grad(objective, scores(*at))
    point, step = dict(zip((CHOSEN, REJECTED), at, strict=True)), 1e-5
    for span in point:
        up, down = point | {span: point[span] + step}, point | {span: point[span] - step}
        slope = (naive(up, REFERENCE) - naive(down, REFERENCE)) / (2 * step)
        assert grads[span].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


ENDS = [0.0, -0.0, -1e-45, -1e-7, -1e-3, -50.0, -1e4, -1e15]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chosen", ENDS)
@pytest.mark.parametrize("rejected", ENDS)
def test_finite_at_both_ends(name: str, chosen: float, rejected: float) -> None:
    """Responses of probability 1, of probability 0, and log-ratios of any size between."""
    value, grads = value_and_grad(CASES[name][0], scores(chosen, rejected))
    assert all(math.isfinite(x.item()) for x in (value.total, *value.metrics.values(), *grads.values()))


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_log_sigmoid_vanishes_and_saturates(name: str) -> None:
    """Far on the right side the preference says nothing; far on the wrong one it pushes at full strength."""
    objective, naive = CASES[name]
    for chosen, rejected in ((-1.0, -4000.0), (-4000.0, -1.0)):
        _, grads = value_and_grad(objective, scores(chosen, rejected))
        slope = naive({CHOSEN: chosen, REJECTED: rejected + 0.5}, REFERENCE)
        slope -= naive({CHOSEN: chosen, REJECTED: rejected - 0.5}, REFERENCE)
        assert grads[REJECTED].item() == pytest.approx(slope, rel=1e-4, abs=1e-30)


@pytest.mark.parametrize("name", CASES)
def test_the_metrics_are_rewards(name: str) -> None:
    objective, _ = CASES[name]
    metrics = {key: value.item() for key, value in objective.loss(scores(-4.0, -9.0)).metrics.items()}
    assert set(REWARDS) <= set(metrics)
    assert metrics["rewards_margins"] == pytest.approx(metrics["rewards_chosen"] - metrics["rewards_rejected"])
    assert (metrics["chosen_logp"], metrics["rejected_logp"]) == pytest.approx((-4 / 5, -3.0))
    assert metrics["accuracy"] == 1.0
    assert objective.loss(scores(-90.0, -9.0)).metrics["accuracy"].item() == 0.0


# --- TRL's definitions on logits ---------------------------------------------------------------------------------

VOCABULARY, PROMPT = 7, 2


def label_logps(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Log-probs of the response's labels: positions from PROMPT on, each predicted by the logits before it."""
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logps[np.arange(PROMPT - 1, len(ids) - 1), ids[PROMPT:]]


def trl_simpo(chosen: np.ndarray, rejected: np.ndarray, reference: list[np.ndarray]) -> float:
    """`loss_type: simpo` with `cpo_alpha: 0`: means of log-probs, gamma in units of beta."""
    logits = (chosen.mean() - rejected.mean()) - 1.1 / 2.5
    return -log_sigmoid(2.5 * logits) * (1 - 0.2) - log_sigmoid(-2.5 * logits) * 0.2


def trl_cpo(chosen: np.ndarray, rejected: np.ndarray, reference: list[np.ndarray]) -> float:
    """`loss_type: sigmoid`: sums of log-probs, and the cross-entropy of the chosen labels, prompt masked."""
    logits = 0.3 * (chosen.sum() - rejected.sum())
    return -log_sigmoid(logits) * (1 - 0.2) - log_sigmoid(-logits) * 0.2 + 0.7 * -chosen.mean()


def trl_dpo(chosen: np.ndarray, rejected: np.ndarray, reference: list[np.ndarray]) -> float:
    """`loss_type: sigmoid` with label smoothing: policy and reference log-ratios of sums."""
    logits = (chosen.sum() - rejected.sum()) - (reference[0].sum() - reference[1].sum())
    return -log_sigmoid(0.4 * logits) * (1 - 0.1) - log_sigmoid(-0.4 * logits) * 0.1


def trl_ipo(chosen: np.ndarray, rejected: np.ndarray, reference: list[np.ndarray]) -> float:
    """`loss_type: ipo`: means of log-probs."""
    logits = (chosen.mean() - rejected.mean()) - (reference[0].mean() - reference[1].mean())
    return (logits - 1 / (2 * 0.4)) ** 2


def trl_hinge(chosen: np.ndarray, rejected: np.ndarray, reference: list[np.ndarray]) -> float:
    """`loss_type: hinge`: relu of 1 less beta times the log-ratios' difference."""
    logits = (chosen.sum() - rejected.sum()) - (reference[0].sum() - reference[1].sum())
    return max(0.0, 1 - 0.4 * logits)


TRL = {
    "simpo, smoothed": trl_simpo,
    "cpo, smoothed": trl_cpo,
    "dpo, smoothed": trl_dpo,
    "ipo": trl_ipo,
    "hinge": trl_hinge,
}


def drawn(seed: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Ids of two rows of five tokens with one prompt, their logits and the reference's."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCABULARY, 5) for _ in range(2)]
    ids[1][:PROMPT] = ids[0][:PROMPT]
    logits, reference = ([rng.normal(size=(5, VOCABULARY)) for _ in range(2)] for _ in range(2))
    return ids, logits, reference


@pytest.mark.parametrize("name", TRL)
@pytest.mark.parametrize("seed", range(3))
def test_trls_value_and_gradient_on_rows_of_five_tokens(name: str, seed: int) -> None:
    """The gradient with respect to every logit: ours by the chain rule, TRL's by central differences."""
    ids, logits, reference = drawn(seed)
    fixed = [label_logps(*each) for each in zip(reference, ids, strict=True)]

    def trl(given: list[np.ndarray]) -> float:
        return TRL[name](*(label_logps(*each) for each in zip(given, ids, strict=True)), fixed)

    spans = (CHOSEN, REJECTED)
    sums, base = (
        {span: mx.array(float(label_logps(*each).sum())) for span, *each in zip(spans, given, ids, strict=True)}
        for given in (logits, reference)
    )
    value, slopes = value_and_grad(CASES[name][0], Scores(sums, dict.fromkeys(spans, 5 - PROMPT), base))
    assert value.total.item() == pytest.approx(trl(logits), rel=1e-6)
    for number, span in enumerate(spans):
        ours, theirs = np.zeros_like(logits[number]), np.zeros_like(logits[number])
        for row in range(PROMPT - 1, 4):
            probabilities = np.exp(logits[number][row]) / np.exp(logits[number][row]).sum()
            ours[row] = slopes[span].item() * (np.eye(VOCABULARY)[ids[number][row + 1]] - probabilities)
        for place in np.ndindex(*theirs.shape):
            step = np.zeros_like(theirs)
            step[place] = 1e-5
            moved = [[z + sign * step if n == number else z for n, z in enumerate(logits)] for sign in (1, -1)]
            theirs[place] = (trl(moved[0]) - trl(moved[1])) / 2e-5
        assert np.abs(ours - theirs).max() < 1e-6


# --- Gradients of a model ----------------------------------------------------------------------------------------

IDS = tiny.tokens(17)
PAIR = IDS[:6], IDS[6:11], IDS[11:17]


@cache
def llama() -> tuple[LayerStack, Lora]:
    model = tiny.build("llama")
    return LayerStack(model), tiny.attach(model)


@pytest.mark.parametrize("every_size", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_layouts_segments_and_full_backward_agree(name: str, every_size: bool) -> None:
    stack, lora = llama()
    objective = CASES[name][0]
    truth = FullBackward(stack, lora, objective).step(pair(*PAIR))
    sizes = range(1, len(stack) + 1) if every_size or name == "dpo" else (2,)  # cuts don't depend on the loss
    engines = [tiny.segmented(stack, lora, objective, segment_size=size) for size in sizes]
    for engine in (*engines, FullBackward(stack, lora, objective)):
        for layout in (pair(*PAIR, score_prompt=False), shared_prefix(*PAIR, score_prompt=False)):
            step = engine.step(layout)
            assert step.loss.total.item() == pytest.approx(truth.loss.total.item(), rel=1e-5)
            assert tiny.relative(truth.grads, step.grads) < 1e-5


def test_another_weight_gives_another_gradient() -> None:
    """The control: what the test above compares depends on the loss."""
    model = tiny.build("llama")
    lora, stack = tiny.attach(model), LayerStack(model)
    one, other = (FullBackward(stack, lora, simpo(beta)).step(pair(*PAIR)) for beta in (1.0, 2.0))
    assert tiny.relative(one.grads, other.grads) > 0.1


def test_a_losss_name_stands_in_its_function_its_command_and_its_section_only() -> None:
    """As a string or an identifier of the package's code; the rest asks the objective."""
    package, names = Path(segtrain.__file__).parent, set(OBJECTIVES) - {"sft"}
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said = {getattr(node, key, None) for key in ("value", "id", "attr", "arg", "name")}
            if names & {one for one in said if isinstance(one, str)}:
                found.add(path.relative_to(package).as_posix())
    assert found == {"cli.py", "engine/objectives.py", "recipe/schema.py", "recipe/scaffold.py"}
    assert set(get_args(schema.Objective)) == set(OBJECTIVES)


@pytest.mark.parametrize(
    "objective",
    [simpo(), cpo(label_smoothing=0.1), dpo(), dpo(loss="ipo"), dpo(loss="hinge"), orpo(), orpo(sft_scope="response")],
    ids=lambda found: found.name,
)
@pytest.mark.parametrize("together", [shared_prefix, pair])
def test_full_backward_of_every_loss_compiled(objective: Objective, together: Callable):
    """On a GPU short rows take full backward, compiled; mlx's compiler can't where a loss computes a thing twice."""
    model = tiny_configs.build("llama")
    lora, stack = tiny.attach(model), LayerStack(model)
    row = (tiny.tokens(6, 0), tiny.tokens(4, 1), tiny.tokens(9, 2))
    layout = together(*row, score_prompt=objective.scores_prompt)
    plain = FullBackward(stack, lora, objective).step(layout)
    asked = FullBackward(stack, lora, objective, compiled=True).step(layout)
    assert tiny.relative(plain.grads, asked.grads) < 1e-6
    assert asked.loss.total.item() == pytest.approx(plain.loss.total.item(), rel=1e-6)
