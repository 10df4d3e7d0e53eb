"""Dropout whose mask does not depend on how the computation is laid out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Position(NamedTuple):
    """Where a block [T, B, ...] of activations lies in the whole computation. int32 scalars."""

    layer: jax.Array | int
    time: jax.Array | int  # of its first time step, within the window
    row: jax.Array | int  # of its first row, within the global batch


def dropout(x_TBH: jax.Array, rate: float, key: jax.Array | None, position: Position) -> jax.Array:
    """Zeroes each element with probability `rate` and scales the others by 1 / (1 - rate).

    The mask of an element is a function of (key, layer, time, row, unit) alone: any mesh, microbatching
    or chunking of time draws the same one (Srivastava et al. 2014; for recurrent networks, on the
    connections between layers only, Zaremba et al. 2014).

    Args:
      key: the key of this training step; None means evaluation, and x is returned as it is.
      position: of `x_TBH[0, 0]`.
    """
    if rate == 0.0 or key is None:
        return x_TBH
    num_times, num_rows, width = x_TBH.shape
    key = jax.random.fold_in(key, position.layer)

    def keep(time, row):
        element_key = jax.random.fold_in(jax.random.fold_in(key, time), row)
        return jax.random.bernoulli(element_key, 1.0 - rate, (width,))

    times = position.time + jnp.arange(num_times, dtype=jnp.int32)
    rows = position.row + jnp.arange(num_rows, dtype=jnp.int32)
    keep_TBH = jax.vmap(jax.vmap(keep, (None, 0)), (0, None))(times, rows)
    scaled = (x_TBH.astype(jnp.float32) / (1.0 - rate)).astype(x_TBH.dtype)
    return jnp.where(keep_TBH, scaled, jnp.zeros((), x_TBH.dtype))
