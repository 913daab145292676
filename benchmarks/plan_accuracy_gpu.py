"""The GPU set of plan_accuracy.py: predicted against measured peak at the 8B shape, by the trainer's own path.

    python benchmarks/plan_accuracy.py --set gpu --minutes 4 --out gpu.jsonl
    python benchmarks/plan_accuracy.py --set gpu --compare gpu.jsonl

The model has Llama-8B's shape and random weights (LoRA rank 8 on all linear layers, AdamW), in bfloat16 and in 4 bits,
a process each. A setting is a row, what its recipe fixes, and a memory budget; `Planner` chooses the plan and sets the
allocator's limits, `Updates` makes the step. Budgets count what is above model and adapter: `lean` is 1.1 times what
the leanest plan is said to need, `room` 3 times, `rich` what the device recommends. Two steps each: the first compiles
kernels, `peak` is of the second; `leftover_gib` is what was allocated beside model and adapter before the first.
Results are written line by line, the most important settings first.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, TextIO

GIB, MB = 2**30, 10**6
SHAPES = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 8192},
}  # fmt: skip
SHORTER = {"8b": 1, "tiny": 128}  # lengths are divided by it
WARM_UP = 512
SHARE = 0.65  # of the minutes, when no further setting of the first model is begun
GRACE = 40.0  # seconds for the last one to end
BUDGETS = {"lean": 1.1, "room": 3.0}


def _setting(tokens: int, budget: str, layout: str = "sft", **engine: Any) -> dict[str, Any]:
    return {"tokens": tokens, "budget": budget, "layout": layout, "engine": engine}


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "bfloat16": [
        _setting(8192, "lean"),
        _setting(8192, "room"),
        _setting(8192, "rich"),
        _setting(1024, "rich"),
        _setting(4096, "room", segment_size=4),
        _setting(8192, "room", "shared"),
        _setting(8192, "lean", "pair"),
        _setting(16384, "lean"),
        _setting(1024, "lean", segment_size=1),
        _setting(4096, "rich", backward="full"),
        _setting(16384, "room"),
        _setting(4096, "lean", "shared"),
        _setting(32768, "lean"),
        _setting(32768, "rich"),
    ],
    "4bit": [
        _setting(8192, "lean"),
        _setting(8192, "rich"),
        _setting(4096, "room", segment_size=4),
        _setting(8192, "lean", "shared"),
        _setting(16384, "room"),
        _setting(1024, "rich"),
        _setting(8192, "rich", "pair"),
        _setting(1024, "lean"),
        _setting(32768, "lean"),
        _setting(32768, "room"),
    ],
}


def config(shape: str, dtype: str) -> dict[str, Any]:
    """The model as a `config.json`."""
    found = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
             "tie_word_embeddings": False, "torch_dtype": "bfloat16", **SHAPES[shape]}  # fmt: skip
    return found | ({"quantization": {"bits": 4, "group_size": 64}} if dtype == "4bit" else {})


@lru_cache
def shapes_of(shape: str, dtype: str) -> Any:
    """The model's shapes on CUDA, as `plan-segments` reads them."""
    from segtrain.memory import anatomy

    return anatomy.of_config(config(shape, dtype), "cuda")


class Subject:
    """One model with its adapter, and how to run settings on it."""

    def __init__(self, shape: str, dtype: str):
        import mlx.core as mx
        import mlx.nn as nn
        from mlx_lm.models import llama

        from segtrain.lora import layers
        from segtrain.models.load import Loaded
        from segtrain.models.stack import LayerStack

        mx.random.seed(0)
        self.config, self.shape, self.dtype = config(shape, dtype), shape, dtype
        model = llama.Model(llama.ModelArgs.from_dict(self.config))
        model.set_dtype(mx.bfloat16)
        if dtype == "4bit":
            nn.quantize(model, group_size=64, bits=4)
        mx.eval(model.parameters())
        model.freeze()
        self.resident = mx.get_active_memory()
        self.lora = layers.attach(model, rank=8, scale=2.0)
        mx.eval(self.lora.values())
        self.loaded_bytes = mx.get_active_memory()
        self.loaded, self.stack = Loaded(model, None, self.config, Path()), LayerStack(model)

    def run(self, setting: dict[str, Any]) -> dict[str, Any]:
        """Two updates as the trainer makes them; peaks, the plan, and what the estimate said."""
        import mlx.core as mx

        from segtrain.memory import rows
        from segtrain.memory.meter import Meter
        from segtrain.run.planning import Planner

        lines: list[dict[str, Any]] = []
        meter = Meter(lines.append)
        session = self._session(setting)
        planner, row = Planner(session, meter), self._row(setting)
        layout = session.layout(row)
        longest = max(map(len, layout.streams)) if setting["layout"] == "sft" else len(row)
        counts = {"longest": longest, "prompt_share": len(getattr(row, "prompt", ())) / len(row)}
        announced = [event.as_json() for event in planner.announce(counts)]
        update = self._updates(session, row, planner.backward, meter)
        times, peaks = [], []
        gc.collect()  # the last setting's optimiser and its closures hold each other
        mx.clear_cache()
        leftover = mx.get_active_memory() - self.loaded_bytes
        for number in (1, 2):
            lines.clear()
            begun = time.perf_counter()
            meter.start_step(number)
            update()
            times.append(round(time.perf_counter() - begun, 3))
            peaks.append(meter.memory().peak_gib)
        shape = rows.of_layout(layout)
        used = planner.plan_for(layout)
        return {
            "row": vars(shape),
            "plan": {k: v for k, v in used.as_json().items() if k != "peak_gib"},
            "notices": [line for line in announced if line and line.get("event") != "plan"],
            "budget_gib": round(planner.budget / GIB, 3),
            "predicted_gib": round(planner.chooser.estimator.peak(shape, used).bytes / GIB, 3),
            "measured_gib": round(peaks[1], 3),
            "leftover_gib": round(leftover / GIB, 3),
            "first_peak_gib": round(peaks[0], 3),
            "resident_gib": round(self.resident / GIB, 3),
            "phases": _by_kind(lines),
            "seconds": times[1],
            "first_seconds": times[0],
        }

    def _session(self, setting: dict[str, Any]) -> Any:
        """What the trainer's session would be, for a recipe that holds this setting."""
        from segtrain.attention import dispatch
        from segtrain.engine import objectives
        from segtrain.models.stack import LayerStack
        from segtrain.recipe.schema import Recipe
        from segtrain.run.session import Session

        preference = setting["layout"] != "sft"
        engine = {**setting["engine"], "memory_budget": self._budget(setting)}
        engine["prefix_sharing"] = setting["layout"] == "shared"
        data = {"train": "none.jsonl", "max_seq_length": self._tokens(setting) + 1}
        recipe = Recipe.from_mapping({"model": "random", "data": data, "engine": engine, "train": {"steps": 10}})
        loss = objectives.orpo(0.1, "full") if preference else objectives.sft
        stack = LayerStack(self.loaded.model)
        align = dispatch.align(dispatch.backend())
        return Session(recipe, self.loaded, self.lora, stack, loss, setting["layout"] == "shared", [], align)

    def _tokens(self, setting: dict[str, Any]) -> int:
        return int(setting["tokens"]) // SHORTER[self.shape]

    def _budget(self, setting: dict[str, Any]) -> str:
        """`lean` and `room` as multiples of what the leanest plan takes beside model and adapter."""
        if setting["budget"] == "rich":
            return "auto"
        from segtrain.memory import choices, rows
        from segtrain.memory.backends import here

        chooser = choices.chooser(shapes_of(self.shape, self.dtype), here(), None, resident=self.resident)
        shape = choices.aligned(rows.of_layout(self._layout(setting)), here())
        fixed, size = chooser.estimator.fixed, setting["engine"].get("segment_size")
        need = chooser.least(shape, sizes=(size,) if size else None) - fixed
        return f"{(fixed + BUDGETS[setting['budget']] * need) / MB:.0f}MB"

    def _layout(self, setting: dict[str, Any]) -> Any:
        from segtrain.engine import layouts

        row = self._row(setting)
        if setting["layout"] == "sft":
            return layouts.single(row.tokens, row.supervised)
        build = layouts.pair if setting["layout"] == "pair" else layouts.shared_prefix
        return build(row.prompt, row.chosen, row.rejected)

    def _row(self, setting: dict[str, Any]) -> Any:
        """Random tokens. A preference row has responses of a sixteenth: `tokens` in its one stream, or in each."""
        import mlx.core as mx

        from segtrain.data.rows import Origin, PreferenceRow, SupervisedRow

        tokens, origin = self._tokens(setting), Origin("random", 1)
        ids: Any = mx.random.randint(0, self.config["vocab_size"], (tokens + 1,), key=mx.random.key(1)).tolist()
        if setting["layout"] == "sft":
            return SupervisedRow(ids, [True] * len(ids), origin)
        response = tokens // 16
        prompt = tokens - response * (2 if setting["layout"] == "shared" else 1)
        return PreferenceRow(ids[:prompt], ids[:response], ids[response : 2 * response], origin)

    def _updates(self, session: Any, row: Any, choose: Callable, meter: Any) -> Callable[[], Any]:
        """A function that makes one update on `row`, as the training loop does."""
        from segtrain.parallel.ranks import Ranks
        from segtrain.run.optimizer import Optimizer
        from segtrain.run.passes import Passes
        from segtrain.run.state import RunState
        from segtrain.run.updates import Updates

        def rows() -> Iterator[Any]:
            while True:
                yield row

        state = RunState()
        updates = Updates(session, rows(), Passes(session, choose), Optimizer(session.recipe.train, 10), Ranks(), meter)
        return lambda: updates.next(state, lambda: False)


def _by_kind(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The highest peak of each kind of phase, GiB."""
    peaks: dict[str, float] = {}
    for line in lines:
        kind = line["phase"].split("[")[0]
        peaks[kind] = max(peaks.get(kind, 0.0), round(line["peak_gib"], 3))
    return peaks


def work(shape: str, dtype: str) -> None:
    """Build the model, compile what most settings need, wait for a line on stdin, then run the settings."""
    subject = Subject(shape, dtype)
    for budget in ("lean", "rich"):
        subject.run(_setting(WARM_UP, budget))
    print(json.dumps({"ready": dtype}), flush=True)
    end = float(input())
    for setting in SETTINGS[dtype]:
        if time.time() > end:
            break
        try:
            found = subject.run(setting)
        except Exception as error:  # one setting that fails must not hide the others
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"shape": shape, "dtype": dtype, **setting, **found}), flush=True)


def start(shape: str, dtype: str) -> subprocess.Popen[str]:
    """A process for one model, with the command buffers that training would ask for."""
    from segtrain.memory.backends import set_buffers

    environment = dict(os.environ)
    set_buffers(environment, max(setting["tokens"] for setting in SETTINGS[dtype]))
    command = [sys.executable, __file__, shape, dtype]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def measure(shape: str, minutes: float, out: Path, head: dict[str, Any], only: Sequence[str] = ()) -> None:
    """Run the settings of one model after the other; while one runs, the next one compiles its kernels."""
    begun = time.time()
    out.parent.mkdir(parents=True, exist_ok=True)
    dtypes = [dtype for dtype in SETTINGS if not only or dtype in only]
    child: subprocess.Popen[str] | None = None
    with out.open("a") as file:
        _line(file, {**head, "buffers": {k: v for k, v in os.environ.items() if k.startswith("MLX_MAX")}})
        for dtype, following in zip(dtypes, [*dtypes[1:], None], strict=True):
            child = child or start(shape, dtype)
            end = begun + 60 * minutes * (SHARE if following else 1.0)
            alarm = threading.Timer(end + GRACE - time.time(), child.kill)
            alarm.start()
            assert child.stdout
            print(child.stdout.readline().strip(), f"after {time.time() - begun:.0f} s", flush=True)
            after = start(shape, following) if following else None
            _collect(child, end, file)
            alarm.cancel()
            print(f"{dtype}: ended with {child.wait()} after {time.time() - begun:.0f} s", flush=True)
            child = after


def _collect(child: "subprocess.Popen[str]", end: float, file: TextIO) -> None:
    """Tell a child to begin once it is ready, no setting after `end`, and keep what it prints."""
    assert child.stdin
    assert child.stdout
    with suppress(BrokenPipeError):  # it was not ready in time
        child.stdin.write(f"{end}\n")
        child.stdin.flush()
    for text in child.stdout:
        if text.startswith("{") and "tokens" in (line := json.loads(text)):
            _line(file, line)


def _line(file: TextIO, line: dict[str, Any]) -> None:
    text = json.dumps(line)
    file.write(text + "\n")
    file.flush()
    print(text, flush=True)


def measured(line: dict[str, Any]) -> float:
    """A setting's own peak, GiB: without what earlier settings of its process had left in memory."""
    return float(line["measured_gib"] - line["leftover_gib"])


def predicted(line: dict[str, Any], backend: str = "cuda") -> Any:
    """Today's estimate for a measured line."""
    from segtrain.memory.backends import BACKENDS, CUDA_BUFFERS, with_buffers
    from segtrain.memory.estimate import Estimator
    from segtrain.memory.plan import Plan
    from segtrain.memory.rows import RowShape

    row = line["row"]
    shape = RowShape(tuple(row["streams"]), tuple(map(tuple, row["scored"])), tuple(row["branches"]))
    resident = round(line["resident_gib"] * GIB)
    table = with_buffers(BACKENDS[backend], line.get("buffers", CUDA_BUFFERS))  # type: ignore[index]
    estimator = Estimator(shapes_of(line["shape"], line["dtype"]), table, resident=resident)
    return estimator.peak(shape, Plan(**line["plan"]))


def compare(path: Path, backend: str = "cuda") -> None:
    """Each measured setting against today's estimate: of the whole peak, and of what is above the model.

    A run is held to its own prediction by the allocator's limit, so today's estimate may differ from both.
    """
    whole, above, live = [], [], []
    for line in map(json.loads, path.read_text().splitlines()):
        if "measured_gib" not in line:
            if "error" in line:
                print("failed", line["dtype"], line["tokens"], line["layout"], line["budget"], line["error"])
            continue
        peak = predicted(line, backend)
        guess, real, base = peak.bytes / GIB, measured(line), line["resident_gib"]
        live.append(abs(line["predicted_gib"] / real - 1))
        whole.append(abs(guess / real - 1))
        above.append(abs((guess - base) / (real - base) - 1))
        print(
            f"{guess / real - 1:+6.1%} {(guess - base) / (real - base) - 1:+7.1%} "
            f"{guess - base:7.2f} {real - base:7.2f} {line['first_peak_gib'] - base:7.2f} "
            f"{line['seconds']:6.2f} s {line['dtype']:8} {line['layout']:6} {line['tokens']:6} {line['budget']:5}",
            {k: v for k, v in line["plan"].items() if v},
            peak.moment,
            {k: round(v - base, 2) for k, v in line["phases"].items()},
            {k: round(v / GIB - base, 2) for k, v in peak.moments.items()},
        )
    names = ("whole peak, as predicted and held in that run", "by today's estimate", "by today's, above the model")
    for name, errors in zip(names, (live, whole, above), strict=True) if whole else ():
        print(f"{name}: {len(errors)} settings, median {median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    work(*sys.argv[1:])
