"""Dropout whose mask does not depend on how the computation is laid out."""

import jax
import jax.numpy as jnp

from jaxpar.base.at import At


def dropout(x: jax.Array, rate: float, at: At, *, number: int = 0) -> jax.Array:
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
    """
    if rate == 0.0 or at.key is None:
        return x
    _check_rows(x, at)
    key = at.key if number == 0 else jax.random.fold_in(at.key, 2**31 + number)
    key = jax.random.fold_in(key, at.layer)
    rows = at.row + jnp.arange(x.shape[1 if at.time_major else 0], dtype=jnp.int32)

    def keep(key, row, shape):
        return jax.random.bernoulli(jax.random.fold_in(key, row), 1.0 - rate, shape)

    if at.time_major:
        times = at.time + jnp.arange(x.shape[0], dtype=jnp.int32)

        def of_time(time):
            step_key = jax.random.fold_in(key, time)
            return jax.vmap(lambda row: keep(step_key, row, x.shape[2:]))(rows)

        is_kept = jax.vmap(of_time)(times)
    else:
        is_kept = jax.vmap(lambda row: keep(key, row, x.shape[1:]))(rows)
    scaled = (x.astype(jnp.float32) / (1.0 - rate)).astype(x.dtype)
    return jnp.where(is_kept, scaled, jnp.zeros((), x.dtype))


def _check_rows(x: jax.Array, at: At) -> None:
    place = 1 if at.time_major else 0
    sized = [leaf for leaf in jax.tree.leaves(at.batch) if jnp.ndim(leaf)]
    rows = {leaf.shape[place if leaf.ndim > 1 else 0] for leaf in sized}
    if len(rows) == 1 and {*x.shape[place : place + 1]} != rows:
        dims = "time, rows, ..." if at.time_major else "rows, ..."
        remedy = "; take one time step of what it returns: dropout(y, rate, at)[-1]" * at.time_major
        raise ValueError(
            f"dropout of an array of shape {list(x.shape)}: it must be [{dims}], with the {rows.pop()} rows "
            f"of the block{remedy}"
        )
