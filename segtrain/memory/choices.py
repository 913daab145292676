"""From a recipe's sections to the inputs of the estimate. Pure."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from segtrain.memory import machine, rows
from segtrain.memory.backends import Backend
from segtrain.memory.choose import Chooser, Settings
from segtrain.memory.estimate import Estimator
from segtrain.memory.rows import RowShape
from segtrain.memory.shapes import Model
from segtrain.memory.timing import Timer

if TYPE_CHECKING:
    from segtrain.recipe.schema import EngineRecipe, Recipe

TRAINED = 16  # layers that still learn well
SHORT = 128  # tokens of a row that any budget should have room for
PROMPT_SHARE = 0.5  # of a preference row whose data were not read


def settings(engine: "EngineRecipe", *, compiled: bool) -> Settings:
    """What `engine` fixes."""

    def fixed(value: object) -> object:
        return None if value == "auto" else value

    return Settings(
        **{
            "backward": fixed(engine.backward),
            "segment_size": fixed(engine.segment_size),
            "head_chunk": fixed(engine.head_chunk),
            "keep": fixed(engine.keep_layers),
            "lookahead": fixed(engine.lookahead),
            "dequantize": fixed(engine.dequantize),
            "compiled": compiled,
        }  # type: ignore[arg-type]
    )


def chooser(
    model: Model, backend: Backend, recipe: "Recipe | None", *, resident: int | None = None, streamed: bool = False
) -> Chooser:
    """For `recipe`, or with every setting on auto; `streamed`: with the layers' weights read from disk."""
    optimizer, accumulates, dropout = "adamw", False, 0.0
    if recipe is not None:
        optimizer, dropout = recipe.train.optimizer, recipe.lora.dropout
        accumulates = recipe.train.grad_accumulation_steps > 1
    estimator = Estimator(
        model, backend, optimizer=optimizer, accumulates=accumulates, resident=resident, streamed=streamed
    )
    compiled = machine.compiles(backend) and not dropout
    chosen = settings(recipe.engine, compiled=compiled) if recipe else Settings(compiled=compiled)
    timer = Timer(model, backend, estimator.lowest, machine.speed(backend))
    return Chooser(estimator, timer, chosen, disk=machine.disk(backend) if streamed else None)


def too_large(chooser: Chooser, budget: int) -> bool:
    """Whether not even a short row could be trained within `budget`."""
    return not chooser.relaxed().fits(row_of(SHORT, preference=False, shared=False), budget)


def adapter(recipe: "Recipe | None", layers: int) -> dict[str, Any]:
    """What `recipe` attaches to so many layers, as arguments of `lora.layers.attach`; without one rank 8 everywhere."""
    if recipe is None:
        return {"rank": 8, "scale": 2.0}
    lora = recipe.lora
    found = {"rank": lora.rank, "scale": lora.effective_scale, "targets": lora.targets, "dropout": lora.dropout}
    return {**found, "kind": lora.kind, "layers": lora.layer_range(layers)}


def remedies(chooser: Chooser) -> list[str]:
    """What to try where a row doesn't fit, before shorter rows or more memory, in the order of what costs least."""
    fixed, model = chooser.settings, chooser.estimator.model
    found = []
    if fixed.backward == "full" or (fixed.segment_size or 1) > 1 or fixed.keep:
        found.append("leave engine.backward, segment_size and keep_layers on auto: it hardly costs time")
    if not model.packed:
        found.append("a quantised model (4-bit from the hub, or by mlx_lm.convert -q)")
    if not chooser.estimator.streamed:
        found.append("engine.weights: streamed, which keeps few layers' weights in memory; how fast is up to the disk")
    if len(model.layers) - model.lowest > TRAINED:
        found.append(f"lora.layers: {TRAINED}, the last ones: layers below need no backward pass; it learns less")
    return found


def row_of(
    length: int, *, preference: bool, shared: bool, prompt_share: float = PROMPT_SHARE, score_prompt: bool = True
) -> RowShape:
    """A row of `length` tokens (preference: prompt and one response together).

    `score_prompt`: whether the objective scores a pair's prompt too.
    """
    if not preference:
        return rows.sft(length)
    prompt = max(1, min(length - 1, round(prompt_share * length)))
    build = rows.shared if shared else rows.pair
    return build(prompt, length - prompt, length - prompt, score_prompt=score_prompt)


def aligned(row: RowShape, backend: Backend) -> RowShape:
    """`row` with stream lengths rounded up as the trainer does."""
    multiple = backend.query_multiple
    return replace(row, streams=tuple(-(-n // multiple) * multiple for n in row.streams))
