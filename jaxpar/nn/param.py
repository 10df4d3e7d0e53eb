"""Parameters with named dims, and their initial values."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.sharding import check_dims

Initializer = Callable[[jax.Array, Sequence[int], jnp.dtype], jax.Array]


def named(init: Initializer, dims: tuple[str | None, ...]) -> Initializer:
    """An initializer for a Flax layer whose parameter carries the names of its dims, as of `named_param`.

    Example:
      init = jaxpar.named(nnx.initializers.lecun_normal(), ("input", "hidden"))
      up = nnx.Linear(64, 256, kernel_init=init, rngs=rngs)
    """
    return nnx.with_partitioning(init, dims, eager_sharding=False)


def named_param(value: jax.Array, dims: tuple[str | None, ...]) -> nnx.Param:
    """An `nnx.Param` that carries the logical name of each of its dims, as Flax's `out_sharding` metadata.

    The names mean nothing to a device until rules map them to mesh axes (`sharding.Rules`).

    Raises:
      ValueError: the number of names is not that of the array's dims.

    Example:
      kernel = jaxpar.nn.named_param(jnp.zeros((16, 64)), ("input", "hidden"))
    """
    check_dims(dims, value.shape)
    return nnx.Param(value, out_sharding=dims, eager_sharding=False)


def kernel_param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    dims: tuple[str | None, ...],
    init: Initializer | None = None,
) -> nnx.Param:
    """A float32 kernel, [inputs, ...]; None draws it with variance 1 / inputs."""
    draw = init or lecun_uniform(shape[0])
    return named_param(draw(rngs.params(), shape, jnp.dtype(jnp.float32)), dims)


def uniform(scale: float) -> Initializer:
    """A uniform initializer, from [-scale, scale)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -scale, scale)


def lecun_uniform(fan_in: int) -> Initializer:
    """A uniform initializer with variance 1 / fan_in (LeCun et al. 1998, "Efficient BackProp", 4.6)."""
    return uniform((3 / fan_in) ** 0.5)
