"""The identity of a run's data: checksums of batches, row by row, which are the same on every mesh.

Before a run, every process reads batch 0 of each split as a whole and in two halves. This finds data that are
not a function of step and rows, and processes or resumed runs with other data. A checkpoint holds the
checksum of the batch that a resumed run reads next.
"""

import contextlib
import json
import logging

import jax
import numpy as np
import xxhash

from jaxpar.base.checks import check_takes, require
from jaxpar.base.files import checksum
from jaxpar.base.parts import SPLITS
from jaxpar.base.types import Batch, Json
from jaxpar.data.batches import Batches, EndOfStreamError, check_numbers
from jaxpar.data.iterator import IteratorBatches
from jaxpar.hosts.agree import DifferentError, Rendezvous, differences
from jaxpar.step.setup import Setup
from jaxpar.step.step import check_batch_shape
from jaxpar.training.changes import describe_settings, free_keys
from jaxpar.training.evaluate import CheckedBatches

_MODULUS = 2**64

_log = logging.getLogger(__name__)


def describe_data(setup: Setup) -> Json:
    """The identity of a task's data, and the settings of the run.

    `batches` may be compared if `settings` are equal: a checksum of the seed and of the fields that are free
    to change batches.

    Raises:
      ValueError: a split has no batch, or one of another shape than the layout expects; or batch 0 has other
        rows when it is read in parts, or a value that the task does not accept.
    """
    task = setup.task
    fields, free = describe_settings(setup), free_keys(setup)
    batches, num_batches = {}, {}
    for split in SPLITS:
        try:
            source = task.make_batches(split, *([setup.train.seed] if split == "train" else []))
            batches[split] = _read_twice(setup, source)
        except ValueError as error:
            fact, _, remedy = str(error).partition("\nFix: ")
            remedy = remedy or "change these data"
            raise ValueError(f"split {split!r}: {fact}\nFix: {remedy}") from error
        num_windows = source.num_windows
        num_batches[split] = "a stream" if num_windows is None else int(num_windows)
    described = {
        "data": task.fingerprint(),
        "files": {name: checksum(text.encode()) for name, text in task.files().items()},
        "settings": checksum(json.dumps({key: fields[key] for key in free}).encode()),
        "batches": batches,
        "num_batches": num_batches,
        "fields": fields,
        "free": free,
    }
    return json.loads(json.dumps(described))


def _read_twice(setup: Setup, source: Batches) -> str:
    """The checksum of batch 0, which is read as a whole and in halves."""
    what = f"the batch of {type(source).__name__}"
    check_takes(source.batch, ("step", "rows"), what, "write batch(self, step, rows=slice(None))")
    batches, B = CheckedBatches(setup, source), source.batch_size
    message = "the data have no batch.\nFix: give more rows, or smaller batches."
    require(batches.num_windows != 0, message)
    batch = batches.batch(0)
    check_numbers(batch)
    check_batch_shape(setup.facts, batch)
    whole, halves = hash_rows(batch, 0), 0
    if isinstance(source, IteratorBatches):
        source.restart()
    for start, stop in ((0, B // 2), (B // 2, B)) if B > 1 else ((0, 1),):
        try:
            part = batches.batch(0, slice(start, stop))
        except EndOfStreamError:  # an iterator that can be read only once
            break
        rows = {len(leaf) for leaf in jax.tree.leaves(part) if np.ndim(leaf)}
        require(
            rows == {stop - start},
            f"batch(0, slice({start}, {stop})) has {sorted(rows)} rows.\n"
            f"Fix: return only these {stop - start} rows of the batch.",
        )
        halves += hash_rows(part, start)
    require(
        whole == halves % _MODULUS,
        "batch(0) has other rows when it is read again, so a run could not be resumed.\n"
        "Fix: draw from np.random.default_rng([seed, step]), or use jaxpar.ArrayBatches, or "
        "jaxpar.IteratorBatches with a make that begins again.",
    )
    return _as_text(whole)


def describe_array(array: np.ndarray) -> dict[str, str]:
    """The shape, type and checksum of an array, for a task's `fingerprint`."""
    known = f"{array.dtype}{list(array.shape)}"
    return {"array": known, "checksum": checksum(np.ascontiguousarray(array).tobytes())}


def hash_rows(batch: Batch, start: int) -> int:
    """A checksum below 2**64; the checksums of all parts of a batch add up to that of the whole batch.

    Args:
      batch: arrays [rows, ...] and scalars, on the host.
      start: number of its first row in the whole batch.
    """
    leaves = [(path, np.asarray(leaf)) for path, leaf in jax.tree.leaves_with_path(batch)]
    rows = [np.ascontiguousarray(leaf) for _, leaf in leaves if leaf.ndim]
    table = np.concatenate(
        [a.view(np.uint8).reshape(len(a), a.nbytes // len(a)) for a in rows], axis=1
    )
    total = sum(xxhash.xxh3_64_intdigest(row, seed=n) for n, row in enumerate(table, start + 1))
    if start == 0:  # names, types and scalars are counted once
        what = [(jax.tree_util.keystr(path), a.dtype.str, a.shape[1:]) for path, a in leaves]
        shared = repr(what).encode() + b"".join(a.tobytes() for _, a in leaves if not a.ndim)
        total += xxhash.xxh3_64_intdigest(shared)
    return total % _MODULUS


class HashedBatches(CheckedBatches):
    """Batches of a run with checksums, by which a resumed run compares its next batch.

    Args:
      settings: checksum of the settings by which they are cut, as of `describe_data`.
    """

    def __init__(self, setup: Setup, batches: Batches, settings: str):
        super().__init__(setup, batches)
        self.settings = settings
        self._rendezvous = Rendezvous()
        self._stream = batches if isinstance(batches, IteratorBatches) else None

    def describe(self, step: int) -> Json:
        """The identity of the batch of a step; all processes call it.

        `batches` is its checksum by its number; empty if a stream has ended. `position` is that of a stream
        before the batch, if it is known. `settings` are as in `HashedBatches`.

        Raises:
          DifferentError: processes have read other data.
        """
        sums = dict[str, str]()
        with contextlib.suppress(EndOfStreamError):
            sums[str(step)] = _as_text(hash_rows(self.batch(step), 0))
        found = {f"batch {number}": text for number, text in sums.items()}
        if differ := self._rendezvous.exchange(found, differences):
            raise DifferentError(
                f"the processes do not agree: {differ}.\nFix: give all processes the same data."
            )
        position = None if self._stream is None else self._stream.position(step)
        return {"batches": sums, "position": position, "settings": self.settings}

    def keep_from(self, step: int) -> None:
        """From this step on, batches may be read again; earlier ones may not."""
        if self._stream is not None:
            self._stream.keep_from(step)

    def check(self, described: Json, what: str) -> None:
        """Reads the batch again, and compares it with its description, if batches are cut in the same way.

        Args:
          described: as of `describe`.
          what: holder of the description, in words.
        Raises:
          ValueError: the data have changed.
        """
        if described["settings"] != self.settings:
            return
        lost = ""
        if self._stream is not None and described["position"]:
            try:
                self._stream.seek(described["position"])
                lost = "other batches follow" * bool(self._different(described))
            except ValueError as error:
                lost = str(error).partition("\n")[0]
            if not lost:
                return
            self._stream.restart()
        for step in self._different(described):
            raise ValueError(
                f"batch {step} is not the one that {what} continues with: the data have changed.\n"
                f"Fix: restore them, or start another run."
            )
        if lost:
            _log.warning(
                "the stream was read from its beginning, because its source does not return to a saved "
                "position (%s). The batches are the same, so the run continues unchanged.",
                lost,
            )

    def _different(self, described: Json) -> list[str]:
        """Numbers of the batches that are not as described."""
        expected = described["batches"].items()
        return [n for n, text in expected if _as_text(hash_rows(self.batch(int(n)), 0)) != text]


def _as_text(checksum: int) -> str:
    return f"{checksum:016x}"
