"""What layers have in common whose state is h, one vector per row."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.axes import BATCH, HIDDEN


class HiddenState(nnx.Module):
    """A layer whose state is h.

    Attributes:
      carry_dims: of its state.
      width: H, of inputs, state and outputs.
    """

    carry_dims: ClassVar[tuple[str, str]] = (BATCH, HIDDEN)
    width: int

    def initial_carry(self, rows: int) -> jax.Array:
        """Zeros, [rows, H]; a layer of your own may return something else, such as a parameter."""
        return jnp.zeros((rows, self.width), jnp.float32)
