"""Peak memory of a training step, from shapes alone. Pure arithmetic; no mlx.

What is live at each moment of a step is counted. T rows of a stream, H hidden, Q queries, K keys and values, b bytes of
the activations' dtype:

    model         all weights, packed as they are
    weights       streamed ones: of the segment that runs, of the next, which is being read, and of each that runs ahead
    adapter       LoRA parameters (float32), the optimiser's moments, and the gradients made so far
    boundaries    what crosses segment edges and is kept: the hidden states, shared keys and values, per-layer inputs
    residuals     of a segment under backward: what its layers keep from forward for backward. `shapes.Pass` says it,
                  read off each layer's own graph; attention adds Q + K + its output, a scan its inputs, outputs and
                  the states at its groups' starts; and there is the cotangent that comes in, H
    temporaries   of one layer's backward: what the graph makes, all in flight at once because evaluation runs ahead;
                  or attention's own, or a scan's group, where that is more
    head          a chunk's logits, their float32 copy, softmax and cotangent: 8 to 16 bytes a logit

The peak is the highest moment of: forward (boundaries + what a layer makes), head (boundaries + head), backward of any
segment (boundaries below it + residuals + temporaries + gradients above it), the optimiser's update. The constants
below are fitted to measured peaks by `benchmarks/fit.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap

from segtrain.engine.picking import most
from segtrain.engine.segments import grouped, layer_cuts
from segtrain.memory import fitted
from segtrain.memory.backends import Backend
from segtrain.memory.plan import Plan
from segtrain.memory.rows import Extent, RowShape
from segtrain.memory.shapes import Attention, Layer, Model, Pass

HELD_LAYERS = 4  # command buffers in flight are few, however long a segment
FORWARD = 4  # chunks of the MLP in forward are so many times as long (`models.tokenwise`)
BLOCK_LOGIT = 18  # bytes a logit of a block: as it is, in float32, exponentials, those without the target, as it was
HEAD_SLICE_BYTES = 128 << 20  # `models.dense.SLICE_BYTES`
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "muon": 1, "adafactor": 0}
UPDATE_COPIES = (
    6  # of the adapter, while the optimiser runs: gradients, normalised, clipped; new moments and parameters
)


@dataclass(frozen=True)
class Peak:
    """The highest moment of a step: what it is called, and the bytes of each part of it."""

    moment: str
    parts: Mapping[str, float]
    moments: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return round(sum(self.parts.values()))


class Estimator:
    """The estimate for one model, adapter and backend; `resident` overrides the bytes of the model's weights.

    `streamed`: of the layers' weights only those of a few segments are in memory, and of the ends a block of rows.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        *,
        optimizer: str = "adamw",
        accumulates: bool = False,
        resident: int | None = None,
        streamed: bool = False,
    ):
        self.model, self.backend, self.lowest, self.streamed = model, backend, model.lowest, streamed
        self.resident = model.bytes if resident is None else resident
        scale = self.resident / model.bytes  # the files may hold another dtype than the configuration says
        self.layer_bytes = [round(scale * size) for size in model.layer_bytes]
        self.block_bytes = round(scale * model.block[1]) if streamed else 0
        if streamed:
            self.resident -= sum(self.layer_bytes) + round(scale * model.ends)
        self.adapter = [4 * layer.adapter for layer in model.layers]
        self._known: dict[tuple, float] = {}
        self.state = sum(self.adapter) * (1 + MOMENTS.get(optimizer, 2) + accumulates)

    @property
    def fixed(self) -> int:
        """Bytes that are there whatever the row."""
        return round(self.resident + self.state)

    def peak(self, row: RowShape, plan: Plan) -> Peak:
        """The highest moment of one step on `row`."""
        moments = list(self._full(row, plan) if plan.backward == "full" else self._segmented(row, plan))
        for _, parts in moments:
            workspace = self.backend.workspace * (fitted.TIGHT_WORKSPACE if plan.tight else 1.0)
            parts["layer"] = parts.get("layer", 0.0) + workspace
        moments.append(("optimizer", {"adapter": UPDATE_COPIES * sum(self.adapter)}))
        base = {"model": float(self.resident), "adapter": float(self.state)}
        highest: dict[str, float] = {}
        for name, parts in moments:
            highest[name] = max(highest.get(name, 0.0), self.fixed + sum(parts.values()))
        name, parts = max(moments, key=lambda moment: sum(moment[1].values()))
        total = {key: base.get(key, 0.0) + parts.get(key, 0.0) for key in [*base, *parts]}
        return Peak(name, total, highest)

    def boundary(self, rows: int) -> float:
        """Bytes of the hidden states of `rows` tokens."""
        return rows * self.model.edge

    def constants(self, rows: int) -> float:
        """Of a stream, beside hidden states: what later layers share and its cotangents, per-layer inputs."""
        layers = self.model.layers
        return rows * sum(2 * layer.carried + layer.constants for layer in layers)

    def residuals(self, i: int, extent: Extent, mlp_rows: int | None = None, *, compiled: bool = False) -> float:
        """Bytes that layer `i`'s backward needs from its forward, and the cotangent that comes in."""
        return self._remembered("residuals", i, extent, mlp_rows, compiled)

    def temporaries(self, i: int, extent: Extent, mlp_rows: int | None = None) -> float:
        """Bytes that come and go in layer `i`'s backward."""
        return self._remembered("temporaries", i, extent, mlp_rows, False)

    def _remembered(self, name: str, i: int, extent: Extent, mlp_rows: int | None, compiled: bool) -> float:
        key = (name, self.model.kinds[i], extent, mlp_rows, compiled)
        if key not in self._known:
            layer = self.model.layers[i]
            if name == "residuals":
                self._known[key] = self._residuals(layer, extent, mlp_rows, compiled)
            else:
                self._known[key] = self._temporaries(layer, extent, mlp_rows)
        return self._known[key]

    def _residuals(self, layer: Layer, extent: Extent, mlp_rows: int | None, compiled: bool) -> float:
        rows, b = extent.tokens, self.model.dtype_bytes
        chunked = self._chunked(layer, rows, mlp_rows)
        passes = chunked[0] if chunked else layer.whole
        left = passes.fused if compiled and self.backend.fuses and not chunked else passes.residual
        # What is taken apart into sequences is there as a stream too.
        held = extent.slots + rows * extent.folded
        attention = sum(a.queries + a.outputs + (0 if layer.shares else a.keys) for a in layer.attention)
        scans = sum(rows * (x.inputs + x.outputs) + extent.sequences * x.states(extent.length) for x in layer.scans)
        return left.at(rows, extent.length) + held * b * attention + scans

    def _temporaries(self, layer: Layer, extent: Extent, mlp_rows: int | None) -> float:
        rows, length = extent.tokens, extent.length
        made = [layer.whole.made.at(rows, length)]
        if chunked := self._chunked(layer, rows, mlp_rows):
            rest, mlp = chunked
            chunk = mlp_rows or rows
            made = [rest.made.at(rows, length), mlp.residual.at(chunk, length) + mlp.made.at(chunk, length)]
        made += [self._attention_temporaries(a, extent) for a in layer.attention]
        made += [rows * (x.inputs + x.outputs) + extent.sequences * x.held_at(length) for x in layer.scans]
        return self.backend.run_ahead * max(made) + sum(self._scratch(a, length) for a in layer.attention)

    def _scratch(self, a: Attention, length: int) -> int:
        """Bytes that the fused attention's backward holds for itself, whatever the row."""
        return self.backend.scratch * a.heads * self.model.dtype_bytes if self._is_fused(a, length) else 0

    def _chunked(self, layer: Layer, rows: int, mlp_rows: int | None) -> tuple[Pass, Pass] | None:
        """The layer without its MLP, and that: where it works in chunks, and that frees memory."""
        if not self.backend.chunks_help or mlp_rows is None or mlp_rows >= rows or not layer.rest or not layer.mlp:
            return None
        return layer.rest, layer.mlp

    def _attention_temporaries(self, a: Attention, extent: Extent) -> float:
        """Bytes of attention's own backward."""
        b, out, slots, length = self.model.dtype_bytes, a.outputs, extent.slots, extent.length
        if self._is_fused(a, length):
            return slots * b * (3 * a.queries + 2 * out + 2 * a.keys)
        seen = length if a.window is None else min(length, a.window)
        tiles = fitted.TILES * min(self.backend.tile_bytes, 4 * a.heads * slots * seen)
        return slots * (4 * (2 * a.queries + out + 2 * a.keys) + b * (2 * a.queries + out)) + tiles

    def _is_fused(self, a: Attention, length: int) -> bool:
        return self.backend.attention_kind(a, length, self.model.dtype_bytes) != "blocks"

    def _fused_attention(self, layer: Layer, length: int) -> bool:
        return bool(layer.attention) and all(self._is_fused(a, length) for a in layer.attention)

    def _dense(self, layers: Sequence[int], plan: Plan) -> float:
        """Bytes of dense copies of quantised weights."""
        if not (plan.dequantize and self.model.packed):
            return 0.0
        each = [sum(x.parameters for x in self.model.layers[i].linears if x.packed and not x.experts) for i in layers]
        waiting = (1.0 - fitted.TIGHT_DENSE) * max(each) if plan.tight else 0.0
        return (sum(each) - waiting) * self.model.dtype_bytes

    @property
    def _logit_bytes(self) -> float:
        wide = self.model.dtype_bytes == 4
        if self.model.capped:
            return fitted.CAPPED_FLOAT32 if wide else fitted.CAPPED_HALF
        return fitted.LOGIT_FLOAT32 if wide else fitted.LOGIT_HALF

    def _head(self, row: RowShape, plan: Plan) -> dict[str, float]:
        """One chunk of logits, and the gradients of all scored rows."""
        b, H = self.model.dtype_bytes, self.model.hidden
        longest = max(count for spans in row.scored for count in spans)
        chunk = min(plan.head_chunk, longest) * self.model.vocabulary * self._logit_bytes
        units = sum(map(sum, row.scored)) * H * b
        if plan.dequantize and self.model.packed:
            chunk += self._head_slices(min(plan.head_chunk, longest))
        return {"head": chunk + units + self.boundary(max(row.streams))}

    def _blocks(self, row: RowShape, plan: Plan, weights: Mapping[str, float]) -> dict[str, float]:
        """A chunk's logits of one block, all scored rows' sums and gradients, and the block that is read meanwhile."""
        b, scored = self.model.dtype_bytes, sum(map(sum, row.scored))
        rows, longest = self.model.block[0], max(count for spans in row.scored for count in spans)
        chunk = min(plan.head_chunk, longest) * rows * BLOCK_LOGIT
        sums = scored * self.model.hidden * (4 + 2 * b)
        ahead = weights["weights"] / (2 + plan.lookahead)  # backward's first segment, while the last block runs
        held = (1 + plan.lookahead) * self.block_bytes + max(self.block_bytes, ahead)
        return {"head": chunk + sums + self.boundary(max(row.streams)), "weights": held}

    def _head_slices(self, rows: int) -> float:
        """A slice of the vocabulary's dense weights, and the logits once more where several make them up."""
        dense = self.model.hidden * self.model.vocabulary * self.model.dtype_bytes
        held = min(HEAD_SLICE_BYTES, dense)
        parts = rows * self.model.vocabulary * self.model.dtype_bytes if dense > held else 0
        return parts + held * (1 + self.backend.unpacking / self.model.dtype_bytes)

    def _segmented(self, row: RowShape, plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
        count = len(self.model.layers)
        kept_from = max(count - plan.keep, self.lowest)
        frozen, trained = layer_cuts(count, plan.segment_size, lowest=self.lowest, keep=plan.keep)
        groups = grouped([range(lo, hi) for lo, hi in trained], plan.boundaries)
        edges = [self.boundary(rows) for rows in row.streams]
        kept = [sum(self._products(i, rows, plan) for i in range(kept_from, count)) for rows in row.streams]
        saved = [len(groups) * edge for edge in edges]
        constants = sum(self.constants(rows) for rows in row.streams)
        boundaries = {"boundaries": sum(saved) + sum(edges) + constants, "kept": sum(kept)}
        unlike = {self._kinds(segment): segment for segment in starmap(range, frozen + trained)}
        forward = max(self._forward(segment, max(row.extents), plan) for segment in unlike.values())
        weights = self._weights(frozen + trained, plan)
        yield "forward", {**boundaries, **weights, "layer": forward}
        yield (
            "head",
            {**boundaries, **(self._blocks(row, plan, weights) if self.block_bytes else self._head(row, plan))},
        )
        grads = 0.0
        for number, extent in enumerate(row.extents):
            others = {
                "boundaries": sum(saved[number + 1 :]) + sum(edges[number:]) + constants,
                "kept": sum(kept[number + 1 :]),
                "adapter": grads,
                **weights,
            }
            yield from self._stream_backward(groups, extent, others, kept_from, plan)
            grads = float(sum(self.adapter))

    def _stream_backward(
        self, groups: Sequence[Sequence[range]], extent: Extent, others: Mapping[str, float], kept_from: int, plan: Plan
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """A stream's moments of backward, last segment first. `others`: bytes beside its own."""
        rows = extent.tokens
        edge, made, whole = self.boundary(rows), 0.0, float(sum(self.adapter))
        products = [self._products(i, rows, plan) for i in range(kept_from, len(self.model.layers))]
        live: dict[tuple[tuple[int, ...], bool], float] = {}  # by the segment's kinds of layers
        for number in range(len(groups) - 1, -1, -1):
            for place in range(len(groups[number]) - 1, -1, -1):
                segment = groups[number][place]
                key = self._kinds(segment), segment.start >= kept_from
                if key not in live:
                    live[key] = self._live(segment, extent, plan, kept=key[1]) * self._at_once(plan)
                # What a kept segment remembers is among its residuals.
                kept = sum(products[: max(0, segment.start - kept_from)])
                yield (
                    "backward",
                    {
                        **others,
                        "boundaries": others["boundaries"] + edge * (number + 1 + place),
                        "kept": others["kept"] + kept,
                        "layer": live[key],
                        "adapter": min(others["adapter"] + made, whole),
                    },
                )
                made += sum(self.adapter[i] for i in segment)

    def _kinds(self, segment: range) -> tuple[int, ...]:
        return self.model.kinds[segment.start : segment.stop]

    def _weights(self, segments: Sequence[tuple[int, int]], plan: Plan) -> dict[str, float]:
        """Bytes of the streamed weights in memory while a segment runs; nothing where the model is there as a whole."""
        if not self.streamed:
            return {}
        largest = max(sum(self.layer_bytes[lo:hi]) for lo, hi in segments)
        return {"weights": float((2 + plan.lookahead) * largest)}

    def read(self, row: RowShape, plan: Plan) -> int:
        """Bytes that one row, or rows that are joined, read of streamed weights: forward, backward, and what is run
        once more."""
        if not self.streamed:
            return 0
        frozen, trained = layer_cuts(len(self.model.layers), plan.segment_size, lowest=self.lowest, keep=plan.keep)
        again = [bounds for group in grouped(trained, plan.boundaries) for bounds in group[:-1]]
        runs = [*frozen, *trained, *trained, *again]
        head = self.block_bytes * self.model.vocabulary // self.model.block[0] if self.block_bytes else 0
        return head + sum(sum(self.layer_bytes[lo:hi]) for lo, hi in runs)

    def _products(self, i: int, rows: int, plan: Plan) -> float:
        """Bytes of a kept layer's linear outputs, without those that work in chunks or route, or end a segment."""
        layer = self.model.layers[i]
        chunked = plan.mlp_rows is not None
        outputs = [x.outputs for x in layer.linears if not x.experts and not (chunked and x.tokenwise)]
        return float(rows * self.model.dtype_bytes * (sum(outputs) - sum(outputs[-1:]) / plan.segment_size))

    def _live(self, segment: range, extent: Extent, plan: Plan, *, kept: bool = False) -> float:
        """Bytes of one segment's backward. Where the products are kept, none of forward's are in flight."""
        rows = extent.tokens
        held = sum(self.residuals(i, extent, plan.mlp_rows, compiled=plan.compiled) for i in segment)
        made = max(self.temporaries(i, extent, plan.mlp_rows) for i in segment) * (
            self.backend.fused if plan.compiled else 1.0
        )
        if kept:
            made *= min(1.0, fitted.KEPT_RUN_AHEAD / self.backend.run_ahead)
        fused = all(self._fused_attention(self.model.layers[i], extent.length) for i in segment)
        if plan.tight and not plan.compiled and fused:
            made *= fitted.TIGHT_UNCOMPILED
        return self.boundary(rows) + held + made + self._dense(segment, plan) + self._done_with(segment, rows, plan)

    def _done_with(self, segment: range, rows: int, plan: Plan) -> float:
        """Bytes that wait for their command buffer's end, where the limit doesn't make the device wait for them.

        A single layer with a whole MLP has none: its own arrays fill the buffers.
        """
        chunked = plan.mlp_rows is not None and plan.mlp_rows < rows
        layers = 0 if plan.tight else len(segment) - (not chunked)
        return self.backend.held * self.boundary(rows) * min(layers, HELD_LAYERS)

    def _at_once(self, plan: Plan) -> int:
        """Segments whose temporaries are live together."""
        return 2 if plan.lookahead == 2 and self.backend.overlaps else 1

    def _forward(self, segment: range, extent: Extent, plan: Plan) -> float:
        """Bytes of one segment's forward pass: what one layer makes."""
        rows = extent.tokens
        chunk = None if plan.mlp_rows is None else FORWARD * plan.mlp_rows
        widest = max(self._made(i, extent, chunk, compiled=plan.compiled) for i in segment)
        return widest * self._at_once(plan) + self._dense(segment, plan) + self._done_with(segment, rows, plan)

    def _made(self, i: int, extent: Extent, chunk: int | None, *, compiled: bool) -> float:
        """Bytes that layer `i`'s forward pass makes; `chunk`: tokens that its MLP takes at a time."""
        layer, b, rows, length = self.model.layers[i], self.model.dtype_bytes, extent.tokens, extent.length
        made = layer.whole.forward.at(rows, length)
        if chunked := self._chunked(layer, rows, chunk):
            rest, mlp = chunked
            made = rest.forward.at(rows, length) + mlp.forward.at(chunk or rows, length)
        made += sum(extent.slots * b * (a.outputs + extent.folded * (a.queries + a.keys)) for a in layer.attention)
        made += sum(rows * x.outputs + extent.sequences * x.held_at(length) for x in layer.scans)
        return made * (self.backend.fused if compiled else 1.0)

    def _full(self, row: RowShape, plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
        """Everything live at once: all layers' residuals, and the logits of all rows."""
        b, V = self.model.dtype_bytes, self.model.vocabulary
        trained = range(self.lowest, len(self.model.layers))
        # Compiled or not: in a graph of all layers little is fused away.
        held = sum(self.residuals(i, extent) for i in trained for extent in row.extents)
        edges = sum(self.boundary(rows) for rows in row.streams)
        made = max(self.temporaries(i, max(row.extents)) for i in trained)
        logits = float(V * sum(map(sum, row.scored)) * (fitted.FULL_FLOAT32 if b == 4 else fitted.FULL_HALF))
        # Where a span scores few of its stream's rows, their logits are picked from those of all rows: its gradient is
        # as large as these.
        spans = [(rows, [n for n in x if not most(n, rows)]) for rows, x in zip(row.streams, row.scored, strict=True)]
        picked = [rows * len(few) for rows, few in spans]
        logits += V * b * max(picked, default=0)
        boundaries = 2 * edges + sum(self.constants(rows) for rows in row.streams)
        yield "step", {"boundaries": boundaries, "layer": held, "head": logits}
        yield "step", {"boundaries": boundaries, "layer": held + made, "adapter": float(sum(self.adapter))}
