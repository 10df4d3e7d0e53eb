"""A state independent of its mesh: arrays by name, stacked layers in order.

    slots of (1, 2)             by layer            slots of (3,)
    0  -  |  1  2       -->     0  1  2     -->     0  1  2

The names are as `params/layers/gru/w_x`, and those of an adopted model are the user's, as
`params/blocks.0-3.up.kernel`; stacked arrays are `[layers of the kind, ...]`, without the empty
rows that a placement needs. Random keys are stored as their numbers, and arrays without elements are not
stored.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.checks import require
from jaxpar.base.keys import data_of, is_key, key_as
from jaxpar.base.types import Arrays, Shapes
from jaxpar.model.outer import ENDS
from jaxpar.model.stack import KIND
from jaxpar.partition.storage import Storage, on_device
from jaxpar.sharding import array_of, axes_of_spec, is_variable, to_spec, user_name

Tree = TypeVar("Tree")
Rows = tuple[int, ...]  # the layer in each row of a kind's stack, -1 in empty ones


def by_layer(state: object, storage: Storage) -> dict[str, jax.Array]:
    """The arrays of a state, or a part of it, as they are stored: by name, stacked layers in their order.

    They stay sharded; where layers change places, over another dim than that of the layers.

    Args:
      storage: that the state was made with.
    Raises:
      ValueError: the rows of the state are not those of the placement.
    """
    arrays = {}

    def take(name: str, leaf: Any, rows: Rows | None) -> None:
        array = _numbers(array_of(leaf))
        if not array.size:
            return  # it needs no storage
        if rows is not None:
            order = tuple(rows.index(layer) for layer in sorted(rows) if layer >= 0)
            array = jax.device_put(array, array.sharding.with_memory_kind("device"))
            array = _take_layers(array, order, _without_layers(array))
            array = array[0] if kind_of(leaf) in ENDS else array
        arrays[name] = array

    _each(state, storage, take)
    return arrays


def abstract_by_layer(target: Shapes, storage: Storage) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read for a state, or a part of it: the arrays of `by_layer`, sharded over its mesh.

    Raises:
      ValueError: two arrays have one name, or as of `by_layer`.
    """
    arrays = {}

    def take(name: str, leaf: Any, rows: Rows | None) -> None:
        array = _numbers(array_of(leaf))
        if not array.size:
            return  # it needs no storage
        if rows is not None:
            shape = (sum(layer >= 0 for layer in rows), *array.shape[1:])
            sharding = _without_layers(array)
            if kind_of(leaf) in ENDS:
                shape, sharding = shape[1:], NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
            array = jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
        require(name not in arrays, f"two arrays are called {name}.\nFix: use keys without '/'.")
        arrays[name] = array

    _each(target, storage, take)
    return arrays


def from_layers(target: Tree, storage: Storage, arrays: Mapping[str, jax.Array]) -> Tree:
    """A state, or a part of it, with these values, as `abstract_by_layer` describes them."""

    def give(name: str, leaf: Any, rows: Rows | None) -> jax.Array:
        wanted = array_of(leaf)
        value = arrays[name] if wanted.size else on_device(_numbers(wanted))
        if rows is not None and wanted.size:
            value = value[None] if kind_of(leaf) in ENDS else value
            value = _take_layers(value, places_in_order(rows), value.sharding)
        value = jax.device_put(value, wanted.sharding)
        return key_as(wanted, value) if is_key(wanted) else value

    return _each(target, storage, give)


def _numbers(leaf: Any) -> Arrays:
    """An array, or the shape of one, as it is stored."""
    return data_of(leaf) if is_key(leaf) else leaf


def kind_of(leaf: Any) -> str | None:
    """The kind of layers that are stacked in a variable; None if it is of no layer."""
    return leaf.get_metadata(KIND, None) if is_variable(leaf) else None


def _each(
    state: Tree, storage: Storage, change: Callable[[str, Any, Rows | None], jax.Array | None]
) -> Tree:
    """As `Storage.each_by_name`; with what lies in the rows of a leaf, see `_rows`."""
    rows_of = storage.rows_of

    def of(name: str, leaf: Any) -> jax.Array | None:
        name = user_name(name, leaf, "/")
        return change(name, leaf, _rows(name, leaf, rows_of))

    return storage.each_by_name(state, of)


def _rows(name: str, leaf: Any, rows_of: Mapping[str, Rows]) -> Rows | None:
    """What lies in the rows of a stacked array; None if they are not stacked, or the layers in order.

    Raises:
      ValueError: the array has another number of rows.
    """
    kind = kind_of(leaf)
    if kind is None:
        return None
    rows = rows_of[kind]
    require(
        leaf.shape[0] == len(rows),
        f"{name} has {leaf.shape[0]} rows of layers, but the placement has {len(rows)}.\n"
        f"Fix: give the task and placement that the state was made with.",
    )
    is_in_order = -1 not in rows and list(rows) == sorted(rows)
    return None if is_in_order else rows


def places_in_order(rows: Rows) -> Rows:
    """For each row the place of its layer among the layers of its kind; -1 in empty ones."""
    in_order = sorted(layer for layer in rows if layer >= 0)
    return tuple(in_order.index(layer) if layer >= 0 else -1 for layer in rows)


def _without_layers(array: Any) -> NamedSharding:
    """The array's sharding, the axes that split the layers moved to the first other dim they divide.

    Every device can then pick layers in any order, and none holds more than its share. If there is
    no such dim (a bias of odd size), the axes are dropped. It is in the devices' own memory, where
    picking is compiled.
    """
    mesh = array.sharding.mesh
    split = axes_of_spec(array.sharding.spec, array.ndim)
    moved, split[0] = split[0], ()
    for other, size in enumerate(array.shape):
        axes = split[other] + moved
        if other and size % math.prod(mesh.shape[axis] for axis in axes) == 0:
            split[other] = axes
            break
    return NamedSharding(mesh, to_spec(split))


@functools.partial(jax.jit, static_argnames=("index", "sharding"))
def _take_layers(array: jax.Array, index: Rows, sharding: NamedSharding) -> jax.Array:
    """The rows `index` of an array that `sharding` leaves whole along them; zeros where it is -1."""
    array = jax.lax.with_sharding_constraint(array, sharding)
    taken = jnp.take(array, np.array(index, np.int32), axis=0, mode="clip")
    wanted = np.expand_dims(np.array(index) >= 0, tuple(range(1, array.ndim)))
    return jax.lax.with_sharding_constraint(
        jnp.where(wanted, taken, jnp.zeros_like(taken)), sharding
    )
