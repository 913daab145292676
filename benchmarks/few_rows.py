"""What do 40 rows teach, by rate and number of epochs? The loss of held-out rows, every two epochs.

    python benchmarks/few_rows.py                     appends to results/few_rows.jsonl; some minutes on a CPU
    python benchmarks/few_rows.py --rates 3e-3

The demo recipe on its first 40 rows, 4 an update, 10 epochs; 16 validation rows about other words.
"""

import argparse
import json
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from segtrain import cli

ROOT = Path(__file__).parents[1]
ROWS, EPOCHS, HELD_OUT = 40, 10, 16


def trained(rate: str, folder: Path) -> dict[str, float]:
    """Held-out loss by epoch; "0" is before training."""
    rows = (ROOT / "examples/data/chat.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    data, out = folder / "rows.jsonl", folder / f"run-{rate}"
    data.write_text("\n".join(rows) + "\n", encoding="utf-8")
    settings = [f"data.train={data}", "train.steps=null", f"train.epochs={EPOCHS}", f"train.learning_rate={rate}"]
    settings += [f"eval.rows={HELD_OUT}", "eval.prompts=[]", "output.eval_every=20", "output.save_every=0"]
    settings += ["output.report_every=20", f"output.dir={out}"]
    assert cli.run(["sft", "configs/demo.yaml", *(word for text in settings for word in ("--set", text))]) == 0
    return losses(out)


def losses(run: Path) -> dict[str, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {str(line["step"] * 4 // ROWS): round(line["loss"], 3) for line in lines if line["event"] == "eval"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1e-4", "1e-3", "3e-3"])
    given = parser.parse_args()
    about = {"rows": ROWS, "date": str(date.today()), "versions": {name: version(name) for name in ("mlx", "mlx-lm")}}
    with (ROOT / "benchmarks/results/few_rows.jsonl").open("a", encoding="utf-8") as out:
        for rate in given.rates:
            with tempfile.TemporaryDirectory() as folder:
                found = trained(rate, Path(folder))
            print(json.dumps({"rate": rate, "losses": found, **about}), file=out, flush=True)


if __name__ == "__main__":
    main()
