"""What the estimate knows of a model: linear layers, attention and scans by layer, and what its passes hold. Pure.

`anatomy` reads all of it off the model itself.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Linear:
    """One linear layer by the last part of its path. `experts` > 0: so many stacked, of which a token uses `chosen`.

    `tokenwise`: inside an MLP that can work on some tokens at a time. `packed`: its weights are quantised.
    """

    name: str
    inputs: int
    outputs: int
    experts: int = 0
    chosen: int = 0
    tokenwise: bool = False
    packed: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * max(self.experts, 1)

    @cached_property
    def active(self) -> int:
        """Parameters that one token is multiplied by."""
        return self.inputs * self.outputs * (self.chosen if self.experts else 1)


@dataclass(frozen=True)
class Attention:
    """One call of causal attention; `window`: keys that a row sees, itself included (None: all before it)."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None = None
    softcap: bool = False
    sinks: bool = False

    @property
    def queries(self) -> int:
        return self.heads * self.dim

    @property
    def outputs(self) -> int:
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * (self.dim + self.value_dim)


SHORTEST = 64  # tokens: chunks are filled up to as many
MOST_GROUPS = 128  # as in `segtrain.recurrence.grouped`


@dataclass(frozen=True)
class Scan:
    """One recurrence in groups of `group` tokens: bytes of its inputs and outputs a token, and of its state.

    `held`: bytes that one group's backward holds. `rule`: the module of `recurrence` that has it.
    """

    inputs: int
    outputs: int
    state: int
    group: int
    held: float = 0.0
    rule: str = ""

    def states(self, rows: int) -> int:
        """Bytes of the states at the starts of all groups of a row."""
        return -(-rows // self._group(rows)) * self.state

    def held_at(self, rows: int) -> float:
        """`held`, where a long row has larger groups and a short one isn't as long as a group."""
        return self.held * min(self._group(rows), max(rows, SHORTEST)) / self.group

    def _group(self, rows: int) -> int:
        return self.group * max(1, -(-rows // (self.group * MOST_GROUPS)))


@dataclass(frozen=True)
class Line:
    """Bytes for T tokens of a stream: fixed + each * T + pairs * T * L (where all scores of a row exist at once).

    L: tokens that see one another, T unless rows run together.
    """

    fixed: float = 0.0
    each: float = 0.0
    pairs: float = 0.0

    def at(self, rows: int, length: int | None = None) -> float:
        return max(0.0, self.fixed + rows * (self.each + (rows if length is None else length) * self.pairs))

    def __add__(self, other: "Line") -> "Line":
        return Line(self.fixed + other.fixed, self.each + other.each, self.pairs + other.pairs)


@dataclass(frozen=True)
class Pass:
    """Bytes that a forward and a backward pass hold, without attention and scans.

    - `residual`: what backward needs from forward; `fused`: the same where elementwise operations are compiled;
    - `made`: what the backward pass holds at its highest beyond that; `forward`: all that the forward pass makes.
    """

    residual: Line = Line()
    fused: Line = Line()
    made: Line = Line()
    forward: Line = Line()


@dataclass(frozen=True)
class Layer:
    """A layer's parts. `whole`: its passes; `rest` and `mlp`: the same without, and of, what can work in chunks.

    `adapter`: its LoRA parameters. `constants`: bytes a token that its calls are given beside hidden states.
    `carried`: bytes a token that it makes for later layers; `shares`: its keys and values are an earlier layer's.
    """

    linears: tuple[Linear, ...]
    whole: Pass
    rest: Pass | None = None
    mlp: Pass | None = None
    attention: tuple[Attention, ...] = ()
    scans: tuple[Scan, ...] = ()
    adapter: int = 0
    constants: float = 0.0
    carried: float = 0.0
    shares: bool = False

    @property
    def parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears)

    @cached_property
    def active(self) -> int:
        return sum(linear.active for linear in self.linears)


@dataclass(frozen=True)
class Model:
    """A whole model. `edge`: bytes a token of the hidden states between layers; `bytes`: of all weights;
    `layer_bytes`: of each layer's; `ends`: of the embeddings and the projection where they can stay on disk; `block`:
    rows and bytes of one block of the projection."""

    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    bytes: int
    dtype_bytes: int
    edge: float
    layer_bytes: tuple[int, ...] = ()
    positions: int | None = None
    packed: bool = False
    packed_head: bool = False
    capped: bool = False  # logits are soft-capped
    ends: int = 0
    block: tuple[int, int] = (0, 0)

    @cached_property
    def lowest(self) -> int:
        """The lowest layer with a trainable parameter."""
        return next((i for i, layer in enumerate(self.layers) if layer.adapter), 0)

    @cached_property
    def distinct(self) -> tuple[Layer, ...]:
        """One layer of each kind: layers of the same shapes are of one kind."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """By layer, the number of its kind."""
        numbers = {layer: number for number, layer in enumerate(self.distinct)}
        return tuple(numbers[layer] for layer in self.layers)

    @cached_property
    def active(self) -> int:
        """Parameters of all layers that one token is multiplied by."""
        return sum(layer.active for layer in self.layers)
