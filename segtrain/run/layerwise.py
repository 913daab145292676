"""Gradients a layer at a time by plain autodiff: the reference for rows that autodiff of the whole model can't hold.

It shares with segmented backward that layers are run one by one from what the one before made, and nothing else: each
layer computes as its model file does (`models.plain.PlainLayers`), all arrays that it leaves are handed on, needed or
not, and the head is differentiated by autodiff over some rows of logits at a time. Memory is that of the arrays
between layers and of one layer's autodiff; of streamed weights (`models.weights`) a layer's are held, or the head's.
"""

from collections.abc import Iterator
from typing import TypeAlias

import mlx.core as mx

from segtrain.engine.backward import Step
from segtrain.engine.head import flattened, log_softmax_at, padded_rows
from segtrain.engine.layouts import Layout, Span
from segtrain.engine.objectives import Objective, Scores, value_and_grad
from segtrain.lora.layers import Lora, swapped
from segtrain.models.plain import PlainLayers
from segtrain.models.stack import LayerStack, Tape

HEAD_ROWS = 128  # whose logits are live at a time

Carry: TypeAlias = dict[str, mx.array]


class Layerwise:
    """The step of a layout without branches, without dropout."""

    def __init__(self, stack: LayerStack, lora: Lora, objective: Objective):
        self.stack, self.lora, self.objective = PlainLayers(stack), lora, objective

    def step(self, layout: Layout) -> Step:
        reference = self._reference(layout) if self.objective.needs_reference else None
        tapes = [self.stack.begin(stream) for stream in layout.streams]
        edges = [self._forward(tape) for tape in tapes]
        hidden = [carries[-1]["h"] for carries in edges]
        counts: dict[str, float] = {name: span.count for name, span in layout.spans.items()}  # type: ignore[misc]
        scores = Scores(self._sums(hidden, layout), counts, reference or {})
        value, slopes = value_and_grad(self.objective, scores)
        grads: dict[str, mx.array] = {slot.name: mx.zeros_like(slot.value) for slot in self.lora.slots()}
        for number, (tape, carries) in enumerate(zip(tapes, edges, strict=True)):
            spans = [(span, slopes[name]) for name, span in layout.spans.items() if span.stream == number]
            self._backward(tape, carries, self._head(hidden[number], spans), grads)
        return Step(value, self.lora.flat_layout.flatten(grads))

    def _reference(self, layout: Layout) -> dict[str, mx.array]:
        """The spans' sums by the model with its adapter as at the start."""
        with self.lora.as_at_start():
            hidden = [self._forward(self.stack.begin(stream))[-1]["h"] for stream in layout.streams]
            return self._sums(hidden, layout)

    def _forward(self, tape: Tape) -> list[Carry]:
        """What stands before each layer, and after the last."""
        carries: list[Carry] = [{"h": tape.embedded}]
        self.stack.expect((i, i + 1) for i in range(len(self.stack)))
        for i in range(len(self.stack)):
            with self.stack.holding(i, i + 1):
                carries.append(self.stack.run(tape, carries[-1], i, i + 1))
                mx.eval(carries[-1])
        return carries

    def _backward(self, tape: Tape, carries: list[Carry], dh: mx.array, grads: dict[str, mx.array]) -> None:
        """From the last layer to the lowest trainable one; adds to `grads`."""
        made = carries.pop()
        cotangents = {name: dh if name == "h" else mx.zeros_like(array) for name, array in made.items()}
        down = range(len(self.stack) - 1, self.lora.lowest - 1, -1)
        self.stack.expect((i, i + 1) for i in down)
        for i in down:
            with self.stack.holding(i, i + 1):
                cotangents = self._layer(tape, i, carries.pop(), cotangents, grads)

    def _layer(self, tape: Tape, i: int, carry: Carry, outer: Carry, grads: dict[str, mx.array]) -> Carry:
        """The cotangents of what stands before layer `i`, given those of what stands after it."""
        slots = self.lora.slots(i, i + 1)

        def layer(*inputs: mx.array) -> list[mx.array]:
            with swapped(slots, inputs[len(carry) :]):
                made = self.stack.run(tape, dict(zip(carry, inputs[: len(carry)], strict=True)), i, i + 1)
            return [made[name] for name in outer]

        _, found = mx.vjp(layer, [*carry.values(), *(slot.value for slot in slots)], list(outer.values()))
        for slot, grad in zip(slots, found[len(carry) :], strict=True):
            grads[slot.name] = grads[slot.name] + grad
        mx.eval(found, grads)
        return dict(zip(carry, found[: len(carry)], strict=True))

    def _sums(self, hidden: list[mx.array], layout: Layout) -> dict[str, mx.array]:
        """The spans' sums of log-probs."""
        with self.stack.whole_head():
            return {name: self._sum(hidden[span.stream], span) for name, span in layout.spans.items()}

    def _sum(self, h: mx.array, span: Span) -> mx.array:
        """The span's sum of log-probs."""
        total = mx.array(0.0)
        for rows, targets, weights in _chunks(span):
            total = total + self._logp(mx.take(flattened(h), rows, axis=-2), targets, weights)
            mx.eval(total)
        return total

    def _head(self, h: mx.array, spans: list[tuple[Span, mx.array]]) -> mx.array:
        """dL/dh, given dL/d(sum of log-probs) of each span."""
        dh = flattened(mx.zeros_like(h))
        with self.stack.whole_head():
            for span, slope in spans:
                for rows, targets, weights in _chunks(span):
                    grad = mx.grad(self._logp)(mx.take(flattened(h), rows, axis=-2), targets, weights * slope)
                    dh = dh.at[..., rows, :].add(grad.astype(h.dtype))
                    mx.eval(dh)
        return dh.reshape(h.shape)

    def _logp(self, h: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        return (log_softmax_at(self.stack.logits(h), targets) * weights).sum()


def _chunks(span: Span) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """(rows, targets, weights) of `HEAD_ROWS` targets at a time."""
    parts = padded_rows(span, 1)[:3]
    for lo in range(0, len(span), HEAD_ROWS):
        yield tuple(part[lo : lo + HEAD_ROWS] for part in parts)  # type: ignore[misc]
