"""Checkpoints: `checkpoints/step-0000100/`, complete or absent, and checked when read.

A checkpoint is written into a hidden directory beside its place, every file is flushed to the disk, and the directory
is renamed. Whatever happens at any moment (a kill, a full disk, a power loss) leaves the earlier checkpoints whole.
`state.json` holds the trainer's state, the size and SHA-256 of the other files, and a hash of itself, so that silent
corruption is found and the checkpoint before it is used instead.

One process at a time may write (the run directory's lock); reading needs none.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from segtrain.errors import RunFailed
from segtrain.storage.durable import Record, Writer, record_of, replace_together, sync_directory, write_new

Arrays = dict[str, mx.array]
Expected = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]

ADAPTERS, CONFIG, OPTIMIZER, STATE = (
    "adapters.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "state.json",
)
FORMAT = 1
WRITING, REPLACED, REMOVED = ".writing-", ".replaced-", ".removed-"  # prefixes of hidden directories
_STEP = re.compile(r"step-(\d{7,})")


class Unreadable(ValueError):
    """A checkpoint is incomplete or its content is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: the step it was taken after, and all that is needed to go on."""

    path: Path
    step: int
    adapters: Arrays
    adapter_config: dict[str, Any]
    optimizer: Arrays
    state: dict[str, Any]

    def check(self, expected: Expected) -> None:
        """Raises RunFailed, naming what differs, unless the adapters have exactly these names, shapes and dtypes."""
        odd = self.misfits(expected)
        if odd:
            more = f" (and {len(odd) - 3} more)" if len(odd) > 3 else ""
            raise RunFailed(
                f"{self.path} doesn't fit the model: {'; '.join(sorted(odd)[:3])}{more}; resume with "
                "the model and the lora section that it was made with"
            )

    def misfits(self, expected: Expected) -> list[str]:
        """Where the adapters have other names, shapes or dtypes."""
        found = {name: (tuple(array.shape), array.dtype) for name, array in self.adapters.items()}
        odd = [f"{name} is missing" for name in expected.keys() - found.keys()]
        odd += [f"{name} is not in the model" for name in found.keys() - expected.keys()]
        for name in expected.keys() & found.keys():
            (shape, dtype), (own_shape, own_dtype) = expected[name], found[name]
            if (tuple(shape), dtype) != (own_shape, own_dtype):
                odd.append(f"{name} is {list(own_shape)} {own_dtype}, the model's is {list(shape)} {dtype}")
        return odd

    def differing(self, **fingerprints: str) -> list[str]:
        """Of `model=..., recipe=...`, the names whose fingerprint isn't the one in `state["<name>_fingerprint"]`."""
        return [name for name, value in fingerprints.items() if self.state.get(f"{name}_fingerprint") != value]


def directory(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:07d}"


def save(
    run_dir: Path, step: int, *, adapters: Arrays, adapter_config: Mapping[str, Any], optimizer: Arrays, state: dict
) -> Path:
    """Write the checkpoint of `step`, replacing one of the same step. `state` is a JSON object.

    Raises RunFailed when the disk refuses; nothing that was saved before is touched then.
    """
    target = directory(run_dir, step)
    temporary = target.with_name(f"{WRITING}{target.name}")
    files = {ADAPTERS: tensors(adapters), CONFIG: plain_json(adapter_config), OPTIMIZER: tensors(optimizer)}
    try:
        target.parent.mkdir(exist_ok=True)
        clean(run_dir)
        temporary.mkdir()
        records = {name: write_new(temporary / name, write) for name, write in files.items()}
        write_new(temporary / STATE, plain_json(_manifest(step, records, state)))
        sync_directory(temporary)
        _put(temporary, target)
    except OSError as error:
        raise failed(f"the checkpoint of step {step} could not be written", error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _put(temporary: Path, target: Path) -> None:
    """Rename into place. Between a replacement's two renames only the hidden old one exists; `clean` restores it."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        os.rename(target, replaced)
    try:
        os.rename(temporary, target)
    except OSError:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    sync_directory(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clean(run_dir: Path) -> None:
    """Remove what an interrupted save or prune left, and undo half a replacement. Only under the run's lock."""
    for path in _hidden(run_dir, REPLACED):
        original = path.with_name(path.name.removeprefix(REPLACED))
        if not original.exists():
            os.rename(path, original)
    for prefix in (WRITING, REPLACED, REMOVED):
        for path in _hidden(run_dir, prefix):
            shutil.rmtree(path, ignore_errors=True)  # a directory; anything else wasn't made here
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _hidden(run_dir: Path, prefix: str) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob(f"{prefix}step-*"))


def steps(run_dir: Path) -> list[int]:
    """The steps with a checkpoint directory, ascending; whether they can be read is not known yet."""
    folder = run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def foreign(run_dir: Path) -> list[Path]:
    """What lies among the checkpoints and is none, hidden files aside."""
    folder = run_dir / "checkpoints"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if not path.name.startswith(".") and not _STEP.fullmatch(path.name)]


def newest_path(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files are all there (their content isn't read)."""
    paths = (directory(run_dir, step) for step in reversed(steps(run_dir)))
    return next((path for path in paths if _complete(path)), None)


def newest(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that reads well (None: there is none), and a notice for each newer one that doesn't."""
    notices: list[str] = []
    for step in reversed(steps(run_dir)):
        try:
            return load(directory(run_dir, step)), notices
        except Unreadable as error:
            notices.append(f"checkpoint skipped, the one before it is used: {error}")
    return None, notices


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint, its arrays into memory. Raises Unreadable, naming the file and why."""
    manifest = read_manifest(path)
    for name, record in manifest["files"].items():
        try:
            same = asdict(record_of(path / name)) == record
        except OSError as error:
            raise Unreadable(f"{path / name}: {error.strerror or error}") from error
        if not same:
            raise Unreadable(f"{path / name} is damaged: its size or checksum isn't the one in {STATE}")
    try:
        adapters, optimizer = read_tensors(path / ADAPTERS), read_tensors(path / OPTIMIZER)
        config = json.loads((path / CONFIG).read_text())
    except (RuntimeError, ValueError, OSError) as error:  # a RecursionError is a RuntimeError
        raise Unreadable(f"{path}: {error}") from error
    return Checkpoint(path, manifest["step"], adapters, config, optimizer, manifest["state"])


def read_manifest(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint, its own hash checked: step, files, state. Raises Unreadable."""
    file = path / STATE
    try:
        manifest = json.loads(file.read_text())
        own = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{file} can't be read ({error})") from error
    if own != _hash(manifest):
        raise Unreadable(f"{file} is damaged: its content doesn't have the hash that it names")
    if manifest.get("format") != FORMAT:
        raise Unreadable(f"{file} has format {manifest.get('format')}; this version reads {FORMAT}")
    files = manifest.get("files")
    listed = isinstance(files, dict) and all(isinstance(record, dict) for record in files.values())
    if not listed or set(files) != {ADAPTERS, CONFIG, OPTIMIZER}:
        raise Unreadable(f"{file} doesn't list the files of a checkpoint")
    return manifest


def pack(found: Checkpoint) -> bytes:
    """A checkpoint as bytes, for another process: a line of JSON, then the two safetensors files."""
    blocks = []
    for arrays in (found.adapters, found.optimizer):
        buffer = io.BytesIO()
        tensors(arrays)(buffer)
        blocks.append(buffer.getvalue())
    head = {"path": str(found.path), "step": found.step, "config": found.adapter_config, "state": found.state}
    return json.dumps({**head, "adapters_bytes": len(blocks[0])}).encode() + b"\n" + b"".join(blocks)


def unpack(data: bytes) -> Checkpoint:
    """The checkpoint that `pack` made bytes of."""
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    length = head["adapters_bytes"]
    adapters, optimizer = (_tensors_in(block) for block in (rest[:length], rest[length:]))
    return Checkpoint(Path(head["path"]), head["step"], adapters, head["config"], optimizer, head["state"])


def _tensors_in(data: bytes) -> Arrays:
    arrays = mx.load(io.BytesIO(data), format="safetensors")
    assert isinstance(arrays, dict)
    mx.eval(arrays)
    return arrays


def _manifest(step: int, records: Mapping[str, Record], state: dict) -> dict[str, Any]:
    files = {name: asdict(record) for name, record in records.items()}
    content = {"format": FORMAT, "step": step, "files": files, "state": state}
    return {**content, "sha256": _hash(json.loads(json.dumps(content)))}


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prune(run_dir: Path, keep: int, best: int | None = None, last: int | None = None) -> list[str]:
    """Remove all but the `keep` newest checkpoints, the one of step `best`, and the newest complete one.

    Those after step `last` are left alone and don't count: a run that goes on from an earlier step found them damaged.
    Returns a notice for each that couldn't be removed.
    """
    found = [step for step in steps(run_dir) if last is None or step <= last]
    kept = {best, *(found[len(found) - keep :] if keep < len(found) else found)}
    kept.add(next((step for step in reversed(found) if _complete(directory(run_dir, step))), None))
    notices = []
    for path in [directory(run_dir, step) for step in found if step not in kept]:
        removed = path.with_name(f"{REMOVED}{path.name}")
        try:
            os.rename(path, removed)  # so that half a removal never looks like a checkpoint
            shutil.rmtree(removed)
        except OSError as error:
            notices.append(f"the old checkpoint {path} could not be removed: {error.strerror or error}")
    return notices


def _complete(path: Path) -> bool:
    """Whether the manifest is whole and every file has its size (the content isn't read)."""
    try:
        files = read_manifest(path)["files"]
        return all((path / name).stat().st_size == record["bytes"] for name, record in files.items())
    except (Unreadable, OSError, KeyError):
        return False


def write_adapters(run_dir: Path, adapters: Arrays, adapter_config: Mapping[str, Any]) -> Path:
    """Put the adapters at the run's root, where mlx-lm finds them. Raises RunFailed, with the old ones still there."""
    path = run_dir / ADAPTERS
    try:
        replace_together([(run_dir / CONFIG, plain_json(adapter_config)), (path, tensors(adapters))])
    except OSError as error:
        raise failed("the adapters could not be written", error) from error
    return path


def read_tensors(path: Path) -> Arrays:
    """The arrays of a safetensors file, evaluated. Raises RuntimeError or OSError when it isn't one."""
    arrays = mx.load(str(path), format="safetensors")
    assert isinstance(arrays, dict)
    mx.eval(arrays)
    return arrays


def tensors(arrays: Arrays) -> Writer:
    return lambda file: mx.save_safetensors(file, dict(sorted(arrays.items())), metadata={"format": "mlx"})


def plain_json(value: Mapping[str, Any]) -> Writer:
    text = json.dumps(value, indent=2) + "\n"
    return lambda file: file.write(text.encode())


def failed(what: str, error: OSError) -> RunFailed:
    """The message for a disk that refuses to take something."""
    where = f" ({error.filename})" if error.filename else ""
    return RunFailed(
        f"{what}: {error.strerror or error}{where}; what was saved before is intact: free some space "
        "or make the directory writable, then go on with --resume"
    )
