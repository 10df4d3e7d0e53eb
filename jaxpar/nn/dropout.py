"""Dropout whose mask does not depend on how the computation is laid out."""

import jax
import jax.numpy as jnp

from jaxpar.base.at import LayerContext, draw_rows
from jaxpar.base.trees import wide


def dropout(x: jax.Array, rate: float, at: LayerContext, *, number: int = 0) -> jax.Array:
    """Zeroes each element with a probability and scales the others by 1 / (1 - probability).

    The mask of an element is a function of (key, number, layer, time, row, position in the other dims) alone:
    any mesh, microbatching or chunking of time draws the same one (Srivastava et al. 2014; for recurrent
    networks, on the connections between layers only, Zaremba et al. 2014).

    Args:
      x: [T, B, ...], or [B, ...] in a model that is not `time_major`.
      rate: the probability.
      at: of `x`; without a key, in evaluation, x is returned as it is.
      number: distinguishes several dropouts of one layer.
    Raises:
      ValueError: the rows of `x` are not where `at` says.

    Example:
      at = jaxpar.LayerContext(0, 0, 0, key=jax.random.key(0))  # a layer gets it from jaxpar
      y = jaxpar.nn.dropout(jnp.ones((5, 2, 16)), 0.1, at)
    """
    if rate == 0.0 or at.key is None:
        return x
    key = at.key if number == 0 else jax.random.fold_in(at.key, 2**31 + number)

    def keep(key, shape):
        return jax.random.bernoulli(key, 1.0 - rate, shape)

    is_kept = draw_rows(key, at, keep, x.shape)
    scaled = (x.astype(wide(x.dtype)) / (1.0 - rate)).astype(x.dtype)
    return jnp.where(is_kept, scaled, jnp.zeros((), x.dtype))
