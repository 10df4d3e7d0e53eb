"""A state without its mesh: arrays by name, stacked layers in order, as it is stored and compared.

    slots of (1, 2)             by layer            slots of (3,)
    0  -  |  1  2       -->     0  1  2     -->     0  1  2

The names are as `params/layers/gru/w_x`; stacked arrays are `[layers of the kind, ...]`, without the empty
rows that a placement needs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.base.axes import LAYERS
from jaxpar.layout import Layout
from jaxpar.sharding import array_of, axes_of_spec, dims_of, is_variable, named_leaves, to_spec
from jaxpar.state import TrainState

Tree = TypeVar("Tree")
Rows = tuple[int, ...]  # the layer in each row of a kind's stack, -1 in empty ones


def by_layer(state: Any, layout: Layout) -> dict[str, jax.Array]:
    """The arrays of a state, or a part of it, as they are stored: by name, stacked layers in their order.

    They stay sharded; where layers change places, over another dim than that of the layers.

    Args:
      layout: that the state was made with.
    Raises:
      ValueError: the rows of the state are not those of the placement.
    """
    arrays = {}
    for name, leaf, rows in _leaves(state, layout):
        array = array_of(leaf)
        if rows is not None:
            order = tuple(rows.index(layer) for layer in sorted(rows) if layer >= 0)
            array = jax.device_put(array, array.sharding.with_memory_kind("device"))
            array = _take_layers(array, order, _without_layers(array))
        arrays[name] = array
    return arrays


def abstract_by_layer(target: Any, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read for a state, or a part of it: the arrays of `by_layer`, sharded over its mesh."""
    arrays = {}
    for name, leaf, rows in _leaves(target, layout):
        array = array_of(leaf)
        if rows is not None:
            shape = (sum(layer >= 0 for layer in rows), *array.shape[1:])
            sharding = _without_layers(array)
            array = jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
        arrays[name] = array
    return arrays


def from_layers(target: Tree, layout: Layout, arrays: Mapping[str, jax.Array]) -> Tree:
    """A state, or a part of it, with these values, as `abstract_by_layer` describes them."""
    leaves = []
    for name, leaf, rows in _leaves(target, layout):
        value = arrays[name]
        if rows is not None:
            value = _take_layers(value, _places_in_order(rows), value.sharding)
            value = jax.device_put(value, array_of(leaf).sharding)
        leaves.append(leaf.replace(value) if is_variable(leaf) else value)
    return jax.tree.unflatten(jax.tree.structure(target, is_leaf=is_variable), leaves)


def with_parameters(
    state: TrainState, layout: Layout, arrays: Mapping[str, np.ndarray]
) -> TrainState:
    """The state with other values of its parameters.

    Args:
      layout: that the state was made with.
      arrays: on the host, named (without "params/") and shaped as `by_layer` gives them.
    """
    placed = {}
    for name, wanted in abstract_by_layer(state.params, layout).items():
        assert arrays[name].shape == wanted.shape, (name, arrays[name].shape, wanted.shape)
        placed[name] = jax.device_put(arrays[name], wanted.sharding)
    return dataclasses.replace(state, params=from_layers(state.params, layout, placed))


def kind_of(leaf: Any) -> str | None:
    """The kind of layers that are stacked in a variable; None if it is of no layer."""
    return leaf.get_metadata("kind", None) if is_variable(leaf) else None


def _leaves(state: Any, layout: Layout) -> Iterator[tuple[str, Any, Rows | None]]:
    """Name and leaf, and what lies in its rows; see `_rows`."""
    rows_of = dict(zip(layout.facts.kinds, layout.slots.rows, strict=True))
    for name, leaf in named_leaves(state, "/"):
        yield name, leaf, _rows(name, leaf, rows_of)


def _rows(name: str, leaf: Any, rows_of: Mapping[str, Rows]) -> Rows | None:
    """What lies in the rows of a stacked array; None if they are not stacked, or the layers in order.

    Raises:
      ValueError: the array has not as many rows, or not the dims of its parameter.
    """
    kind = kind_of(leaf)
    if kind is None:
        return None
    rows, is_stacked = rows_of[kind], LAYERS in dims_of(leaf)
    if is_stacked and leaf.shape[0] != len(rows):
        raise ValueError(
            f"{name} has {leaf.shape[0]} rows of layers, the placement with layers {rows} in them needs "
            f"{len(rows)}; give the task and the placement that the state was made with"
        )
    if -1 not in rows and list(rows) == sorted(rows):
        return None
    if not is_stacked:
        raise ValueError(
            f"{name} has the shape {leaf.shape}: optimizer state with other dims than its parameter cannot "
            f"be stored by layer, as placement and schedule ask for with layers {rows}; place as many layers "
            f"on every stage, in one group, or use another optimizer"
        )
    return rows


def _places_in_order(rows: Rows) -> Rows:
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
