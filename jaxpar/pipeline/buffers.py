"""Arrays with a place for everything that waits: made, read and written without being filled or copied.

An array of slots is changed in place where three things hold, which the compiled programs show
(`tests/test_aot.py`): nobody asks for it in another memory layout, nothing needs it to be of zeros, and what
changes it runs where XLA knows it to be the only user (`loop.Loop`).
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxpar.base.types import Arrays, Shapes

# A TPU moves arrays in tiles of 128 columns, each of 32 bytes (8 rows of float32), or of fewer rows where the
# array has no more.
_COLUMNS, _COLUMN_BYTES = 128, 32
# Room that an order of dims may waste before another one is looked for. A layout that is not the natural one
# costs copies where a branch between layers of several kinds comes to ask for that.
_WASTE = 1.5


def make_buffers(
    count: int, shapes: Shapes, *, fill: float | None = None, in_parts: bool = False
) -> Arrays:
    """Buffers [count, ...] of anything; or all of one value.

    Args:
      shapes: of what lies in one slot, a tree.
      in_parts: whether the compiler splits them, but would make `lax.empty` whole and cut it.
    """

    def of(a):
        shape = count, *a.shape
        if fill is not None:
            return jnp.full(shape, fill).astype(a.dtype)
        return _empty_in_parts(shape, a.dtype) if in_parts else lax.empty(shape, a.dtype)

    return jax.tree.map(of, shapes)


def _empty_in_parts(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`lax.empty`, of which each device makes its own part."""

    @custom_partitioning
    def empty(_):
        return lax.empty(shape, dtype)

    def partition(mesh, _, result):
        own = result.sharding.shard_shape(shape)
        whole = NamedSharding(mesh, P())
        return mesh, lambda _: lax.empty(own, dtype), result.sharding, (whole,)

    dims = " ".join(f"d{n}" for n in range(len(shape)))
    empty.def_partition(partition, sharding_rule=f" -> {dims}")
    return empty(jnp.float32(0))


def write(buffers: Arrays, values: Arrays, slot: ArrayLike) -> Arrays:
    """Puts values into one slot of buffers [slots, ...]; slot -1 is the last, which then nobody reads."""
    return jax.tree.map(
        lambda a, value: lax.dynamic_update_index_in_dim(
            a, value, jnp.where(jnp.asarray(slot) < 0, a.shape[0] - 1, slot), 0
        ),
        buffers,
        values,
    )


def read_at(a: jax.Array, place: tuple[Any, ...], platform: str) -> jax.Array:
    """What lies at a place, numbers in the first dims of an array."""
    n = len(place)
    part = lax.dynamic_slice(a, corner(a, *place), (*[1] * n, *a.shape[n:]))
    return _laid_out(part.reshape(a.shape[n:]), platform)


def write_at(a: jax.Array, place: tuple[Any, ...], value: jax.Array, platform: str) -> jax.Array:
    """The array with that changed."""
    part = _laid_out(value, platform).reshape(*[1] * len(place), *value.shape)
    return lax.dynamic_update_slice(a, part, corner(a, *place))


def _laid_out(value: jax.Array, platform: str) -> jax.Array:
    """A value in the layout in which it lies in its buffer.

    Left to choose, XLA gives an array of slots the layout that one of its readers likes, and copies all of it
    for another. So who saves and who reads ask for the same.
    """
    if platform == "cpu" or value.ndim < 2:
        return value
    order = tuple(range(value.ndim))
    if platform == "tpu":
        order = order_of_dims(value.shape, value.dtype.itemsize)
    return with_layout_constraint(value, Layout(order))


def order_of_dims(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The order in which an array's dims lie in a TPU's memory: as they are, unless that wastes room.

    `(32, 256, 16, 64)`, say of 16 heads, would be twice as large with 64 in rows of 128: 256 come last.
    """

    def waste(last_two):
        rows, columns = (shape[dim] for dim in last_two)
        tile = min(_COLUMN_BYTES // itemsize, 1 << (rows - 1).bit_length())
        wasted = math.prod(
            -(-size // unit) * unit / size for size, unit in ((rows, tile), (columns, _COLUMNS))
        )
        return wasted if wasted > _WASTE else 1.0

    numbers = range(len(shape))
    pairs = [pair[::-1] for pair in itertools.permutations(reversed(numbers), 2)]
    last_two = min(pairs, key=waste)
    return *(dim for dim in numbers if dim not in last_two), *last_two


def corner(a: jax.Array, *starts: ArrayLike) -> list[jax.Array]:
    """Where a part of an array begins: so in its first dims, at 0 in others; of one type, as XLA asks."""
    return [jnp.asarray(start, jnp.int32) for start in (*starts, *[0] * (a.ndim - len(starts)))]
