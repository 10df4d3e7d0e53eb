"""Random keys, of one implementation whatever `jax_default_prng_impl` is.

Each row of a batch, and each layer, draws from a key of its own under `jax.vmap`. Threefry gives it the same
numbers as alone. `rbg` does not: what it draws would depend on the mesh.
"""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

IMPLEMENTATION = "threefry2x32"
Array = jax.Array | jax.ShapeDtypeStruct


def new_key(seed: int | jax.Array) -> jax.Array:
    """The key of a seed."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def key_data(seed: int) -> np.ndarray:
    """The numbers of the key of a seed, as `jax.random.key_data` gives them; nothing is compiled for them."""
    is_wide = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    low = seed if is_wide else int(np.int64(seed).astype(np.int32))
    return np.array([low >> 32 if is_wide else 0, low], np.int64).astype(np.uint32)


def key_of(data: jax.Array | np.ndarray) -> jax.Array:
    """The key that `jax.random.key_data` gave as numbers."""
    return jax.random.wrap_key_data(cast(jax.Array, data), impl=IMPLEMENTATION)


def is_key(leaf: Array) -> bool:
    """Whether an array, or the shape of one, is of random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def data_of(leaf: Array) -> Array:
    """The numbers of random keys, of any implementation; of a shape, theirs."""
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def key_as(like: Array, data: jax.Array) -> jax.Array:
    """Keys with these numbers, of the implementation of another, or of its shape."""
    found: list = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(data, impl=found[0])


def same_under_vmap(key: jax.Array) -> jax.Array:
    """The key itself, or, of another implementation, a key that is drawn from it."""
    is_own = str(jax.random.key_impl(key)) == IMPLEMENTATION
    return key if is_own else key_of(jax.random.bits(key, (2,), "uint32"))
