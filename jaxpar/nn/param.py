"""Parameters with named dims, and the initial values they are born with."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.axes import DIMS

Initializer = Callable[[jax.Array, Sequence[int], jnp.dtype], jax.Array]


def named_param(value: jax.Array, dims: tuple[str | None, ...]) -> nnx.Param:
    """An `nnx.Param` that carries the logical name of each of its dims, as Flax's `out_sharding` metadata.

    The names mean nothing to a device until rules map them to mesh axes (`sharding.Rules`).

    Raises:
      ValueError: as many names as dims are not given, or a name is not one of `axes.DIMS`.
    """
    if len(dims) != value.ndim:
        raise ValueError(f"dims={dims} names {len(dims)} dims, the array has shape {value.shape}")
    unknown = [dim for dim in dims if dim is not None and dim not in DIMS]
    if unknown:
        raise ValueError(f"unknown dim name {unknown[0]!r} in {dims}; names are {DIMS}")
    return nnx.Param(value, out_sharding=dims, eager_sharding=False)


def uniform(scale: float) -> Initializer:
    """Values drawn evenly from [-scale, scale)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -scale, scale)


def lecun_uniform(fan_in: int) -> Initializer:
    """Values drawn evenly with variance 1 / fan_in (LeCun et al. 1998, "Efficient BackProp", 4.6)."""
    return uniform((3 / fan_in) ** 0.5)


def stacked(
    init: Initializer, key: jax.Array, layer_ids: Sequence[int], shape: Sequence[int]
) -> jax.Array:
    """Initial values of several layers of one kind, each drawn from its own key.

    A layer's values depend on its number alone, not on where it is placed or how many there are.

    Args:
      layer_ids: the layer in each slot; -1 marks an empty slot, which is filled with zeros.
    Returns:
      [len(layer_ids), *shape], float32.
    """
    ids = jnp.asarray(layer_ids, jnp.int32)

    def one(layer):
        value = init(jax.random.fold_in(key, layer), shape, jnp.dtype(jnp.float32))
        return jnp.where(layer >= 0, value, jnp.zeros_like(value))

    return jax.vmap(one)(ids)
