"""Predicted against measured peak memory, over families, segment sizes, lengths, dtypes and layouts, on this machine.

    python benchmarks/plan_accuracy.py                      every case, one process each
    python benchmarks/plan_accuracy.py --only llama bfloat16 --out mine.jsonl
    python benchmarks/plan_accuracy.py --compare            the kept measurements against today's estimate

`--compare` measures nothing, prints every case and the errors' median and worst, and draws a picture, for the main set
docs/plan_accuracy.svg. Where the same model, settings and layout were measured on a shorter row too, it also says the
error after one step on that row: the estimate is corrected by it as a run corrects its own.

A case is a small random model of a real family, a row, a dtype and the engine's settings. `measured_mb` is the highest
`mx.get_peak_memory` of one step, the model included (the process had allocated nothing before it), in MiB; an AdamW
state exists, as in any step but a run's first. `phases` are the highest peaks of each kind of phase.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import plan_accuracy_gpu

MIB = 2**20
OUT = Path(__file__).parent / "results" / "plan_accuracy.jsonl"
GPU_OUT = OUT.with_name("plan_accuracy_gpu.jsonl")
COMMON = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0}
SLIDING, FULL = "sliding_attention", "full_attention"
DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_value_head_dim": 32, "full_attention_interval": 2, "partial_rotary_factor": 0.5,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 320, "num_hidden_layers": 6, "intermediate_size": 1024,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 12000,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 16000,
        "query_pre_attn_scalar": 64, "tie_word_embeddings": False, "sliding_window": 256,
        "sliding_window_pattern": 3, "rope_local_base_freq": 1e4,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "gemma4": {
        "model_type": "gemma4_text", "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "global_head_dim": 128,
        "vocab_size": 8192, "vocab_size_per_layer_input": 8192, "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 4, "sliding_window": 256, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 2,
        "rope_theta": None, "tie_word_embeddings": True,
    },
    "lfm2": {
        "model_type": "lfm2", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 8192, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
        "block_dim": 256, "block_ff_dim": 768, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "full_attn_idxs": [2, 5],
    },
    "qwen3_5": {
        "model_type": "qwen3_5", "text_config": {
            **COMMON, "model_type": "qwen3_5", "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
            "tie_word_embeddings": False, **DELTA, "rope_parameters": {
                "type": "default", "mrope_section": [4, 4, 0], "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        },
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid", "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
        "tie_word_embeddings": False, "attention_bias": False, **DELTA, "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 3,
    },
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
        "vocab_size": 8192, "conv_kernel": 4, "head_dim": 64, "num_heads": 8, "n_groups": 1, "state_size": 64,
        "ssm_state_size": 64, "time_step_rank": 16, "time_step_limit": [0.01, 10.0], "use_bias": False,
        "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "expand": 2,
        "residual_in_fp32": True, "time_step_min": 0.001, "time_step_max": 0.1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8192, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 48, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "attention_bias": False, "rope_scaling": None,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
KEPT = ("llama", "qwen3", "gemma3", "qwen3_moe", "gemma4", "lfm2")  # the families of the main set
LEAN = {"segment_size": 1, "head_chunk": 64, "mlp_rows": 256, "boundaries": 2}


def sft(length: int) -> dict[str, Any]:
    return {"layout": "sft", "length": length}


def preference(layout: str, prompt: int, response: int) -> dict[str, Any]:
    return {"layout": layout, "prompt": prompt, "chosen": response, "rejected": response}


def cases() -> list[dict[str, Any]]:
    """Family, dtype (`4bit`: bfloat16 with quantised weights), row and engine settings."""
    kept: list[dict[str, Any]] = []
    for family in KEPT:
        whole = CONFIGS[family]["num_hidden_layers"]

        def add(dtype: str, row: dict[str, Any], size: int, *, family: str = family, **engine: Any) -> None:
            kept.append({"family": family, "dtype": dtype, "row": row, "engine": {"segment_size": size, **engine}})

        for length, size in [(256, 1), (256, whole), (1024, 1), (1024, 2), (1024, 4), (1024, whole), (4096, 1)]:
            add("float32", sft(length), size)
        # On CPU mlx routes tokens to experts in float32 only, and packed products are slow.
        if family != "qwen3_moe":
            for length, size in [(512, 1), (1024, 2), (512, whole)]:
                add("bfloat16", sft(length), size)
            for length, size in [(128, 1), (256, 4)]:
                add("4bit", sft(length), size)
        add("float32", preference("pair", 512, 256), 1)
        add("float32", preference("pair", 256, 128), 4)
        if family != "lfm2":
            add("float32", preference("shared", 512, 256), 1)
            add("float32" if family == "qwen3_moe" else "bfloat16", preference("shared", 256, 128), 2)
    return kept


def family_cases() -> list[dict[str, Any]]:
    """Each family with each kind of row, in full and lean, and half as long: what a run's first step may have seen."""
    rows = [sft(512), preference("pair", 256, 128), preference("shared", 256, 128)]
    rows += [sft(256), preference("pair", 128, 64), preference("shared", 128, 64)]
    return [
        {"family": family, "dtype": "float32", "row": row, "engine": engine}
        for family in CONFIGS
        for row in rows
        for engine in ({"backward": "full"}, LEAN)
        if not (row["layout"] == "shared" and family == "mamba2")
    ]


def tuning_cases() -> list[dict[str, Any]]:
    """Settings beyond the segment size, on one family each."""
    found = []
    for engine in [
        {"backward": "full"},
        {"segment_size": 1, "mlp_rows": 256},
        {"segment_size": 1, "boundaries": 4},
        {"segment_size": 1, "keep": 3},
        {"segment_size": 1, "lookahead": 1},
        {"segment_size": 1, "lookahead": 2},
        {"segment_size": 1, "compiled": True},
        {"segment_size": 1, "head_chunk": 1024},
        {"backward": "full", "compiled": True},
    ]:
        for family in ("llama", "gemma3"):
            found.append({"family": family, "dtype": "float32", "row": sft(1024), "engine": engine})
    found.append(
        {"family": "llama", "dtype": "4bit", "row": sft(256), "engine": {"segment_size": 1, "dequantize": True}}
    )
    return found


def tokens(case: dict[str, Any]) -> int:
    row = case["row"]
    return int(row.get("length") or row["prompt"] + row["chosen"] + row["rejected"])


def expense(case: dict[str, Any]) -> float:
    """Cheap cases first; packed and half-precision products are slow on a CPU."""
    return tokens(case) * {"float32": 1, "bfloat16": 4, "4bit": 20}[case["dtype"]]


def build(family: str, dtype: str) -> Any:
    import mlx.core as mx
    import mlx.nn as nn

    config = CONFIGS[family]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(COMMON | config))
    model.set_dtype(getattr(mx, "bfloat16" if dtype == "4bit" else dtype))
    if dtype == "4bit":
        nn.quantize(model, group_size=64, bits=4, class_predicate=lambda _, m: _quantises(m))
    mx.eval(model.parameters())
    model.freeze()
    return model


def _quantises(module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0


def layout_of(row: dict[str, Any], vocabulary: int) -> Any:
    import mlx.core as mx

    from segtrain.engine import layouts

    def ids(count: int, seed: int) -> list[int]:
        return mx.random.randint(0, vocabulary, (count,), key=mx.random.key(seed)).tolist()

    if row["layout"] == "sft":
        return layouts.single(ids(row["length"] + 1, 0), [True] * (row["length"] + 1))
    builder = layouts.pair if row["layout"] == "pair" else layouts.shared_prefix
    return builder(ids(row["prompt"], 0), ids(row["chosen"], 1), ids(row["rejected"], 2))


class Phases:
    """The highest peak of each kind of phase."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.highest = 0

    @contextmanager
    def __call__(self, phase: str, stream: int) -> Iterator[None]:
        import mlx.core as mx

        self.close()
        yield
        kind = phase.split("[")[0]
        self.peaks[kind] = max(self.peaks.get(kind, 0), mx.get_peak_memory())
        self.close()

    def close(self) -> int:
        import mlx.core as mx

        self.highest = max(self.highest, mx.get_peak_memory())
        mx.reset_peak_memory()
        return self.highest


def backward_of(model: Any, lora: Any, engine: dict[str, Any], loss: Any, meter: Any) -> Any:
    from segtrain.engine.backward import FullBackward, SegmentedBackward
    from segtrain.models.stack import Execution, LayerStack

    options = dict(engine)
    execution = Execution(options.pop("mlp_rows", None), options.pop("dequantize", False))
    stack = LayerStack(model).executing(execution)
    if options.pop("backward", "segmented") == "full":
        return FullBackward(stack, lora, loss, meter=meter, **options)
    return SegmentedBackward(stack, lora, loss, meter=meter, **options)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process: a short step and an update make the optimiser's state, then the step that counts."""
    import mlx.core as mx

    from segtrain.engine import objectives
    from segtrain.lora import layers as L
    from segtrain.recipe.schema import TrainRecipe
    from segtrain.run.optimizer import Optimizer

    mx.set_default_device(mx.cpu)
    model = build(case["family"], case["dtype"])
    resident = mx.get_active_memory()
    lora, phases = L.attach(model, rank=8, scale=2.0), Phases()
    loss = objectives.sft if case["row"]["layout"] == "sft" else objectives.orpo(0.1, "full")
    chunk = {} if case["engine"].get("backward") == "full" else {"head_chunk": 256}
    backward = backward_of(model, lora, chunk | case["engine"], loss, phases)
    optimizer = Optimizer(TrainRecipe(), 10)
    vocabulary = CONFIGS[case["family"]].get("text_config", CONFIGS[case["family"]])["vocab_size"]
    short = {"layout": "sft", "length": 16} | dict.fromkeys(("prompt", "chosen", "rejected"), 16)
    step = backward.step(layout_of(short | {"layout": case["row"]["layout"]}, vocabulary))
    lora.set(optimizer.update(lora.flat(), step.grads))
    mx.eval(lora.values(), optimizer.state_dict())
    del step
    if limit := case.get("limit_bytes"):
        mx.set_memory_limit(limit)
    mx.clear_cache()
    phases.close()
    phases.peaks, phases.highest = {}, 0
    before = mx.get_active_memory()
    backward.step(layout_of(case["row"], vocabulary))
    return {
        "measured_mb": round(phases.close() / MIB, 2),
        "resident_mb": round(resident / MIB, 2),
        "before_mb": round(before / MIB, 2),
        "phases": {kind: round(peak / MIB, 2) for kind, peak in phases.peaks.items()},
    }


@lru_cache
def shapes_of(family: str, dtype: str) -> Any:
    """The model's shapes, as `plan-segments` reads them."""
    from segtrain.memory import anatomy

    config = COMMON | CONFIGS[family] | {"torch_dtype": "bfloat16" if dtype == "4bit" else dtype}
    if dtype == "4bit":
        config["quantization"] = {"bits": 4, "group_size": 64}
    return anatomy.of_config(config, "cpu")


def predicted(line: dict[str, Any], step: dict[str, Any] | None = None) -> float:
    """Today's estimate for a measured case, MiB; `step`: corrected by another case of the model, as a run does."""
    from segtrain.memory.backends import BACKENDS
    from segtrain.memory.corrections import Corrections
    from segtrain.memory.estimate import Estimator

    estimator = Estimator(shapes_of(line["family"], line["dtype"]), BACKENDS["cpu"])
    plan, fixed, corrections = plan_of(line), estimator.fixed, Corrections()
    if step is not None:
        before = estimator.peak(shape_of(step), plan_of(step)).bytes
        corrections.learn(plan_of(step), before - fixed, step["measured_mb"] * MIB - fixed)
    above = estimator.peak(shape_of(line), plan).bytes - fixed
    return (fixed + corrections.ratio(plan) * above) / MIB


def plan_of(line: dict[str, Any]) -> Any:
    from segtrain.memory.plan import Plan

    return Plan(**{"backward": "segmented", "head_chunk": 256, **line["engine"]})


def shape_of(line: dict[str, Any]) -> Any:
    from segtrain.memory import rows

    row = line["row"]
    if row["layout"] == "sft":
        return rows.sft(row["length"] + 1)
    return (rows.pair if row["layout"] == "pair" else rows.shared)(row["prompt"], row["chosen"], row["rejected"])


def step_before(line: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The longest row measured that is shorter than this one, of the same model, settings and layout."""

    def alike(case: dict[str, Any]) -> list[Any]:
        return [*(case[name] for name in ("family", "dtype", "engine")), case["row"]["layout"]]

    shorter = [x for x in lines if alike(x) == alike(line) and tokens(x) < tokens(line)]
    return max(shorter, key=tokens, default=None)


def compare(path: Path) -> None:
    """Print each case's error, before and after a step, and draw those before."""
    from draw_plan_accuracy import draw

    points, after, lines = [], [], read(path)
    for line in lines:
        guess, real, step = predicted(line), line["measured_mb"], step_before(line, lines)
        points.append((line["family"], real, guess))
        corrected = ""
        if step:
            after.append(predicted(line, step) / real - 1)
            corrected = f"{after[-1]:+7.1%}"
        case = (line["family"], line["dtype"], line["row"], line["engine"])
        print(f"{guess / real - 1:+7.1%} {corrected:7} {guess:8.1f} {real:8.1f}", *case)
    summarise("", [guess / real - 1 for _, real, guess in points])
    if after:
        summarise(" after one step", after)
    if path == OUT:
        draw(points, Path(__file__).parents[1] / "docs" / "plan_accuracy.svg")


def summarise(name: str, errors: list[float]) -> None:
    sizes = [*map(abs, errors)]
    print(f"{len(sizes)} cases{name}: median {median(sizes):.1%}, worst {max(sizes):.1%}")


def environment() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{sys.platform}, {os.cpu_count()} cores",
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "openblas": "preloaded" if "openblas" in os.environ.get("LD_PRELOAD", "") else "no",
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file that hold a measurement."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "measured_mb" in line]


def case_key(line: dict[str, Any]) -> str:
    return json.dumps([line[name] for name in ("family", "dtype", "row", "engine")], sort_keys=True)


def spawn(case: dict[str, Any], out: Path) -> None:
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}
    with out.open("a") as file:
        file.write(json.dumps({**case, **result, **environment()}) + "\n")
    print(case["family"], case["dtype"], case["row"], case["engine"], result, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a case must hold, such as llama or 4bit")
    parser.add_argument("--tuning", action="store_true", help="the other settings, instead of the main set")
    parser.add_argument("--families", action="store_true", help="ten families, each kind of row, full and lean")
    parser.add_argument("--compare", type=Path, nargs="?", const=OUT, help="measure nothing; --out's file, or another")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--set", choices=["cpu", "gpu"], default="cpu", help="gpu: see plan_accuracy_gpu.py")
    parser.add_argument("--shape", choices=list(plan_accuracy_gpu.SHAPES), default="8b", help="of the GPU set")
    parser.add_argument("--minutes", type=float, default=4.0, help="of the GPU set")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
        return
    if args.set == "gpu":  # a file of its own
        args.out, args.compare = (GPU_OUT if path == OUT else path for path in (args.out, args.compare))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.set == "gpu" and args.compare:
        plan_accuracy_gpu.compare(args.compare)
    elif args.set == "gpu":
        plan_accuracy_gpu.measure(args.shape, args.minutes, args.out, environment(), args.only)
    elif args.compare:
        compare(args.compare)
    else:
        done = {case_key(line) for line in read(args.out)}
        found = tuning_cases() if args.tuning else family_cases() if args.families else cases()
        for case in sorted(found, key=expense):
            if all(word in json.dumps(case) for word in args.only) and case_key(case) not in done:
                spawn(case, args.out)


if __name__ == "__main__":
    main()
