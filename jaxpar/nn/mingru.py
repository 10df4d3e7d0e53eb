"""A minGRU layer, a linear recurrence.

    z_t = sigmoid(W_z x_t + b_z)      n_t = W_n x_t + b_n      h_t = (1 - z_t) * h_{t-1} + z_t * n_t

(Feng et al. 2024, "Were RNNs All We Needed?", arXiv:2410.01201, section 3.1.) Gates see only the inputs.

Legend of the dim suffixes: T time, B batch, I input, H hidden, 2 z and n.
"""

import jax

from jaxpar.nn.linear_recurrence import LinearRecurrence


class MinGRU(LinearRecurrence):
    """One minGRU layer.

    Example:
      layer = jaxpar.nn.MinGRU(16, rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    def factors(self, gates_TB2H: jax.Array, x_TBH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of z and n."""
        return _factors(gates_TB2H)


@jax.checkpoint  # what it is made of is kept, not what it makes on its way
def _factors(gates_TB2H: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the state is multiplied by, and what is added to it."""
    z, n = jax.nn.sigmoid(gates_TB2H[:, :, 0]), gates_TB2H[:, :, 1]
    return 1 - z, z * n
