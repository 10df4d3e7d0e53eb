"""Regularization of language models (Merity et al. 2017, arXiv:1708.02182).

All masks are functions of the seed, the step and what they drop, whatever the mesh and the schedule; there
are none in evaluation.
"""

import jax
import jax.numpy as jnp

from jaxpar.at import At

WORDS, KERNELS = 2**30, 2**30 + 1  # tell the keys of masks from those of layers


def scale_of_words(rate: float, num_words: int, at: At) -> jax.Array | None:
    """The factor of each word's embedding, float32 [num_words]; None if all stay as they are."""
    if rate == 0.0 or at.key is None:
        return None
    is_kept = jax.random.bernoulli(jax.random.fold_in(at.key, WORDS), 1.0 - rate, (num_words,))
    return jnp.where(is_kept, 1.0 / (1.0 - rate), 0.0)


def drop_kernels(
    kernel: jax.Array, layer_of_row: tuple[int, ...], rate: float, key: jax.Array
) -> jax.Array:
    """Stacked kernels [rows, ...] with some weights dropped; a row's mask is that of its layer."""
    key = jax.random.fold_in(key, KERNELS)

    def drop(kernel, layer):
        is_kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 1.0 - rate, kernel.shape)
        return jnp.where(is_kept, kernel / (1.0 - rate), 0.0)

    return jax.vmap(drop)(kernel, jnp.asarray(layer_of_row, jnp.int32))


def square_of(y_TBH: jax.Array) -> jax.Array:
    """The mean square over H, float32 [T, B]."""
    return jnp.mean(jnp.square(y_TBH.astype(jnp.float32)), axis=-1)
