"""One side: the same step by Flax, with `nnx.RNN(nnx.GRUCell)`.

python -m benchmarks.layers.flax_side '{"width": 256}'
"""

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.layers.work import LEARNING_RATE, Work
from benchmarks.sides import serve


def main() -> None:
    """Serves steps."""
    work, layers = Work.from_arguments(), []
    H = work.width
    for w_x, w_h in work.gru():
        cell = nnx.GRUCell(H, H, rngs=nnx.Rngs(0))
        cell.dense_i.kernel[...] = jnp.asarray(w_x.reshape(H, 3 * H))
        cell.dense_h.kernel[...] = jnp.asarray(w_h.reshape(H, 3 * H))
        layers.append(nnx.RNN(cell, time_major=True, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(nnx.List(layers), nnx.Param, ...)
    start = jnp.zeros((work.rows, H))
    x, y = (jnp.asarray(a.swapaxes(0, 1)) for a in work.batch())

    def loss(params, x, y):
        for layer in nnx.merge(graphdef, params, rest):
            x = layer(x, initial_carry=start)
        return jnp.mean(jnp.square(x - y))

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), value

    step = jax.jit(step, donate_argnums=0)

    def run():
        nonlocal params
        params, value = step(params, x, y)
        return value

    serve(run)


if __name__ == "__main__":
    main()
