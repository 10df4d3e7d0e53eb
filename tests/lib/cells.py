"""Recurrent cells: those of Flax, and some that compute in other ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxpar import nn

B, W = 3, 8  # no weight has a dim of B


def of_flax(make):
    def cell(rngs):
        return make(W, W, rngs=rngs)

    return cell


class Own(nnx.Module):
    """A cell of one's own; its carry begins with a parameter."""

    in_features = W

    def __init__(self, rngs, **shapes):
        for name, shape in shapes.items():
            value = jax.random.normal(rngs.params(), shape) / W**0.5
            setattr(self, name, nnx.Param(value))
        self.start = nnx.Param(jax.random.normal(rngs.params(), (W,)))

    def initialize_carry(self, input_shape, rngs):
        return jnp.broadcast_to(self.start[...], input_shape)


class Transposed(Own):
    """Weights as PyTorch has them, an input projection of two layers, factors and a mask of constants."""

    def __init__(self, rngs):
        super().__init__(rngs, up=(W, 16), down=(W, 16), w_h=(W, W), scale=(W,), peep=(W,))

    def __call__(self, h, x):
        x = nnx.gelu(x @ self.up[...]) @ self.down[...].T
        odd = jnp.arange(W) % 2 == 1
        mixed = jnp.where(odd[None], h @ self.w_h[...].T, self.peep[...][None] * h)
        h = jnp.tanh(x + mixed) * jnp.exp(self.scale[...])[None]
        return h, h


class Joined(Own):
    """One product of inputs and state; a norm; a product from the left."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(2 * W, W), left=(5, W), right=(5, W))
        self.norm = nnx.LayerNorm(W, rngs=rngs)

    def __call__(self, h, x):
        h = self.norm(jnp.concatenate([x, h], -1) @ self.w[...])
        rest = jnp.einsum("kw,bw->kb", self.left[...], h)
        return jnp.tanh(h), jnp.tanh(h) + jnp.sin(rest).T @ self.right[...]


class Heads(Own):
    """Blocks of a recurrent matrix."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(2, W // 2, W // 2))

    def __call__(self, h, x):
        split = jnp.einsum("bhi,hij->bhj", h.reshape(-1, 2, W // 2), self.w[...])
        h = jnp.tanh(x + split.reshape(h.shape))
        return h, x


SCALES = np.linspace(0.5, 1.5, B * W, dtype=np.float32).reshape(B, W)
scaled = jax.jit(lambda a: a * SCALES)


class Called(Own):
    """A compiled function that knows an array, called twice."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(W, W))

    def __call__(self, h, x):
        h = jnp.tanh(scaled(x) + scaled(h) @ self.w[...])
        return h, h


class Stays(Own):
    """What is inside of a loop, and a function with a backward pass of its own, stay where they are."""

    def __init__(self, rngs):
        super().__init__(rngs, w=(W, W))
        self.linear = nn.Linear(W, W, dims=(None, None), rngs=rngs)

    def __call__(self, h, x):
        w = self.w[...]
        h = lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w + x), h + x @ w)
        return self.linear(h), h


CELLS = {
    "GRUCell": of_flax(nnx.GRUCell),
    "LSTMCell": of_flax(nnx.LSTMCell),
    "OptimizedLSTMCell": of_flax(nnx.OptimizedLSTMCell),
    "SimpleCell": of_flax(nnx.SimpleCell),
    "transposed": Transposed,
    "joined": Joined,
    "heads": Heads,
    "called": Called,
    "stays": Stays,
}
# Those that go the same ways as others.
ROWS = [
    pytest.param(name, marks=pytest.mark.more) if name in ("LSTMCell", "SimpleCell") else name
    for name in CELLS
]


def layer_of(name):
    with nnx.use_eager_sharding(False), jax.numpy_rank_promotion("allow"):
        return nn.Recurrent(CELLS[name](nnx.Rngs(0)))
