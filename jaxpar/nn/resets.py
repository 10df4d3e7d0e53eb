"""Where sequences begin and end within a window."""

import jax
import jax.numpy as jnp

from jaxpar.base.at import LayerContext
from jaxpar.base.types import Carry, Module


def begin_anew(is_new_B: jax.Array | None, initial: Carry, carry: Carry) -> Carry:
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


def mask_padding(x_TBH: jax.Array, at: LayerContext) -> jax.Array:
    """`x` [time, rows, ...] with zeros in place of padding, where the batch says what is padding.

    For layers in which a step reads later ones: 0 times a number that is not finite would not be 0.

    Example:
      at = jaxpar.LayerContext(0, 0, 0, batch={"lengths": jnp.array([5, 3])})
      x = jaxpar.nn.mask_padding(jnp.ones((5, 2, 16)), at)  # zeros after step 3 of row 1
    """
    if at.lengths is None:
        return x_TBH
    is_real_TB = jnp.arange(len(x_TBH))[:, None] < at.lengths[None]
    return jnp.where(jnp.expand_dims(is_real_TB, range(2, x_TBH.ndim)), x_TBH, 0)


def initial_of(layer: Module, x_TBH: jax.Array, at: LayerContext) -> Carry:
    """The state that sequences within the block begin with; None if none begins there."""
    return None if at.resets is None else layer.initial_carry(x_TBH.shape[1])
