"""The rows of each batch: shuffled by the seed and the epoch, the same in every process.

Nothing is kept between batches: a resumed run continues with the batch that it would have had, and every
process reads only its own rows. Dims: B batch rows, T time steps.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxpar.base.checks import require, require_instance
from jaxpar.base.parts import PARTS, RESETS, STATIC, WEIGHT, check_part


class BatchIndices(NamedTuple):
    """The rows or steps of the data that a batch holds.

    Attributes:
      at: Index of each row or step in the data, [B] or [B, T]; any number for padding.
      inside: False for padding.
      marks: Other parts of the batch by name, such as `starts`, `resets` and `lengths`.
    """

    at: np.ndarray
    inside: np.ndarray
    marks: dict[str, Any]


class DrawnBatches:
    """Batches of arrays in memory.

    Attributes:
      arrays: [length, ...] each, rows or steps; may be memory maps, or of `h5py` and the like: batches read
        what they need. Of rows, `static` may be a dict of them.
      batch_size: B, over all processes.
      seed: of what is drawn; None for evaluation, in plain order.
      num_windows: batches in an epoch.
      lookahead: steps after its own that a step reads, 0 or 1: so many at the end are read by others alone.
      index_dims: of `BatchIndices.at`: 1 where arrays are of rows, 2 where they are of steps.
    """

    lookahead: ClassVar[int] = 0
    index_dims: ClassVar[int] = 2
    num_windows: int

    def __init__(self, arrays: Mapping[str, np.ndarray], batch_size: int, seed: int | None):
        """Takes them; lists become arrays.

        Raises:
          ValueError: a number is out of range, or arrays differ in their length, or rows in theirs; or one
            has a name that means something else in a batch (`base.parts`).
        """
        self.arrays = checked_arrays(arrays)
        require(
            self.index_dims == 1 or STATIC not in self.arrays,
            f"{type(self).__name__} has arrays of steps, but {STATIC!r} has no time.\n"
            f"Fix: give these numbers for each step, under another name.",
        )
        for name in PARTS.keys() & self.arrays.keys():
            array = self.arrays[name]
            dims = self.index_dims + np.ndim(array) - 1
            check_part(name, dims, array.dtype, f"arrays[{name!r}], in a batch,")
        self.length = len(next(iter(flat(self.arrays).values())))
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, seed=0 if seed is None else seed)
        self.batch_size, self.seed = batch_size, seed
        self._drawn = functools.lru_cache(maxsize=2)(self.draw)

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        """See `Batches`; `weight` float32 [B] or [B, T] is 1, or what the arrays say, and 0 for padding.

        With time, a batch also has `lengths`.
        """
        at, inside, marks = self.indices(step, rows)
        batch = map_arrays(lambda name, array: _read(name, array, at), self.arrays)
        weight = np.asarray(batch.get(WEIGHT, inside), np.float32)
        counts = inside.reshape(*inside.shape, *[1] * (weight.ndim - inside.ndim))
        if RESETS in marks and RESETS in batch:  # sequences begin within sequences
            marks = {**marks, RESETS: marks[RESETS] | (inside & (batch[RESETS] != 0))}
        return {**batch, WEIGHT: np.where(counts, weight, np.float32(0)), **marks}

    def indices(self, step: int, rows: slice = slice(None)) -> BatchIndices:
        """Indices of the batch of a step, counted from 0 over all epochs; of some of its rows, if given.

        Raises:
          ValueError: step is negative.
        """
        require(step >= 0, f"step={step} is negative.\nFix: begin with step 0.")
        epoch, window = divmod(step, self.num_windows)
        return self.window(self._drawn(epoch), window, rows)

    def draw(self, epoch: int) -> Any:
        """What `window` needs of an epoch."""
        raise NotImplementedError

    def window(self, drawn: Any, window: int, rows: slice) -> BatchIndices:
        """Indices of rows of a batch, by its number in the epoch for which `draw` gave this."""
        raise NotImplementedError

    def rng(self, epoch: int, *more: int) -> np.random.Generator:
        """Of an epoch of training."""
        assert self.seed is not None
        return np.random.default_rng([self.seed, epoch, *more])


def _read(name: str, array: Any, at: np.ndarray) -> np.ndarray:
    """Rows of an array; those of a file (HDF5, NetCDF, Zarr) in slices of neighbors."""
    if isinstance(array, np.ndarray | jax.Array):
        return np.asarray(array[at])
    rows, order = np.unique(at % len(array), return_inverse=True)
    ends = np.flatnonzero(np.diff(rows) > 1) + 1
    parts = []
    for neighbors in np.split(rows, ends):
        part = array[neighbors[0] : neighbors[-1] + 1]
        require_unmasked(f"arrays[{name!r}]", part)  # NetCDF masks values that are missing
        parts.append(np.asarray(part))
    return np.concatenate(parts)[order.reshape(at.shape)]


def checked_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by name of as many rows, or steps; of lists, too.

    Raises:
      ValueError: these are no arrays by name, they differ in their rows, or rows of one in their shapes.
    """
    use = 'a dict of arrays by name, such as {"x": x, "y": y}'
    require_instance("arrays", arrays, Mapping, use)
    found = map_arrays(_as_array, arrays)
    lengths = {name: len(array) for name, array in flat(found).items()}
    are_alike = len(set(lengths.values())) == 1
    require(are_alike, f"arrays of {lengths} rows.\nFix: give all arrays the same number of rows.")
    return found


def map_arrays(change: Callable[[str, Any], Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """A changed batch, or data of one: `change` takes the name of an array, and the array."""

    def of(name: str, array: Any) -> Any:
        if name == STATIC and isinstance(array, Mapping):
            return {key: change(f"{STATIC}.{key}", own) for key, own in array.items()}
        return change(name, array)

    return {name: of(name, array) for name, array in arrays.items()}


def flat(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """All arrays of a batch, or of data, by their names, such as "static.label"."""
    found = dict[str, Any]()
    map_arrays(found.__setitem__, arrays)
    return found


def _as_array(name: str, array: Any) -> Any:
    """Rows as an array; what is one already is not read."""
    if hasattr(array, "to_numpy"):  # its indices are labels
        raise ValueError(
            f"arrays[{name!r}] is a {type(array).__name__}.\nFix: give numbers, {name}.to_numpy(np.float32)."
        )
    require_unmasked(f"arrays[{name!r}]", array)
    is_array = not isinstance(array, list | tuple)
    try:
        found = array if is_array else np.asarray(array)
    except ValueError:  # of unequal shapes
        found = np.empty(len(array), object)
        found[:] = array
    if not np.ndim(found):
        raise ValueError(f"arrays[{name!r}]={array!r} has no rows.\nFix: give an array of rows.")
    of_objects = isinstance(found, np.ndarray) and found.dtype.kind == "O"
    if not (of_objects and all(isinstance(row, list | tuple | np.ndarray) for row in found)):
        return found  # other objects are told of the batch
    lengths = [len(row) for row in found]
    if len({np.shape(row) for row in found}) == 1:
        return found
    what = "shapes" if len(set(lengths)) == 1 else "lengths"
    raise ValueError(
        f"arrays[{name!r}] has {len(lengths)} rows of unequal {what}.\nFix: pad them, or give "
        f"np.concatenate({name}) and their lengths to jaxpar.data.packed.PackedBatches."
    )


def require_unmasked(name: str, array: Any) -> None:
    """Raises for an array of `numpy.ma` with masked values, or a list of such: to JAX they would be data."""
    num_masked = 0
    for part in array if isinstance(array, list | tuple) else [array]:
        if isinstance(part, np.ma.MaskedArray):
            num_masked += int(np.ma.count_masked(part))
    require(
        not num_masked,
        f"{name} has {num_masked} masked values, which would count as data.\n"
        f"Fix: replace them with array.filled(0), and give these rows a weight of 0.",
    )


def check_at_least(least: int, **values: int) -> None:
    """Checks that all are whole numbers of `least` or more.

    Raises:
      ValueError: names the first that is not.
    """
    for name, value in values.items():
        require_instance(name, value, int | np.integer, "a whole number")
        require(value >= least, f"{name}={value} is too small.\nFix: use {least} or more.")
