"""What is read of the step of a loop: its products, and what can be computed before the loop."""

import jax.numpy as jnp
from jax import lax

from jaxpar.internal.step_program import read_step

B, W = 3, 8


def test_products_of_blocks_are_products():
    """From either side, of inputs before the loop and of the state in it."""
    heads = ((2,), (1,)), ((1,), (0,))  # [B, N, D] [N, D, D] -> [N, B, D]

    def step(params, h, x):
        early = lax.dot_general(x.reshape(B, 2, -1), params["x"], heads)
        late = lax.dot_general(params["h"], h.reshape(B, 2, -1), (heads[0][::-1], heads[1][::-1]))
        h = jnp.tanh(early.swapaxes(0, 1) + late.transpose(2, 0, 1)).reshape(h.shape)
        return h, h

    params = {name: jnp.ones((2, W // 2, W // 2)) for name in "xh"}
    program, _, _ = read_step(step, params, jnp.ones((B, W)), jnp.ones((B, W)))
    assert [p.num_blocks for p in program.products.values()] == [1, 1]
    assert [e.primitive.name for e in program.early].count("dot_general") == 1
