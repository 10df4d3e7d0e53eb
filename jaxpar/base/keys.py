"""Random keys, of one implementation whatever `jax_default_prng_impl` is.

Each row of a batch, and each layer, draws from a key of its own under `jax.vmap`. Threefry gives it the same
numbers as alone. `rbg` does not: what it draws would depend on the mesh.
"""

import jax

IMPLEMENTATION = "threefry2x32"


def new_key(seed: int | jax.Array) -> jax.Array:
    """The key of a seed."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def key_of(data: jax.Array) -> jax.Array:
    """The key that `jax.random.key_data` gave as numbers."""
    return jax.random.wrap_key_data(data, impl=IMPLEMENTATION)


def same_under_vmap(key: jax.Array) -> jax.Array:
    """The key itself, or, of another implementation, a key that is drawn from it."""
    is_own = str(jax.random.key_impl(key)) == IMPLEMENTATION
    return key if is_own else key_of(jax.random.bits(key, (2,), "uint32"))
