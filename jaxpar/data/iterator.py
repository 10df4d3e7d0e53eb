"""Batches from a stream that can only be read in order, such as an input pipeline or a generator.

Every process reads all of the stream and takes its own rows, so the processes read the same. What is asked
for again is kept, or read again: from a position that the source has told, or else from the beginning.
Dims: B batch rows.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxpar.base.checks import require
from jaxpar.base.parts import WEIGHT, check_parts
from jaxpar.data.batches import EndOfStreamError
from jaxpar.data.order import check_at_least, flat, map_arrays, require_unmasked

_USE = "give a function that opens the stream from its beginning, such as lambda: read(seed)."

_log = logging.getLogger(__name__)


class IteratorBatches:
    """Batches from an iterator, such as one of Grain, Hugging Face's `datasets` or PyTorch.

    In training the stream has as many batches as there are steps; in an evaluation it is read to its end,
    where the last batch may be smaller: it is padded with copies of its first row whose weight is 0. A
    `weight` float32 [B] of ones is added to batches without one. Where rows continue those of the batch
    before, batches need a scalar `starts`, which is False then. Each batch is copied before the next one is
    read, so the iterator may fill the same arrays again.

    A resumed run goes on from the position that the source saves, if JSON can hold it: by `get_state` and
    `set_state` of the iterator, as Grain has them, or by `state_dict` and `load_state_dict` of what `make`
    returns, as of `datasets`. Where there is none, or it leads to other batches than before, batches are read
    from the beginning and left out; a warning says so, and how long it took.

    Args:
      make: called for each pass; gives an iterable of dicts of arrays [B, ...], the same ones each time.
      batch_size: B, over all processes.
    Raises:
      ValueError: `make` is no function, or the size is out of range. As a batch is read: it is no dict of
        numbers, or of another size or type than the first.
      EndOfStreamError: as a batch is read, there is none.

    Example:
      def read():
        for start in range(0, len(x), 16):
          yield {"x": x[start : start + 16], "y": y[start : start + 16]}

      batches = jaxpar.IteratorBatches(read, batch_size=16)
    """

    num_windows = None  # known at the end alone

    def __init__(self, make: Callable[[], Iterable[Mapping[str, Any]]], batch_size: int):
        require(callable(make), f"make={make!r} can be read only once.\nFix: {_USE}")
        check_at_least(1, batch_size=batch_size)
        self.batch_size, self._make = batch_size, make
        self._source: Any = None
        self._iterator: Any = None
        self._next = 0
        self._kept_from: int | None = None
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        self._positions: dict[int, str | None] = {}
        self._kinds: dict[str, str] = {}  # of the first batch

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, Any]:
        """See `Batches`; the next one, or one that is kept. Others make it read from the beginning."""
        if step not in self._kept:
            if self._iterator is None or step < self._next:
                self._open(None)
            began, first = time.perf_counter(), self._next
            while self._next <= step:
                self._read()
            if first < step:
                _log.warning(
                    "read %d batches of a stream in %.1f s to reach batch %d, counted from 0",
                    *(step - first, time.perf_counter() - began, step),
                )
        return map_arrays(lambda _, leaf: leaf[rows] if leaf.ndim else leaf, self._kept[step])

    def keep_from(self, step: int) -> None:
        """Keeps this batch and later ones for repeated reads, not only the last batch."""
        self._kept_from = step
        self._forget()

    def position(self, step: int) -> str | None:
        """Position of the source before a batch that is kept, for `seek`."""
        return self._positions.get(step)

    def seek(self, position: str) -> None:
        """Goes to a position, so that the batch after it is the next.

        Raises:
          ValueError: the source takes no positions, or not this one.
        """
        number, state = json.loads(position)
        try:
            self._open(state, number)
        except Exception as error:
            self._iterator = None
            fact = f"{type(error).__name__}: {error}"
            raise ValueError(f"{fact}\nFix: read the stream from its beginning.") from error

    def restart(self) -> None:
        """Forgets what is read: the next batch is read from the beginning."""
        self._iterator = None
        self._kept.clear()

    def _open(self, state: Any, number: int = 0) -> None:
        self._kept.clear()
        self._positions.clear()
        self._source, self._next = self._make(), number
        if state is not None and hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict(state)
        fact = f"make gives a {type(self._source).__name__}, which is not iterable."
        require(isinstance(self._source, Iterable), f"{fact}\nFix: {_USE}")
        self._iterator = iter(self._source)
        if state is not None and not hasattr(self._source, "load_state_dict"):
            self._iterator.set_state(state)

    def _read(self) -> None:
        """Reads the next batch."""
        self._positions[self._next] = self._tell()
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise EndOfStreamError(
                f"the stream has ended after {self._next} batches.\n"
                f"Fix: make the stream repeat its data, or train fewer steps."
            ) from None
        self._kept[self._next] = self._checked(batch)
        self._next += 1
        self._forget()

    def _tell(self) -> str | None:
        """The source's position, if it has one that can be written."""
        state = None
        if hasattr(self._source, "load_state_dict"):
            state = self._source.state_dict()
        elif hasattr(self._iterator, "set_state"):
            state = self._iterator.get_state()
        with contextlib.suppress(TypeError):
            return None if state is None else json.dumps([self._next, state])
        return None

    def _forget(self) -> None:
        oldest = self._next - 1 if self._kept_from is None else self._kept_from
        for old in [number for number in self._kept if number < oldest]:
            del self._kept[old]
            self._positions.pop(old, None)

    def _checked(self, batch: Any) -> dict[str, np.ndarray]:
        """A batch with its weight, padded if it is the last one and smaller."""
        number, B = self._next, self.batch_size
        require(
            isinstance(batch, Mapping),
            f"batch {number} of the stream is a {type(batch).__name__}.\n"
            f'Fix: give a dict of arrays, such as {{"x": x, "label": label}}.',
        )
        batch = {str(name): array for name, array in batch.items()}
        map_arrays(lambda name, a: require_unmasked(f"batch[{name!r}] of the stream", a), batch)
        arrays = map_arrays(lambda _, a: np.array(a), batch)
        for name, array in flat(arrays).items():
            fact = f"batch[{name!r}] of the stream has the type {array.dtype}."
            is_valid = array.dtype.kind not in "OSUM"
            require(is_valid, f"{fact}\nFix: leave out everything but arrays of numbers.")
        check_parts(arrays, "of the stream")
        sizes = {len(array) for array in flat(arrays).values() if array.ndim}
        if len(sizes) != 1 or not 0 < (size := max(sizes)) <= B:
            fact = f"batch {number} of the stream has {sorted(sizes)} rows, but batch_size={B}."
            raise ValueError(f"{fact}\nFix: give all its arrays {B} rows.")
        arrays.setdefault(WEIGHT, np.ones(size, np.float32))
        kinds = {name: f"{a.dtype}{list(a.shape[1:])}" for name, a in flat(arrays).items()}
        self._kinds = self._kinds or kinds
        fact = f"batch {number} of the stream has rows of {kinds}, but the first had {self._kinds}."
        require(kinds == self._kinds, f"{fact}\nFix: give all batches the same arrays.")
        if size == B:
            return arrays
        require(
            next(self._iterator, None) is None,
            f"batch {number} of the stream has {size} rows, but batch_size={B}, and it is not the last.\n"
            f"Fix: leave out smaller batches (drop_remainder, drop_last).",
        )
        return map_arrays(lambda name, a: self._padded(name, a) if a.ndim else a, arrays)

    def _padded(self, name: str, array: np.ndarray) -> np.ndarray:
        more = np.repeat(array[:1], self.batch_size - len(array), 0)
        return np.concatenate([array, np.zeros_like(more) if name == WEIGHT else more])
