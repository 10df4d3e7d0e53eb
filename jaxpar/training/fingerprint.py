"""What identifies the data of a run: checksums of batches, row by row, which are the same on every mesh.

Before a run every process reads batch 0 of each split whole and in two halves. So data that are not a
function of step and rows are found, and processes, or a resumed run, with other data. Of later batches each
process hashes the rows that it reads; a checkpoint holds the sums of the last ones, which a resumed run reads
again.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import xxhash

from jaxpar.base.checks import check_takes, require
from jaxpar.base.files import checksum
from jaxpar.base.parts import SPLITS
from jaxpar.data.batches import Batches, EndOfStreamError, check_numbers
from jaxpar.data.iterator import REMEMBERED, IteratorBatches
from jaxpar.hosts.agree import DifferentError, Together
from jaxpar.setup import Setup
from jaxpar.step import check_batch_shape
from jaxpar.training.evaluate import CheckedBatches

_MODULUS = 2**64

_log = logging.getLogger(__name__)


def describe_data(setup: Setup) -> dict[str, Any]:
    """What identifies a task's data, as JSON has it.

    `batches` are those of the task's fields and the seed, and may be compared where `settings` are equal.

    Raises:
      ValueError: a split has no batch, or one of another shape than the layout is for; or batch 0 has other
        rows when it is read in parts, or a value that the task refuses.
    """
    task = setup.task
    names = (field.name for field in dataclasses.fields(task) if field.name != "optimizer")
    fields = {name: repr(getattr(task, name)) for name in names}
    batches = {}
    for split in SPLITS:
        try:
            batches[split] = _read_twice(setup, split)
        except ValueError as error:
            raise ValueError(f"split {split!r}: {error}") from error
    described = {
        "data": task.fingerprint(),
        "files": {name: checksum(text.encode()) for name, text in task.files().items()},
        "settings": checksum(json.dumps([fields, setup.train.seed], sort_keys=True).encode()),
        "batches": batches,
    }
    return json.loads(json.dumps(described))


def _read_twice(setup: Setup, split: str) -> str:
    """The checksum of batch 0, which is read whole and in halves."""
    task = setup.task
    source = task.make_batches(split, *([setup.train.seed] if split == "train" else []))
    what = f"the batch of {type(source).__name__}"
    check_takes(source.batch, ("step", "rows"), what, "write batch(self, step, rows=slice(None))")
    batches, B = CheckedBatches(setup, source), source.batch_size
    require(batches.num_windows != 0, "no batch; give more rows, or smaller batches")
    batch = batches.batch(0)
    check_numbers(batch)
    check_batch_shape(setup.layout, batch)
    if isinstance(source, IteratorBatches):
        _check_reads_again(source, batch)
    whole, halves = hash_rows(batch, 0), 0
    for start, stop in ((0, B // 2), (B // 2, B)) if B > 1 else ((0, 1),):
        part = batches.batch(0, slice(start, stop))
        rows = {len(leaf) for leaf in jax.tree.leaves(part) if np.ndim(leaf)}
        if rows != {stop - start}:
            raise ValueError(
                f"batch(0, slice({start}, {stop})) has {sorted(rows)} rows, not {stop - start}; "
                f"return these rows of the batch alone"
            )
        halves += hash_rows(part, start)
    if whole != halves % _MODULUS:
        raise ValueError(
            "batch(0) has other rows when it is read again in two halves; every device reads its "
            "own rows, and a resumed run reads batches again, so batch(step, rows) must depend on these two "
            "alone: use arrays (jaxpar.ArrayBatches, SeriesBatches) and draw from "
            "np.random.default_rng([seed, step]), or give an iterator to jaxpar.IteratorBatches"
        )
    return _as_text(whole)


def _check_reads_again(source: IteratorBatches, batch: Any) -> None:
    """Raises if a stream does not begin with this batch when it is read from the beginning again."""
    source.restart()
    try:
        is_same = hash_rows(source.batch(0), 0) == hash_rows(batch, 0)
    except EndOfStreamError:
        is_same = False
    require(
        is_same,
        "the stream begins with another batch when it is read again, as a resumed run or the next evaluation "
        "does; let make open it anew, with the order of its data drawn from a seed",
    )


def describe_array(array: np.ndarray) -> dict[str, Any]:
    """What a task's `fingerprint` may say of an array: shape, type and checksum."""
    known = f"{array.dtype}{list(array.shape)}"
    return {"array": known, "checksum": checksum(np.ascontiguousarray(array).tobytes())}


def hash_rows(batch: Any, start: int) -> int:
    """A checksum below 2**64; those of all parts of a batch add up to that of the whole.

    Args:
      batch: arrays [rows, ...] and scalars, on the host.
      start: the number of its first row in the whole batch.
    """
    leaves = [(path, np.asarray(leaf)) for path, leaf in jax.tree.leaves_with_path(batch)]
    rows = [np.ascontiguousarray(leaf) for _, leaf in leaves if leaf.ndim]
    table = np.concatenate(
        [a.view(np.uint8).reshape(len(a), a.nbytes // len(a)) for a in rows], axis=1
    )
    total = sum(xxhash.xxh3_64_intdigest(row, seed=n) for n, row in enumerate(table, start + 1))
    if start == 0:  # what all rows share is counted once
        what = [(jax.tree_util.keystr(path), a.dtype.str, a.shape[1:]) for path, a in leaves]
        shared = repr(what).encode() + b"".join(a.tobytes() for _, a in leaves if not a.ndim)
        total += xxhash.xxh3_64_intdigest(shared)
    return total % _MODULUS


class HashedBatches(CheckedBatches):
    """Batches that remember the checksums of the rows that this process has read last.

    Args:
      settings: by which they are cut, as of `describe_data`.
    """

    def __init__(self, setup: Setup, batches: Batches, settings: str):
        super().__init__(setup, batches)
        self.settings = settings
        self._stream = batches if isinstance(batches, IteratorBatches) else None
        self._read: dict[int, dict[str, int]] = {}
        self._together = Together()

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        """See `CheckedBatches`."""
        read = batch = super().batch(step, rows)
        start, stop, _ = rows.indices(self.batch_size)
        if self._stream is not None:  # every process reads all rows
            read, start, stop = self._stream.batch(step), 0, self.batch_size
        parts, part = self._read.setdefault(step, {}), f"{start} to {stop - 1}"
        if self._stream is None or part not in parts:
            parts[part] = hash_rows(read, start)
        for old in sorted(self._read)[:-REMEMBERED]:
            del self._read[old]
        return batch

    def checksums(self, step: int) -> dict[str, str]:
        """Those of the last batches before a step, by their numbers. All processes call it.

        Raises:
          DifferentError: processes that read the same rows have read other data.
        """
        read = {str(each): parts for each, parts in sorted(self._read.items()) if each < step}
        sums, problem = self._together.exchange(read, _add_up)
        if problem:
            raise DifferentError(f"{problem}; give all processes the same data")
        return sums

    def position(self, step: int) -> str | None:
        """Where a stream was before the first of those batches; None if it cannot tell, or is none."""
        first = min((each for each in self._read if each < step), default=step)
        return None if self._stream is None else self._stream.position(first)

    def keep_from(self, step: int) -> None:
        """Batches from this step on may be asked for again, and of those before none."""
        if self._stream is not None:
            self._stream.keep_from(step)

    def check(self, sums: Mapping[str, str], what: str, position: str | None = None) -> None:
        """Reads batches again, and compares.

        Args:
          sums: as of `checksums`.
          what: has them, in words.
          position: as of `position`.
        Raises:
          ValueError: the data have changed.
        """
        if self._stream is not None and position is not None:
            try:
                self._stream.seek(position)
                self._compare(sums, what)
            except ValueError as error:
                _log.warning(
                    "the stream is read from its beginning, not from its position (%s)", error
                )
                self._stream.restart()
            else:
                return
        self._compare(sums, what)

    def _compare(self, sums: Mapping[str, str], what: str) -> None:
        for step, expected in sums.items():
            if _as_text(hash_rows(super().batch(int(step)), 0)) != expected:
                raise ValueError(
                    f"batch {step} is not the one that {what} was trained on: the data have changed; bring "
                    f"them back, or start another run"
                )


def _add_up(told: Mapping[int, Mapping[str, Mapping[str, int]]]) -> tuple[dict[str, str], str]:
    """The checksums of batches, by those of rows that processes have read; and where these differ."""
    known: dict[str, dict[str, tuple[int, int]]] = {}
    for process, read in told.items():
        for step, parts in read.items():
            for rows, found in parts.items():
                first, same = known.setdefault(step, {}).setdefault(rows, (process, found))
                if found != same:
                    who = f"processes {first} and {process}"
                    return {}, f"{who} have read other data as rows {rows} of batch {step}"
    return {
        step: _as_text(sum(found for _, found in parts.values()) % _MODULUS)
        for step, parts in known.items()
    }, ""


def _as_text(checksum: int) -> str:
    return f"{checksum:016x}"
