"""Random small runs through the command line, each against full backward on one rank: the same adapter must come out.

    python benchmarks/differential.py --seeds 0:200 --out benchmarks/results/differential.jsonl

A case draws model, data, recipe, engine settings, ranks, a stop with resume, and what the machine is taken for
(compiled segments, small attention tiles, aligned streams, MLP chunks of a few tokens). Its reference has
`backward: full`, no shared prompts (but with dropout, whose masks differ by stream), and as many rows an update.
Compared are each update's loss and gradient norm, each evaluation, and how far each adapter array has moved. A case
that fails is run again alone by its number: `--seeds 17:18 --keep DIR`.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import data_toys  # noqa: E402
import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import processes  # noqa: E402
import tiny_configs  # noqa: E402
import tiny_run  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from segtrain import cli  # noqa: E402
from segtrain.attention import dispatch  # noqa: E402
from segtrain.engine import objectives  # noqa: E402
from segtrain.errors import RunFailed  # noqa: E402
from segtrain.event import TrainStep  # noqa: E402
from segtrain.memory import anatomy, choices, choose, machine  # noqa: E402
from segtrain.memory.backends import BACKENDS  # noqa: E402
from segtrain.memory.meter import frozen_bytes  # noqa: E402
from segtrain.models import support  # noqa: E402
from segtrain.models.load import load  # noqa: E402
from segtrain.recipe.schema import load_recipe  # noqa: E402
from segtrain.run.session import open_session  # noqa: E402
from segtrain.run.trainer import Trainer  # noqa: E402

FAMILIES = ("llama", "gemma3_text", "gemma4_text", "qwen3_moe")
WORDS = ["the", "a", "in", "then", "hers", "other", "inner", "thin", "rather", "there", "ant", "tea", "net", "earth"]
# By these most optimisers don't divide a gradient that is all but zero by itself: experts that no token chose get
# gradients that are rounding alone.
OPTIONS: dict[str, dict[str, Any]] = {"sgd": {}, "adamw": {"eps": 1e-3}, "adafactor": {"eps": [1e-6, 1e-3]}, "muon": {}}
# Largest relative difference of (losses and gradient norms, movement of an adapter array). SGD is linear in the
# gradient. The others divide by its size, so that they amplify the rounding of what is small.
TOLERANCES = {"sgd": (1e-5, 1e-4), "adamw": (1e-4, 1e-3), "adafactor": (1e-4, 1e-3), "muon": (1e-4, 1e-2)}
ROUNDING = 3e-7  # of an array's own size: what a few updates in float32 lose of a small movement
FLOORS = {"log_odds": 1.0}  # it is a difference of log-probs
LEAST = "1MB"  # stands for the least budget that the longest row fits
SMALL_MLP = (32, 8)
REFUSED = re.compile(r"raise engine\.memory_budget to (\d+)MB")


@dataclass(frozen=True)
class Machine:
    """What the machine is taken for; the defaults are this one."""

    compiled: bool = False
    attention: str = "blocks"  # blocks | tiles: small ones | fused
    align: int = 1
    mlp_rows: tuple[int, ...] = choose.MLP_ROWS
    head_chunk: int = choose.MIN_CHUNK
    whim: int = 0  # not 0: of the plans that fit a row any one is taken, not the fastest


@dataclass(frozen=True)
class Case:
    """One drawn run. `stop`: the update after which it ends, to be resumed with other engine settings."""

    seed: int
    loss: str
    model: str
    bits: int
    recipe: dict[str, Any]
    machine: Machine
    ranks: int = 1
    stop: int = 0
    resumed: dict[str, Any] = field(default_factory=dict)


# --- drawing


def draw(seed: int, families: Sequence[str] = FAMILIES, ranks: Sequence[int] = (1, 1, 1, 2)) -> Case:
    r = random.Random(seed)
    loss, model, bits = r.choice(["sft", "sft", "orpo"]), r.choice(families), r.choice([0, 0, 0, 4])
    layers = tiny_configs.CONFIGS[model].get("num_hidden_layers", 4)
    number, accumulation, steps = r.choice(ranks), r.randint(1, 4), r.randint(2, 4)
    recipe = {
        "data": {
            "max_seq_length": r.choice([90, 150, 300]),
            "on_long": r.choice(["truncate", "drop"]) if loss == "sft" else "drop",
            "supervise": r.choice(["last", "assistant", "all"]),
        },
        "lora": {
            "rank": r.choice([1, 2, 5]),
            "dropout": r.choice([0.0, 0.0, 0.1]),
            "targets": r.choice(["all-linear", "all-linear", ["q_proj"], ["*_proj"]]),
            "layers": r.choice(["all", "all", 2, [1, 3]]),
        },
        "engine": _engine(r, layers, bits),
        "orpo": {"beta": r.choice([0.1, 1.0]), "sft_scope": r.choice(["full", "response"])},
        "train": _train(r, steps, accumulation),
        "output": {"eval_every": r.choice([1, 2]), "save_every": 1},
    }
    experts = support.FAMILIES[model.split("/")[0]].experts
    stretches = bool(recipe["lora"]["dropout"]) and experts  # experts' masks are drawn for a whole stream
    taken_for = Machine(
        compiled=r.random() < 0.4,
        attention=r.choice(["blocks", "tiles", "fused"]),
        align=1 if stretches else r.choice([1, 1, 16]),
        mlp_rows=r.choice([choose.MLP_ROWS, SMALL_MLP, SMALL_MLP]),
        head_chunk=r.choice([choose.MIN_CHUNK, 4]),
        whim=r.choice([0, seed + 1, seed + 1]),
    )
    stop = r.choice([0, 0, 1]) if number == 1 else 0
    resumed = _engine(r, layers, bits) | {"prefix_sharing": recipe["engine"]["prefix_sharing"]}
    return Case(seed, loss, model, bits, recipe, taken_for, number, stop, resumed)


def _engine(r: random.Random, layers: int, bits: int) -> dict[str, Any]:
    dense = {"dequantize": r.choice([True, False, "auto"])} if bits else {}
    sharing = {"prefix_sharing": r.random() < 0.8}
    if r.random() < 0.4:  # the planner decides, within about as little as there can be
        backward = r.choice(["auto", "segmented"])
        return {"backward": backward, "memory_budget": LEAST, "lookahead": r.choice(["auto", 2]), **sharing, **dense}
    return {
        "backward": r.choice(["segmented", "segmented", "segmented", "auto", "full" if not dense else "auto"]),
        "segment_size": r.choice([1, 2, 3, layers, "auto"]),
        "head_chunk": r.choice([1, 3, 16, "auto"]),
        "keep_layers": r.choice([0, 1, 2, layers, "auto"]),
        "lookahead": r.choice([0, 1, 2, "auto"]),
        "memory_budget": "2GB",
        **sharing,
        **dense,
    }


def _train(r: random.Random, steps: int, accumulation: int) -> dict[str, Any]:
    optimizer = r.choice(["sgd", "sgd", "sgd", "adamw", "adafactor", "muon"])
    return {
        "steps": steps,
        "optimizer": optimizer,
        "optimizer_config": OPTIONS[optimizer] | ({"momentum": r.choice([0.0, 0.9])} if optimizer == "sgd" else {}),
        "learning_rate": 0.05 if optimizer == "sgd" else 0.01,
        "lr_schedule": r.choice(["constant", "cosine"]),
        "weight_decay": r.choice([0.0, 0.01]),
        "max_grad_norm": r.choice([None, 0.1, 1.0]),
        "grad_accumulation_steps": accumulation,
        "seed": r.randint(0, 99),
    }


def rows(r: random.Random, loss: str, count: int) -> list[dict[str, Any]]:
    """Rows of about 8 to 180 tokens."""

    def text(longest: int) -> str:
        return " ".join(r.choices(WORDS, k=r.randint(1, longest)))

    if loss == "orpo":
        return [
            {"prompt": text(r.choice([2, 14])) + " ", "chosen": text(12), "rejected": text(r.choice([1, 12]))}
            for _ in range(count)
        ]
    kind = r.choice(["chat", "completion", "text"])
    if kind == "text":
        return [{"text": text(30)} for _ in range(count)]
    if kind == "completion":
        return [{"prompt": text(14) + " ", "completion": text(14)} for _ in range(count)]
    turns = [r.randint(1, 2) for _ in range(count)]
    return [
        {"messages": [{"role": role, "content": text(5)} for _ in range(n) for role in ("user", "assistant")]}
        for n in turns
    ]


# --- running


def files(case: Case, folder: Path) -> tuple[Path, Path]:
    """The recipes of a case and of its reference."""
    r = random.Random(f"rows {case.seed}")
    data = {
        part: str(tiny_run.written(folder / f"{part}.jsonl", lines))
        for part, lines in _split(rows(r, case.loss, 18)).items()
    }
    recipe = {**case.recipe, "model": str(model(folder.parent, case)), "data": {**case.recipe["data"], **data}}
    sharing = case.recipe["engine"]["prefix_sharing"] and bool(case.recipe["lora"]["dropout"])
    per_update = case.ranks * case.recipe["train"]["grad_accumulation_steps"]
    reference = {
        **recipe,
        "engine": {"backward": "full", "memory_budget": "4GB", "prefix_sharing": sharing},
        "train": {**recipe["train"], "grad_accumulation_steps": per_update},
    }
    return _recipe_file(folder, "case", recipe), _recipe_file(folder, "reference", reference)


def _split(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {"train": lines[4:], "valid": lines[:4]}


def _recipe_file(folder: Path, name: str, recipe: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    output = {**recipe["output"], "dir": str(folder / name)}
    path.write_text(json.dumps({**recipe, "output": output}))  # JSON is YAML
    return path


def model(folder: Path, case: Case) -> Path:
    """A random float32 model, or one whose linear layers have 4 bits, with a tokenizer of bytes."""
    path = folder / f"{case.model.replace('/', '-')}-{case.bits}"
    if path.exists():
        return path
    tokenizer = data_toys.byte_level()
    tiny_configs.save(case.model, path, vocab_size=len(tokenizer), vocab_size_per_layer_input=len(tokenizer))
    tokenizer.save_pretrained(path)
    if case.bits:
        config = json.loads((path / "config.json").read_text())
        net = tiny_configs.build_config(config)
        nn.quantize(net, group_size=32, bits=case.bits, class_predicate=lambda _, m: _divisible(m))
        mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(net.parameters())))
        config["quantization"] = {"group_size": 32, "bits": case.bits}
        (path / "config.json").write_text(json.dumps(config))
    return path


def _divisible(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@contextlib.contextmanager
def taken_for(given: Machine, cache: Path) -> Iterator[None]:
    """While the block runs, segtrain takes this machine for `given`; `cache` is the user's cache directory."""
    measured: dict[str, Any] = {"compiled": 0.5 if given.compiled else 1.0, "attention": "blocks"}
    if given.attention == "fused":
        measured |= {"attention": "fused", "attention_dim": 8, "attention_dtype": "float32"}
    if given.whim:
        measured["lookahead"] = [1.0, 0.9, 0.8]
    bench = {"backend": "cpu", "mlx": machine.mlx_version(), "choices": measured}
    (cache / "segtrain").mkdir(parents=True, exist_ok=True)
    (cache / "segtrain" / "bench.json").write_text(json.dumps(bench))
    tiles = {"tile_bytes": 2048} if given.attention == "tiles" else {}
    rows = replace(dispatch.BACKENDS["cpu"], query_multiple=given.align, array_mask=True, **tiles)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(dispatch.BACKENDS, {"cpu": rows}))
        stack.enter_context(patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}))
        stack.enter_context(patch.multiple(choose, MLP_ROWS=given.mlp_rows, MIN_CHUNK=given.head_chunk))
        if given.whim:
            stack.enter_context(patch.object(choose, "sparing", partial(_by_whim, given.whim)))
        yield


def _by_whim(seed: int, options: Sequence[choose.Option], *_: Any) -> choose.Option | None:
    """In an order of plans that has no reason, and differs from one length of rows to another."""
    return min(options, key=lambda option: zlib.crc32(f"{seed} {option.plan}".encode()), default=None)


def command(arguments: Sequence[str], log: Path) -> int:
    """The command line in this process, its output in `log`."""
    with log.open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return cli.run(list(arguments))


def least_budget(case: Case, folder: Path) -> str:
    """What the leanest plan for the longest row needs, by the estimate."""
    recipe = load_recipe(folder / "case.yaml")
    loaded = load(recipe.model)
    (longest,) = [line["longest"] for line in tiny_run.lines(folder / "reference") if line["event"] == "data"]
    resident = frozen_bytes(loaded.model)
    model = anatomy.of_config(loaded.config, "cpu", lambda layers: choices.adapter(recipe, layers))
    chooser = choices.chooser(model, BACKENDS["cpu"], recipe, resident=resident).relaxed()
    row = choices.row_of(longest, preference=case.loss == "orpo", shared=recipe.engine.prefix_sharing)
    return f"{-(-chooser.least(row) // 1024)}KiB"


def candidate(case: Case, path: Path) -> str:
    """Run the case; "" or why it failed. A budget that is refused is raised to what the refusal asks for."""
    for attempt in range(6):
        log = path.parent / f"case-{attempt}.log"
        code = _ranks(case, path, log) if case.ranks > 1 else _alone(case, path, log)
        text = log.read_text()
        if code == 0:
            return ""
        asked = REFUSED.findall(text)
        if not asked:
            break
        path.write_text(re.sub(r'"memory_budget": "[^"]*"', f'"memory_budget": "{asked[-1]}MB"', path.read_text()))
    return f"exit code {code}: {text[-600:]}"


def _alone(case: Case, path: Path, log: Path) -> int:
    with taken_for(case.machine, path.parent / "cache"):
        if not case.stop:
            return command([case.loss, str(path), "--overwrite"], log)
        if code := command([case.loss, str(path), "--overwrite", "--dry-run"], log):
            return code
        try:
            _stopped(case, path)
        except RunFailed as error:
            log.write_text(str(error))
            return cli.FAILED
        engine = {**case.resumed, "memory_budget": json.loads(path.read_text())["engine"]["memory_budget"]}
        settings = [f"--set=engine.{name}={json.dumps(value)}" for name, value in engine.items()]
        return command([case.loss, str(path), "--resume", *settings], log)


def _stopped(case: Case, path: Path) -> None:
    """Run to the checkpoint of update `case.stop`, and a part of the next update."""
    events = Trainer(load_recipe(path), case.loss, overwrite=True).events()  # type: ignore[arg-type]
    for event in events:
        if isinstance(event, TrainStep) and event.step > case.stop:
            break
    events.close()  # type: ignore[attr-defined]


def _ranks(case: Case, path: Path, log: Path) -> int:
    """All ranks' processes; the largest exit code."""
    hosts, ports = path.parent / "hosts.json", processes.free_ports(case.ranks)
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    started = []
    for rank in range(case.ranks):
        arguments = (case, path, log, {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)})
        started.append(processes.CONTEXT.Process(target=_rank, args=arguments))
        started[-1].start()
    return max(abs(processes.ended(process)) for process in started)


def _rank(case: Case, path: Path, log: Path, environment: dict[str, str]) -> None:
    os.environ.update({"HF_HUB_OFFLINE": "1", **environment})
    with taken_for(case.machine, path.parent / f"cache-{environment['MLX_RANK']}"):
        raise SystemExit(command([case.loss, str(path), "--overwrite"], log))


# --- comparing


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case and its reference in `folder`; what differs, and by how much."""
    begun = time.monotonic()
    folder.mkdir(parents=True)
    path, reference = files(case, folder)
    with taken_for(Machine(), folder / "cache"):
        code = command([case.loss, str(reference)], folder / "reference.log")
    if code:
        return {"seed": case.seed, "skipped": (folder / "reference.log").read_text()[-300:]}
    if case.recipe["engine"]["memory_budget"] == LEAST:
        path.write_text(path.read_text().replace(f'"{LEAST}"', f'"{least_budget(case, folder)}"'))
    problem = candidate(case, path)
    result = {"seed": case.seed, "problems": [problem]} if problem else compared(case, folder)
    return {**result, "seconds": round(time.monotonic() - begun, 2)}


def compared(case: Case, folder: Path) -> dict[str, Any]:
    optimizer = case.recipe["train"]["optimizer"]
    close, moved = TOLERANCES[optimizer]
    problems, worst = _metrics(folder, close)
    errors = movements(case, folder)
    problems += [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= moved]
    memory = tiny_run.lines(folder / "case", "memory.jsonl")
    plan = next(line for line in tiny_run.lines(folder / "case") if line["event"] == "plan")
    kinds = sorted({line["phase"].split("[")[0] for line in memory})
    return {
        "seed": case.seed,
        "optimizer": optimizer,
        "metrics": worst,
        "adapter": max(errors.values()),
        "problems": problems,
        "plan": plan,
        "phases": kinds,
    }


def _metrics(folder: Path, close: float) -> tuple[list[str], float]:
    """Problems, and the largest relative difference of any number in a train or eval line."""
    ours, theirs = (
        [line for line in tiny_run.lines(folder / name) if line["event"] in ("train", "eval")]
        for name in ("case", "reference")
    )
    where = [[(line["event"], line["step"]) for line in lines] for lines in (ours, theirs)]
    if where[0] != where[1]:
        return [f"lines {where[0]} instead of {where[1]}"], 0.0
    without = {
        "shared_tokens",
        "tokens",
        "padding_tokens",
    }  # those that were computed: less of a shared prompt, more to fill up
    problems, worst = [], 0.0
    for one, other in zip(ours, theirs, strict=True):
        for key in other.keys() - without - {"event", "step"}:
            error = abs(one[key] - other[key]) / max(abs(other[key]), FLOORS.get(key, 1e-2))
            worst = max(worst, error)
            if not error <= (close if isinstance(other[key], float) else 0):
                problems.append(f"{other['event']} {other['step']}: {key} {one[key]} instead of {other[key]}")
    return problems, worst


def movements(case: Case, folder: Path) -> dict[str, float]:
    """Per adapter array, |case - reference| over |reference - initial value|, but for float32's own rounding."""
    recipe = load_recipe(folder / "reference.yaml")
    begun = open_session(recipe, objectives.of_recipe(case.loss, recipe), load(recipe.model)).lora.values()
    ours, theirs = (mx.load(str(folder / name / "adapters.safetensors")) for name in ("case", "reference"))
    assert ours.keys() == theirs.keys() == begun.keys()  # type: ignore[union-attr]

    def norm(array: mx.array) -> float:
        return float(mx.linalg.norm(array.reshape(-1)).item())

    errors = {}
    for name, start in begun.items():
        moved = norm(theirs[name] - start)  # type: ignore[index, call-overload]
        apart = norm(ours[name] - theirs[name])  # type: ignore[index, call-overload]
        errors[name] = max(0.0, apart - ROUNDING * norm(start)) / moved if moved else float(apart > 0)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:50")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--ranks", default="1,1,1,2")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    families, ranks = options.families.split(","), list(map(int, options.ranks.split(",")))
    begun, lines = time.monotonic(), []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(first, last):
            if time.monotonic() - begun > 60 * options.minutes:
                break
            case = draw(seed, families, ranks)
            result = run(case, (options.keep or Path(temporary)) / str(seed))
            lines.append(result | {"case": asdict(case)})
            if result.get("problems") or "skipped" in result:
                print(json.dumps(result), flush=True)
    summary = _summary(lines)
    print(json.dumps(summary))
    if options.out:
        head = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.platform(),
            "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
            "command": " ".join(sys.argv),
        }
        with options.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in (head, *lines, summary))
    sys.exit(1 if summary["failed"] else 0)


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    done = [line for line in lines if "plan" in line]
    worst: dict[str, list[float]] = {}
    for line in done:
        metrics, adapter = worst.get(line["optimizer"], [0.0, 0.0])
        worst[line["optimizer"]] = [max(metrics, line["metrics"]), max(adapter, line["adapter"])]
    plans = Counter(
        f"{key} {line['plan'][key]}"
        for line in done
        for key in ("backward", "segment_size", "keep", "boundaries", "lookahead", "mlp_rows", "dequantize", "compiled")
    )
    return {
        "cases": len(lines),
        "compared": len(done),
        "failed": [line["seed"] for line in lines if line.get("problems")],
        "skipped": [line["seed"] for line in lines if "skipped" in line],
        "worst": worst,
        "plans": dict(sorted(plans.items())),
    }


if __name__ == "__main__":
    main()
