"""What a user gets: `segtrain` beside `mlx_lm.lora`, each as its command, on the same model directory and rows.

    python benchmarks/as_a_user.py --minutes 9 --out benchmarks/results/as_a_user.jsonl      on a GPU, first cases first
    python benchmarks/as_a_user.py --only 8b short-8 --folder DIR
    python benchmarks/as_a_user.py --small                                                   the same code on a CPU
    python benchmarks/as_a_user.py --table benchmarks/results/as_a_user.jsonl

Model directories have real shapes and random weights (`user_models.py`); LoRA has rank 8 and scale 20 on all linear
layers. A line of the result file is one command's run: `seconds` an update (the median of the later half),
`tokens_per_second` of the rows' own tokens (mean over the same updates), `peak_gib` (`mx.get_peak_memory` as each
command reports it, in all), `first_seconds` of the first update, in which kernels compile, and for segtrain what its
plan had predicted. mlx-lm's readings come through its own `--report-to wandb`, with a module of that name that writes
lines.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import user_models

GIB = 2**30
SFT = "sft"
RECORDER = """import json, os
def init(**given): pass
def log(values, step=None): print(json.dumps(values), file=open(os.environ["READINGS"], "a"), flush=True)
"""


def case(shape: str, tokens: int | tuple[int, int], *, bits: int = 0, rows: int = 1, **more: Any) -> dict[str, Any]:
    """A model and its rows: `tokens` of a row (or the least and the most), `rows` an update."""
    least, most = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    return {"shape": shape, "bits": bits, "least": least, "most": most, "rows": rows, **more}


# `settings`: runs of segtrain, by name; `mlx_lm`: batch sizes of its runs, with or without --grad-checkpoint.
CASES: dict[str, dict[str, Any]] = {
    "8b-4bit": case("llama-8b", 8192, bits=4, mlx_lm=[1],
                    settings={"auto": {}, "lean": {"engine.memory_budget": "9.0GB"}}),
    "8b": case("llama-8b", 8192, mlx_lm=[1], settings={
        "auto": {}, "lean": {"engine.memory_budget": "20.5GB"}, "middle": {"engine.memory_budget": "37GB"}}),
    "8b-streamed": case("llama-8b", 8192, updates=3, mlx_lm=[], settings={
        "lean": {"engine.weights": "streamed", "engine.memory_budget": "7.0GB"},
        "auto": {"engine.weights": "streamed"}}),
    "8b-streamed-8": case("llama-8b", 8192, rows=8, updates=2, mlx_lm=[], settings={
        "auto": {"engine.weights": "streamed"}}),
    "8b-4bit-streamed": case("llama-8b", 32768, bits=4, updates=3, mlx_lm=[], settings={
        "auto": {"engine.weights": "streamed", "engine.memory_budget": "12.5GB"}}),
    "delta": case("qwen3.5-8-layers", 8192, mlx_lm=[], settings={
        "auto": {}, "lean": {"engine.memory_budget": "8.2GB"}}),
    "delta-lean": case("qwen3.5-8-layers", 8192, mlx_lm=[], settings={"10 GB": {"engine.memory_budget": "10GB"}}),
    "short-8": case("llama-8b", (40, 300), rows=8, mlx_lm=[8], checkpoint=False, updates=64, settings={"auto": {}}),
    "short-32": case("llama-8b", (40, 300), rows=32, mlx_lm=[32], checkpoint=False, updates=12, settings={
        "auto": {}, "22 GiB": {"engine.memory_budget": "23.6GB"}}),
    "gemma3": case("gemma3-12-layers", 8192, mlx_lm=[1], settings={
        "auto": {}, "lean": {"engine.memory_budget": "10.5GB"}}),
    "moe": case("qwen3-moe-6-layers", 4096, mlx_lm=[1], settings={"auto": {}}),
    "gpt-oss": case("gpt-oss-6-layers", 4096, mlx_lm=[1], settings={"auto": {}}),
    "orpo-shared": case("llama-8b", 8192, mlx_lm=[], command="orpo", answers=512, settings={"auto": {}}),
    "orpo-pair": case("llama-8b", 8192, mlx_lm=[], command="orpo", answers=512, settings={
        "auto": {"engine.prefix_sharing": "false"}}),
    "dpo-shared": case("llama-8b", 8192, mlx_lm=[], command="dpo", answers=512, epochs=2, settings={
        "pass": {"dpo.reference": "pass", "engine.memory_budget": "40GB"},
        "cached": {"dpo.reference": "cached", "engine.memory_budget": "40GB"}}),
    "simpo-shared": case("llama-8b", 8192, mlx_lm=[], command="simpo", answers=512, settings={
        "40 GB": {"engine.memory_budget": "40GB"}}),
    "cpo-shared": case("llama-8b", 8192, mlx_lm=[], command="cpo", answers=512, settings={
        "40 GB": {"engine.memory_budget": "40GB"}}),
    "8b-dora": case("llama-8b", 8192, mlx_lm=[], settings={
        "dora, lean": {"lora.kind": "dora", "engine.memory_budget": "20.5GB"}}),
    "delta-orpo-shared": case("qwen3.5-8-layers", 2048, mlx_lm=[], command="orpo", answers=128, settings={"auto": {}}),
    "delta-orpo-pair": case("qwen3.5-8-layers", 2048, mlx_lm=[], command="orpo", answers=128, settings={
        "auto": {"engine.prefix_sharing": "false"}}),
    "short-8-4bit": case("llama-8b", (40, 300), bits=4, rows=8, mlx_lm=[8, 32], checkpoint=False, updates=48,
                         settings={"auto": {}}),
    "512-8": case("llama-8b", 512, rows=8, mlx_lm=[8], checkpoint=False, updates=12, settings={"auto": {}}),
    "delta-2048": case("qwen3.5-8-layers", 2048, mlx_lm=[1], settings={"auto": {}}, timeout=100),
    "delta-32768": case("qwen3.5-8-layers", 32768, mlx_lm=[], updates=3, settings={"auto": {}}),
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "tiny": case("tiny", 128, mlx_lm=[1], dtype="float32", settings={"auto": {}}),
    "tiny-streamed": case("tiny", 128, mlx_lm=[], dtype="float32", settings={"auto": {"engine.weights": "streamed"}}),
    "tiny-4bit": case("tiny", 64, bits=4, mlx_lm=[1], dtype="float32", settings={"auto": {}}),
    "tiny-short": case("tiny", (10, 40), rows=8, mlx_lm=[8], checkpoint=False, dtype="float32", settings={"auto": {}}),
    "tiny-orpo": case("tiny", 128, mlx_lm=[], command="orpo", answers=32, dtype="float32", settings={"auto": {}}),
    "tiny-dpo": case("tiny", 128, mlx_lm=[], command="dpo", answers=32, epochs=2, dtype="float32", settings={
        "pass": {"dpo.reference": "pass"}, "cached": {"dpo.reference": "cached"}}),
    "tiny-delta": case("tiny-delta", 64, mlx_lm=[1], dtype="float32", settings={"auto": {}}),
    "tiny-delta-orpo-shared": case("tiny-delta", 2048, mlx_lm=[], command="orpo", answers=128, dtype="float32",
                                   settings={"auto": {}}),
    "tiny-delta-orpo-pair": case("tiny-delta", 2048, mlx_lm=[], command="orpo", answers=128, dtype="float32",
                                 settings={"auto": {"engine.prefix_sharing": "false"}}),
    "small-orpo": case("small", 512, mlx_lm=[], command="orpo", answers=64, dtype="float32", settings={
        "auto": {}, "segmented": {"engine.backward": "segmented"}}),
    "small-dpo": case("small", 512, mlx_lm=[], command="dpo", answers=64, epochs=2, dtype="float32", settings={
        "pass": {"dpo.reference": "pass"}, "cached": {"dpo.reference": "cached"},
        "pass, segmented": {"dpo.reference": "pass", "engine.backward": "segmented"},
        "cached, segmented": {"dpo.reference": "cached", "engine.backward": "segmented"}}),
}  # fmt: skip
UPDATES, TIMEOUT = 6, 170
PLAN = {"backward", "segment_size", "head_chunk", "keep", "boundaries", "lookahead", "mlp_rows", "dequantize",
        "compiled", "tight"}  # fmt: skip


def rows_of(given: dict[str, Any]) -> list[dict[str, str]]:
    """Text rows, or pairs whose prompt and answers add up to the tokens; later `epochs` see them again."""
    count = given["rows"] * given.get("updates", UPDATES) // given.get("epochs", 1)
    if given.get("command", SFT) == SFT:
        return [{"text": text} for text in user_models.texts(count, given["least"], given["most"])]
    answers = given["answers"]
    prompts = user_models.texts(count, given["most"] - 2 * answers - 8, given["most"] - 2 * answers - 8)
    parts = iter(user_models.texts(2 * count, answers - 4, answers - 4, seed=1))
    return [{"prompt": text + " ", "chosen": next(parts), "rejected": next(parts)} for text in prompts]


def row_tokens(rows: list[dict[str, str]], most: int) -> int:
    """Tokens of the rows' text, each at most `most`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(user_models.TOKENIZER / "tokenizer.json"))
    return sum(min(most, sum(len(tokenizer.encode(part).ids) for part in row.values())) for row in rows)


def run(command: list[str], log: Path, timeout: float, environment: dict[str, str]) -> str:
    """Run to the end or the timeout; how it ended."""
    with log.open("w") as out:
        try:
            done = subprocess.run(command, stdout=out, stderr=out, timeout=timeout, env={**os.environ, **environment})
        except subprocess.TimeoutExpired:
            return f"not done within {timeout:.0f} s"
    return "done" if done.returncode == 0 else f"exit code {done.returncode}: {tail(log)}"


def tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-400:]


def json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def later(values: list[float]) -> list[float]:
    """The later half, without what is compiled in the first."""
    return values[len(values) // 2 :]


def segtrain(given: dict[str, Any], settings: dict[str, str], model: Path, data: Path, out: Path) -> dict[str, Any]:
    recipe = {
        "model": str(model),
        "data": {"train": str(data / "train.jsonl"), "max_seq_length": given["most"], "on_long": "truncate"},
        "lora": {"rank": 8, "scale": 20.0},
        "train": {"steps": given.get("updates", UPDATES), "learning_rate": 1e-5, "lr_schedule": "constant",
                  "grad_accumulation_steps": given["rows"]},
        "output": {"dir": str(out / "run"), "save_every": 0, "eval_every": 0},
    }  # fmt: skip
    (out / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "segtrain", given.get("command", SFT), str(out / "recipe.yaml")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    ended = run(command, out / "segtrain.log", given["timeout"], {})
    lines = json_lines(out / "run" / "metrics.jsonl")
    steps = [line for line in lines if line["event"] == "train"]
    plans = [line for line in lines if line["event"] == "plan"]
    found: dict[str, Any] = {"ended": ended, "updates": len(steps), "command": " ".join(command[2:])}
    if plans:
        found["plan"] = {key: value for key, value in plans[-1].items() if key not in ("event", "phases", "options")}
    return found | readings(
        given, [s["step_seconds"] for s in steps], [s["peak_gib"] for s in steps], [s["loss"] for s in steps]
    )


def mlx_lm(given: dict[str, Any], batch: int, model: Path, data: Path, out: Path) -> dict[str, Any]:
    (out / "recorder").mkdir()
    (out / "recorder" / "wandb.py").write_text(RECORDER, encoding="utf-8")
    iterations = max(4, given.get("updates", UPDATES) * given["rows"] // batch)
    command = [sys.executable, "-m", "mlx_lm", "lora", "--model", str(model), "--train", "--data", str(data),
               "--iters", str(iterations), "--batch-size", str(batch), "--num-layers", "-1", "--steps-per-report", "1",
               "--max-seq-length", str(given["most"]), "--adapter-path", str(out / "adapters"),
               "--report-to", "wandb"]  # fmt: skip
    if given.get("checkpoint", True):
        command.append("--grad-checkpoint")
    environment = {"READINGS": str(out / "readings.jsonl"), "PYTHONPATH": prepended(out / "recorder")}
    ended = run(command, out / "mlx_lm.log", given["timeout"], environment)
    steps = [line for line in json_lines(out / "readings.jsonl") if "train_loss" in line]
    found = {"ended": ended, "updates": len(steps), "command": " ".join(command[1:])}
    found |= readings(
        given | {"rows": batch},
        [1 / step["iterations_per_second"] for step in steps],
        [step["peak_memory"] * 1e9 / GIB for step in steps],
        [step["train_loss"] for step in steps],
    )
    if steps:
        halves = later(steps)
        tokens = sum(step["tokens_per_second"] / step["iterations_per_second"] for step in halves)
        found["tokens_per_second"] = round(tokens / sum(1 / step["iterations_per_second"] for step in halves))
    return found


def prepended(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def readings(given: dict[str, Any], seconds: list[float], peaks: list[float], losses: list[float]) -> dict[str, Any]:
    if not seconds:
        return {}
    return {
        "seconds": round(statistics.median(later(seconds)), 4),
        "first_seconds": round(seconds[0], 1),
        "tokens_per_second": round(given["mean_tokens"] * given["rows"] / statistics.mean(later(seconds))),
        "peak_gib": round(max(peaks), 2),
        "first_peak_gib": round(peaks[0], 2),
        "losses": [round(losses[0], 3), round(losses[-1], 3)],
    }


def run_case(name: str, given: dict[str, Any], folder: Path, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = folder / f"{given['shape']}-{given['bits']}"
    user_models.make_model(given["shape"], model, bits=given["bits"], dtype=given.get("dtype", "bfloat16"))
    rows = rows_of(given)
    given = given | {"mean_tokens": row_tokens(rows, given["most"]) / len(rows)}
    data = user_models.write_rows(folder / f"rows-{name}", rows)
    about = {"case": name, "shape": given["shape"], "bits": given["bits"], "tokens": [given["least"], given["most"]],
             "mean_tokens": round(given["mean_tokens"], 1), "rows": given["rows"]}  # fmt: skip
    for setting, keys in given["settings"].items() if "segtrain" in asked.systems else ():
        if asked.settings and setting not in asked.settings:
            continue
        with tempfile.TemporaryDirectory(dir=folder) as out:
            yield about | {"system": "segtrain", "setting": setting} | segtrain(given, keys, model, data, Path(out))
    for batch in given["mlx_lm"] if "mlx-lm" in asked.systems else ():
        with tempfile.TemporaryDirectory(dir=folder) as out:
            found = mlx_lm(given, batch, model, data, Path(out))
        yield about | {"system": "mlx-lm", "setting": f"batch {batch}"} | found


def planned_lines(path: Path) -> list[dict[str, Any]]:
    """Of each case and setting of one row an update, weights in memory, the last line that has a plan and a peak."""
    found = {}
    for line in json_lines(path):
        given = CASES.get(line.get("case", ""), {})
        plain = given.get("rows") == 1 and given.get("command", SFT) == SFT and "streamed" not in line["case"]
        if line.get("system") == "segtrain" and plain and line.get("plan") and "peak_gib" in line:
            found[line["case"], line["setting"]] = line
    return [*found.values()]


@lru_cache
def shapes_of(shape: str, bits: int, adapter: str) -> Any:
    """A model's shapes on CUDA, as the command reads them; `adapter`: JSON of what its recipe asks for."""
    from segtrain.memory import anatomy

    packing = {"quantization": {"group_size": 64, "bits": bits}} if bits else {}
    options = {"rank": 8, "scale": 20.0, **json.loads(adapter)}
    return anatomy.of_config(user_models.SHAPES[shape] | packing, "cuda", lambda layers: options)


def predicted(line: dict[str, Any]) -> tuple[Any, int]:
    """Today's estimate for one of `planned_lines`, which nothing measured has corrected; and the model's bytes."""
    from segtrain.memory.backends import BACKENDS, CUDA_BUFFERS, with_buffers
    from segtrain.memory.choices import aligned
    from segtrain.memory.estimate import Estimator
    from segtrain.memory.plan import Plan
    from segtrain.memory.rows import sft

    keys = CASES[line["case"]]["settings"][line["setting"]]
    adapter = json.dumps({"kind": keys["lora.kind"]} if "lora.kind" in keys else {})
    model = shapes_of(line["shape"], line["bits"], adapter)
    backend = with_buffers(BACKENDS["cuda"], CUDA_BUFFERS)
    estimator, row = Estimator(model, backend), aligned(sft(line["tokens"][1]), backend)
    plan = Plan(**{key: value for key, value in line["plan"].items() if key in PLAN})
    return estimator.peak(row, plan), estimator.resident


def machine() -> dict[str, Any]:
    import platform

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "device": os.environ.get("DEVICE_NAME", ""),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def measure(given: argparse.Namespace) -> None:
    cases = SMALL if given.small else CASES
    names = given.only or list(cases)
    cases = {name: {"timeout": given.timeout, **cases[name]} for name in names}
    begun, folder = time.monotonic(), given.folder or Path(tempfile.mkdtemp())
    shapes_left = [cases[name]["shape"] for name in names]
    with given.out.open("a", encoding="utf-8") as out:
        print(json.dumps(machine()), file=out, flush=True)
        for name in names:
            if time.monotonic() - begun > given.minutes * 60:
                print(f"{name} and what follows: no time left", flush=True)
                break
            for line in run_case(name, cases[name], folder, given):
                text = json.dumps(line).replace(f"{folder}{os.sep}", "")
                print(text, file=out, flush=True)
                print(f"[{time.monotonic() - begun:.0f} s] {text}", flush=True)
            shapes_left.remove(cases[name]["shape"])
            if cases[name]["shape"] not in shapes_left and given.folder is None:
                for old in folder.glob(f"{cases[name]['shape']}-*"):
                    shutil.rmtree(old)


def table(path: Path) -> str:
    """The result file's last run of each case, as Markdown."""
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in json_lines(path):
        if "case" in line:
            newest[line["case"], line["system"], line["setting"]] = line
    rows = ["| case | command | setting | s an update | tokens/s | GiB in all | predicted | first update, s |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for (name, system, setting), line in newest.items():
        if "seconds" not in line:
            rows.append(f"| {name} | {system} | {setting} | {line['ended'][:60]} | | | | |")
            continue
        predicted = line.get("plan", {}).get("peak_gib")
        cells = [name, system, setting, f"{line['seconds']:.3f}", f"{line['tokens_per_second']:,}"]
        cells += [f"{line['peak_gib']:.2f}", "" if predicted is None else f"{predicted:.2f}"]
        cells.append(f"{line['first_seconds']:.0f}")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", help=f"some of {', '.join([*CASES, *SMALL])}")
    parser.add_argument("--systems", nargs="+", default=["segtrain", "mlx-lm"], help="whose commands run")
    parser.add_argument("--settings", nargs="+", help="some of segtrain's settings: auto, lean, ...")
    parser.add_argument("--minutes", type=float, default=1e9, help="no case begins after this many")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that a command may take")
    parser.add_argument("--folder", type=Path, help="where models are made, and stay")
    parser.add_argument("--out", type=Path, default=Path("as_a_user.jsonl"))
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a result file as a table")
    given = parser.parse_args()
    if given.table:
        print(table(given.table))
    else:
        measure(given)


if __name__ == "__main__":
    main()
