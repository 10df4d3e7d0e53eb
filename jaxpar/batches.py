"""Batches: pytrees of arrays, a function of the seed and the step, and how they get onto a mesh.

Nothing is kept between batches, so a resumed run continues with the batch that it would have had, and every
process reads only its own rows. Dims: N rows in all, B batch rows, T time steps.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.fields import nearest_multiples, require_instance
from jaxpar.parts import STARTS, WEIGHT


class Batches(Protocol):
    """The batches of a split; `batch_size` is B, over all processes."""

    batch_size: int

    @property
    def num_windows(self) -> int:
        """Batches in an epoch."""
        ...

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked.

        Returns:
          a pytree of NumPy arrays [rows, ...] and scalars. A field or key `starts` says whether carried
          state begins anew; without it, it does so with every batch.
        """
        ...


def place_batch(batches: Batches, step: int, sharding: NamedSharding) -> Any:
    """The batch of a step as global arrays on a mesh; each process reads only its own rows.

    Args:
      sharding: of the dim of rows, such as `step.batch_sharding` gives.
    Raises:
      ValueError: the sharding does not divide the rows.
    """
    B = batches.batch_size
    check_rows(B, sharding)
    read = functools.cache(lambda start, stop: batches.batch(step, slice(start, stop)))
    # Devices that differ on other axes share rows; those of other processes are not read.
    mine = [
        index[0].indices(B)[:2] if index else (0, B)
        for index in sharding.addressable_devices_indices_map((B,)).values()
    ]
    leaves, structure = jax.tree.flatten(read(*mine[0]))

    def place(number: int, leaf: Any):
        if not np.ndim(leaf):
            return leaf
        shape = (B, *np.shape(leaf)[1:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            rows, *others = index or (slice(None),)
            start, stop, _ = rows.indices(B)
            return jax.tree.leaves(read(start, stop))[number][(slice(None), *others)]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.unflatten(structure, [place(n, leaf) for n, leaf in enumerate(leaves)])


def put_batch(batch: Any, sharding: NamedSharding) -> Any:
    """A batch that is whole on the host, on a mesh."""
    return jax.tree.map(lambda a: jax.device_put(a, sharding) if np.ndim(a) else a, batch)


def check_rows(batch_size: int, sharding: NamedSharding) -> None:
    """Checks that the sharding divides the rows of a batch.

    Raises:
      ValueError: it does not; the message names sizes that work.
    """
    spec = (*sharding.spec, None)[0]
    axes = spec if isinstance(spec, tuple) else () if spec is None else (spec,)
    parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % parts:
        split = " x ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in axes)
        raise ValueError(
            f"batch_size={batch_size} does not split over {split}; use "
            f"batch_size={nearest_multiples(batch_size, parts)}"
        )


class ArrayBatches:
    """Rows of arrays in memory, in batches.

    With a seed, for training: every epoch has a different order, drawn from (seed, epoch), and all batches
    are full; rows that do not fill one are left to other epochs. Without a seed, for evaluation: plain order,
    every row once, the last batch padded with copies of row 0 whose weight is 0.

    Args:
      arrays: [N, ...] each.
      batch_size: B.
      seed: None for evaluation.
    Raises:
      ValueError: a number is out of range, arrays differ in their rows, or there are too few of them.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], batch_size: int, seed: int | None = None):
        self.num_rows = _common_length(arrays)
        check_at_least(1, batch_size=batch_size)
        if seed is not None and batch_size > self.num_rows:
            raise ValueError(
                f"batch_size={batch_size} is more than the {self.num_rows} rows there are; use "
                f"{self.num_rows} or less"
            )
        self.arrays, self.batch_size, self.seed = dict(arrays), batch_size, seed

    @property
    def num_windows(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole if self.seed is not None else whole + (rest > 0)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """See `Batches`; `weight` float32 [B] is 1, or 0 for a row that fills the last batch."""
        epoch, window = divmod(step, self.num_windows)
        places_B = np.arange(window * self.batch_size, (window + 1) * self.batch_size)[rows]
        there_B = places_B < self.num_rows
        places_B = np.where(there_B, places_B, 0)
        if self.seed is not None:
            rng = np.random.default_rng([self.seed, epoch])
            places_B = rng.permutation(self.num_rows)[places_B]
        batch = {name: array[places_B] for name, array in self.arrays.items()}
        return {**batch, WEIGHT: there_B.astype(np.float32)}


class SeriesBatches:
    """One long series in windows, for models that carry their state from window to window.

    The series is cut into one contiguous stream for each row of the batch; batch i holds window i of every
    stream. With a seed, for training: every epoch begins at a different place, drawn from (seed, epoch),
    wraps around at the end of the series, and all windows are full. Without one, for evaluation: every step
    counts once, in plain order; the ends of streams are padded with places whose weight is 0. There a stream
    may first read what comes before it, so that its state is not an initial one:

        warmup=2, batch_size=2     a b c d e f g h
        row 0                      - - c d e
        row 1                            - - f g h      -: its weight is 0

    Args:
      arrays: [steps, ...] each, such as inputs and targets of every step.
      batch_size: B, the number of streams.
      seq_len: T, the steps of a window.
      seed: None for evaluation.
      warmup: steps that each stream of an evaluation reads first; the first so many of the series are for
        that alone.
    Raises:
      ValueError: a number is out of range, arrays differ in their steps, or the series is too short.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        batch_size: int,
        seq_len: int,
        seed: int | None = None,
        *,
        warmup: int = 0,
    ):
        self.num_steps = _common_length(arrays)
        check_at_least(1, batch_size=batch_size, seq_len=seq_len)
        require_instance("warmup", warmup, int | np.integer, "a whole number")
        if warmup < 0 or (warmup and seed is not None):
            raise ValueError(
                f"warmup={warmup} with seed={seed}: it is 0 in training, whose streams go on from window to "
                f"window, and 0 or more without a seed"
            )
        least = warmup + batch_size * (1 if seed is None else seq_len)
        if self.num_steps < least:
            more = f", warmup={warmup}" if warmup else ""
            raise ValueError(
                f"a series of {self.num_steps} steps is too short for batch_size={batch_size}, "
                f"seq_len={seq_len}{more}, which need {least}; use smaller ones, or a longer series"
            )
        self.arrays, self.batch_size, self.seq_len, self.seed, self.warmup = (
            dict(arrays), batch_size, seq_len, seed, warmup,
        )  # fmt: skip
        # Stream b has the steps from bounds[b] to bounds[b + 1]; lengths differ by one at most.
        self._bounds = warmup + np.arange(batch_size + 1) * (self.num_steps - warmup) // batch_size

    @property
    def num_windows(self) -> int:
        """Batches in an epoch."""
        if self.seed is None:
            longest = math.ceil((self.num_steps - self.warmup) / self.batch_size)
            return math.ceil((self.warmup + longest) / self.seq_len)
        return self.num_steps // self.batch_size // self.seq_len

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, Any]:
        """See `Batches`; `weight` float32 [B, T] is 1, or 0 before and beyond a stream."""
        epoch, window = divmod(step, self.num_windows)
        times = window * self.seq_len + np.arange(self.seq_len) - self.warmup
        places_BT = self._bounds[:-1][rows, None] + times
        inside_BT = (times >= 0) & (places_BT < self._bounds[1:][rows, None])
        if self.seed is not None:
            inside_BT = np.ones_like(inside_BT)
            places_BT = places_BT + np.random.default_rng([self.seed, epoch]).integers(
                self.num_steps
            )
        batch = {name: array[places_BT % self.num_steps] for name, array in self.arrays.items()}
        return {**batch, WEIGHT: inside_BT.astype(np.float32), STARTS: window == 0}


def _common_length(arrays: Mapping[str, np.ndarray]) -> int:
    require_instance(
        "arrays", arrays, Mapping, 'a dict of arrays by name, such as {"x": x, "y": y}'
    )
    for name, array in arrays.items():
        if not np.ndim(array):
            raise ValueError(f"arrays[{name!r}]={array!r} has no rows; give an array of rows")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"arrays of {lengths} rows; give one or more, all with the same number of rows"
        )
    return next(iter(lengths.values()))


def check_at_least(least: int, **values: int) -> None:
    """Checks that all are whole numbers of `least` or more.

    Raises:
      ValueError: names the first that is not.
    """
    for name, value in values.items():
        require_instance(name, value, int | np.integer, "a whole number")
        if value < least:
            raise ValueError(f"{name}={value} is too small; use {least} or more")


def place_of(step: int, num_windows: int) -> tuple[int, int]:
    """The epoch of a step, and its window there.

    Raises:
      ValueError: step is negative.
    """
    if step < 0:
        raise ValueError(f"step={step} is negative; the first batch is step 0")
    return divmod(step, num_windows)
