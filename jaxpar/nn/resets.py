"""Where sequences begin within a window."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.base.at import At


def begin_anew(is_new_B: jax.Array | None, initial: Any, carry: Any) -> Any:
    """The state before a step: the initial one in rows where a sequence begins.

    Args:
      is_new_B: where one begins, bool; None means nowhere.
      initial: as the carry, arrays [B, ...]; None is zeros.
    """
    if is_new_B is None:
        return carry
    initial = jax.tree.map(jnp.zeros_like, carry) if initial is None else initial

    def choose(new, old):
        return jnp.where(jnp.expand_dims(is_new_B, range(1, old.ndim)), new.astype(old.dtype), old)

    return jax.tree.map(choose, initial, carry)


def initial_of(layer: Any, x_TBH: jax.Array, at: At) -> Any:
    """The state that sequences within the block begin with; None if none begins there."""
    if at.resets is None or at.initial is not None:
        return at.initial
    return layer.initial_carry(x_TBH.shape[1])
