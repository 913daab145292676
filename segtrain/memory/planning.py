"""From the recipe and the device to the plan that each row runs by."""

from collections.abc import Iterator, Mapping
from typing import Any

from segtrain.engine import Backward
from segtrain.events import Event, PlanChosen
from segtrain.layouts import Layout
from segtrain.logprobs import chunk_rows
from segtrain.memory.meter import Meter
from segtrain.memory.plan import Plan
from segtrain.session import Session


class Planner:
    """Chooses a plan and hands out the backward pass that runs it."""

    def __init__(self, session: Session, meter: Meter):
        self.session, self.meter = session, meter
        engine = session.recipe.engine
        size = 1 if engine.segment_size == "auto" else engine.segment_size
        vocabulary = int(session.loaded.config.get("vocab_size") or 128_000)
        self.plan = Plan(
            "full" if engine.backward == "full" else "segmented",
            segment_size=size,
            head_chunk=chunk_rows(vocabulary) if engine.head_chunk == "auto" else engine.head_chunk,
            keep=0 if engine.keep_layers == "auto" else engine.keep_layers,
            lookahead=0 if engine.lookahead == "auto" else engine.lookahead,
        )
        self._backward = session.backward(self.plan, meter)

    def announce(self, counts: Mapping[str, Any]) -> Iterator[Event]:
        yield PlanChosen(self.plan.as_json())

    def backward(self, layout: Layout) -> Backward:
        return self._backward

    def after_step(self, step: int, meter: Meter) -> Iterator[Event]:
        yield from ()
