"""A model's shapes read off the model itself: its modules, its calls of attention, and the graphs of its layers.

No weight is read for it. `unread` builds a model from its `config.json` as mlx-lm does, with arrays that take no
memory. `read` captures it with `LayerStack` and looks at each kind of layer once, at a few short lengths: what its
passes hold grows linearly from there.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

from segtrain.engine.layouts import Stream
from segtrain.engine.segments import HIDDEN
from segtrain.errors import UserError
from segtrain.lora import layers as lora_layers
from segtrain.lora.frozen import dense_shape
from segtrain.lora.layers import EXPERTS, Lora, swapped
from segtrain.memory.doors import Seen, doors
from segtrain.memory.graph import QUEUES, Graph, Queue, trace, trace_vjp
from segtrain.memory.meter import frozen_bytes
from segtrain.memory.shapes import Layer, Line, Linear, Model, Pass
from segtrain.models import quantise
from segtrain.models.alike import LAYER_NUMBERS, as_function, holding, places
from segtrain.models.capture import intercept, leaves
from segtrain.models.ends import array_bytes
from segtrain.models.stack import LayerStack, Tape
from segtrain.models.tokenwise import tokenwise_modules

POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_seq_len")
LENGTHS = (65, 129, 257)  # numbers that no model's own sizes are
UNKNOWN, UNKNOWN_LEFT = 2, 3  # times what a layer's products take and give; of that, what is left for backward
LINEAR = (*lora_layers.LINEAR, *EXPERTS)


def _plain_adapter(layers: int) -> dict[str, Any]:
    return {"rank": 8, "scale": 2.0}


@dataclass(frozen=True)
class Subject:
    """A model whose shapes are wanted, with its adapter."""

    model: nn.Module
    stack: LayerStack
    lora: Lora


def unread(config: Mapping[str, Any], adapter: Callable[[int], Mapping[str, Any]] = _plain_adapter) -> Subject:
    """The model that `config` describes, without its weights.

    `adapter`: from the number of layers to the arguments of `lora.layers.attach`. Raises UserError where mlx-lm can't
    build the model or the adapter doesn't suit it.
    """
    model = _built(copy.deepcopy(dict(config)))
    try:
        lora = lora_layers.attach(model, **adapter(len(model.layers)), evaluate=False)
        _empty(model)
        with doors(Seen(QUEUES["cpu"]), "cpu"):  # no attention is called for, and none of its kernels
            return Subject(model, LayerStack(model), lora)
    except ValueError as error:
        raise UserError(str(error)) from error


def of_config(
    config: Mapping[str, Any], backend: str, adapter: Callable[[int], Mapping[str, Any]] = _plain_adapter
) -> Model:
    """The shapes of the model that `config` describes: see `unread` and `read`."""
    return read(unread(config, adapter), backend, config)


def quantised(config: Mapping[str, Any], kind: int | str) -> tuple[dict[str, Any], int]:
    """The `config.json` of a model quantised as `quantise.KINDS[kind]`, and the bytes of its weights.

    Raises UserError where mlx-lm can't build the model.
    """
    model = _built(copy.deepcopy(dict(config)))
    found = quantise.quantised(model, config, kind)
    return found, sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values())


def read(subject: Subject, backend: str, config: Mapping[str, Any]) -> Model:
    """The shapes of a model as `backend` (cpu, cuda, metal) would run it."""
    seen = Seen(QUEUES[backend])
    frozen = places([*subject.stack.layers, *subject.stack.ends])  # may not be in memory
    nothing = [mx.broadcast_to(mx.zeros((), module[key].dtype), module[key].shape) for module, key in frozen]
    mx.eval(nothing)
    with doors(seen, backend), holding(frozen, nothing):
        reader = _Reader(subject, seen)
        layers = tuple(reader.layer(i) for i in range(len(subject.stack)))
        logits = trace(lambda h: [subject.stack.logits(h)], mx.zeros((1, 2, reader.hidden), reader.dtype))
    return Model(
        hidden=reader.hidden,
        vocabulary=subject.stack.logits(mx.zeros((1, 1, reader.hidden), reader.dtype)).shape[-1],
        layers=layers,
        bytes=frozen_bytes(subject.model),
        dtype_bytes=reader.dtype.size,
        edge=reader.edge,
        layer_bytes=tuple(frozen_bytes(layer) for layer in subject.stack.layers),
        positions=_positions(config),
        packed=any(linear.packed for layer in layers for linear in layer.linears),
        capped=any(operation.name == "Tanh" for operation in logits.operations),
        ends=sum(map(array_bytes, subject.stack.ends)),
        block=_block(subject.stack),
    )


def _block(stack: LayerStack) -> tuple[int, int]:
    """Rows and bytes of the vocabulary's largest block; zeros where the head runs as a whole."""
    if stack.projection is None:
        return 0, 0
    rows, all_rows = max(block.hi - block.lo for block in stack.blocks), stack.blocks[-1].hi
    return rows, -(-rows * array_bytes(stack.projection) // all_rows)


def _built(config: dict[str, Any]) -> nn.Module:
    """The model with arrays that take no memory, of the dtypes and packed as its weights are."""
    try:
        kind, arguments = _get_classes(config)
        model = kind(arguments.from_dict(config))
    except SystemExit as error:  # how a model file of mlx-lm says that it needs another package
        raise UserError(f"model: {config.get('model_type')} needs a package that isn't installed") from error
    except (LookupError, ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"config.json doesn't describe a {config.get('model_type')} model: {reason}") from error
    _without_head(model, config)
    _empty(model, _dtype(config))
    packing = _packing(config)
    if packing:
        nn.quantize(model, **packing)
    return model


def _without_head(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Let the model drop its projection as it does when loaded without weights for one: where embeddings are tied."""
    text = config.get("text_config") or {}
    if config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)) and hasattr(model, "sanitize"):
        names = {name: value for name, value in dict(tree_flatten(model.parameters())).items() if "lm_head" not in name}
        with suppress(Exception):  # it expects the names and shapes of a published file
            model.sanitize(names)


def _empty(model: nn.Module, dtype: mx.Dtype | None = None) -> None:
    """All parameters as views of one number, in `dtype` where they are floating-point."""

    def view(array: mx.array) -> mx.array:
        kind = dtype if dtype is not None and mx.issubdtype(array.dtype, mx.floating) else array.dtype
        return mx.broadcast_to(mx.zeros((), kind), array.shape)

    model.update(tree_map(view, model.parameters()))
    mx.eval(model.parameters())


def _dtype(config: Mapping[str, Any]) -> mx.Dtype:
    text = config.get("text_config") or {}
    name = next((c[key] for c in (config, text) for key in ("torch_dtype", "dtype") if c.get(key)), "bfloat16")
    return {"float32": mx.float32, "float16": mx.float16}.get(str(name).removeprefix("torch."), mx.bfloat16)


def _packing(config: Mapping[str, Any]) -> dict[str, Any]:
    """How the weights are quantised, as arguments of `nn.quantize`; {}: not at all."""
    found = config.get("quantization") or config.get("quantization_config") or {}
    if found.get("quant_method") == "mxfp4":
        found = {"bits": 4, "group_size": 32, "mode": "mxfp4", "experts": True}
    if not found.get("bits"):
        return {}
    group = found.get("group_size", 64)

    def predicate(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        if found.get("experts"):
            return isinstance(module, EXPERTS)
        return found.get(path, True)

    return {
        "bits": found["bits"],
        "group_size": group,
        "mode": found.get("mode", "affine"),
        "class_predicate": predicate,
    }


def _positions(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config") or {}
    return next((int(c[key]) for c in (config, text) for key in POSITIONS if c.get(key)), None)


class _Reader:
    """Reads layers, each kind once. All of it happens inside `doors`."""

    def __init__(self, subject: Subject, seen: Seen):
        self.subject, self.seen = subject, seen
        self.tapes = {rows: self._tape(rows) for rows in LENGTHS}
        h = self.tapes[LENGTHS[0]].embedded
        self.hidden, self.dtype, self.edge = h.shape[-1], h.dtype, h.nbytes / LENGTHS[0]
        self._known: dict[tuple, Layer] = {}
        self._edges = {rows: {HIDDEN: tape.embedded} for rows, tape in self.tapes.items()}

    def _tape(self, rows: int) -> Tape:
        return self.subject.stack.begin(Stream(mx.zeros((1, rows), mx.int32)))

    def layer(self, i: int) -> Layer:
        """Layer `i`; called in order."""
        kind = self._kind(i)
        if kind not in self._known:
            self._known[kind] = self._read(i)
        if self.subject.stack.crossing:
            for rows, tape in self.tapes.items():
                self._edges[rows] = self.subject.stack.run(tape, self._edges[rows], i, i + 1)
        return self._known[kind]

    def _kind(self, i: int) -> tuple:
        """What layers of the same shapes have in common."""
        stack, layer = self.subject.stack, self.subject.stack.layers[i]
        call = self.tapes[LENGTHS[0]].calls[i]
        given = tuple(_described(leaf) for leaf in leaves((call.args, call.kwargs)))
        modules = tuple((name, type(m), _plain(m)) for name, m in layer.named_modules())
        crossing = bool(stack.crossing) and (stack.reads(i), stack.writes(i))
        return modules, given, crossing, len(self.subject.lora.slots(i, i + 1))

    def _read(self, i: int) -> Layer:
        stack, layer = self.subject.stack, self.subject.stack.layers[i]
        chunked: list[nn.Module] = []
        rest = mlp = None
        try:
            whole = self._passes(lambda rows: self._graph(i, rows))
            attention, scans = tuple(self.seen.attention), self.seen.measured_scans()
            chunked, rest, mlp = self._chunked(i, tokenwise_modules(layer))
        except ValueError:  # a model that looks at values, or an operation that MLX can't hand out
            attention, scans = tuple(self.seen.attention), ()
            whole = _products(self._linears(i, []), self.dtype.size)
        return Layer(
            linears=tuple(self._linears(i, chunked)),
            whole=whole,
            rest=rest,
            mlp=mlp,
            attention=attention,
            scans=scans,
            adapter=sum(slot.value.size for slot in self.subject.lora.slots(i, i + 1)),
            constants=self._constants(i),
            carried=self._carried(i),
            shares=bool(stack.reads(i)),
        )

    def _chunked(self, i: int, modules: list[nn.Module]) -> tuple[list[nn.Module], Pass | None, Pass | None]:
        """Modules that can work on some tokens at a time; passes of the rest of the layer, and theirs."""
        given: dict[int, mx.array] = {}
        rest = self._passes(lambda rows: self._graph_without(i, rows, modules, given)) if modules else None
        taken = [module for number, module in enumerate(modules) if number in given]
        if rest is None or len(taken) < len(modules):
            return [], None, None
        passes = [self._passes(partial(_graph_of, module, given[number])) for number, module in enumerate(modules)]
        return modules, rest, reduce(_sum, passes)

    def _passes(self, graph: Callable[[int], Graph]) -> Pass:
        return _passes(graph, self.seen.queue)

    def _graph(self, i: int, rows: int) -> Graph:
        """The graph of layer `i`'s vjp on `rows` tokens."""
        stack, tape = self.subject.stack, self.tapes[rows]
        slots = self.subject.lora.slots(i, i + 1)
        reads, writes = (HIDDEN, *stack.reads(i)), (HIDDEN, *stack.writes(i))
        self.seen.clear()
        made = stack.run(tape, self._edges[rows], i, i + 1)
        self.seen.clear()
        given = [_like(self._edges[rows][name]) for name in reads]
        outer = [_like(made[name]) for name in writes]
        values = [slot.value for slot in slots]

        def outputs(*primals: mx.array) -> list[mx.array]:
            with swapped(slots, primals[len(given) :]):
                out = stack.run(tape, dict(zip(reads, primals, strict=False)), i, i + 1)
            return [out[name] for name in writes]

        return trace_vjp(outputs, [*given, *values], outer)

    def _graph_without(self, i: int, rows: int, modules: Sequence[nn.Module], given: dict[int, mx.array]) -> Graph:
        """The same with a stand-in for `modules`; `given` gets the input of each that is called with nothing else."""

        def stand_in(number: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
            if len(args) > 1 or kwargs:
                return originals[number](modules[number], *args, **kwargs)
            given[number] = _like(args[0])
            return mx.sinh(args[0])

        originals = [type(module).__call__ for module in modules]
        with intercept(modules, stand_in):
            return self._graph(i, rows)

    def _linears(self, i: int, chunked: Sequence[nn.Module]) -> list[Linear]:
        chosen: dict[int, int] = {}
        inner = {id(m) for module in chunked for m in module.modules()}
        named = self.subject.stack.layers[i].named_modules()
        found = [(path, m) for path, m in named if isinstance(m, LINEAR)]
        experts = [m for _, m in found if isinstance(m, EXPERTS)]
        if experts:
            self._count_chosen(i, experts, chosen)
        linears = [_linear(path, m, chosen.get(id(m), 0), id(m) in inner) for path, m in found]
        return sorted(linears, key=lambda x: (x.tokenwise or x.experts > 0, x.outputs == self.hidden))

    def _count_chosen(self, i: int, experts: Sequence[nn.Module], chosen: dict[int, int]) -> None:
        """Experts of a token, from the indices that the layer's experts are called with."""
        originals = [type(m).__call__ for m in experts]
        rows = LENGTHS[0]

        def counted(number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
            indices = args[1] if len(args) > 1 else kwargs["indices"]
            chosen[id(experts[number])] = max(1, indices.size // rows)
            return originals[number](experts[number], *args, **kwargs)

        with intercept(experts, counted):
            self.subject.stack.run(self.tapes[rows], self._edges[rows], i, i + 1)

    def _constants(self, i: int) -> float:
        """Bytes a token of what the layer's call is given beside hidden states."""
        few, many = (sum(a.nbytes for a in self.tapes[rows].calls[i].constants) for rows in LENGTHS[:2])
        return (many - few) / (LENGTHS[1] - LENGTHS[0])

    def _carried(self, i: int) -> float:
        rows = LENGTHS[0]
        names = self.subject.stack.writes(i)
        if not names:
            return 0.0
        made = self.subject.stack.run(self.tapes[rows], self._edges[rows], i, i + 1)
        return sum(made[name].nbytes for name in names) / rows


def _graph_of(module: nn.Module, like: mx.array, rows: int) -> Graph:
    """The graph of a module's vjp, on an input like `like` with `rows` tokens."""
    function, trainable = as_function(module, type(module).__call__)
    x = mx.zeros((*like.shape[:-2], rows, like.shape[-1]), like.dtype)

    outer = _like(function(x, *trainable))
    return trace_vjp(lambda *inputs: [function(*inputs)], [x, *trainable], [outer])


def _linear(path: str, module: nn.Module, chosen: int, tokenwise: bool) -> Linear:
    *outer, outputs, inputs = dense_shape(module)
    name = path.removesuffix(".linear").rsplit(".", 1)[-1]
    return Linear(name, inputs, outputs, outer[0] if outer else 0, chosen, tokenwise, "scales" in module)


def _passes(graph: Callable[[int], Graph], queue: Queue) -> Pass:
    few, middle, many = LENGTHS
    made = graph(middle)
    pairs = any(buffer.shape[-2:] == (middle, middle) for buffer in made.buffers if buffer.maker >= 0)
    graphs = {few: graph(few)} if pairs else {}
    graphs |= {middle: made, many: graph(many)}

    def line(value: Callable[[Graph], float]) -> Line:
        return _line({rows: value(g) for rows, g in graphs.items()})

    return Pass(
        line(lambda g: g.residual),
        line(lambda g: g.fused_residual),
        line(lambda g: g.peak(queue) - g.residual),
        line(lambda g: g.forward(queue)),
    )


def _products(linears: Sequence[Linear], size: int) -> Pass:
    """What a layer without a graph holds at most, by its products: each one's input and output, some times."""
    each = size * sum((x.inputs + x.outputs) * max(1, x.chosen) for x in linears)
    left, made = Line(0.0, UNKNOWN_LEFT * each), Line(0.0, UNKNOWN * each)
    return Pass(left, left, made, made)


def _line(values: Mapping[int, float]) -> Line:
    """Through two lengths' values, or with a square through three."""
    *first, (y, b), (z, c) = values.items()
    slope = (c - b) / (z - y)
    if not first:
        return Line(c - slope * z, slope)
    ((x, a),) = first
    square = (slope - (b - a) / (y - x)) / (z - x)
    each = slope - square * (y + z)
    return Line(c - each * z - square * z * z, each, square)


def _sum(a: Pass, b: Pass) -> Pass:
    return Pass(a.residual + b.residual, a.fused + b.fused, a.made + b.made, a.forward + b.forward)


def _like(array: mx.array) -> mx.array:
    return mx.zeros(array.shape, array.dtype)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, mx.array):
        return leaf.shape, str(leaf.dtype)
    return type(leaf), getattr(leaf, "window", None), leaf if isinstance(leaf, (int, float, str, bool)) else None


def _plain(module: nn.Module) -> tuple:
    """A module's array shapes and plain numbers, but for the layer's own."""
    held = [(key, value) for key, value in module.items() if not isinstance(value, (nn.Module, list, dict))]
    held += [(key, value) for key, value in vars(module).items() if key not in LAYER_NUMBERS and key[0] != "_"]
    return tuple((key, *_described(value)) for key, value in held)
