"""Draws the pictures of the pages that show a terminal or the report.

    python docs/render_pictures.py              the SVG pictures, from docs/recordings/
    python docs/render_pictures.py --record     runs the commands first and keeps what they print there
    python docs/render_pictures.py --report     screenshots of a run's report, light and dark, by a Chromium on the path

A recording is what commands really printed, each after a line with `$`. Plans are of a published model's configuration
(`benchmarks/published_models.json`), as no weights are needed for one. Screenshots need pillow too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WIDTH = 92  # columns
RECORDINGS = {
    "first_run": ["segtrain sft configs/demo.yaml"],
    "check": ["segtrain check examples/orpo.yaml"],
    "plan_segments": ["segtrain plan-segments --model mlx-community/Qwen3-8B-4bit --seq 32768 --device mac-24gb"],
}
STYLES = {
    r"\$ .*": "bold white",
    r"(data|plan|run|memory|percentiles|form|planned for)\b": "cyan",
    r"(eval|sample) .*|tokens a row": "green",
    r"(done|adapter|next)\b": "bold green",
    r"> recommended.*": "bold",
    r"saved .*": "dim",
    r"note\b": "yellow",
}
SIZE = 1240, 1445  # of a screenshot, pixels
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": str(WIDTH)}


def recorded(commands: list[str]) -> str:
    """What the commands print, in a directory with the repository's configs and examples."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in ("configs", "examples"):
            (home / name).symlink_to(ROOT / name)
        _write_model(home / "mlx-community/Qwen3-8B-4bit", "Qwen3 8B")
        return "\n".join(f"$ {command}\n{_output(command, home)}" for command in commands)


def _output(command: str, home: Path) -> str:
    here = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", *command.split()]
    return subprocess.run(words, cwd=home, env=here, check=True, capture_output=True, text=True).stdout


def _write_model(path: Path, name: str) -> None:
    """The configuration of a published model in 4 bits."""
    entry = json.loads((ROOT / "benchmarks/published_models.json").read_text(encoding="utf-8"))[name]
    packed = {"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "bfloat16"}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**entry["config"], **packed}), encoding="utf-8")


def styled(text: str) -> Iterator[Text]:
    """The lines, their first words coloured; what stands between ⟦ and ⟧ too."""
    inside = False
    for line in text.splitlines():
        shown = Text(line)
        for pattern, style in STYLES.items():
            if found := re.match(pattern, line):
                shown.stylize(style, 0, found.end())
        for mark in re.finditer("[⟦⟧]|[^⟦⟧]+", line):
            inside = mark[0] == "⟦" or (inside and mark[0] != "⟧")
            if inside or mark[0] == "⟧":
                shown.stylize("green", *mark.span())
        inside = inside and "between ⟦ and ⟧" not in line
        yield shown


def drawn(name: str, text: str) -> str:
    """An SVG picture of a terminal, with nothing that a browser would have to fetch."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for line in styled(text.rstrip() + "\n\n"):  # the last line would be clipped
        console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
    svg = console.export_svg(title="", theme=DIMMED_MONOKAI, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code, ", "font-family: ui-monospace, Menlo, Consolas, DejaVu Sans Mono, ", svg)


def draw() -> None:
    for name in RECORDINGS:
        text = (DOCS / f"recordings/{name}.txt").read_text(encoding="utf-8")
        (DOCS / f"{name}.svg").write_text(drawn(name, text), encoding="utf-8")


def record(names: list[str]) -> None:
    for name in names or RECORDINGS:
        (DOCS / f"recordings/{name}.txt").write_text(recorded(RECORDINGS[name]), encoding="utf-8")


def photograph() -> None:
    """The report of the demo run, one layer a segment so that each phase shows."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run = f"segtrain sft configs/demo.yaml --set engine.backward=segmented --set output.dir={home / 'demo'}"
        for command in (run, f"segtrain report {home / 'demo'}"):
            _output(command, ROOT)
        for scheme, name in (("1", "light"), ("0", "dark")):
            _shot(home / "demo/report.html", DOCS / f"report-{name}.png", scheme)


def _shot(page: Path, out: Path, scheme: str) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    width, height = SIZE
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    options += [f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={scheme}"]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "shot.png"
        command = [browser, *options, f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        _pack(picture, out)


def _pack(picture: Path, out: Path) -> None:
    """In few colours, which a page of lines and text needs no more of."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(out, optimize=True)


def main() -> None:
    if "--report" in sys.argv:
        photograph()
        return
    if "--record" in sys.argv:
        record([name for name in sys.argv[1:] if name in RECORDINGS])
    draw()


if __name__ == "__main__":
    main()
