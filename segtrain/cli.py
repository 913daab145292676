"""The command line: arguments in, exit code out. What is heavy is imported inside its command, so that help is quick.

Exit codes: 0 done; 1 the run failed, or for plan-segments does not fit; 2 bad recipe, data or usage; 130 interrupted.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from segtrain import __version__
from segtrain.errors import RunFailed, UserError
from segtrain.signals import INTERRUPTED, StopRequest, leave_with

if TYPE_CHECKING:
    from segtrain.event import Event
    from segtrain.recipe.schema import Recipe

DONE, FAILED, MISUSED = 0, 1, 2
FIRST_RUN = "no recipe given; `segtrain init` writes one to start from, then: segtrain {command} recipe.yaml"
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, whether typer ships its own copy or not


class Loss(StrEnum):
    sft = "sft"
    orpo = "orpo"
    simpo = "simpo"
    cpo = "cpo"
    dpo = "dpo"


TRAINING = tuple(Loss)


class ExportFormat(StrEnum):
    peft = "peft"
    mlx = "mlx"
    merged = "merged"
    gguf = "gguf"
    gguf_model = "gguf-model"
    ollama = "ollama"


class Quantisation(StrEnum):
    four = "4"
    eight = "8"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"
    base = "base"


class Interrupted(Exception):
    """Ctrl-C outside a training step; click would turn it into a silent exit code."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    cls=_Commands,
    help="LoRA and DoRA fine-tuning on MLX at long contexts and on small memory budgets, by segmented backward.",
    epilog=(
        "\b\nWhat to type next:\n  segtrain init                       a recipe to fill in\n"
        "  segtrain check recipe.yaml          what is learnt\n"
        "  segtrain plan-segments recipe.yaml  memory and time\n"
        "  segtrain sft recipe.yaml            trains\n"
        "  segtrain doctor                     tests this machine"
    ),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Debug:
    """Whether `--debug` stands anywhere on the command line."""

    on = False

    @classmethod
    def switch(cls, given: bool) -> None:
        cls.on = cls.on or given


def _show_version(given: bool) -> None:
    if given:
        typer.echo(f"segtrain {__version__}")
        raise typer.Exit


RecipeFile = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory (output.dir).", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a recipe key, e.g. train.steps=50. Repeatable."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on from the run's newest complete checkpoint, or start where there is none."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Everything but the training: data accounting and plan.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")]
Force = Annotated[bool, typer.Option("--force", help="Resume even though recipe, data or model changed.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_Debug.switch, help="Show the traceback of an error.")]
Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
]


@app.callback(invoke_without_command=True)
def root(context: typer.Context, debug: Debug = False, version: Version = False) -> int:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        return MISUSED
    return DONE


def _training_command(name: str, text: str, setting: str) -> None:
    """Add the command that trains with the loss `name`; `text` is its help, with a short sentence first.

    `setting`: one that its examples change.
    """

    def command(
        recipe: RecipeFile = None,
        set_: Set = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        overwrite: Overwrite = False,
        force: Force = False,
        debug: Debug = False,
    ) -> int:
        flags = {"resume": resume, "dry_run": dry_run, "overwrite": overwrite, "force": force}
        return _train(name, _load(recipe, set_, name), **flags)

    uses = ("recipe.yaml", "recipe.yaml --resume", f"recipe.yaml --set {setting}")
    lines = "".join(f"\n  segtrain {line}" for line in (f"init --loss {name}", *(f"{name} {use}" for use in uses)))
    app.command(name=name, help=text, epilog=f"\b\nExamples:{lines}")(command)


_training_command(
    "sft",
    "Supervised fine-tuning on chats, completions or texts.\n\nThe adapter goes to output.dir and loads in mlx_lm "
    "(generate, fuse, server) as it is. Ctrl-C saves a checkpoint before it ends the run.",
    "train.steps=50",
)
_training_command(
    "orpo",
    "Preference fine-tuning (ORPO) on chosen and rejected.\n\nLearns to prefer the chosen answer, without a reference "
    "model. The prompt that both answers share is computed once (engine.prefix_sharing).",
    "orpo.beta=0.2",
)
_training_command(
    "simpo",
    "Preference fine-tuning by mean log-probs (SimPO).\n\nMakes the chosen answer likelier per token than the "
    "rejected one, by a margin (simpo.gamma). No reference model.",
    "simpo.gamma=1.0",
)
_training_command(
    "cpo",
    "Preference fine-tuning by log-probs and likelihood (CPO).\n\nMakes the chosen answer likelier than the "
    "rejected one, and imitates it as well (cpo.alpha). No reference model.",
    "cpo.alpha=0.5",
)
_training_command(
    "dpo",
    "Preference fine-tuning with a reference model (DPO).\n\nMakes the chosen answer gain on the rejected one, "
    "compared with the model at the start. With dpo.reference=cached that model scores each row once.",
    "dpo.reference=cached",
)


@app.command(
    name="plan-segments",
    epilog="\b\nExamples:\n  segtrain plan-segments recipe.yaml\n"
    "  segtrain plan-segments --seq 16384 --device mac-24gb \\\n    --model mlx-community/Qwen3-8B-4bit",
)
def plan_segments(
    recipe: RecipeFile = None,
    model: Annotated[str | None, typer.Option(help="Hub id or directory, instead of the recipe's.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens of a row; else the recipe's longest row.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Memory to stay within, e.g. 24GB; else what the device recommends.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Plan for another machine: mac-24gb, mac-64gb, ..., h200 or cpu.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the model and compare the plan with one real step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Preview memory and time before anything runs.

    Compares segment sizes and recommends one; exit code 1: nothing fits. Reads config.json only, and weights only with
    --measure.
    """
    if recipe is None and set_:
        raise UserError("--set changes a recipe, and none is given")
    from segtrain.api import plan

    loaded = _load(recipe, set_, "plan-segments") if recipe else None
    if measure and model is None:
        _announce(loaded)
    found = plan(loaded, model=model, seq=seq, budget=budget, device=device, measure=measure)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        from segtrain.terminal.progress import print_preview

        print_preview(found)
    return DONE if found.fits else FAILED


@app.command(
    epilog="\b\nExamples:\n  segtrain check recipe.yaml\n  segtrain check recipe.yaml --rows 3\n"
    "  segtrain check recipe.yaml --set data.on_long=truncate"
)
def check(
    recipe: RecipeFile = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Show the first N rows made of the data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Count the data and show what would be learnt.

    Rows, tokens, supervised tokens, what is dropped and why, and one sample, or the first N rows, with the supervised
    tokens marked. Trains nothing.
    """
    loaded = _load(recipe, set_, "check")
    from segtrain.api import check as examine
    from segtrain.terminal.counter import counter
    from segtrain.terminal.progress import print_check

    with counter("rows") as count:
        report = examine(loaded, rows=rows or int(as_json), workers=None, progress=count)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        print_check(report)
    return DONE


@app.command(
    name="verify-grads",
    epilog="\b\nExamples:\n  segtrain verify-grads recipe.yaml\n"
    "  segtrain verify-grads recipe.yaml \\\n    --set data.max_seq_length=256",
)
def verify_grads(recipe: RecipeFile = None, set_: Set = None, debug: Debug = False) -> int:
    """Compare segmented with full gradients.

    On a short row of your data, module by module, and on a row as long as the
    longest. Exit code 1: they differ.
    """
    loaded = _load(recipe, set_, "verify-grads")
    _prepare(exact=True)
    from segtrain.run.verify import verify_gradients
    from segtrain.terminal.progress import print_verify

    _announce(loaded)
    report = verify_gradients(loaded)
    print_verify(report)
    return DONE if report.passed else FAILED


@app.command(
    epilog="\b\nExamples:\n  segtrain export runs/my-run --format peft --out adapter\n"
    "  segtrain export runs/my-run --format merged --out model\n"
    "  segtrain export runs/my-run --format merged \\\n    --quantize 4 --out model"
)
def export(
    run: RunDir,
    format_: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="peft: for transformers; mlx: for mlx_lm; merged: base and adapter as one model directory; gguf: for "
            "llama.cpp; gguf-model: merged, by llama.cpp's converter; ollama: a Modelfile and what it names.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="What to write: a directory, or a GGUF file.", show_default=False)],
    model: Annotated[
        str | None, typer.Option("--model", help="The base model, if it isn't where the adapter says.")
    ] = None,
    quantize: Annotated[
        Quantisation | None,
        typer.Option("--quantize", help="Quantises the merged model; base: as the base model is. Else it is dense."),
    ] = None,
    converter: Annotated[
        Path | None, typer.Option("--converter", help="For gguf-model: the path of llama.cpp's convert_hf_to_gguf.py.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="For ollama: the base model's name in Ollama, or a GGUF file.")
    ] = None,
    debug: Debug = False,
) -> int:
    """Write a run's adapter, or its model, for other programs.

    RUN may also be a checkpoint, or an adapter directory of mlx-lm or PEFT.
    """
    _require_format(format_, ExportFormat.merged, "--quantize", quantize)
    _require_format(format_, ExportFormat.gguf_model, "--converter", converter)
    _require_format(format_, ExportFormat.ollama, "--from", from_)
    kind = int(quantize) if quantize and quantize.isdigit() else quantize and quantize.value
    only = {"quantize": kind, "converter": converter, "from_": from_}
    for notice in _export(run, out, format_, model, {name: value for name, value in only.items() if value}):
        typer.echo(notice, err=True)
    typer.echo(f"wrote {out}")
    return DONE


def _require_format(format_: ExportFormat, wanted: ExportFormat, option: str, value: object) -> None:
    if value is not None and format_ is not wanted:
        raise UserError(f"{option} is for --format {wanted}, not {format_}; leave it out")


def _export(run: Path, out: Path, format_: ExportFormat, model: str | None, only: dict[str, Any]) -> list[str]:
    """Write it; what to say. `only`: options of one format."""
    if format_ in (ExportFormat.peft, ExportFormat.mlx):
        from segtrain.lora.adapters import export as write

        return write(run, out, "peft" if format_ is ExportFormat.peft else "mlx", model)
    recipe = _recipe_of(run)
    from segtrain.run.environment import prepare

    prepare(os.environ, longest=recipe.data.max_seq_length if recipe else 0, exact=True)
    from segtrain.run import elsewhere, merging

    if model is None and format_ in (ExportFormat.merged, ExportFormat.gguf_model):
        _announce(recipe)
    if format_ is ExportFormat.gguf:
        return elsewhere.export_gguf(run, out, model=model)
    writers: dict[ExportFormat, Callable[..., list[str]]] = {
        ExportFormat.merged: merging.export_merged,
        ExportFormat.gguf_model: elsewhere.export_gguf_model,
        ExportFormat.ollama: elsewhere.export_ollama,
    }
    return writers[format_](run, out, recipe=recipe, model=model, **only)


def _recipe_of(run: Path) -> "Recipe | None":
    """The recipe of a run's directory; None where it has none."""
    from segtrain.api import recipe_file
    from segtrain.recipe.schema import load_recipe

    file = recipe_file(run)
    return load_recipe(file) if file else None


@app.command(
    name="eval",
    epilog="\b\nExamples:\n  segtrain eval runs/my-run --base\n"
    "  segtrain eval runs/my-run --data held-out.jsonl --json",
)
def evaluate(
    run: RunDir,
    data: Annotated[
        str | None, typer.Option("--data", help="A file or directory of rows, instead of the recipe's data.test.")
    ] = None,
    base: Annotated[
        bool,
        typer.Option("--base", help="Also the model without the adapter, and with the one of lora.init_from."),
    ] = False,
    last: Annotated[bool, typer.Option("--last", help="The last adapter instead of the best one.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> int:
    """Evaluate a run's adapter on held-out rows.

    Loss and perplexity, and for preference rows accuracy and margins, of the best adapter that the run has kept.
    """
    from segtrain.api import evaluate as measure
    from segtrain.terminal.counter import counter
    from segtrain.terminal.progress import print_evaluation

    _announce(_recipe_of(run))
    with counter("rows") as count:
        found = measure(run, data=data, base=base, last=last, progress=count)
    if as_json and _writes():
        typer.echo(json.dumps(found.as_json()))
    elif _writes():
        print_evaluation(found.as_json())
    return DONE


@app.command(epilog="\b\nExamples:\n  segtrain report runs/my-run\n  segtrain report runs/my-run --follow")
def report(
    run: RunDir,
    live: Annotated[
        bool, typer.Option("--follow", help="Serve the page to this machine, up to date, until the run ends.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --follow: the port; 0 takes a free one.")] = 0,
    debug: Debug = False,
) -> int:
    """Write an HTML page about a run.

    One self-contained file, for a run that is finished or going on: loss, evaluation, speed, memory by phase. With
    --follow nothing is written: the page is served to this machine's browsers.
    """
    from segtrain.report import follow, write_report

    if port and not live:
        raise UserError("--port goes with --follow; give both, or neither")
    if not live:
        typer.echo(f"wrote {write_report(run)}")
        return DONE
    with suppress(KeyboardInterrupt):  # how one leaves it
        follow(run, port, typer.echo)
    return DONE


@app.command(epilog="\b\nExamples:\n  segtrain init\n  segtrain init --loss orpo --out configs/preferences.yaml")
def init(
    loss: Annotated[
        Loss, typer.Option(help="sft: examples to follow; the others: pairs of better and worse answers.")
    ] = Loss.sft,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("recipe.yaml"),
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> int:
    """Write a commented recipe to start from."""
    from segtrain.recipe.scaffold import write_recipe

    write_recipe(out, loss.value, overwrite=overwrite)
    typer.echo(f"wrote {out}; set model and data.train in it, then: segtrain check {out}")
    return DONE


@app.command(epilog="\b\nExample:\n  segtrain models")
def models(debug: Debug = False) -> int:
    """List the supported model types."""
    from segtrain.models.support import table
    from segtrain.terminal.progress import print_models

    print_models(table())
    return DONE


@app.command(epilog="\b\nExamples:\n  segtrain doctor\n  segtrain doctor recipe.yaml --json")
def doctor(
    recipe: RecipeFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    set_: Set = None,
    debug: Debug = False,
) -> int:
    """Check this machine: are gradients right, is memory bounded?

    Attention, quantised products, recurrences, memory limits, speed: for a recipe's model, or for what most models
    consist of. Exit code 1: something is wrong that segtrain can't work around.
    """
    if recipe is None and set_:
        raise UserError("--set changes a recipe, and none is given")
    loaded = _load(recipe, set_, "doctor") if recipe else None
    from segtrain.memory.backends import LONG

    _prepare(longest=LONG)
    from segtrain.run.doctor import doctor as examine
    from segtrain.terminal.progress import print_doctor

    report = examine(loaded)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        print_doctor(report.as_json())
    return DONE if report.passed else FAILED


@app.command(epilog="\b\nExample:\n  segtrain bench")
def bench(debug: Debug = False) -> int:
    """Time this machine's choices, for the planner.

    Kinds of attention, dense copies of quantised weights, look-ahead. Takes less than two minutes.
    """
    _prepare()
    from segtrain.run.bench import bench as measure
    from segtrain.terminal.progress import print_bench

    print_bench(measure())
    return DONE


def main() -> None:
    """The console entry: runs the command and exits with its code."""
    code = run(sys.argv[1:])
    leave_with(code)
    if code == INTERRUPTED:  # Python would die of the signal itself where it came in a string's `exec`
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Errors go to stderr as one paragraph."""
    _Debug.on = False
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch, which nothing here needs
    with StopRequest() as stop:
        return _run(arguments, stop)


def _run(arguments: Sequence[str], stop: StopRequest) -> int:
    try:
        code = int(_command().main(args=list(arguments), prog_name="segtrain", standalone_mode=False) or DONE)
        # Before its command begins, typer makes a silent exit code of an interrupt.
        return _failed(code, "interrupted") if stop.interrupted and code == INTERRUPTED else code
    except typer.Exit as end:
        return end.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again at its exit
        return FAILED
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        return _failed(INTERRUPTED, "interrupted")
    except Exception as error:
        if stop.interrupted:  # an import or a library made another error of it
            return _failed(INTERRUPTED, "interrupted")
        return _failed(*_explained(error))


def _command() -> Any:
    return typer.main.get_command(app)


def _explained(error: Exception) -> tuple[int, str]:
    """The exit code and the paragraph for an error."""
    if isinstance(error, UsageError):
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "segtrain"
        message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
        message = message.replace("Value error, ", "")
        return MISUSED, f"{message}; see {where} --help"
    if isinstance(error, UserError):
        return MISUSED, str(error)
    if isinstance(error, RunFailed):
        return FAILED, str(error)
    if isinstance(error, MemoryError):
        return FAILED, f"out of memory; `segtrain plan-segments` shows what would fit{_detail(error)}"
    if isinstance(error, OSError):
        return FAILED, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return (
        FAILED,
        f"unexpected {type(error).__name__}{_detail(error)}; --debug shows the traceback, which helps in a report",
    )


def _detail(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f": {lines[0][:300]}" if lines else ""


def _failed(code: int, message: str) -> int:
    with suppress(OSError):  # stderr may be closed
        if _Debug.on:
            traceback.print_exc()
        typer.echo(f"segtrain: {message}", err=True)
    return code


def _load(recipe: Path | None, changes: list[str] | None, command: str) -> "Recipe":
    if recipe is None:
        raise UserError(FIRST_RUN.format(command=command))
    from segtrain.recipe.schema import load_recipe

    loaded = load_recipe(recipe, changes or ())
    _require_command(loaded, recipe, command)
    if command not in TRAINING:  # a run shows them as events
        for notice in loaded.notices:
            typer.echo(f"note: {notice}", err=True)
    return loaded


def _prepare(*, longest: int = 0, exact: bool = False) -> None:
    """Set what mlx reads when it is imported."""
    from segtrain.run.environment import prepare

    prepare(os.environ, longest=longest, exact=exact)


def _announce(recipe: "Recipe | None") -> None:
    """Say that the recipe's model is quantised first, if so."""
    if recipe is None or recipe.quantize is None:
        return
    from segtrain.run.base import pending
    from segtrain.run.environment import prepare

    prepare(os.environ, longest=recipe.data.max_seq_length)  # what fetches a model imports mlx
    if text := pending(recipe):
        typer.echo(f"note: {text}", err=True)


def _require_command(recipe: "Recipe", path: Path, command: str) -> None:
    """Raises UserError where the recipe names a loss (`training_mode`) that the command doesn't train."""
    asked = recipe.asked_loss
    if asked is not None and asked not in TRAINING:
        raise UserError(f"{path}: training_mode: {asked} isn't available; segtrain has {', '.join(TRAINING)}")
    if asked is not None and command in TRAINING and command != asked:
        raise UserError(f"{path}: training_mode: {asked} is trained by `segtrain {asked} {path}`")


def _train(loss: str, recipe: "Recipe", *, dry_run: bool, **flags: bool) -> int:
    from segtrain.api import stream_events
    from segtrain.event import RunEnded
    from segtrain.terminal.progress import make_progress

    with StopRequest() as stop, ExitStack() as stack:
        show: Callable[[Event], None] | None = None
        code = DONE
        for event in stream_events(recipe, loss, stop=stop, dry_run=dry_run, **flags):
            if show is None and _writes():
                show = stack.enter_context(make_progress(every=recipe.output.report_every))
            if show is not None:
                show(event)
            if isinstance(event, RunEnded) and event.reason == "interrupted":
                code = INTERRUPTED
        return code


def _writes() -> bool:
    """Whether this process shows and writes things: one of several ranks does. Only for where mlx is imported."""
    from segtrain.parallel.ranks import join

    return join().writes
