"""A state without its mesh: arrays by name, stacked layers in their order. As it is stored, and compared.

    slots of (1, 2)             by layer            slots of (3,)
    0  -  |  1  2       -->     0  1  2     -->     0  1  2

The names are as `params/lstm/w_x`; stacked arrays are `[num_layers, ...]`, without the empty slots that a
placement needs.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.axes import LAYERS
from jaxpar.config import RunConfig
from jaxpar.sharding import is_variable, named_leaves
from jaxpar.state import TrainState


def by_layer(state: TrainState, config: RunConfig) -> dict[str, jax.Array]:
    """The arrays of a state as they are stored: by name, stacked layers in the order of the layers.

    They stay sharded; where layers change their places, over another dim than that of the layers.

    Args:
      config: the one that the state was made with.
    Raises:
      ValueError: the state has another number of slots than the config's placement.
    """
    layer_ids = config.layer_ids
    order = tuple(layer_ids.index(layer) for layer in sorted(layer_ids) if layer >= 0)
    arrays = {}
    for name, leaf in named_leaves(state, "/"):
        array, dim = _array(leaf), _layers_dim(leaf)
        if dim is not None and array.shape[dim] != len(layer_ids):
            raise ValueError(
                f"{name} has {array.shape[dim]} slots for layers, the placement layer_ids={layer_ids} "
                f"needs {len(layer_ids)}; give the config that the state was made with"
            )
        if dim is not None and _is_reordered(config):
            array = jax.device_put(array, array.sharding.with_memory_kind("device"))
            array = _take_layers(array, dim, order, _without_layers(array, dim))
        arrays[name] = array
    return arrays


def abstract_by_layer(target: TrainState, config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read for an abstract state: the arrays of `by_layer`, sharded over its mesh."""
    return {name: _stored_form(leaf, config) for name, leaf in named_leaves(target, "/")}


def from_layers(
    target: TrainState, config: RunConfig, arrays: Mapping[str, jax.Array]
) -> TrainState:
    """The state of an abstract one with these values, as `abstract_by_layer` describes them."""
    leaves = []
    for name, leaf in named_leaves(target, "/"):
        value, dim = arrays[name], _layers_dim(leaf)
        if dim is not None and _is_reordered(config):
            value = _take_layers(value, dim, config.layer_ids, value.sharding)
            value = jax.device_put(value, _array(leaf).sharding)
        leaves.append(leaf.replace(value) if is_variable(leaf) else value)
    return jax.tree.unflatten(jax.tree.structure(target, is_leaf=is_variable), leaves)


def with_parameters(
    state: TrainState, config: RunConfig, arrays: Mapping[str, np.ndarray]
) -> TrainState:
    """The state with other values of its parameters.

    Args:
      config: the one that the state was made with.
      arrays: on the host, named (without "params/") and shaped as `by_layer` gives them.
    """
    layer_ids, leaves = np.array(config.layer_ids), []
    for name, leaf in named_leaves(state.params, "/"):
        value, dim = arrays[name], _layers_dim(leaf)
        if dim is not None:
            empty = np.zeros_like(np.take(value, [0], dim))
            value = np.take(np.concatenate([value, empty], dim), layer_ids, dim)  # -1 is the last
        assert value.shape == leaf.shape, (name, value.shape, leaf.shape)
        leaves.append(leaf.replace(jax.device_put(value, _array(leaf).sharding)))
    structure = jax.tree.structure(state.params, is_leaf=is_variable)
    return dataclasses.replace(state, params=jax.tree.unflatten(structure, leaves))


def _stored_form(leaf: Any, config: RunConfig) -> jax.ShapeDtypeStruct:
    """The array to read for a leaf of the abstract state, sharded over this mesh."""
    array, dim = _array(leaf), _layers_dim(leaf)
    if dim is None or not _is_reordered(config):
        return array
    num_layers = max(config.layer_ids) + 1
    shape = (*array.shape[:dim], num_layers, *array.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=_without_layers(array, dim))


def _is_reordered(config: RunConfig) -> bool:
    """Whether the slots are anything but the layers in their order."""
    return config.layer_ids != tuple(range(len(config.layer_ids)))


def _without_layers(array: Any, dim: int) -> NamedSharding:
    """The array's sharding, the axes that split `dim` moved to the first other dim they divide.

    Every device can then pick layers in any order, and none holds more than its share. If there is
    no such dim (a bias of odd size), the axes are dropped. It is in the devices' own memory, where
    picking is compiled.
    """
    mesh = array.sharding.mesh
    split = [
        (axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in array.sharding.spec
    ]
    split += [()] * (array.ndim - len(split))
    moved, split[dim] = split[dim], ()
    for other, size in enumerate(array.shape):
        axes = split[other] + moved
        if other != dim and size % math.prod(mesh.shape[axis] for axis in axes) == 0:
            split[other] = axes
            break
    return NamedSharding(mesh, P(*(axes[0] if len(axes) == 1 else axes or None for axes in split)))


@functools.partial(jax.jit, static_argnames=("dim", "index", "sharding"))
def _take_layers(
    array: jax.Array, dim: int, index: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """The slices `index` of a dim that `sharding` leaves whole; zeros where the index is -1."""
    array = jax.lax.with_sharding_constraint(array, sharding)
    taken = jnp.take(array, np.array(index, np.int32), axis=dim, mode="clip")
    others = tuple(other for other in range(array.ndim) if other != dim)
    wanted = np.expand_dims(np.array(index) >= 0, others)
    return jax.lax.with_sharding_constraint(
        jnp.where(wanted, taken, jnp.zeros_like(taken)), sharding
    )


def _array(leaf: Any) -> Any:
    return leaf.get_value() if is_variable(leaf) else leaf


def _layers_dim(leaf: Any) -> int | None:
    dims = leaf.get_metadata("out_sharding", None) if is_variable(leaf) else None
    return dims.index(LAYERS) if dims and LAYERS in dims else None
