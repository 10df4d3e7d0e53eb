"""A layer of real-gated linear recurrent units, of Griffin.

    r_t = sigmoid(W_r x_t + b_r)      i_t = sigmoid(W_i x_t + b_i)      a_t = exp(-8 softplus(L) r_t)
    h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * i_t * x_t

(De et al. 2024, arXiv:2402.19427, section 2.4.) A unit sees the others only through its gates: Griffin has
linear layers around it.

Legend of the dim suffixes: T time, B batch, H hidden, 2 the gates r i.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.axes import HIDDEN
from jaxpar.base.checks import require
from jaxpar.nn.linear_recurrence import LinearRecurrence
from jaxpar.nn.param import named_param

SHARPNESS = 8.0  # the paper's c
# What is kept of a state in a step with a wide-open gate, a ** c, is drawn from these (section 2.4).
LEAST_KEPT, MOST_KEPT = 0.9, 0.999


class RGLRU(LinearRecurrence):
    """One RG-LRU layer.

    Attributes:
      decay: L, [H].

    Example:
      layer = jaxpar.nn.RGLRU(16, rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs, **options: Any):
        """As every `Recurrence`, and `decay` as in the paper.

        Raises:
          ValueError: inputs are of another width; they are what is added to the state.
        """
        super().__init__(width, rngs=rngs, **options)
        require(
            self.inputs == width,
            f"inputs={self.inputs} of an RG-LRU of width={width}: it adds inputs to its state.\n"
            f"Fix: use inputs={width}, or a linear layer before it.",
        )
        dtype = jnp.dtype(jnp.float32)
        kept = jax.random.uniform(rngs.params(), (width,), dtype, LEAST_KEPT, MOST_KEPT)
        self.decay = named_param(jnp.log(jnp.expm1(-jnp.log(kept) / SHARPNESS)), (HIDDEN,))

    def factors(self, gates_TB2H: jax.Array, x_TBH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of r and i, and x itself."""
        # Of weights nothing is kept for the backward pass but themselves.
        slope_H = jax.checkpoint(lambda decay: -SHARPNESS * jax.nn.softplus(decay))(self.decay[...])
        log_a = slope_H[None, None] * jax.nn.sigmoid(gates_TB2H[:, :, 0])
        return _factors(log_a, gates_TB2H[:, :, 1], x_TBH)


@jax.checkpoint  # what it is made of is kept, not what it makes on its way
def _factors(log_a: jax.Array, z_i: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the state is multiplied by, and what is added to it."""
    # At a = 1 the root has no slope: what is less than a rounding away counts as one.
    share = jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), jnp.finfo(jnp.float32).eps ** 2))
    return jnp.exp(log_a), share * jax.nn.sigmoid(z_i) * x.astype(jnp.float32)
