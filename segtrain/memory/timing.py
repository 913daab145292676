"""Time of a step relative to full backward, from operation counts. Pure.

With frozen weights a matrix product's backward costs as much as its forward, attention's 2.5 times as much. So

    full        forward + backward
    segmented   forward + recomputed forward + backward; of kept layers what isn't a product is recomputed (`again`);
                where fewer boundaries are kept than there are, some segments run forward once more

`OVERHEAD` tokens stand for what a layer's pass costs however short the row is. On a fast GPU, short rows are bound by
the time it takes to hand it the operations, of which segments have far more than full backward: `Speed.launch`. The
factors are of an H200's times at the 8B shape (`benchmarks/plan_accuracy.py --set gpu`, `benchmarks/floor.py`); what
computing a layer again costs is fitted to them by `benchmarks/fit.py`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from segtrain.engine.segments import layer_cuts
from segtrain.memory import fitted
from segtrain.memory.backends import Backend
from segtrain.memory.plan import Plan
from segtrain.memory.rows import Extent, RowShape
from segtrain.memory.shapes import Layer, Model

OVERHEAD = 128
ATTENTION_BACKWARD = 2.5
LOOKAHEAD = (1.0, 0.99, 0.98)
COMPILED = 0.95
LAUNCH = (1600, 5000, 3000)
TIGHT = 1.04  # a step whose device waits for memory
EDGE_TOKENS = 4  # what one more segment costs, in tokens of a layer

SCAN = 64  # operations of a scan, for each byte of its inputs: a chunk's tokens meet each other


@dataclass(frozen=True)
class Speed:
    """This machine's factors; `segtrain bench` measures them. `packed`: a quantised product's time over a dense one."""

    packed: float = 1.0
    lookahead: tuple[float, float, float] = (1.0, 1.0, 1.0)
    compiled: float = 1.0
    mlp_chunks: float = 1.03
    launch: tuple[int, int, int] = (0, 0, 0)
    """The least that a layer costs, in tokens of one product: full, segmented, and for each chunk of its MLP."""
    again: tuple[float, float] = (1.0, 0.0)
    """What a layer costs that is computed again, as a share of its products in forward: one that isn't kept, one that
    is, of which elementwise operations are left."""


DEFAULTS = {
    "cpu": Speed(),
    "cuda": Speed(
        packed=3.0,
        lookahead=LOOKAHEAD,
        compiled=COMPILED,
        mlp_chunks=1.0,
        launch=LAUNCH,
        again=(fitted.AGAIN, fitted.AGAIN_KEPT),
    ),
    "metal": Speed(packed=1.0, lookahead=LOOKAHEAD, compiled=COMPILED),
}


class _Place(NamedTuple):
    """Of which kind a layer is, whether it is trained, and whether its products are kept from forward to backward."""

    kind: int
    trained: bool
    kept: bool


class Timer:
    """Operation counts of one model on one backend."""

    def __init__(self, model: Model, backend: Backend, lowest: int = 0, speed: Speed | None = None):
        self.model, self.backend, self.lowest = model, backend, lowest
        self.speed = speed or DEFAULTS[backend.name]
        self._counted: dict[int, Counter[_Place]] = {}

    def relative(self, row: RowShape, plan: Plan) -> float:
        """Time of a step on `row` by `plan` over that of full backward (uncompiled, as it stands in memory)."""
        return self.cost(row, plan) / self.cost(row, Plan("full"))

    def cost(self, row: RowShape, plan: Plan) -> float:
        """Operations, weighed by speed; only ratios mean anything."""
        total = sum(self._stream(extent, plan) for extent in row.extents)
        head = 2 * self.model.hidden * self.model.vocabulary * sum(map(sum, row.scored)) * self._packed(plan)
        chunks = sum(-(-count // plan.head_chunk) for spans in row.scored for count in spans)
        total = max(total, self._launches(row, plan)) + 2 * head
        if plan.backward == "segmented":
            total += chunks * EDGE_TOKENS * self.model.hidden * self.model.vocabulary
        if plan.compiled:
            total *= self.speed.compiled
        if plan.tight:
            total *= TIGHT
        return total * (1.0 if plan.backward == "full" else self.speed.lookahead[plan.lookahead])

    def _launches(self, row: RowShape, plan: Plan) -> float:
        """What handing all operations to the device costs."""
        full, segmented, chunk = self.speed.launch
        made_again = self._made_again(plan)
        tokens = 0.0
        for rows in row.streams:
            chunks = -(-rows // plan.mlp_rows) if plan.mlp_rows is not None and rows > plan.mlp_rows else 0
            # One forward pass more was measured to cost nearly as much as the other two and the backward pass.
            tokens += full if plan.backward == "full" else segmented * (1 + made_again) + chunk * chunks
        return 2.0 * tokens * self.model.active

    def _packed(self, plan: Plan) -> float:
        """What products of packed weights cost more than dense ones, where the plan leaves them packed."""
        return self.speed.packed if self.model.packed and not plan.dequantize else 1.0

    def _stream(self, extent: Extent, plan: Plan) -> float:
        places = self._places(plan.keep if plan.backward == "segmented" else len(self.model.layers))
        total = sum(count * self._layer(place, extent, plan) for place, count in places.items())
        layers = len(self.model.layers)
        edges = 0 if plan.backward == "full" else -(-layers // plan.segment_size)
        return total + edges * EDGE_TOKENS * 2.0 * self.model.active / layers

    def _places(self, keep: int) -> Counter[_Place]:
        """How many layers are of one kind and alike in what is done with them, the last `keep` of them kept."""
        if keep not in self._counted:
            kept_from = len(self.model.layers) - keep
            kinds = enumerate(self.model.kinds)
            self._counted[keep] = Counter(_Place(kind, i >= self.lowest, i >= kept_from) for i, kind in kinds)
        return self._counted[keep]

    def _layer(self, place: _Place, extent: Extent, plan: Plan) -> float:
        """One layer's operations in a step."""
        rows = extent.tokens
        layer, backward, recomputed, forwards = self.model.distinct[place.kind], 0.0, 0.0, 1.0
        if place.trained and plan.backward == "segmented":
            made_again = self._made_again(plan)
            recomputed = made_again + self.speed.again[place.kept] * self._again(layer, plan, rows)
            forwards += 1 + made_again
        if place.trained:
            backward = self.speed.mlp_chunks if plan.mlp_rows is not None and rows > plan.mlp_rows else 1.0
        matmul = 2.0 * layer.active * (rows + OVERHEAD) * self._packed(plan)
        attention = self._attention(layer, extent) * (forwards + ATTENTION_BACKWARD * place.trained)
        return matmul * (1 + recomputed + backward) + attention

    def _made_again(self, plan: Plan) -> float:
        """The share of the segments that run forward once more, for carries that were let go of."""
        if plan.boundaries is None:
            return 0.0
        _, trained = layer_cuts(len(self.model.layers), plan.segment_size, lowest=self.lowest, keep=plan.keep)
        return max(0.0, 1.0 - plan.boundaries / max(1, len(trained)))

    def _again(self, layer: Layer, plan: Plan, rows: int) -> float:
        """The share of a layer's products that its segment's backward computes again.

        Nothing needs the last product of a segment's last layer; an MLP in chunks runs again in each chunk's backward.
        """
        active = max(1, layer.active)
        last = sum(x.active for x in layer.linears[-1:])
        share = 1.0 - last / active / plan.segment_size
        if plan.mlp_rows is not None and plan.mlp_rows < rows:
            chunked = sum(x.active for x in layer.linears if x.tokenwise)
            share += max(0, chunked - last) / active * (1 - 1 / plan.segment_size)
        return share

    def _attention(self, layer: Layer, extent: Extent) -> float:
        """Operations of what mixes a layer's tokens, forward."""
        slots, half = extent.slots, extent.length / 2
        total = float(sum(SCAN * x.inputs * slots for x in layer.scans))
        for a in layer.attention:
            seen = half if a.window is None else min(half, a.window)
            total += 2.0 * slots * seen * a.heads * (a.dim + a.value_dim)
        return total
