"""What every command that runs a model needs, assembled from a recipe: model, adapter, layer stack, loss, layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from segtrain.attention.dispatch import align, backend
from segtrain.data.rows import PreferenceRow, Row
from segtrain.engine import groups
from segtrain.engine.backward import Backward, FullBackward, Meter, SegmentedBackward, no_meter
from segtrain.engine.layouts import Layout, padded, pair, shared_prefix, single
from segtrain.engine.objectives import Objective
from segtrain.engine.traces import Traces
from segtrain.errors import UserError
from segtrain.lora import initial
from segtrain.lora.layers import Lora, attach
from segtrain.lora.modules import LoRAModule
from segtrain.memory import choices
from segtrain.memory.plan import Plan
from segtrain.models.experts import check_experts
from segtrain.models.load import Loaded
from segtrain.models.positions import pads
from segtrain.models.stack import Execution, LayerStack, UnsupportedModel
from segtrain.models.support import shares_prefix
from segtrain.recipe.schema import Recipe
from segtrain.run.readiness import ready
from segtrain.run.references import References

SHARING_PAYS_FROM = 16  # prompt tokens below which two streams are no dearer than the split attention of one


@dataclass
class Session:
    """A model ready to train: LoRA attached, layers captured.

    `shares_prefix`: pairs' prompts are computed once. `ragged`: rows that run together are one stream, of rows of any
    kind, not a padded batch.
    """

    recipe: Recipe
    loaded: Loaded
    lora: Lora
    stack: LayerStack
    objective: Objective
    shares_prefix: bool
    ragged: bool = False
    notices: list[str] = field(default_factory=list)
    align: int = 1
    traces: Traces = field(default_factory=Traces)
    references: References | None = None

    def layout(self, row: Row) -> Layout:
        """The row's streams and spans, its stream lengths rounded up to what the backend's attention needs."""
        return padded(self.bare(row), self.align)

    def bare(self, row: Row) -> Layout:
        """The row's streams and spans without filler."""
        if not isinstance(row, PreferenceRow):
            return single(row.tokens, row.supervised, row.weights)
        if self.shares(row):
            return shared_prefix(row.prompt, row.chosen, row.rejected, score_prompt=self.objective.scores_prompt)
        return pair(
            row.prompt,
            row.chosen,
            row.rejected,
            rejected_prompt=row.rejected_prompt,
            score_prompt=self.objective.scores_prompt,
        )

    def tokens(self, row: Row) -> int:
        """That the row's streams have, about."""
        if not isinstance(row, PreferenceRow):
            return len(row)
        return len(row.prompt) * (1 if self.shares(row) else 2) + row.targets

    def together(self, rows: Sequence[Row]) -> Layout:
        """One layout of several rows: a ragged batch where there can be one and it has less filler."""
        layouts = [self.bare(row) for row in rows]
        if self.ragged and (self.lora.dropout or not groups.alike(layouts, self.align)):
            return groups.ragged(layouts, self.align)
        return groups.together(layouts, self.align)

    def grouped(self, rows: Sequence[Row], cut: Callable[[Sequence[int]], Sequence[int]]) -> list[list[int]]:
        """Numbers of the rows that run together; `cut`: sizes of groups of rows, by their lengths in order."""
        return groups.grouped([self.bare(row) for row in rows], cut, kinds_apart=not self.ragged)

    @property
    def width(self) -> int:
        """Of the hidden states."""
        inner = self.loaded.config.get("text_config")
        found = (inner if isinstance(inner, dict) else self.loaded.config).get("hidden_size")
        return found if type(found) is int else 4096

    @property
    def why_alone(self) -> str:
        """Why rows can't run together; empty where they can."""
        if self.lora.dropout and self.lora.adapts_experts:
            return "lora.dropout draws the masks of experts' inputs for the tokens that reach them, row by row"
        if self.lora.dropout and not self.ragged:
            return "lora.dropout draws its masks for a row's own length, which a padded batch hasn't"
        return ""

    def referenced(self, rows: Sequence[Row], layout: Layout, backward: Backward) -> Layout:
        """The layout of these rows with their reference sums, where the run keeps them."""
        pairs = [row for row in rows if isinstance(row, PreferenceRow)]
        return self.references(pairs, layout, backward) if self.references is not None and pairs else layout

    def shares(self, row: PreferenceRow) -> bool:
        """Whether this row's prompt is computed once: possible, wanted and cheaper."""
        return self.shares_prefix and row.rejected_prompt is None and len(row.prompt) >= SHARING_PAYS_FROM

    def backward(self, plan: Plan, meter: Meter = no_meter) -> Backward:
        return make_backward(plan, self.stack, self.lora, self.objective, meter, self.traces)


def make_backward(
    plan: Plan,
    stack: LayerStack,
    lora: Lora,
    objective: Objective,
    meter: Meter = no_meter,
    traces: Traces | None = None,
) -> Backward:
    """The backward pass that runs `plan`; `traces` holds its compiled graphs."""
    if plan.backward == "full":
        return FullBackward(stack, lora, objective, compiled=plan.compiled, meter=meter, traces=traces)
    return SegmentedBackward(
        stack.executing(Execution(plan.mlp_rows, plan.dequantize)),
        lora,
        objective,
        segment_size=plan.segment_size,
        head_chunk=plan.head_chunk,
        keep=plan.keep,
        boundaries=plan.boundaries,
        lookahead=plan.lookahead,
        compiled=plan.compiled,
        meter=meter,
        traces=traces,
    )


def open_session(recipe: Recipe, objective: Objective, loaded: Loaded) -> Session:
    """Attach LoRA to a loaded model and capture its layers.

    Raises UserError for what the recipe or the model can't do, RunFailed where mlx is wrong on this machine.
    """
    check_experts(loaded.model, recipe.model)
    found = ready(loaded)
    options = choices.adapter(recipe, len(loaded.model.layers))
    try:
        lora = attach(loaded.model, **options, seed=recipe.train.seed, holding=loaded.held)
        stack = LayerStack(loaded.model, loaded.weights)
    except (UnsupportedModel, ValueError) as error:
        raise UserError(str(error)) from error
    initial.begin(lora, recipe.lora, recipe.model)
    model_type = str(loaded.config.get("model_type"))
    shares, notices = _prefix_sharing(recipe, objective, stack, model_type)
    ragged = stack.takes_ragged and shares_prefix(model_type)
    multiple = align(backend()) if pads(loaded.model, loaded.config) else 1
    return Session(recipe, loaded, lora, stack, objective, shares, ragged, [*found, *notices], multiple)


def parameter_counts(session: Session) -> tuple[int, int]:
    """(trainable, all) parameters; quantised weights count as the dense ones that they stand for."""
    trainable = sum(slot.value.size for slot in session.lora.slots())
    total = trainable
    for _, module in session.loaded.model.named_modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and key not in ("scales", "biases") and not isinstance(module, LoRAModule):
                packed = key == "weight" and "scales" in module
                total += value.size * 32 // module.bits if packed else value.size
    return trainable, total


def _prefix_sharing(recipe: Recipe, objective: Objective, stack: LayerStack, model_type: str) -> tuple[bool, list[str]]:
    if not objective.pairs or not recipe.engine.prefix_sharing:
        return False, []
    if not (stack.shares_prefix and shares_prefix(model_type)):
        return False, ["this model can't share a prompt between chosen and rejected: each pair runs as two streams"]
    return True, []


def summary(session: Session) -> dict[str, Any]:
    """What describes the model in events and checkpoints."""
    trainable, total = parameter_counts(session)
    return {
        "model": session.recipe.model,
        "model_type": str(session.loaded.config.get("model_type", "unknown")),
        "layers": len(session.stack),
        "trainable_parameters": trainable,
        "total_parameters": total,
    }
