"""Token embedding."""

import jax
from flax import nnx

from jaxpar.base.axes import EMBED, TOKENS
from jaxpar.nn.param import Initializer, kernel_param, uniform

UNIT_VARIANCE = uniform(3**0.5)


class Embedding(nnx.Module):
    """A table with one vector per token, [tokens, embed]; its dims may be split by the rules.

    Example:
      embed = jaxpar.nn.Embedding(1000, 16, rngs=rngs)
      print(embed(jnp.array([[1, 2, 3]])).shape)  # (1, 3, 16)
    """

    def __init__(
        self,
        num_tokens: int,
        embed_size: int,
        *,
        dims: tuple[str | None, str | None] = (TOKENS, EMBED),
        init: Initializer = UNIT_VARIANCE,
        rngs: nnx.Rngs,
    ):
        self.table = kernel_param(rngs, (num_tokens, embed_size), dims, init)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Vectors of the tokens: int [...] -> float32 [..., embed]."""
        return self.table[...][tokens]
