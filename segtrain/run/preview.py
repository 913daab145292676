"""`segtrain plan-segments`: memory and time per segment size, from `config.json` alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from segtrain.errors import UserError, counted
from segtrain.memory import choices, machine
from segtrain.memory.backends import Backend
from segtrain.memory.choose import Chooser, Option, longest, sizes, sparing
from segtrain.memory.corrections import kept
from segtrain.memory.device import Device
from segtrain.memory.device import device as device_of
from segtrain.memory.rows import RowShape
from segtrain.memory.shapes import Model
from segtrain.memory.source import find
from segtrain.models.support import refuse, shares_prefix
from segtrain.run.base import base, planned

if TYPE_CHECKING:
    from segtrain.recipe.schema import Recipe

GIB, GB = 2**30, 10**9
FAR = 1 << 20  # tokens: as far as a model without a limit of its own is looked at


@dataclass(frozen=True)
class Preview:
    """What is printed; memory in GiB. `lengths`: the data set's own rows. `measured`: with --measure.

    Where nothing fits, `tries` is what to try, in the order of what costs least.
    """

    model: str
    seq: int
    budget_gib: float
    fits: bool
    recommended: dict[str, Any] | None
    options: list[dict[str, Any]]
    advice: str = ""
    planned_for: str = ""
    tries: list[str] = field(default_factory=list)
    lengths: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Lengths:
    """What is known of the data: named row lengths, and how much of a preference row is its prompt."""

    named: Mapping[str, int] = field(default_factory=dict)
    preference: bool = False
    prompt_share: float = choices.PROMPT_SHARE
    note: str = ""


def preview(
    recipe: "Recipe | None",
    *,
    model: str | None = None,
    seq: int | None = None,
    budget: str | None = None,
    device: str | None = None,
    measure: bool = False,
) -> Preview:
    """Options for `recipe`, or for `model` at `seq` tokens, on `device` (`memory.device`), None for this machine.

    Raises UserError for what can't be planned at all.
    """
    target = device_of(device, seq or (recipe.data.max_seq_length if recipe else 0))
    name = model or (recipe.model if recipe else "")
    source = planned(recipe) if recipe and not model else find(name)
    refuse(source.config)
    backend = machine.steered(target.backend) if target.here else target.backend
    shape = _shapes(source.config, recipe, backend)
    limit = _budget(recipe, budget) or target.budget
    asked = recipe.engine.weights if recipe else "auto"
    chooser = choices.chooser(shape, backend, recipe, resident=source.weights, streamed=asked == "streamed")
    if asked == "auto" and choices.too_large(chooser, limit):
        chooser = choices.chooser(shape, backend, recipe, resident=source.weights, streamed=True)
    if target.here:
        chooser = chooser.corrected(kept(shape, backend.name))
    _require_room(chooser, limit, name)
    length = _length(recipe, seq, shape)
    lengths = _lengths(recipe, name)
    if seq is None and lengths.named:
        length = max(2, min(length, max(lengths.named.values())))
    shared = shares_prefix(str(source.config.get("model_type"))) and _shares(recipe)
    case = _Case(chooser, backend, limit, lengths, shared, _planned_for(target, limit))
    found = case.preview(name, length, shape.positions or FAR)
    if measure:
        from segtrain.run.measure import measured_step

        place = base(recipe) if recipe and not model else name
        return replace(found, measured=measured_step(recipe, place, found.recommended, case.row(length), chooser))
    return found


@dataclass(frozen=True)
class _Case:
    """One question: these rows, this budget."""

    chooser: Chooser
    backend: Backend
    budget: int
    lengths: Lengths
    shared: bool
    planned_for: str

    def row(self, length: int) -> RowShape:
        row = choices.row_of(
            length,
            preference=self.lengths.preference,
            shared=self.shared,
            prompt_share=self.lengths.prompt_share,
        )
        return choices.aligned(row, self.backend)

    def preview(self, name: str, length: int, limit: int) -> Preview:
        row = self.row(length)
        options = [self._option(row, size, limit) for size in self._sizes()]
        if self.chooser.settings.backward != "segmented" and not self.chooser.estimator.streamed:
            options.append(self._full(row, limit))
        fastest = self.chooser.fastest(row, self.budget)
        if fastest and fastest.plan.keep:
            options.append(self._as_json(fastest, longest(self._fits(fastest.plan.segment_size), limit)))
        fitting = [option for option in options if option["fits"]]
        best = sparing(fitting, self.budget / GIB, lambda x: x["relative_time"], lambda x: x["peak_gib"])
        notes = [self.lengths.note] if self.lengths.note else []
        if best and self.chooser.estimator.streamed:
            notes.append(f"weights are read from disk as layers run: {self._reading(best)}")
        return Preview(
            name,
            length,
            round(self.budget / GIB, 4),
            best is not None,
            best,
            options,
            "" if best else self._advice(length, limit),
            self.planned_for,
            [] if best else choices.remedies(self.chooser),
            [self._own(key, value) for key, value in self.lengths.named.items()],
            notes,
        )

    def _reading(self, option: Mapping[str, Any]) -> str:
        """What a row reads, and how long the disk takes for it."""
        text, disk = f"{option['read_gib']:.3g} GiB a row", self.chooser.disk
        if disk is None:
            return f"{text}; how long that takes is up to the disk, which segtrain bench times"
        return f"{text}, {option['read_gib'] * GIB / disk:.3g} s at the disk's {disk / GIB:.2g} GiB a second"

    @property
    def _keep(self) -> int:
        return self.chooser.settings.keep or 0

    def _sizes(self) -> list[int]:
        if self.chooser.settings.backward == "full":
            return []
        fixed = self.chooser.settings.segment_size
        return [min(fixed, self.chooser.layers)] if fixed else sizes(self.chooser.layers)

    def _option(self, row: RowShape, size: int, limit: int) -> dict[str, Any]:
        plain = [self.chooser.option(row, plan) for plan in self.chooser.plans(row, (size,)) if plan.keep == self._keep]
        fitting = [option for option in plain if option.peak <= self.budget]
        chosen = sparing(fitting, self.budget, lambda x: x.relative_time, lambda x: x.peak)
        chosen = chosen or self.chooser.leanest(row, sizes=(size,))
        return self._as_json(chosen, longest(self._fits(size), limit))

    def _full(self, row: RowShape, limit: int) -> dict[str, Any]:
        options = [self.chooser.option(row, plan) for plan in self.chooser.full(row)]
        chosen = min(options, key=lambda x: (x.peak > self.budget, x.relative_time))

        def fits(length: int) -> bool:
            row = self.row(length)
            return any(self.chooser.option(row, plan).peak <= self.budget for plan in self.chooser.full(row))

        return self._as_json(chosen, longest(fits, limit))

    def _fits(self, size: int | None) -> Callable[[int], bool]:
        chosen = None if size is None else (size,)
        return lambda length: self.chooser.fits(self.row(length), self.budget, sizes=chosen)

    def _as_json(self, option: Option, far: int) -> dict[str, Any]:
        return {
            **option.plan.as_json(),
            "peak_gib": round(option.peak / GIB, 4),
            "phases": {name: round(size / GIB, 4) for name, size in option.parts.items() if size},
            "moment": option.moment,
            **({"read_gib": round(option.read / GIB, 4)} if option.read else {}),
            "relative_time": round(option.relative_time, 3),
            **self._here(option),
            "fits": option.peak <= self.budget,
            "longest": far,
        }

    @staticmethod
    def _here(option: Option) -> dict[str, Any]:
        """What runs on this machine added: seconds, and the peak before it was corrected."""
        found: dict[str, Any] = {} if option.seconds is None else {"seconds": round(option.seconds, 3)}
        if option.estimated != option.peak:
            found["estimated_gib"] = round(option.estimated / GIB, 4)
        return found

    def _advice(self, length: int, limit: int) -> str:
        need = self.chooser.least(self.row(length))
        far = longest(self._fits(None), limit)
        text = f"rows of {counted(length, 'token')} need a budget of {_rounded_up(need)}"
        return f"rows of up to {counted(far, 'token')} fit; {text}" if far else text

    def _own(self, name: str, length: int) -> dict[str, Any]:
        """One of the data set's own lengths, and the fastest plan for it."""
        found = self.chooser.fastest(self.row(length), self.budget)
        line: dict[str, Any] = {"name": name, "tokens": length, "fits": found is not None}
        if found:
            line |= {"peak_gib": round(found.peak / GIB, 4), "relative_time": round(found.relative_time, 3)}
            line |= {"backward": found.plan.backward, "segment_size": found.plan.segment_size}
        return line


def _shapes(config: Mapping[str, Any], recipe: "Recipe | None", backend: Backend) -> Model:
    from segtrain.memory import anatomy  # imports mlx

    return anatomy.of_config(config, backend.name, lambda layers: choices.adapter(recipe, layers))


def _budget(recipe: "Recipe | None", budget: str | None) -> int | None:
    """What was asked for."""
    from segtrain.recipe.schema import parse_bytes

    if budget is not None:
        return parse_bytes(budget)
    return recipe.engine.budget_bytes if recipe else None


def _planned_for(target: Device, limit: int) -> str:
    """The device, and its own budget where another was asked for."""
    gives = f"it gives a run {_as_given(target.budget)} unless told otherwise"
    return target.words if limit == target.budget else f"{target.words}; {gives}"


def _require_room(chooser: Chooser, budget: int, name: str) -> None:
    """Raise UserError where not even a short row could be trained."""
    need = chooser.least(choices.row_of(128, preference=False, shared=False))
    if need > budget:
        fixed = chooser.estimator.fixed
        raise UserError(
            f"a budget of {_as_given(budget)} is too small for {name}: model and adapter alone take "
            f"{_rounded_up(fixed)}, and rows of 128 tokens need {_rounded_up(need)}"
        )


def _rounded_up(size: int) -> str:
    """What is needed, as a budget that is enough."""
    return f"{-(-size // (GB // 10)) / 10:.1f}GB" if size >= GB else f"{-(-size // 10**6)}MB"


def _as_given(size: int) -> str:
    """A budget as it may have been written."""
    unit, name = next(((n, name) for n, name in ((GB, "GB"), (10**6, "MB"), (1000, "KB")) if size >= n), (1, "B"))
    return f"{size / unit:.4g}{name}"


def _length(recipe: "Recipe | None", seq: int | None, shape: Model) -> int:
    """The row length to plan for. Raises UserError where the model has no such positions, or nothing says."""
    length = seq or (recipe.data.max_seq_length if recipe else None)
    if length is None:
        raise UserError("give --seq, the tokens of a row: segtrain plan-segments --model DIR --seq 8192")
    if shape.positions and length > shape.positions:
        raise UserError(
            f"rows of {counted(length, 'token')} are longer than the model's {counted(shape.positions, 'position')}; "
            f"use --seq (or data.max_seq_length) {shape.positions} at most"
        )
    return length


def _shares(recipe: "Recipe | None") -> bool:
    return recipe is None or recipe.engine.prefix_sharing


def _lengths(recipe: "Recipe | None", name: str) -> Lengths:
    """The lengths of the recipe's own rows; where the data can't be read, only a note that says why."""
    if recipe is None:
        return Lengths()
    from segtrain.data.dataset import open_data
    from segtrain.data.tokenizer import load_tokenizer

    preference = recipe.data.format == "preference"
    errors = []
    try:
        tokenizer = load_tokenizer(name, recipe.trust_remote_code)
    except UserError as error:
        return Lengths(preference=preference, note=f"planned by max_seq_length alone: {error}")
    for pairs in (True,) if preference else (False, True):
        try:
            counts = open_data(recipe, tokenizer, pairs=pairs).counts
        except UserError as error:
            errors.append(error)
        else:
            return _counted(counts, pairs, recipe.data.max_seq_length)
    return Lengths(preference=preference, note=f"planned by max_seq_length alone: {errors[0]}")


def _counted(counts: Mapping[str, Any], preference: bool, limit: int) -> Lengths:
    named = {
        name: min(int(counts[key]), limit)
        for name, key in (("median", "median"), ("95 %", "p95"), ("longest", "longest"))
        if counts.get(key)
    }
    share = counts["prompt_share"] if preference else choices.PROMPT_SHARE
    return Lengths(named, preference, min(0.99, share))
