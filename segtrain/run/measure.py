"""`plan-segments --measure`: one real step on the real weights, by phase, against the estimate."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from segtrain.attention import dispatch
from segtrain.engine import layouts, objectives
from segtrain.engine.backward import Backward
from segtrain.engine.layouts import Layout
from segtrain.lora import layers as lora_module
from segtrain.memory import choices, machine
from segtrain.memory.choose import Chooser
from segtrain.memory.meter import GIB, Meter
from segtrain.memory.plan import Plan
from segtrain.memory.rows import RowShape
from segtrain.models.load import Loaded, load
from segtrain.models.stack import LayerStack
from segtrain.recipe.schema import Recipe
from segtrain.run.session import make_backward

WARM_UP = 16  # tokens of the row that compiles kernels and is not measured


def measured_step(
    recipe: Recipe | None, name: str, recommended: dict[str, Any] | None, row: RowShape, chooser: Chooser
) -> dict[str, Any]:
    """What one step on `row` took by the recommended plan (`Plan.as_json`), or by the leanest one without it."""
    streamed = chooser.estimator.streamed
    loaded = load(name, trust_remote_code=bool(recipe and recipe.trust_remote_code), stream=lambda path: streamed)
    dispatch.follow(machine.measured(chooser.estimator.backend))
    plan = _plan(recommended) if recommended else chooser.leanest(row).plan
    lines: list[dict[str, Any]] = []
    backward = _backward(
        loaded, recipe, plan, Meter(lines.append), preference=len(row.streams) > 1 or bool(row.branches)
    )
    backward.step(_layout(row, loaded.vocabulary, WARM_UP))
    mx.clear_cache()
    lines.clear()
    mx.reset_peak_memory()
    backward.step(_layout(row, loaded.vocabulary))
    peak = max(line["peak_gib"] for line in lines)
    # The optimiser's moments aren't there in a single step.
    adapter = sum(chooser.estimator.adapter)
    predicted = (chooser.estimator.peak(row, plan).bytes - (chooser.estimator.state - adapter)) / GIB
    return {
        "plan": plan.as_json(),
        "predicted_gib": round(predicted, 4),
        "peak_gib": round(peak, 4),
        "error": round(predicted / peak - 1, 4),
        "seconds": round(sum(line["seconds"] for line in lines), 3),
        "phases": dict(_by_kind(lines)),
    }


def _by_kind(lines: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Forward, head, backward: the highest peak and the seconds of all."""
    kinds = dict.fromkeys(line["phase"].split("[")[0] for line in lines)
    for kind in kinds:
        own = [line for line in lines if line["phase"].split("[")[0] == kind]
        yield (
            kind,
            {
                "peak_gib": round(max(line["peak_gib"] for line in own), 4),
                "seconds": round(sum(line["seconds"] for line in own), 3),
            },
        )


def _plan(recommended: dict[str, Any]) -> Plan:
    names = Plan.__dataclass_fields__.keys() - {"peak_bytes"}
    return Plan(**{name: recommended[name] for name in names})


def _backward(loaded: Loaded, recipe: Recipe | None, plan: Plan, meter: Meter, *, preference: bool) -> Backward:
    lora = lora_module.attach(loaded.model, **choices.adapter(recipe, len(loaded.model.layers)), holding=loaded.held)
    stack = LayerStack(loaded.model, loaded.weights)
    return make_backward(plan, stack, lora, objectives.for_rows(pairs=preference), meter)


def _layout(row: RowShape, vocabulary: int, at_most: int | None = None) -> Layout:
    """Random tokens in the shape of `row`, or of a short one like it."""

    def ids(count: int, seed: int) -> list[int]:
        drawn: Any = mx.random.randint(0, vocabulary, (min(count, at_most or count),), key=mx.random.key(seed)).tolist()
        return list(drawn)

    if row.branches:
        chosen, rejected = row.branches
        return layouts.shared_prefix(ids(row.streams[0] - chosen - rejected, 0), ids(chosen, 1), ids(rejected, 2))
    if len(row.streams) == 2:
        chosen, rejected = row.scored[0][0], row.scored[1][0]
        return layouts.pair(ids(row.streams[0] + 1 - chosen, 0), ids(chosen, 1), ids(rejected, 2))
    tokens = ids(row.streams[0] + 1, 0)
    return layouts.single(tokens, [True] * len(tokens))
