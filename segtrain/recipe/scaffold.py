"""The recipes that `segtrain init` writes: every key that most people change, with what changing it does."""

import contextlib
import os
from pathlib import Path

from segtrain.errors import UserError

_HEAD = """\
# {title}
#   segtrain check {name}             what is learnt of the data; trains nothing
#   segtrain plan-segments {name}     memory and time, before anything runs
#   segtrain {loss} {name}
# Any key can be changed for one run: --set train.steps=50

model: mlx-community/Qwen3-0.6B-4bit   # a hub id or a directory that mlx-lm loads; try small first
# quantize: 4                          # of a model that isn't quantised yet: 4 | 8 | mxfp4 | nvfp4; once, into a cache

"""

_SFT_DATA = """\
data:
  train: data/train.jsonl        # or a list of files, a glob, a directory with train/valid/test.jsonl, a hub data set
  # valid: data/valid.jsonl      # its loss is what tells learning from memorising; keeps the best checkpoint
  format: auto                   # chat {"messages"}, completion {"prompt", "completion"}, text {"text"}
  max_seq_length: 2048           # tokens; memory follows your longest row, not this cap
  on_long: drop                  # rows above it: drop | truncate_prompt | truncate | error; counted and shown
  supervise: assistant           # every assistant turn; last: only the last one; all: every token, the user's too

"""

_PAIRS = """\
data:
  train: data/train.jsonl        # {"prompt", "chosen", "rejected"}: each a string or a list of messages
  # valid: data/valid.jsonl      # gives loss and accuracy on unseen pairs; keeps the best checkpoint
  format: preference
  max_seq_length: 2048           # tokens of the prompt and the longer answer
  on_long: drop                  # pairs above it: drop | truncate_prompt | error; counted and shown

"""

_SECTIONS = {
    "sft": "",
    "orpo": """\
orpo:
  beta: 0.1                      # weight of the odds-ratio term; larger: prefers harder, imitates `chosen` less
  sft_scope: full                # the likelihood term covers prompt and chosen; response: chosen only

""",
    "simpo": """\
simpo:
  beta: 2.0                      # weight of the mean log-probs; larger: less is learnt of pairs that are right already
  gamma: 0.5                     # how far chosen should lead before a pair counts as learnt, in beta's unit
  label_smoothing: 0.0           # the share of pairs that may be labelled the wrong way round

""",
    "cpo": """\
cpo:
  beta: 0.1                      # weight of the log-probs' sums; larger: less is learnt of pairs that are right already
  alpha: 1.0                     # weight of the likelihood of chosen; 0: preference alone, which may lower both answers
  label_smoothing: 0.0           # the share of pairs that may be labelled the wrong way round

""",
    "dpo": """\
dpo:
  beta: 0.1                      # larger: stays closer to the model as it was at the start
  loss: sigmoid                  # or ipo, hinge
  reference: pass                # the model at the start: one more forward pass; cached: once a row, kept in the run

""",
}

_TAIL = """\
lora:
  rank: 8                        # larger: can learn more, a little slower, larger files
  alpha: 16                      # strength is alpha / rank: doubling both leaves it as it was
  dropout: 0.0                   # 0.05 helps on a few hundred rows
  targets: all-linear            # or some, e.g. [q_proj, v_proj]: faster, learns less
  layers: all                    # or the last N: the layers below need no backward, which saves time and memory

engine:
  segment_size: auto             # layers whose activations are live at a time; 1: least memory, about the same speed
  memory_budget: auto            # e.g. 24GB; auto: what the device recommends

train:
  epochs: 1                      # times through the data; fewer than 100 rows want 10 to 20; or steps: N (updates)
  learning_rate: {rate}          # too high: the loss jumps; too low: it barely falls
  lr_schedule: cosine            # falls to 0 at the end; or linear, constant
  warmup_ratio: 0.03             # share of the updates in which the rate rises
  grad_accumulation_steps: 4     # rows an update; more: steadier, fewer updates an epoch; costs no memory
  seed: 0
  # patience: 3                  # evaluations without a better validation loss that end the run

eval:
  prompts: []                    # questions to answer before training and at each evaluation: ["What is ...?"]

output:
  dir: runs/{stem}
  save_every: 100                # updates; a run that stops goes on from the newest checkpoint with --resume
  eval_every: 100                # with `valid` the best one is kept: a short run wants 10 or 20
  # final: best                  # the adapter that the run leaves, by validation loss; without it the last one
"""


def recipe_text(loss: str, path: Path) -> str:
    """The commented recipe for a file called `path`."""
    pairs = bool(_SECTIONS[loss])
    title = f"Preference fine-tuning ({loss})." if pairs else "Supervised fine-tuning."
    head = _HEAD.format(title=title, name=path, loss=loss)
    tail = _TAIL.format(rate="5.0e-5" if pairs else "1.0e-4", stem=f"my-{loss}-run" if pairs else "my-run")
    return head + (_PAIRS if pairs else _SFT_DATA) + _SECTIONS[loss] + tail


def write_recipe(path: Path, loss: str, *, overwrite: bool = False) -> None:
    """Write it. Raises UserError where `path` exists (without `overwrite`) or can't be written."""
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; give another --out, or --overwrite to replace it")
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(recipe_text(loss, path), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"{path} can't be written: {error.strerror}; give another --out") from None
