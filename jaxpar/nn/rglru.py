"""A layer of real-gated linear recurrent units, of Griffin.

    r_t = sigmoid(W_r x_t + b_r)      i_t = sigmoid(W_i x_t + b_i)      a_t = exp(-8 softplus(L) r_t)
    h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * i_t * x_t

(De et al. 2024, arXiv:2402.19427, section 2.4.) A unit sees the others through its gates alone: Griffin has
linear layers around it.

Legend of the dim suffixes: T time, B batch, H hidden, 2 the gates r i.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.at import At
from jaxpar.axes import BATCH, GATES, HIDDEN, INPUT
from jaxpar.nn.dropout import Dropout, dropout
from jaxpar.nn.linear_recurrence import gates_of, linear_recurrence
from jaxpar.nn.param import Initializer, lecun_uniform, named_param

SHARPNESS = 8.0  # the paper's c
# What is kept of a state in a step with a wide-open gate, a ** c, is drawn from these (section 2.4).
LEAST_KEPT, MOST_KEPT = 0.9, 0.999


class RGLRU(nnx.Module):
    """One RG-LRU layer.

    Attributes:
      carry_dims: of its state.
      w: [H, 2, H].
      b: [2, H].
      decay: L, [H].
    """

    carry_dims: ClassVar[tuple[str, str]] = (BATCH, HIDDEN)

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs,
        init: Initializer | None = None,
        dropout: float | Dropout = 0.0,
    ):
        """Draws the kernel, biases are 0, and `decay` as in the paper.

        Args:
          width: H, of inputs, state and outputs.
          init: of the kernels; None draws them with variance 1 / width.
          dropout: of the inputs; see `nn.dropout`.
        """
        self.width, self.dropout = width, dropout
        draw, dtype = init or lecun_uniform(width), jnp.dtype(jnp.float32)
        self.w = named_param(draw(rngs.params(), (width, 2, width), dtype), (INPUT, GATES, HIDDEN))
        self.b = named_param(jnp.zeros((2, width)), (GATES, HIDDEN))
        kept = jax.random.uniform(rngs.params(), (width,), dtype, LEAST_KEPT, MOST_KEPT)
        self.decay = named_param(jnp.log(jnp.expm1(-jnp.log(kept) / SHARPNESS)), (HIDDEN,))

    def initial_carry(self, rows: int) -> jax.Array:
        """Zeros, [rows, H]; a layer of one's own may have others, such as a parameter."""
        return jnp.zeros((rows, self.width), jnp.float32)

    @jax.named_scope("rglru")
    def __call__(self, carry: jax.Array, x_TBH: jax.Array, at: At) -> tuple[jax.Array, jax.Array]:
        """Dropout, then the layer over a window of time."""
        x_TBH = dropout(x_TBH, self.dropout, at)
        gates_TB2H = gates_of(x_TBH, self.w[...], self.b[...])
        # Of weights nothing is kept for the backward pass but themselves.
        slope_H = jax.checkpoint(lambda decay: -SHARPNESS * jax.nn.softplus(decay))(self.decay[...])
        log_a = slope_H[None, None] * jax.nn.sigmoid(gates_TB2H[:, :, 0])
        a_TBH, b_TBH = _factors(log_a, gates_TB2H[:, :, 1], x_TBH)
        initial = None if at.resets is None else self.initial_carry(x_TBH.shape[1])
        carry, h_TBH = linear_recurrence(a_TBH, b_TBH, carry, at.resets, initial)
        return carry, h_TBH.astype(x_TBH.dtype)


@jax.checkpoint  # what it is made of is kept, not what it makes on its way
def _factors(log_a: jax.Array, z_i: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the state is multiplied by, and what is added to it."""
    # At a = 1 the root has no slope: what is less than a rounding away counts as one.
    share = jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), jnp.finfo(jnp.float32).eps ** 2))
    return jnp.exp(log_a), share * jax.nn.sigmoid(z_i) * x.astype(jnp.float32)
