"""A model's layers as a stack that runs any range of them, learnt by watching the model run itself.

No family's `embed -> layers -> norm -> head` is written again here. `begin` calls the model with its layers
intercepted (only embeddings and constants are computed) and records what each layer is called with. Three kinds of
argument come out:

- the hidden states: the first array argument, which must be the previous layer's output;
- other arrays that an earlier layer made, recognised by identity or through its cache: *carries*, such as a donor's
  keys and values;
- everything else: constants of the stream (masks, per-layer inputs), evaluated once.

`run` replays the recorded calls of layers lo..hi-1 on given carries; it is what both the forward pass and `mx.vjp`
use. `logits` calls the model with its layers as identities, which leaves the final norm, projection, scale and
soft-cap. A model whose layers are called out of order, skipped, twice, or with glue between them is refused.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from segtrain.engine.layouts import Stream
from segtrain.engine.segments import HIDDEN
from segtrain.errors import counted
from segtrain.models.alike import Place, fingerprint, holding, places, plain
from segtrain.models.capture import arrays, intercept, leaves, map_tree
from segtrain.models.causal import Causal
from segtrain.models.dense import dequantized, dequantized_in_slices, quantized_modules
from segtrain.models.ends import EMBEDDINGS, Block, blocks_of, embedding, ends_of
from segtrain.models.exceptions import exceptions_of
from segtrain.models.products import linear_modules, recalling, remembering
from segtrain.models.recurrences import restarts
from segtrain.models.stream_ops import StreamCache, stream_ops
from segtrain.models.tokenwise import chunked, tokenwise_modules
from segtrain.models.vocabulary import Vocabulary, held, projection_of
from segtrain.models.weights import Streamed


class UnsupportedModel(ValueError):
    """The model can't be run layer range by layer range; the message says why."""


@dataclass(frozen=True)
class _Carry:
    """Stands in a recorded argument for an array that arrives as a carry."""

    name: str


@dataclass(frozen=True)
class _Constant:
    """Stands in a shared call for the constant array of that number."""

    number: int


@dataclass(frozen=True)
class _Signature:
    """What is true of a layer whatever the stream."""

    reads: tuple[str, ...]  # carries beside h that its arguments or caches bring
    returns: tuple[str, ...]  # names of the floating-point arrays that it returns beside h
    caches: tuple[int, ...]  # numbers of the caches that it is given
    result: Any  # its result with arrays as `_Carry` (h), or as the names in `returns`
    rewritten: tuple[tuple[nn.Module, str], ...]  # weights that its forward pass assigns


@dataclass(frozen=True)
class _Call:
    """One layer call on one stream: arguments, with `_Carry` for what is not a constant."""

    args: tuple
    kwargs: dict[str, Any]
    caches: dict[int, StreamCache]

    @cached_property
    def constants(self) -> list[mx.array]:
        return arrays((self.args, self.kwargs))


@dataclass(frozen=True)
class Tape:
    """A stream and the recorded calls of its layers; `embedded` is h before layer 0, [..., T, H]."""

    stream: Stream
    embedded: mx.array
    calls: list[_Call]
    kinds: dict[int, tuple] = field(default_factory=dict)  # by layer, see `LayerStack._kind`


@dataclass(frozen=True)
class Pure:
    """A layer range as a function of its arrays alone: `run(carry, arrays)`.

    Ranges with the same `key` compute the same function; `arrays` are this range's own frozen weights and constants.
    With `key` None nothing is shared: `arrays` is empty, and `run` uses what the layers hold.
    """

    key: tuple | None
    run: Callable[[Mapping[str, mx.array], Sequence[mx.array]], dict[str, mx.array]]
    arrays: list[mx.array]


@dataclass(frozen=True)
class Execution:
    """How layers run. `mlp_rows`: tokens that a layer's MLP takes at a time, None for all. `dequantize`: whether they
    work on dense copies of quantised weights. `blocks`: whether the head takes a block of the vocabulary at a time
    though the projection is in memory.
    """

    mlp_rows: int | None = None
    dequantize: bool = False
    blocks: bool = False


class LayerStack:
    """The layers of an mlx-lm model, to be run by ranges. Raises `UnsupportedModel` where that is not possible."""

    def __init__(self, model: nn.Module, source: Streamed | None = None):
        """`source`: where the layers' weights come from, None for a model that holds them."""
        self.model, self.source = model, source
        self.execution = Execution()
        self._fingerprints: dict[int, int] = {}
        self._numbers: dict[tuple, int] = {}  # a fingerprint -> a number for it
        self._places: dict[int, list[Place]] = {}
        self.layers = list(model.layers)
        self._exceptions = exceptions_of(model)
        inner = {id(m) for m in quantized_modules(self.layers)}
        self._outer = [m for m in quantized_modules([model]) if id(m) not in inner]  # quantised, but not in a layer
        self.attention_only = _attention_only(model)
        self.recurrent = _recurrent(model)
        self.shares_prefix = (self.attention_only or restarts(self.layers)) and not _rope_by_length(model)
        self.takes_ragged = self.attention_only and self.shares_prefix
        learner = _Learner(self.layers)
        self._record(Stream(mx.zeros((1, 4), mx.int32)), learner)
        self._signatures = learner.signatures
        self.ends, self.projection = self._found_ends(learner)
        if source:
            source.keep([end for end in source.ends if not any(end is other for other in self.ends)])
        self.blocks = blocks_of(self.projection, self.layers) if self.projection else []
        self.crossing = {name for signature in self._signatures for name in signature.reads}
        self._writes = _first_writers(self._signatures, self.crossing)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def replaces(self) -> bool:
        """Whether parts of the model's own files are replaced while it runs."""
        return bool(self._exceptions)

    def _found_ends(self, learner: "_Learner") -> tuple[list[nn.Module], nn.Module | None]:
        """Of the model's large ends those that can be read by rows and blocks, and the projection among them."""
        assert learner.embedded is not None
        ends, like = ends_of(self.model), mx.zeros(learner.embedded.shape, learner.embedded.dtype)
        if not ends or (projection := projection_of(ends, self.logits, like)) is None:
            return [], None
        return [end for end in ends if type(end) in EMBEDDINGS or end is projection], projection

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The head by blocks of the vocabulary, where it is to run so."""
        module, source, execution = self.projection, self.source, self.execution
        streamed = source is not None and any(end is module for end in source.ends)
        if module is None or not (streamed or execution.blocks):
            return None
        if streamed:
            source.project_by(module)  # type: ignore[union-attr]
        read = source.block if source and streamed else held(module)
        logits = self.executing(replace(execution, dequantize=False)).logits
        return Vocabulary(module, self.blocks, read, logits, execution.dequantize)

    @property
    def streams(self) -> bool:
        """Whether layers' weights are read for each use."""
        return self.source is not None

    def executing(self, execution: Execution) -> "LayerStack":
        """The same layers, to be run so; this stack stays as it is."""
        view = copy.copy(self)
        view.execution = execution
        return view

    def reads(self, i: int) -> tuple[str, ...]:
        """Carries beside `h` that layer `i` uses."""
        return self._signatures[i].reads

    def writes(self, i: int) -> tuple[str, ...]:
        """Carries beside `h` that layer `i` makes and a later layer uses."""
        return self._writes[i]

    def begin(self, stream: Stream) -> Tape:
        """Record the model's calls on `stream`; embeddings and constants are being evaluated, no layer runs."""
        tape = self._record(stream, _Recorder(self._signatures))
        mx.async_eval(tape.embedded, [call.constants for call in tape.calls])
        return tape

    def run(self, tape: Tape, carry: Mapping[str, mx.array], lo: int, hi: int) -> dict[str, mx.array]:
        """Layers lo..hi-1 on `carry` (`h` and what they read): `carry` updated by all they make, unevaluated."""
        known = dict(carry)
        with stream_ops(tape.stream, self._exceptions), self._in_chunks(lo, hi):
            for i in range(lo, hi):
                self._replay(i, tape.calls[i], known)
        return known

    def pure(self, tape: Tape, lo: int, hi: int, *, shared: bool) -> Pure:
        """Layers lo..hi-1 as a function that, if `shared` and possible, serves every range of like layers."""
        if not shared or any(self.recurrent[lo:hi]):  # a recurrence compiles its own groups (`recurrence.grouped`)
            return Pure(None, lambda carry, _: self.run(tape, carry, lo, hi), [])
        key = (self.execution, *(self._kind(tape, i) for i in range(lo, hi)))
        own = [module[name] for i in range(lo, hi) for module, name in self._places[i]]
        constants = [array for call in tape.calls[lo:hi] for array in call.constants]
        own += tape.stream.arrays[1:]
        return Pure(key, self._function_of_arrays(tape, lo, hi), [*own, *constants])

    def _function_of_arrays(self, tape: Tape, lo: int, hi: int) -> Callable:
        """`run` of layers lo..hi-1 with their frozen arrays, the stream's and their calls' constants as arguments."""
        where = [place for i in range(lo, hi) for place in self._places[i]]
        like, constants = _without_arrays(tape, lo, hi), len(where) + len(tape.stream.arrays) - 1

        def run(carry: Mapping[str, mx.array], given: Sequence[mx.array]) -> dict[str, mx.array]:
            filled = _with_arrays(like, given[len(where) : constants], given[constants:])
            with holding(where, given[: len(where)]):
                return self.run(filled, carry, lo, hi)

        return run

    def _kind(self, tape: Tape, i: int) -> tuple:
        """A description that layer calls have in common when they compute the same function of their arrays."""
        if i not in tape.kinds:
            if i not in self._places:
                self._places[i] = places([self.layers[i]])
                self._fingerprints[i] = self._numbers.setdefault(fingerprint(self.layers[i]), len(self._numbers))
            stream = tape.stream
            call = _static(tape.calls[i], self.crossing)
            names = self._signatures[i].reads, self._writes[i]
            tape.kinds[i] = (self._fingerprints[i], names, call, stream.structure)
        return tape.kinds[i]

    def remembering(self, lo: int, hi: int) -> AbstractContextManager[list[mx.array]]:
        """Around a forward pass of layers lo..hi-1: a list of the products that `recalling` needs."""
        return remembering(self._linear(lo, hi))

    def recalling(self, lo: int, hi: int, products: Sequence[mx.array]) -> AbstractContextManager[None]:
        """Around a recomputation of layers lo..hi-1, which takes these products instead of computing them."""
        return recalling(self._linear(lo, hi), products)

    def _linear(self, lo: int, hi: int) -> list[nn.Module]:
        """The linear layers whose products can be remembered: not those that work in chunks."""
        layers = self.layers[lo:hi]
        chunked = [] if self.execution.mlp_rows is None else [m for layer in layers for m in tokenwise_modules(layer)]
        return linear_modules(layers, chunked)

    def expect(self, order: Iterable[Any]) -> None:
        """The ranges of layers and the blocks of the vocabulary whose weights are wanted, in order; None where nothing
        should be read ahead."""
        if self.source:
            self.source.expect(order)

    def holding(self, lo: int, hi: int) -> AbstractContextManager[None]:
        """Around all use of layers lo..hi-1, `pure` too: they hold their weights."""
        return self.source.held(lo, hi) if self.source else nullcontext()

    @contextmanager
    def layer_by_layer(self) -> Iterator[None]:
        """While the block runs, the model itself can be called: each of its layers holds its weights while it runs."""
        if self.source is None:
            yield
            return
        originals = [type(layer).__call__ for layer in self.layers]

        def handler(i: int, args: tuple, kwargs: dict[str, Any]) -> Any:
            with self.holding(i, i + 1):
                result = originals[i](self.layers[i], *args, **kwargs)
                mx.eval(
                    arrays(result), [arrays(dict(vars(leaf))) for leaf in leaves((args, kwargs)) if _is_cache(leaf)]
                )
            return result

        head = self.vocabulary
        self.expect(itertools.cycle([*((i, i + 1) for i in range(len(self.layers))), *(head.blocks if head else ())]))
        try:
            with intercept(self.layers, handler), self._looking_up(), head.whole() if head else nullcontext():
                yield
        finally:
            self.expect(())

    @contextmanager
    def whole_head(self) -> Iterator[None]:
        """While the block runs, `logits` has all of the projection's weights in memory."""
        module, source = self.projection, self.source
        if module is None or source is None or not any(end is module for end in source.ends):
            yield
            return
        source.project_by(module)
        arrays = source.block(Block(0, module["weight"].shape[0]))
        with holding([(module, key) for key in arrays], list(arrays.values())):
            yield

    def prepared(self, lo: int, hi: int) -> AbstractContextManager[None]:
        """Around one use of layers lo..hi-1, a forward pass or a whole vjp: holds their dense weights if wanted."""
        return dequantized(self.layers[lo:hi]) if self.execution.dequantize else nullcontext()

    def logits(self, h: mx.array) -> mx.array:
        """What the model makes of `h` [..., M, H] after its last layer: logits [1, M, V]."""
        last = len(self.layers) - 1
        h = h.reshape(h.shape)  # an object of our own: some models assign into it

        def identity(i: int, args: tuple, kwargs: dict[str, Any]) -> Any:
            return _placeholder(self._signatures[i].result, h if i == last else _hidden(args, kwargs))

        dense = dequantized_in_slices(self._outer) if self.execution.dequantize else nullcontext()
        with intercept(self.layers, identity), dense:
            return self.model(mx.zeros((1, h.shape[-2]), mx.int32))

    def whole(self, stream: Stream) -> mx.array:
        """The model's own forward pass on `stream`: logits [1, T, V], nothing captured."""
        if (stream.branches or stream.ragged) and not self.shares_prefix:
            why = "rotary embedding that depends on the row's length" if self.attention_only else "recurrent layers"
            raise UnsupportedModel(f"a model with {why} can't share a prefix: use two streams")
        caches = self._caches(stream)
        with stream_ops(stream, self._exceptions):
            return self.model(stream.tokens, cache=caches) if caches else self.model(stream.tokens)

    def _in_chunks(self, lo: int, hi: int) -> AbstractContextManager[None]:
        if self.execution.mlp_rows is None:
            return nullcontext()
        return chunked([m for layer in self.layers[lo:hi] for m in tokenwise_modules(layer)], self.execution.mlp_rows)

    def _record(self, stream: Stream, recorder: "_Recorder") -> Tape:
        with intercept(self.layers, recorder), self._looking_up():
            self.whole(stream)
        if len(recorder.calls) != len(self.layers):
            raise UnsupportedModel(f"the model calls {len(recorder.calls)} of its {counted(len(self.layers), 'layer')}")
        assert recorder.embedded is not None
        return Tape(stream, recorder.embedded, recorder.calls)

    def _looking_up(self) -> AbstractContextManager[None]:
        """Around the model's calls of its embeddings: those on disk are read row by row."""
        ends = self.source.ends if self.source else []
        return embedding([end for end in ends if type(end) in EMBEDDINGS], self.source.rows) if ends else nullcontext()  # type: ignore[union-attr]

    def _caches(self, stream: Stream) -> list[StreamCache] | None:
        return [StreamCache(stream) for _ in make_prompt_cache(self.model)] if self.attention_only else None

    def _replay(self, i: int, call: _Call, known: dict[str, mx.array]) -> None:
        signature = self._signatures[i]
        for number, cache in call.caches.items():
            cache.keys, cache.values = (known.get(name) for name in _cache_names(number))

        def filled(leaf: Any) -> Any:
            return known[leaf.name] if isinstance(leaf, _Carry) else leaf

        with _assigned_back(signature.rewritten):
            result = self.layers[i](*map_tree(filled, call.args), **map_tree(filled, call.kwargs))
        known[HIDDEN], rest = _split(result)
        made: dict[str, mx.array | None] = dict(zip(signature.returns, rest, strict=True))
        for number, cache in call.caches.items():
            made |= dict(zip(_cache_names(number), (cache.keys, cache.values), strict=True))
            cache.keys = cache.values = None
        known |= {name: array for name, array in made.items() if name in self.crossing and array is not None}


class _Recorder:
    """The handler that turns the model's layer calls on a stream into `_Call`s; no layer runs."""

    def __init__(self, signatures: list[_Signature]):
        self.signatures = signatures
        self.calls: list[_Call] = []
        self.embedded: mx.array | None = None
        self._made: dict[int, tuple[str, mx.array]] = {}  # holds the arrays, so that ids stay theirs
        self._caches: dict[int, int] = {}
        self._output: mx.array | None = None

    def __call__(self, i: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        hidden = self._expected_hidden(i, args, kwargs)
        caches: dict[int, StreamCache] = {}

        def recorded(leaf: Any) -> Any:
            if isinstance(leaf, StreamCache):
                caches[self._caches.setdefault(id(leaf), len(self._caches))] = leaf
            if leaf is hidden:
                return _Carry(HIDDEN)
            return _Carry(self._made[id(leaf)][0]) if id(leaf) in self._made else leaf

        call = _Call(map_tree(recorded, args), map_tree(recorded, kwargs), caches)
        result = self.result(i, call, args, kwargs, hidden)
        self.calls.append(call)
        self._output, rest = _split(result)
        for name, array in zip(self.signatures[i].returns, rest, strict=True):
            self._made.setdefault(id(array), (name, array))
        return result

    def result(self, i: int, call: _Call, args: tuple, kwargs: dict[str, Any], hidden: mx.array) -> Any:
        return _placeholder(self.signatures[i].result, mx.stop_gradient(hidden))  # an object that is nowhere else

    def _expected_hidden(self, i: int, args: tuple, kwargs: dict[str, Any]) -> mx.array:
        if i != len(self.calls):
            raise UnsupportedModel(f"the model calls layer {i} where layer {len(self.calls)} was due")
        if i == 0:
            hidden = _hidden(args, kwargs)
            self.embedded = mx.stop_gradient(hidden)
        elif not any(value is self._output for value in (*args, *kwargs.values())):
            raise UnsupportedModel(f"the model changes the hidden states between layers {i - 1} and {i}")
        else:
            assert self._output is not None
            hidden = self._output
        return hidden


class _Learner(_Recorder):
    """Records, and lets each layer run (lazily) to learn its signature."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__([])
        self._layers = layers
        self._originals = [type(layer).__call__ for layer in layers]
        self._indices: list[mx.array] = []  # integers that layers returned

    def result(self, i: int, call: _Call, args: tuple, kwargs: dict[str, Any], hidden: mx.array) -> Any:
        self._refuse_indices(i, args, kwargs)
        for cache in call.caches.values():
            cache.was_read = False
        before = _weights(self._layers[i])
        result = self._originals[i](self._layers[i], *args, **kwargs)
        rewritten = tuple(
            (m, k) for (m, k, v), now in zip(before, _weights(self._layers[i]), strict=True) if now[2] is not v
        )
        for module, key, value in before:
            module[key] = value
        carried = [leaf.name for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, _Carry)]
        shared = [name for n, cache in call.caches.items() if cache.was_read for name in _cache_names(n)]
        reads = tuple(dict.fromkeys(name for name in carried + shared if name != HIDDEN))
        returns = tuple(self._made.get(id(a), (f"{i}.{j}", a))[0] for j, a in enumerate(_split(result)[1]))
        self._indices += [a for a in arrays(result) if not mx.issubdtype(a.dtype, mx.floating)]
        self.signatures.append(_Signature(reads, returns, tuple(call.caches), _result_template(result), rewritten))
        return result

    def _refuse_indices(self, i: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Integers are not carried. An offset of a cache is fine: it is zero, which is what stands in for it."""
        used = [index for index in self._indices if any(leaf is index for leaf in arrays((args, kwargs)))]
        if any(index.size > 1 or index.item() for index in used):
            raise UnsupportedModel(f"layer {i} uses integers that an earlier layer computed")


def _static(call: _Call, crossing: set[str]) -> tuple:
    """All of a call but its arrays' values, hashable. A cache's number counts only where others read it."""

    def described(leaf: Any) -> Any:
        if isinstance(leaf, mx.array):
            return "array", leaf.shape, leaf.dtype
        if isinstance(leaf, Causal):
            return "causal", leaf.window
        if isinstance(leaf, (_Carry, StreamCache)):
            return leaf.name if isinstance(leaf, _Carry) else "cache"
        return plain(leaf)

    caches = tuple(number if crossing & {*_cache_names(number)} else None for number in call.caches)
    return tuple(map(described, leaves((call.args, call.kwargs)))), tuple(call.kwargs), caches


def _without_arrays(tape: Tape, lo: int, hi: int) -> Tape:
    """The tape of layers lo..hi-1 with each constant array replaced by its position among them."""
    count = itertools.count()

    def numbered(leaf: Any) -> Any:
        return _Constant(next(count)) if isinstance(leaf, mx.array) else leaf

    calls = list(tape.calls)
    for i in range(lo, hi):
        call = calls[i]
        calls[i] = _Call(map_tree(numbered, call.args), map_tree(numbered, call.kwargs), call.caches)
    kept = [call if lo <= i < hi else None for i, call in enumerate(calls)]
    return Tape(tape.stream, mx.zeros(()), kept)  # type: ignore[arg-type]


def _with_arrays(tape: Tape, of_stream: Sequence[mx.array], constants: Sequence[mx.array]) -> Tape:
    def filled(leaf: Any) -> Any:
        return constants[leaf.number] if isinstance(leaf, _Constant) else leaf

    calls = [c and _Call(map_tree(filled, c.args), map_tree(filled, c.kwargs), c.caches) for c in tape.calls]
    return Tape(tape.stream.with_arrays([tape.stream.tokens, *of_stream]), tape.embedded, calls)


def _first_writers(signatures: list[_Signature], crossing: set[str]) -> list[tuple[str, ...]]:
    """Per layer, the crossing carries that it is the first to make."""
    seen: set[str] = set()
    writes = []
    for signature in signatures:
        own = {*signature.returns, *(name for number in signature.caches for name in _cache_names(number))}
        writes.append(tuple(sorted((own & crossing) - seen)))
        seen |= own
    return writes


def _attention_only(model: nn.Module) -> bool:
    """Whether every cache the model asks for holds plain keys and values, so that a `StreamCache` can stand in."""
    return all(type(cache) in (KVCache, RotatingKVCache) for cache in make_prompt_cache(model))


def _recurrent(model: nn.Module) -> list[bool]:
    """By layer, whether it looks back otherwise than by attention; of all layers where caches don't tell which."""
    plain = [type(cache) in (KVCache, RotatingKVCache) for cache in make_prompt_cache(model)]
    count = len(list(model.layers))
    return [not one for one in plain] if len(plain) == count else [not all(plain)] * count


def _rope_by_length(model: nn.Module) -> bool:
    """Whether rotary frequencies depend on the number of rows, so that a prompt's keys differ between its responses."""
    return any(type(module).__name__ == "DynamicNTKScalingRoPE" for _, module in model.named_modules())


def _is_cache(leaf: Any) -> bool:
    """Whether a layer's argument holds what the layer remembers of earlier tokens."""
    return hasattr(leaf, "update_and_fetch") or hasattr(leaf, "cache")


def _cache_names(number: int) -> tuple[str, str]:
    return f"k{number}", f"v{number}"


def _hidden(args: tuple, kwargs: dict[str, Any]) -> mx.array:
    """The first array among a layer's own arguments (not nested ones)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, mx.array):
            return value
    raise UnsupportedModel("a layer is called without an array")


def _split(result: Any) -> tuple[mx.array, list[mx.array]]:
    """A layer's result as hidden states and the other floating-point arrays in it, in order."""
    first, *rest = arrays(result)
    return first, [array for array in rest if mx.issubdtype(array.dtype, mx.floating)]


def _result_template(result: Any) -> Any:
    """`result` with its hidden states marked and every other array replaced by its dtype."""
    first = arrays(result)[0]

    def marked(leaf: Any) -> Any:
        if leaf is first:
            return _Carry(HIDDEN)
        return leaf.dtype if isinstance(leaf, mx.array) else leaf

    return map_tree(marked, result)


def _placeholder(template: Any, h: mx.array) -> Any:
    """A result of the template's structure: `h`, and small arrays in the place of others."""

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, _Carry):
            return h
        return mx.zeros((1,), leaf) if isinstance(leaf, mx.Dtype) else leaf

    return map_tree(filled, template)


def _weights(layer: nn.Module) -> list[tuple[nn.Module, str, mx.array]]:
    return [(m, k, v) for _, m in layer.named_modules() for k, v in m.items() if isinstance(v, mx.array)]


@contextmanager
def _assigned_back(weights: tuple[tuple[nn.Module, str], ...]) -> Iterator[None]:
    """Undo assignments that a forward pass makes to weights, so that no graph (or tracer) grows in the model."""
    before = [module[key] for module, key in weights]
    try:
        yield
    finally:
        for (module, key), value in zip(weights, before, strict=True):
            module[key] = value
