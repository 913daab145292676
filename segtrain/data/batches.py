"""Encoding many rows in several processes, in order.

Rows travel to the workers unparsed and come back as counts. Workers ignore Ctrl-C: the parent stops them.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from segtrain.data.accounting import EXAMPLES, Tally
from segtrain.data.dataset import Pipeline
from segtrain.data.formats import Reader
from segtrain.data.limits import Encoded
from segtrain.data.raw import Raw
from segtrain.data.rows import Origin, PreferenceRow, Row
from segtrain.errors import UserError

BATCH = 256
AHEAD = 4  # batches in flight for each worker


@dataclass
class Batch:
    """What one batch of rows amounts to. `digests` has one entry for each kept row, `places` says where it stands."""

    tally: Tally = field(default_factory=Tally)
    digests: "array[int]" = field(default_factory=lambda: array("Q"))
    places: list[Origin] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    truncated: list[Origin] = field(default_factory=list)
    split_prompts: list[Origin] = field(default_factory=list)


def count_batch(pipeline: Pipeline, rows: list[Raw]) -> Batch:
    """Encode rows and count them; a malformed row is noted and does not stop the count."""
    batch = Batch()
    for raw in rows:
        try:
            results = pipeline.encode(raw)
        except UserError as error:
            batch.fault_count += 1
            if len(batch.faults) < EXAMPLES:
                batch.faults.append(str(error))
            continue
        batch.tally.add(results)
        for result in results:
            if isinstance(result, Encoded):
                _place(batch, result, raw.origin)
    return batch


def _place(batch: Batch, kept: Encoded, origin: Origin) -> None:
    """Note where a kept row stands, and what else there is to tell of it."""
    batch.digests.append(digest(kept.row))
    batch.places.append(origin)
    if kept.truncated:
        batch.truncated.append(origin)
    if isinstance(kept.row, PreferenceRow) and kept.row.rejected_prompt is not None:
        batch.split_prompts.append(origin)


def digest(row: Row) -> int:
    """64 bits that tell rows with different tokens apart."""
    parts = [row.prompt, row.chosen, row.rejected] if isinstance(row, PreferenceRow) else [row.tokens]
    hasher = blake2b(digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(array("q", part).tobytes())
    return int.from_bytes(hasher.digest(), "little")


def count_rows(pipeline: Pipeline, rows: Iterable[list[Raw]], workers: int) -> Iterator[Batch]:
    """Counts of each batch of rows, in their order."""
    if workers < 2:
        yield from (count_batch(pipeline, batch) for batch in rows)
        return
    with _pool(pipeline, workers) as submit:
        waiting: deque[Future[Batch]] = deque()
        for batch in rows:
            waiting.append(submit(batch, pipeline.readers))
            if len(waiting) >= workers * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _pool(pipeline: Pipeline, workers: int) -> Iterator[Callable[[list[Raw], dict[str, Reader]], "Future[Batch]"]]:
    context = multiprocessing.get_context("spawn")  # fork isn't safe once the tokenizer has threads
    executor = ProcessPoolExecutor(workers, context, _start, (pickle.dumps(pipeline),))
    try:
        yield lambda rows, readers: executor.submit(_count, rows, readers)
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def can_travel(pipeline: Pipeline) -> bool:
    """Whether the pipeline can be sent to another process (a tokenizer with code of its own may not)."""
    try:
        pickle.dumps(pipeline)
    except Exception:
        return False
    return True


_pipeline: Pipeline | None = None


def _start(pickled: bytes) -> None:
    global _pipeline
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _pipeline = pickle.loads(pickled)
    _pipeline.encoder.codec.leave_offsets()


def _end_with_parent() -> None:
    """A parent that is killed can't stop its workers, and they hold the queue that they wait for open themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _count(rows: list[Raw], readers: dict[str, Reader]) -> Batch:
    assert _pipeline is not None
    _pipeline.readers = readers
    return count_batch(_pipeline, rows)
