"""Optimiser updates on flat dicts of parameters, their learning-rate schedule, and gradient clipping.

Parameters, gradients and the optimiser's state are flat: `{mlx-lm name: array}` and `{"<name>.<slot>": array}`. An
optimiser that treats each number by itself works on all of them as one array. All arithmetic is that of
`mlx.optimizers`, with three choices that differ from its defaults:

- Adam and AdamW correct the bias of their moments, as their papers do
  (`optimizer_config: {bias_correction: false}` turns it off);
- Adafactor takes the recipe's learning rate (its own relative step would ignore it, and a scale by the parameters'
  size would all but stop a LoRA B that starts at zero);
- Muon treats stacked experts `[E, m, n]` as E matrices.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optimizers

from segtrain.errors import RunFailed, UserError
from segtrain.lora.flat import ALIGN, FlatArrays, FlatLayout
from segtrain.recipe.schema import TrainRecipe

Arrays = dict[str, mx.array]
STEP = "step"
SINCE = "since"  # updates that the moments have no part of, where there are any
FLAT = "flat"  # the name of the one array that elementwise optimisers work on


class Optimizer:
    """The optimiser that `train` names, with a schedule over `total_steps` updates.

    `step` counts the updates done or skipped. `plus_ratio`: LoRA's B learns at so many times the learning rate (LoRA+,
    Hayou et al. 2024, arXiv:2402.12354). `compiled`: an update is one graph (None: on a GPU only). Raises
    UserError for an option that the optimiser doesn't have.
    """

    def __init__(self, train: TrainRecipe, total_steps: int, *, plus_ratio: float = 1.0, compiled: bool | None = None):
        if total_steps < 1:
            raise UserError(
                f"a run needs at least 1 optimiser update, not {total_steps}; give more rows or train.steps"
            )
        self.train = train
        self.total_steps, self.plus_ratio = total_steps, plus_ratio
        self.step = self._since = 0
        self._inner = _make(train)
        self._elementwise = train.optimizer in ELEMENTWISE
        self._layout = FlatLayout(())
        self._compiled = mx.default_device() != mx.Device(mx.cpu) if compiled is None else compiled
        self._apply: Callable[[Arrays, Arrays, mx.array], Arrays] = self._scaled
        self._known: Arrays | None = None  # the state to go on with, until parameters are seen

    def learning_rate(self, step: int) -> float:
        """The learning rate of the update that follows `step` updates.

        Warm-up is counted in optimiser updates: the first one takes base / warmup (never 0), the last one the base. The
        schedule then falls from the base towards `final_learning_rate`, which it reaches at `total_steps`.
        """
        base, final = self.train.learning_rate, self.train.final_learning_rate
        warmup = self.train.warmup(self.total_steps)
        if step < warmup:
            return base * (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        match self.train.lr_schedule:
            case "constant":
                return base
            case "linear":
                return base + (final - base) * done
            case "cosine":
                return final + (base - final) * 0.5 * (1 + math.cos(math.pi * done))

    def update(self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], factor: float = 1.0) -> FlatArrays:
        """New parameters after one update by `factor` times `grads` at the current learning rate.

        They and the state are evaluated. `params` and `grads` have the same names at every update. Raises RunFailed
        when a loaded state is not theirs.
        """
        assert params.keys() == grads.keys(), sorted(params.keys() ^ grads.keys())
        self._begin(params)
        self._inner.learning_rate = self.learning_rate(self.step)
        flatten = self._layout.flatten
        new = self._apply(self._unit(flatten(params)), self._unit(flatten(grads)), mx.array(factor, mx.float32))
        flat = FlatArrays(self._layout, new[FLAT]) if self._elementwise else flatten(new)
        if self.plus_ratio != 1:
            flat = self._further(params, flat)
        mx.eval(flat.array, self._inner.state)
        self.step += 1
        return flat

    def _unit(self, arrays: FlatArrays) -> Arrays:
        """What the inner optimiser works on: one array, or the named ones."""
        return {FLAT: arrays.array} if self._elementwise else dict(arrays)

    def _scaled(self, params: Arrays, grads: Arrays, factor: mx.array) -> Arrays:
        scaled = {name: (grads[name] * factor).astype(value.dtype) for name, value in params.items()}
        new: Arrays = self._inner.apply_gradients(scaled, params)
        return new

    def _further(self, before: Mapping[str, mx.array], after: FlatArrays) -> FlatArrays:
        """B moved `plus_ratio` times as far: every optimiser here moves in proportion to its learning rate."""

        def moved(name: str, new: mx.array) -> mx.array:
            return before[name] + self.plus_ratio * (new - before[name]) if name.endswith("lora_b") else new

        return self._layout.flatten({name: moved(name, new) for name, new in after.items()})

    def state_dict(self) -> Arrays:
        """The state as `<parameter name>.<slot>`, and `step`; enough for `load_state_dict` to go on to the bit."""
        if self._known is not None:
            return dict(self._known)
        state = {STEP: mx.array(self.step, mx.uint64)}
        if self._since:
            state[SINCE] = mx.array(self._since, mx.uint64)
        for name, slots in self._inner.state.items():
            for slot, value in slots.items() if isinstance(slots, dict) else ():
                named = FlatArrays(self._layout, value) if name == FLAT else {name: value}
                state |= {f"{name}.{slot}": array for name, array in named.items()}
        return state

    def load_state_dict(self, state: Arrays) -> None:
        """Go on from `state`. Raises RunFailed when it has no step count; `update` compares it with the parameters."""
        if STEP not in state:
            raise RunFailed("the saved optimiser state has no step count; resume from another checkpoint")
        self.step = int(cast(int, state[STEP].item()))
        self._since = int(cast(int, state[SINCE].item())) if SINCE in state else 0
        self._known = dict(state)

    def skip(self) -> None:
        """An update that isn't made: the schedule goes on, the moments stay."""
        self.step += 1
        self._since += 1
        if self._known is not None:
            self._known |= {STEP: mx.array(self.step, mx.uint64), SINCE: mx.array(self._since, mx.uint64)}

    def begin_anew(self) -> None:
        """Keep the place in the schedule; the moments begin with the next update."""
        self._since, self._known = self.step, None

    def require_fit(self, params: Mapping[str, mx.array]) -> None:
        """Raises RunFailed unless a loaded state is one of this optimiser with these parameters."""
        if self._known is not None and self.step > self._since:
            fresh = Optimizer(self.train, self.total_steps, compiled=False)
            fresh._begin(params)
            _check_state(fresh.state_dict(), self._known)

    def _begin(self, params: Mapping[str, mx.array]) -> None:
        """Make the inner optimiser's state at the first update after the start or after a load."""
        if self._inner._initialized and self._known is None:
            return
        flat = params if isinstance(params, FlatArrays) else FlatLayout.of(params).flatten(params)
        self._layout = flat.layout
        self._inner.state = {STEP: mx.array(self.step - self._since, mx.uint64)}  # what corrects the moments' bias
        self._inner.init(self._unit(flat))
        if self._known is not None and self.step > self._since:
            known, self._known = self._known, None
            _check_state(self.state_dict(), known)
            for name, slots in self._inner.state.items():
                for slot in slots if isinstance(slots, dict) else ():
                    names = flat if name == FLAT else (name,)
                    found = {name: known[f"{name}.{slot}"] for name in names}
                    slots[slot] = self._layout.flatten(found).array if name == FLAT else found[name]
        self._known = None
        if self._compiled:  # anew, since it holds on to this state
            state = [self._inner.state]
            self._apply = mx.compile(self._scaled, inputs=state, outputs=state)


def global_norm(grads: Mapping[str, mx.array]) -> float:
    """The Euclidean norm of all arrays together, in float32; the order of their names doesn't matter."""
    if not grads:
        return 0.0
    flat = grads if isinstance(grads, FlatArrays) else FlatLayout.of(dict(sorted(grads.items()))).flatten(grads)
    squares = mx.square(flat.array.astype(mx.float32)).reshape(-1, ALIGN).sum(axis=-1)
    return math.sqrt(cast(float, mx.sum(squares).item()))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of this global norm are multiplied by so that theirs is at most `max_norm` (None or 0: any)."""
    return max_norm / norm if max_norm and math.isfinite(norm) and norm > max_norm else 1.0


class ExpertMuon(optimizers.Muon):
    """Muon in which a 3-D array `[E, m, n]` is E matrices, each orthogonalised by itself.

    mlx's own flattens it to one `[E, m * n]` matrix, which mixes the experts. Otherwise equal to `mlx.optimizers.Muon`.
    """

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        if gradient.ndim != 3:
            return super().apply_single(gradient, parameter, state)
        gradient = gradient + self.weight_decay * parameter
        v = state["v"] = self.momentum * state["v"] + (1 - self.momentum) * gradient
        update = (1 - self.momentum) * gradient + self.momentum * v if self.nesterov else v
        rows, columns = update.shape[-2:]
        rate = self.learning_rate.astype(gradient.dtype) * max(1, rows / columns) ** 0.5
        return parameter - rate * _orthogonalised(update, self.ns_steps)


def _orthogonalised(x: mx.array, steps: int) -> mx.array:
    """[E, m, n]: quintic Newton-Schulz iterations on each matrix, which drive its singular values to about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-1, -2) if tall else x
    x = x / (mx.sqrt(mx.sum(mx.square(x), axis=(-2, -1), keepdims=True)) + 1e-7)
    for _ in range(steps):
        gram = x @ x.swapaxes(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(-1, -2) if tall else x


ELEMENTWISE = ("adamw", "adam", "sgd")
# optimizer: (class, options that differ from mlx's defaults, has weight decay)
_KINDS: dict[str, tuple[Callable[..., optimizers.Optimizer], dict[str, Any], bool]] = {
    "adamw": (optimizers.AdamW, {"bias_correction": True}, True),
    "adam": (optimizers.Adam, {"bias_correction": True}, False),
    "sgd": (optimizers.SGD, {}, True),
    "adafactor": (optimizers.Adafactor, {"relative_step": False, "scale_parameter": False}, True),
    "muon": (ExpertMuon, {}, True),
}
_OWN_KEYS = ("learning_rate", "weight_decay")


def _make(train: TrainRecipe) -> optimizers.Optimizer:
    kind, defaults, decays = _KINDS[train.optimizer]
    if train.weight_decay and not decays:
        raise UserError(
            f"train.weight_decay {train.weight_decay}: {train.optimizer} has none; use adamw, or set it to 0"
        )
    _check_options(train, kind)
    options = {**defaults, **train.optimizer_config}
    if options.get("relative_step"):
        raise UserError("train.optimizer_config.relative_step: true makes adafactor ignore learning_rate; leave it out")
    if decays:
        options["weight_decay"] = train.weight_decay
    try:
        return kind(learning_rate=train.learning_rate, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"train.optimizer_config for {train.optimizer}: {error}") from None


def _check_options(train: TrainRecipe, kind: Callable[..., optimizers.Optimizer]) -> None:
    allowed = [name for name in inspect.signature(kind).parameters if name not in _OWN_KEYS]
    for name in train.optimizer_config:
        if name in _OWN_KEYS:
            raise UserError(f"train.optimizer_config.{name}: give it as train.{name}")
        if name not in allowed:
            known = ", ".join(allowed)
            raise UserError(f"train.optimizer_config.{name}: {train.optimizer} has no such option; it has {known}")


def _check_state(fresh: Arrays, saved: Arrays) -> None:
    """Raises RunFailed unless `saved` has exactly the names, shapes and dtypes of a fresh state."""
    expected, found = ({k: v for k, v in state.items() if k not in (STEP, SINCE)} for state in (fresh, saved))
    odd = sorted(expected.keys() ^ found.keys())
    odd += [name for name in expected.keys() & found.keys() if not _alike(expected[name], found[name])]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise RunFailed(
            f"the saved optimiser state is of another optimiser or other parameters ({', '.join(odd[:3])}{more}); "
            "resume with the recipe that made it, or by --force with new moments"
        )


def _alike(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
