"""Token embedding."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.axes import EMBED, TOKENS
from jaxpar.nn.param import named_param, uniform


class Embedding(nnx.Module):
    """A table of one vector a token, [tokens, embed], drawn evenly from +-0.1."""

    def __init__(
        self,
        num_tokens: int,
        embed_size: int,
        *,
        dims: tuple[str | None, str | None] = (TOKENS, EMBED),
        rngs: nnx.Rngs,
    ):
        table = uniform(0.1)(rngs.params(), (num_tokens, embed_size), jnp.dtype(jnp.float32))
        self.table = named_param(table, dims)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Vectors of the tokens: int [...] -> float32 [..., embed]."""
        return self.table[...][tokens]
