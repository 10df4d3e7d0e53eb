"""A minGRU layer, a linear recurrence.

    z_t = sigmoid(W_z x_t + b_z)      n_t = W_n x_t + b_n      h_t = (1 - z_t) * h_{t-1} + z_t * n_t

(Feng et al. 2024, "Were RNNs All We Needed?", arXiv:2410.01201, section 3.1.) Gates see the inputs alone.

Legend of the dim suffixes: T time, B batch, I input, H hidden, 2 z and n.
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


class MinGRU(nnx.Module):
    """One minGRU layer.

    Attributes:
      carry_dims: of its state.
      w: [H, 2, H].
      b: [2, H].
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
        """Draws the kernels; biases are 0.

        Args:
          width: H, of inputs, state and outputs.
          init: of the kernels; None draws them with variance 1 / width.
          dropout: of the inputs; see `nn.dropout`.
        """
        self.width, self.dropout = width, dropout
        draw, dtype = init or lecun_uniform(width), jnp.dtype(jnp.float32)
        self.w = named_param(draw(rngs.params(), (width, 2, width), dtype), (INPUT, GATES, HIDDEN))
        self.b = named_param(jnp.zeros((2, width)), (GATES, HIDDEN))

    def initial_carry(self, rows: int) -> jax.Array:
        """Zeros, [rows, H]; a layer of one's own may have others, such as a parameter."""
        return jnp.zeros((rows, self.width), jnp.float32)

    @jax.named_scope("mingru")
    def __call__(self, carry: jax.Array, x_TBH: jax.Array, at: At) -> tuple[jax.Array, jax.Array]:
        """Dropout, then the layer over a window of time."""
        x_TBH = dropout(x_TBH, self.dropout, at)
        gates_TB2H = gates_of(x_TBH, self.w[...], self.b[...])
        a_TBH, b_TBH = _factors(gates_TB2H)
        initial = None if at.resets is None else self.initial_carry(x_TBH.shape[1])
        carry, h_TBH = linear_recurrence(a_TBH, b_TBH, carry, at.resets, initial)
        return carry, h_TBH.astype(x_TBH.dtype)


@jax.checkpoint  # what it is made of is kept, not what it makes on its way
def _factors(gates_TB2H: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the state is multiplied by, and what is added to it."""
    z, n = jax.nn.sigmoid(gates_TB2H[:, :, 0]), gates_TB2H[:, :, 1]
    return 1 - z, z * n
