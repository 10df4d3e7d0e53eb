"""Batches: pytrees of arrays, a function of the seed and the step, and how they get onto a mesh.

Nothing is kept between batches, so a resumed run continues with the batch that it would have had, and every
process reads only its own rows. Those of arrays in memory are in `data`. Dims: B batch rows.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.base.checks import check_divides
from jaxpar.base.types import Arrays, Batch
from jaxpar.data.order import require_unmasked


class EndOfStreamError(ValueError):
    """A batch is asked for that a stream does not have."""


@runtime_checkable
class Batches(Protocol):
    """The batches of a split; `batch_size` is B, over all processes."""

    batch_size: int

    @property
    def num_windows(self) -> int | None:
        """Batches in an epoch; None for a stream, which is read until an `EndOfStreamError`."""
        ...

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked.

        Returns:
          a pytree of NumPy arrays [rows, ...] and scalars, which are copied before the next call: the same
          arrays may be filled again. Arrays under `static` have no time. Fields or keys of other names mean
          something, too (`base.parts.PARTS`): `starts` says whether carried state begins anew; without it, it
          does so with every batch. Where rows end with padding, `lengths` [rows] has the number of real time
          steps of each.
        """
        ...


def windows(batches: Batches) -> Iterator[int]:
    """The numbers of the batches of an epoch, each while it can be read."""
    if batches.num_windows is not None:
        yield from range(batches.num_windows)
        return
    for window in itertools.count():
        try:
            batches.batch(window)
        except EndOfStreamError:
            return
        yield window


def owned(tree: Arrays) -> Arrays:
    """A copy of the NumPy arrays of a batch: the caller may fill its own arrays again at once.

    JAX makes no copy of some arrays on CPU, or copies them after the call that takes them has returned. Files
    may have numbers in another order of bytes; copies have the machine's.

    Raises:
      ValueError: an array has masked values; its copy would have none.
    """

    def copy(path: tuple[Any, ...], a: Any) -> Any:
        if not isinstance(a, np.ndarray):
            return a
        require_unmasked(f"batch{jax.tree_util.keystr(path)}", a)
        return np.array(a, a.dtype.newbyteorder("="))

    return jax.tree.map_with_path(copy, tree)


def check_types(batch: Batch, of: str) -> None:
    """Checks that JAX has arrays of the types of a batch.

    Args:
      of: whose batch it is, such as "of task Own".
    Raises:
      ValueError: an array holds something else than numbers, or floats of more than 64 bits.
    """
    for path, leaf in jax.tree.leaves_with_path(batch):
        dtype = getattr(leaf, "dtype", None)
        dtype = np.asarray(leaf).dtype if dtype is None else dtype
        kind = getattr(dtype, "kind", None)
        what, fix = f"an array of {dtype}", None
        if hasattr(leaf, "to_numpy"):
            what, fix = f"a {type(leaf).__name__}", "give its .to_numpy(np.float32)"
        elif fields := getattr(dtype, "names", None):
            fix = f"give an array of numbers, such as array[{fields[0]!r}]"
        elif kind in {*"OSUMm"}:  # objects, texts, dates
            fix = "give numbers (.astype(np.float32)), and classes and words as int32 ids"
        elif kind == "f" and dtype.itemsize > 8:  # long doubles
            fix = "give its .astype(np.float32)"
        elif kind == "c" and dtype.itemsize > 16:
            fix = "give its .astype(np.complex64)"
        if fix:
            name = f"batch{jax.tree_util.keystr(path)} {of}"
            raise ValueError(f"{name} is {what}.\nFix: {fix}.")


def place_batch(batches: Batches, step: int, sharding: NamedSharding) -> Batch:
    """The batch of a step as global arrays on a mesh; each process reads only its own rows.

    Args:
      sharding: of the dim of rows, such as `step.batch_sharding` gives.
    Raises:
      ValueError: the sharding does not divide the rows, or as of `owned` and `check_numbers`.
    """
    B = batches.batch_size
    axes = (*sharding.spec, None)[0] or ()
    axes = (axes,) if isinstance(axes, str) else axes
    check_divides("batch_size", B, {axis: sharding.mesh.shape[axis] for axis in axes})

    @functools.cache
    def read(start: int, stop: int) -> Batch:
        batch = owned(batches.batch(step, slice(start, stop)))
        check_numbers(batch)
        return batch

    # Devices that differ on other axes share rows; those of other processes are not read.
    [index, *_] = sharding.addressable_devices_indices_map((B,)).values()
    start, stop, _ = index[0].indices(B) if index else (0, B, 1)
    leaves, structure = jax.tree.flatten(read(start, stop))

    def place(number: int, leaf: np.ndarray) -> np.ndarray | jax.Array:
        if not np.ndim(leaf):
            return leaf
        shape = (B, *np.shape(leaf)[1:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            rows, *others = index or (slice(None),)
            start, stop, _ = rows.indices(B)
            return jax.tree.leaves(read(start, stop))[number][(slice(None), *others)]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.unflatten(structure, [place(n, leaf) for n, leaf in enumerate(leaves)])


def check_numbers(batch: Batch) -> None:
    """Checks that devices can hold a batch's whole numbers: they have 32 bits, unless JAX_ENABLE_X64 is on.

    Raises:
      ValueError: one is too large, and would become another.
    """
    for path, leaf in jax.tree.leaves_with_path(batch):
        given = np.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf
        kept = jax.dtypes.canonicalize_dtype(given.dtype)
        if given.dtype == kept or given.dtype.kind not in "iu" or not given.size:
            continue
        least, most = int(given.min()), int(given.max())
        of_kept = np.iinfo(kept)
        if not of_kept.min <= least <= most <= of_kept.max:
            number = most if most > of_kept.max else least
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has {number}, which does not fit in {kept} on devices.\n"
                f"Fix: use ids counted from 0, or JAX_ENABLE_X64=1."
            )


def put_batch(batch: Batch, sharding: NamedSharding) -> Batch:
    """A batch that is whole on the host, on a mesh."""
    return jax.tree.map(lambda a: jax.device_put(a, sharding) if np.ndim(a) else a, owned(batch))
