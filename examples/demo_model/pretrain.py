"""Pre-trains the demo model: a llama of about 4 million parameters that stock `mlx_lm.load` loads.

    python pretrain.py --data .demo --out examples/demo-model --minutes 3.5      # a GPU
    python pretrain.py --data .demo --out /tmp/demo --steps 20                    # a look at it, on a CPU

DATA holds train.npy, valid.npy and tokenizer/ (train_tokenizer.py writes them). Float32 master weights, multiplied in
bfloat16 on a GPU; a cosine schedule over the time (or the steps) given; short rows first, long ones at the end.
Shapes: B rows, T tokens of a row, V vocabulary.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
WARM_UP = 0.02  # share of the run
FINAL_RATE = 0.05  # of the peak
EVALUATIONS = 10
Params = dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """Rows of one length, until that share of the run is over."""

    length: int
    rows: int
    until: float


def batches(tokens: np.ndarray, phase: Phase, rng: np.random.Generator) -> Iterator[mx.array]:
    """Endless [B, T+1] batches: every pass cuts the text at another offset and takes its rows in another order."""
    width = phase.length
    while True:
        offset = int(rng.integers(width))
        starts = offset + width * rng.permutation((tokens.size - offset - 1) // width)
        for chunk in range(0, len(starts) - phase.rows + 1, phase.rows):
            rows = starts[chunk : chunk + phase.rows, None] + np.arange(width + 1)
            yield mx.array(tokens[rows].astype(np.int32))


def named(params: Params) -> dict[str, mx.array]:
    """Every array by its dotted name."""
    flat: Any = tree_flatten(params)
    return dict(flat)


def number(scalar: mx.array) -> float:
    value = scalar.item()
    assert isinstance(value, float)
    return value


def mean_loss(model: Model, dtype: mx.Dtype, params: Params, rows: mx.array) -> mx.array:
    """Mean cross-entropy in nats of the last T tokens of [B, T+1] rows, with `params` multiplied in `dtype`."""
    model.update(tree_map(lambda weight: weight.astype(dtype), params))
    logits = model(rows[:, :-1]).astype(mx.float32)  # [B, T, V]
    return nn.losses.cross_entropy(logits, rows[:, 1:], reduction="mean")


def make_step(model: Model, optimizer: optim.Optimizer, dtype: mx.Dtype) -> Callable[..., tuple[Params, mx.array]]:
    """A compiled update: (params, rows) -> (new params, loss)."""

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def step(params: Params, rows: mx.array) -> tuple[Params, mx.array]:
        loss, grads = mx.value_and_grad(partial(mean_loss, model, dtype))(params, rows)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        return optimizer.apply_gradients(grads, params), loss

    return step


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then a cosine down to FINAL_RATE of the peak; progress runs from 0 to 1."""
    if progress < WARM_UP:
        return peak * (progress + 0.001) / WARM_UP
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def held_out_loss(loss: Callable[..., mx.array], params: Params, tokens: np.ndarray, phase: Phase) -> float:
    """Mean loss over all whole rows of the validation part (they fit one row at least)."""
    length = min(phase.length, tokens.size - 1)
    starts = np.arange(0, tokens.size - length, length)
    size = max(1, min(phase.rows, 16))
    total = 0.0
    for first in range(0, len(starts), size):
        rows = tokens[starts[first : first + size, None] + np.arange(length + 1)]
        total += number(loss(params, mx.array(rows.astype(np.int32)))) * len(rows)
    return total / len(starts)


def save(params: Params, out: Path, tokenizer: Path, log: list[dict]) -> None:
    """A model directory: bfloat16 weights, config, tokenizer and the training log."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.astype(mx.bfloat16) for name, weight in named(params).items()}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    (out / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log), encoding="utf-8")
    for file in tokenizer.iterdir():
        shutil.copyfile(file, out / file.name)


class Clock:
    """How much of the run is over: in steps where they are given, else in minutes."""

    def __init__(self, steps: int | None, minutes: float) -> None:
        self.steps, self.seconds = steps, 60 * minutes
        self.step, self.start = 0, time.perf_counter()

    def tick(self) -> None:
        self.step += 1
        if self.step == 1:  # compiling the kernels is not counted
            self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def progress(self) -> float:
        return min(1.0, self.step / self.steps if self.steps else self.elapsed / self.seconds)


class Run:
    """Parameters, optimiser and what was seen; `advance` is one update, `measure` a log line and a saved model."""

    def __init__(self, arguments: argparse.Namespace, dtype: mx.Dtype) -> None:
        mx.random.seed(0)
        self.arguments, self.clock = arguments, Clock(arguments.steps, arguments.minutes)
        self.tokens, self.held_out = (np.load(arguments.data / f"{part}.npy") for part in ("train", "valid"))
        model = Model(ModelArgs.from_dict(CONFIG))
        self.params: Params = model.parameters()
        self.optimizer = optim.AdamW(0.0, betas=[0.9, 0.95], weight_decay=0.1, bias_correction=True)
        self.optimizer.init(self.params)
        self.step, self.loss_only = make_step(model, self.optimizer, dtype), partial(mean_loss, model, dtype)
        self.seen, self.previous, self.loss = 0, mx.array(math.nan), mx.array(math.nan)
        self.log: list[dict] = []
        size = sum(weight.size for weight in named(self.params).values())
        print(f"{size} parameters, {self.tokens.size} tokens, {mx.default_device()}", flush=True)

    def advance(self, rows: mx.array) -> None:
        """Queue one update and wait for the one before it."""
        self.optimizer.learning_rate = mx.array(learning_rate(self.arguments.learning_rate, self.clock.progress))
        self.params, self.loss = self.step(self.params, rows)
        mx.async_eval(self.params, self.optimizer.state, self.loss)
        mx.eval(self.previous if self.clock.step else self.loss)  # the first one compiles its kernels
        self.previous, self.seen = self.loss, self.seen + rows.shape[0] * (rows.shape[1] - 1)
        self.clock.tick()
        if self.clock.step % self.arguments.report_every == 0 or self.clock.step == 1:
            print(f"step {self.clock.step}  {self.clock.elapsed:.1f} s  loss {number(self.loss):.4f}", flush=True)

    def measure(self, phase: Phase) -> None:
        held_out = self.held_out[: self.arguments.held_out_tokens]
        line = {
            "step": self.clock.step,
            "seconds": round(self.clock.elapsed, 1),
            "tokens": self.seen,
            "row_length": phase.length,
            "loss": round(number(self.loss), 4),
            "held_out_loss": round(held_out_loss(self.loss_only, self.params, held_out, phase), 4),
        }
        print(json.dumps(line), flush=True)
        self.log.append(line)
        save(self.params, self.arguments.out, self.arguments.data / "tokenizer", self.log)


def train(run: Run, phases: list[Phase]) -> None:
    rng = np.random.default_rng(0)
    for phase in phases:
        source = batches(run.tokens, phase, rng)
        while run.clock.progress < phase.until:
            run.advance(next(source))
            if run.clock.progress * EVALUATIONS >= len(run.log) + 1:
                run.measure(phase)
    if run.log[-1]["step"] != run.clock.step:
        run.measure(phases[-1])


def main() -> None:
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(".demo"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.5)
    parser.add_argument("--steps", type=int, help="a number of steps instead of the minutes")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--length", type=int, default=1024 if on_gpu else 256, help="tokens of a row")
    parser.add_argument("--long", type=int, default=8192 if on_gpu else 1024, help="tokens of a row at the end")
    parser.add_argument("--long-share", type=float, default=0.15, help="of the run, on long rows")
    parser.add_argument("--tokens", type=int, default=131072 if on_gpu else 4096, help="tokens of a step")
    parser.add_argument("--held-out-tokens", type=int, default=None if on_gpu else 4097)
    parser.add_argument("--report-every", type=int, default=100 if on_gpu else 10, help="steps")
    arguments = parser.parse_args()
    phases = [
        Phase(arguments.length, max(1, arguments.tokens // arguments.length), 1 - arguments.long_share),
        Phase(arguments.long, max(1, arguments.tokens // arguments.long), 1.0),
    ]
    train(Run(arguments, mx.bfloat16 if on_gpu else mx.float32), phases)


if __name__ == "__main__":
    main()
