"""Data-parallel training on two GPUs of one host: parity, scaling, unequal rows, a lost rank; all in one command.

    PYTHONPATH=. python3 benchmarks/two_gpus.py --out benchmarks/results/two_gpus.jsonl
    PYTHONPATH=. python3 benchmarks/two_gpus.py --small      the same code on CPUs, over the ring backend

parity    20 steps of two ranks against one rank with two rows of accumulation, SFT and ORPO with a shared prefix, on a
          small random llama: float32 to 1e-6; bf16 by distance to the float32 run, err_two <= 1.1 err_one + 1e-3.
scaling   Llama-8B shape, T = 8192, bf16, rank 8: rank 0 alone, then both with the exchange; time by phase, memory.
unequal   rows of 512 to 8192 tokens: how long the rank with the shorter row waits, in file order and sorted by length.
lost      one rank is killed (SIGKILL) in mid-run: the other must end within 30 s with a message; --resume must finish.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
LAUNCH = [sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"]
CLI = [sys.executable, "-m", "segtrain"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
    "HF_HUB_OFFLINE": "1",
    "MLX_ENABLE_TF32": "0",
    "NCCL_NVLS_ENABLE": "0",
}
WORDS = [f"w{number}" for number in range(1000)]
STEPS = 20


# --- the small model and its data


def make_model(path: Path, dtype: str, small: bool = False) -> None:
    """A random llama; float32 has the same (bf16) weights, so that it is the truth for the other."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    hidden, layers = (32, 2) if small else (256, 4)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {k: v.astype(mx.bfloat16).astype(getattr(mx, dtype)) for k, v in tree_flatten(model.parameters())}
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    tokens = {token: number for number, token in enumerate(["<unk>", "</s>", "<s>", *WORDS])}
    words = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", bos_token="<s>")
    tokenizer.save_pretrained(path)


def make_data(folder: Path, longest: int) -> None:
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    sft = [{"prompt": text(8, 64), "completion": " " + text(16, longest)} for _ in range(64)]
    orpo = [
        {"prompt": text(32, longest), "chosen": " " + text(8, 32), "rejected": " " + text(8, 32)} for _ in range(64)
    ]
    for name, rows in (("sft", sft), ("orpo", orpo)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_recipe(folder: Path, name: str, loss: str, dtype: str, accumulation: int, steps: int = STEPS) -> Path:
    recipe = {
        "model": str(folder / dtype),
        "data": {"train": str(folder / f"{loss}.jsonl"), "max_seq_length": 1024},
        "engine": {"backward": "segmented"},
        "lora": {"rank": 8, "dropout": 0.05},
        "train": {"steps": steps, "learning_rate": 1e-3, "grad_accumulation_steps": accumulation},
        "output": {"dir": str(folder / name), "save_every": 5},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    return path


def launched(backend: str, port: int, command: list[str]) -> subprocess.Popen:
    """The command on two ranks. Its stdin is a pipe that stays open: mlx.launch spins on one that is at its end."""
    where = ["--nccl-port", str(port)] if backend == "nccl" else ["--starting-port", str(port)]
    return subprocess.Popen(
        [*LAUNCH, "-n", "2", "--backend", backend, *where, "--", *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip


def output_of(process: subprocess.Popen, limit: float) -> str:
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        text, _ = process.communicate()
        text += f"\nended after {limit} s"
    return text


# --- parity


def parity(folder: Path, backend: str) -> list[dict]:
    cases = [(loss, dtype) for loss in ("sft", "orpo") for dtype in ("float32", "bfloat16")]
    ones, logs = {}, {}
    for number, (loss, dtype) in enumerate(cases):
        path = make_recipe(folder, f"one-{loss}-{dtype}", loss, dtype, 2)
        environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": str(number % 2)}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ones[loss, dtype] = subprocess.Popen([*CLI, loss, str(path)], env=environment, cwd=ROOT, **pipe)
    for case, process in ones.items():
        logs[("one", *case)] = output_of(process, 150)
    twos = {}
    for number, (loss, dtype) in enumerate(cases):
        path = make_recipe(folder, f"two-{loss}-{dtype}", loss, dtype, 1)
        twos[loss, dtype] = launched(backend, 23000 + 10 * number, [*CLI, loss, str(path)])
    for case, process in twos.items():
        logs[("two", *case)] = output_of(process, 150)
    return [compared(folder, loss, dtype, logs) for loss, dtype in cases]


def compared(folder: Path, loss: str, dtype: str, logs: dict) -> dict:
    line = {"part": "parity", "loss": loss, "dtype": dtype, "steps": STEPS}
    try:
        runs = (("one", dtype), ("two", dtype), ("one", "float32"))
        one, two, truth = (arrays(folder / f"{name}-{loss}-{kind}") for name, kind in runs)
        losses = [losses_of(folder / f"{n}-{loss}-{dtype}") for n in ("one", "two")]
    except Exception as error:
        text = (logs["one", loss, dtype] + logs["two", loss, dtype])[-1500:]
        return {**line, "ok": False, "error": f"{type(error).__name__}: {error}"[:300], "log": text}
    assert len(losses[0]) == len(losses[1]) == STEPS
    line["loss_difference"] = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    line["adapter_difference"] = relative(one, two)
    if dtype == "float32":
        return {**line, "ok": max(line["loss_difference"], line["adapter_difference"]) <= 1e-6}
    line["err_one"], line["err_two"] = relative(truth, one), relative(truth, two)
    return {**line, "ok": line["err_two"] <= 1.1 * line["err_one"] + 1e-3}


def arrays(run: Path) -> dict:
    import mlx.core as mx

    return mx.load(str(run / "adapters.safetensors"))


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


def relative(truth: dict, other: dict) -> float:
    """The norm-relative error of all arrays as one vector."""
    import mlx.core as mx

    error = sum(mx.square(truth[k].astype(mx.float32) - other[k]).sum().item() for k in truth)
    return (error / sum(mx.square(v.astype(mx.float32)).sum().item() for v in truth.values())) ** 0.5


# --- scaling and unequal rows: one process per GPU, started by mlx.launch


class Worker:
    """A model on this rank, and timed updates of rows of given lengths."""

    def __init__(self, shape: str) -> None:
        import floor
        import mlx.core as mx

        from segtrain.engine import objectives
        from segtrain.engine.backward import SegmentedBackward
        from segtrain.lora import layers
        from segtrain.models.stack import LayerStack
        from segtrain.parallel import ranks
        from segtrain.recipe.schema import TrainRecipe
        from segtrain.run.optimizer import Optimizer

        self.mx = mx
        self.ranks = ranks.join()
        model, self.args = floor.build(shape, 0, "float32" if shape == "tiny" else "bfloat16")
        self.lora = layers.attach(model, rank=8, scale=20.0)
        stack, options = LayerStack(model), {"head_chunk": 1024, "compiled": True, "lookahead": 1}
        self.engine = SegmentedBackward(stack, self.lora, objectives.sft, **options)
        self.optimizer = Optimizer(TrainRecipe(optimizer="adam", learning_rate=1e-5, lr_schedule="constant"), 10**6)
        self.base = mx.get_active_memory()
        mx.set_cache_limit(8 << 30)

    def step(self, tokens: int, *, exchange: bool) -> dict[str, float]:
        """Seconds of one update's phases."""
        from segtrain.engine.layouts import single

        mx = self.mx
        ids = mx.random.randint(0, self.args.vocab_size, (tokens + 1,)).tolist()
        begun = time.perf_counter()
        result = self.engine.step(single(ids, [True] * (tokens + 1)))
        mx.synchronize()
        computed = time.perf_counter()
        grads, weight = result.grads, result.loss.weight
        if exchange:
            summed, (weight,) = self.ranks.sum({"grads": grads.array}, [weight])
            grads = grads.with_array(summed["grads"])
        exchanged = time.perf_counter()
        self.lora.set(self.optimizer.update(self.lora.flat(), grads, 1 / weight))
        mx.synchronize()
        ended = time.perf_counter()
        return {"rows": computed - begun, "exchange": exchanged - computed, "optimizer": ended - exchanged}

    def timed(self, lengths: list[int], *, exchange: bool) -> dict[str, float]:
        """Mean seconds of an update and of its phases."""
        begun = time.perf_counter()
        steps = [self.step(length, exchange=exchange) for length in lengths]
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        return {"update": (time.perf_counter() - begun) / len(steps), **mean}

    def measured(self, lengths: list[int], *, exchange: bool) -> dict[str, float]:
        """The same, and the peak above the model, GiB."""
        self.mx.clear_cache()
        self.mx.reset_peak_memory()
        found = self.timed(lengths, exchange=exchange)
        above = (self.mx.get_peak_memory() - self.base) / 2**30
        return found | {"above_gib": above, "base_gib": self.base / 2**30}

    def by_rank(self, found: dict[str, float]) -> list[dict[str, float]]:
        return [json.loads(text) for text in self.ranks.gather(json.dumps(found))]


def work(shape: str, T: int, steps: int) -> None:
    worker = Worker(shape)
    ranks = worker.ranks
    worker.step(T, exchange=False)  # kernels compile
    ranks.barrier()
    alone = worker.measured([T] * steps, exchange=False) if ranks.writes else {"update": 0.0}
    ranks.barrier()
    worker.step(T, exchange=True)
    pure = []
    for _ in range(3):
        ranks.barrier()
        begun = time.perf_counter()
        ranks.sum({"grads": worker.lora.flat().array}, [1.0])
        pure.append(time.perf_counter() - begun)
    ranks.barrier()
    both = worker.measured([T] * steps, exchange=True)
    alone_by, both_by = worker.by_rank(alone), worker.by_rank(both)
    one, two = 1 / alone_by[0]["update"], 2 / max(b["update"] for b in both_by)
    line = {"part": "scaling", "shape": shape, "T": T, "steps": steps, "factor": two / one, "ok": two / one >= 1.9}
    line |= {"rows_per_second_one": one, "rows_per_second_two": two, "exchange_alone_seconds": min(pure)}
    report({**line, "one": alone_by[0], "two": both_by}, ranks)
    draw, unit = random.Random(1), max(1, T // 16)
    rows = [unit * draw.choice([1, 1, 2, 3, 4, 8, 16]) for _ in range(16)]
    for order, lengths in (("file order", rows), ("sorted", sorted(rows))):
        mine = lengths[ranks.rank :: ranks.size]
        for length in set(mine):
            worker.step(length, exchange=False)
        ranks.barrier()
        timed = worker.by_rank(worker.timed(mine, exchange=True))
        waited = max(0.0, sum(t["exchange"] for t in timed) / 2 - min(pure))
        line = {"part": "unequal", "order": order, "lengths": lengths, "ok": True, "by_rank": timed}
        line |= {"update_seconds": timed[0]["update"], "mean_wait_seconds": waited}
        report({**line, "share_waiting": waited / timed[0]["update"]}, ranks)
    ranks.leave()


def report(line: dict, ranks) -> None:
    if ranks.writes:
        print("RESULT " + json.dumps(line), flush=True)


def scaling(backend: str, small: bool) -> list[dict]:
    size = ["tiny", "32", "2"] if small else ["8b", "8192", "5"]
    text = output_of(launched(backend, 23100, [sys.executable, __file__, "--work", *size]), 300)
    found = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]
    return found if len(found) == 3 else [*found, {"part": "scaling", "ok": False, "log": text[-2000:]}]


# --- a lost rank


def lost(folder: Path, backend: str, rank: int) -> dict:
    from segtrain.storage import checkpoint

    steps, name = 60, f"lost-{rank}"
    path = make_recipe(folder, name, "sft", "float32", 1, steps)
    process = launched(backend, 23200 + 10 * rank, [*CLI, "sft", str(path)])
    line: dict = {"part": "lost", "killed": rank, "ok": False}
    metrics, until = folder / name / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and '"step": 12,' in metrics.read_text()):
        if time.monotonic() > until or process.poll() is not None:
            return {**line, "log": output_of(process, 1)[-2000:]}
        time.sleep(0.02)
    ranks = {child.environ().get("MLX_RANK"): child for child in psutil.Process(process.pid).children(recursive=True)}
    other = ranks[str(1 - rank)]
    ranks[str(rank)].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    gone, _ = psutil.wait_procs([other], timeout=60)
    line["seconds"] = time.monotonic() - begun
    text = output_of(process, 60)
    line["message"] = [said for said in text.splitlines() if said.startswith("segtrain:")][:3]
    found, notices = checkpoint.newest(folder / name)
    line["checkpoint"] = found.step if found else None
    text = output_of(launched(backend, 23300 + 10 * rank, [*CLI, "sft", str(path), "--resume"]), 120)
    line["resumed_steps"] = len(losses_of(folder / name))
    whole = found is not None and not notices
    line["ok"] = bool(gone and line["seconds"] < 30 and line["message"] and whole and line["resumed_steps"] == steps)
    return line if line["ok"] else {**line, "log": text[-1500:]}


def both_lost(folder: Path, backend: str) -> list[dict]:
    """Either rank, in two runs side by side."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: lost(folder, backend, rank), (1, 0)))


# --- all of it


def summary(line: dict) -> str:
    match line["part"]:
        case "parity" if "adapter_difference" in line:
            text = f"{line['loss']:5} {line['dtype']:9} adapters differ by {line['adapter_difference']:.1e}, "
            text += f"losses by {line['loss_difference']:.1e}"
            if "err_one" in line:
                text += f"; to float32: one {line['err_one']:.2e}, two {line['err_two']:.2e}"
        case "scaling" if "factor" in line:
            phases = ", ".join(f"{k} {line['two'][0][k]:.4f} s" for k in ("rows", "exchange", "optimizer"))
            above = ", ".join(f"{rank['above_gib']:.2f}" for rank in (line["one"], *line["two"]))
            text = (
                f"T {line['T']}: {line['rows_per_second_one']:.3f} rows/s on one, {line['rows_per_second_two']:.3f} on "
                f"two: {line['factor']:.3f} x; {phases}; exchange alone {line['exchange_alone_seconds']:.4f} s; "
                f"GiB above the model, alone and together, {above}"
            )
        case "unequal":
            text = f"{line['order']:10} update {line['update_seconds']:.3f} s, "
            text += f"waiting {line['mean_wait_seconds']:.3f} s a rank ({line['share_waiting']:.0%})"
        case "lost" if "seconds" in line:
            text = f"rank {line['killed']} killed: the other ended after {line['seconds']:.1f} s {line['message']}; "
            text += f"checkpoint {line['checkpoint']}, resumed to {line.get('resumed_steps')}"
        case _:
            text = line.get("error", "") + "\n" + line.get("log", "")
    return f"{'ok  ' if line['ok'] else 'FAIL'} {line['part']:8} {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/two_gpus.jsonl"))
    parser.add_argument("--small", action="store_true", help="tiny shapes on CPUs, over the ring backend")
    parser.add_argument("--parts", default="parity,scaling,lost")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        make_model(options.model, options.model.name, options.small)
        return
    if options.work:
        work(options.work[0], int(options.work[1]), int(options.work[2]))
        return
    backend, begun = "ring" if options.small else "nccl", time.monotonic()
    head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.platform(),
            "versions": {name: version(name) for name in ("mlx", "mlx-lm")}, "backend": backend}  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for dtype in ("float32", "bfloat16"):
            size = ["--small"] if options.small else []
            command = [sys.executable, __file__, "--model", str(folder / dtype), *size]
            subprocess.run(command, env=ENVIRONMENT, check=True)
        make_data(folder, 60 if options.small else 400)
        parts = {
            "parity": lambda: parity(folder, backend),
            "scaling": lambda: scaling(backend, options.small),
            "lost": lambda: both_lost(folder, backend),
        }
        lines = []
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as out:
            out.write(json.dumps(head) + "\n")
            out.flush()
            for name in options.parts.split(","):
                found = parts[name]()
                lines += found
                print("\n".join(map(summary, found)), flush=True)
                out.writelines(json.dumps(line) + "\n" for line in found)
                out.flush()
    print(f"{sum(line['ok'] for line in lines)} of {len(lines)} ok in {time.monotonic() - begun:.0f} s")
    sys.exit(0 if all(line["ok"] for line in lines) else 1)


if __name__ == "__main__":
    main()
