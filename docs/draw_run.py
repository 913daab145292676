"""Draws docs/run.svg: the loss of a run, and the memory of each phase of an update.

    python docs/draw_run.py             from docs/recordings/run.json
    python docs/draw_run.py --record    runs two examples, and keeps their figures there

The picture follows the reader's light or dark setting.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from segtrain import cli
from segtrain.report.run_files import RunFiles, read_run, worst_step

DOCS = Path(__file__).parent
RECORDING = DOCS / "recordings/run.json"
WIDTH, HEIGHT, LEFT, TOP, PLOT = 840, 330, 56, 52, 200
PANELS = {"loss": (LEFT, 330), "memory": (470, 340)}  # x of its left edge, width
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #59636e }
  .title { font-weight: 600; font-size: 15px; fill: #1f2328 }
  .grid { stroke: #d1d9e0 }
  .curve { fill: none; stroke: #2f6fb3; stroke-width: 2 }
  .point { fill: #d1722c }
  .forward { fill: #2f6fb3 } .head { fill: #6f42c1 } .backward { fill: #d1722c } .optimizer { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .title { fill: #f0f6fc } .grid { stroke: #3d444d }
    .curve { stroke: #6cb0f5 } .point { fill: #e08a48 }
    .forward { fill: #6cb0f5 } .head { fill: #ab7df8 } .backward { fill: #e08a48 } .optimizer { fill: #9198a1 }
  }
"""
Point = tuple[float, float]


def axis(panel: str, top: float, unit: str, ticks: int = 4) -> Iterator[str]:
    """Lines at `ticks` equal steps up to `top`, with their values."""
    x, width = PANELS[panel]
    for number in range(ticks + 1):
        y = TOP + PLOT - PLOT * number / ticks
        value = top * number / ticks
        yield f'<line class="grid" x1="{x}" x2="{x + width}" y1="{y:g}" y2="{y:g}"/>'
        yield f'<text x="{x - 6}" y="{y + 4:g}" text-anchor="end">{value:.3g}</text>'
    yield f'<text x="{x - 6}" y="{TOP - 12}" text-anchor="end">{unit}</text>'


def loss_panel(losses: Sequence[Point], evals: Sequence[Point]) -> Iterator[str]:
    x, width = PANELS["loss"]
    last, top = max(step for step, _ in losses), 8.0

    def at(point: Point) -> str:
        return f"{x + width * point[0] / last:.1f},{TOP + PLOT * (1 - point[1] / top):.1f}"

    yield f'<text class="title" x="{x}" y="20">Loss</text>'
    yield from axis("loss", top, "nats")
    yield f'<polyline class="curve" points="{" ".join(map(at, losses))}"/>'
    for point in evals:
        left, y = at(point).split(",")
        yield f'<circle class="point" cx="{left}" cy="{y}" r="5"/>'
    yield f'<text x="{x}" y="{TOP + PLOT + 20}">0</text>'
    yield f'<text x="{x + width}" y="{TOP + PLOT + 20}" text-anchor="end">update {last:g}</text>'
    yield f'<text x="{x}" y="{TOP + PLOT + 46}">line: rows trained on; dots: held-out rows, before and after</text>'


def memory_panel(phases: Sequence[tuple[str, float]], tokens: int) -> Iterator[str]:
    x, width = PANELS["memory"]
    top = 5.0 * -(-max(peak for _, peak in phases) // 5)
    yield f'<text class="title" x="{x}" y="20">Memory by phase of one update</text>'
    yield from axis("memory", top, "MiB")
    step = width / len(phases)
    for number, (name, peak) in enumerate(phases):
        height = PLOT * peak / top
        kind = name.partition("[")[0]
        left = x + number * step + 0.1 * step
        box = f'x="{left:.1f}" y="{TOP + PLOT - height:.1f}" width="{0.8 * step:.1f}" height="{height:.1f}"'
        yield f'<rect class="{kind}" {box}><title>{name}: {peak:.1f} MiB</title></rect>'
    left = x
    for kind in dict.fromkeys(name.partition("[")[0] for name, _ in phases):
        yield f'<rect class="{kind}" x="{left}" y="{TOP + PLOT + 11}" width="10" height="10"/>'
        yield f'<text x="{left + 14}" y="{TOP + PLOT + 20}">{kind}</text>'
        left += 22 + 7 * len(kind)
    yield f'<text x="{x}" y="{TOP + PLOT + 46}">a bar a layer, in the order they run; a row of {tokens:,} tokens</text>'


def picture(run: dict[str, Any]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>A run of the demo recipe: its loss, and the memory of each phase of one update</title>",
        f"<style>{STYLE}</style>",
        *loss_panel(run["losses"], run["evals"]),
        *memory_panel(run["phases"], run["tokens"]),
    ]
    return "\n".join([*lines, "</svg>", ""])


def recorded() -> dict[str, Any]:
    """A run's losses and evaluations by update, and the peak in MiB of each phase of one update of a document."""
    with tempfile.TemporaryDirectory() as folder:
        short = trained(folder, "configs/demo.yaml", "eval.prompts=[]")
        script = [sys.executable, str(DOCS.parent / "examples/long_documents.py"), "--out", folder]
        subprocess.run([*script, "--characters", "5000"], check=True)
        settings = (f"data.train={folder}/train.jsonl", "data.valid=null", "train.steps=1", "train.warmup_ratio=0.0")
        document = trained(folder, "examples/long-documents.yaml", *settings)
        return {
            "losses": [[line["step"], round(line["loss"], 4)] for line in short.train],
            "evals": [[line["step"], round(line["loss"], 4)] for line in short.evals],
            "tokens": document.train[0]["tokens"] // document.settings["train"]["grad_accumulation_steps"],
            "phases": [[line["phase"], round(1024 * line["peak_gib"], 2)] for line in worst_step(document.memory)],
        }


def trained(folder: str, recipe: str, *settings: str) -> RunFiles:
    out = f"{folder}/{Path(recipe).stem}"
    changes = [word for text in (*settings, f"output.dir={out}") for word in ("--set", text)]
    assert cli.run(["sft", str(DOCS.parent / recipe), *changes]) == 0
    return read_run(Path(out))


if __name__ == "__main__":
    if "--record" in sys.argv:
        RECORDING.write_text(json.dumps(recorded()) + "\n", encoding="utf-8")
    (DOCS / "run.svg").write_text(picture(json.loads(RECORDING.read_text(encoding="utf-8"))), encoding="utf-8")
