"""Sides of the comparison in JAX without jaxpar: what a user would write, and the step's matmuls alone.

    python -m benchmarks.single_device.jax_side A scan|flax|matmuls

scan: a `lax.scan` over time for every layer, left to autodiff. flax: `nnx.RNN(nnx.OptimizedLSTMCell)`.
matmuls: no training step, but the products that one cannot do without, at their shapes: the ceiling.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from benchmarks.sides import serve
from benchmarks.work import LEARNING_RATE, WORKS, Work


def scan_layer(params: dict[str, jax.Array], x_TBI: jax.Array) -> jax.Array:
    """One LSTM layer, [T, B, I] -> [T, B, H], from the zero state."""
    H = params["w_h"].shape[0]
    zx_TBZ = x_TBI @ params["w_x"] + params["b"]

    def step(carry, zx_BZ):
        h_BH, c_BH = carry
        i, f, g, o = jnp.split(zx_BZ + h_BH @ params["w_h"], 4, axis=-1)
        c_BH = jax.nn.sigmoid(f) * c_BH + jax.nn.sigmoid(i) * jnp.tanh(g)
        h_BH = jax.nn.sigmoid(o) * jnp.tanh(c_BH)
        return (h_BH, c_BH), h_BH

    zero_BH = jnp.zeros((x_TBI.shape[1], H))
    return lax.scan(step, (zero_BH, zero_BH), zx_TBZ)[1]


def flax_layer(params: dict[str, jax.Array], x_TBI: jax.Array) -> jax.Array:
    """The same with Flax's own layer."""
    sizes = params["w_x"].shape[0], params["w_h"].shape[0]
    abstract = nnx.eval_shape(
        lambda: nnx.RNN(nnx.OptimizedLSTMCell(*sizes, rngs=nnx.Rngs(0)), time_major=True)
    )
    rnn = nnx.merge(*nnx.split(abstract))
    rnn.cell.dense_i.kernel = nnx.Param(params["w_x"])
    rnn.cell.dense_h.kernel = nnx.Param(params["w_h"])
    rnn.cell.dense_h.bias = nnx.Param(params["b"])
    zero_BH = jnp.zeros((x_TBI.shape[1], sizes[1]))
    return rnn(x_TBI, initial_carry=(zero_BH, zero_BH))


def initial_params(work: Work) -> dict[str, Any]:
    """The weights, gates of a layer side by side."""
    weights = work.weights()
    layers = [
        {
            name: weights[f"{name}_{layer}"].reshape(*weights[f"{name}_{layer}"].shape[:-2], -1)
            for name in ("w_x", "w_h", "b")
        }
        for layer in range(work.num_layers)
    ]
    head = {name: weights[name] for name in ("table", "kernel", "bias")}
    return jax.tree.map(jnp.asarray, {**head, "layers": layers})


def make_training_step(work: Work, layer: Callable[..., jax.Array]) -> Callable[[], float]:
    """A training step with this layer."""
    optimizer = optax.sgd(LEARNING_RATE)
    inputs_BT, targets_BT = map(jnp.asarray, work.text())

    def loss_of(params):
        x_TBW = params["table"][inputs_BT.T]
        for each in params["layers"]:
            x_TBW = layer(each, x_TBW)
        logits_TBV = x_TBW @ params["kernel"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits_TBV, targets_BT.T).mean()

    def update(params, opt_state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    update = jax.jit(update, donate_argnums=(0, 1))
    params = initial_params(work)
    opt_state = optimizer.init(params)

    def step() -> float:
        nonlocal params, opt_state
        params, opt_state, loss = update(params, opt_state)
        jax.block_until_ready(params)
        return float(loss)

    return step


def make_matmuls(work: Work) -> Callable[[], float]:
    """The products of a training step on arrays of its shapes, and nothing else worth mentioning."""
    T, B, H, V = work.seq_len, work.batch_size, work.hidden_size, work.vocab_size
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    y_NH, dlogits_NV, kernel_HV = draw(T * B, H), draw(T * B, V), draw(H, V)
    z_BZ, dz_NZ, w_h_HZ = draw(B, 4 * H), draw(T * B, 4 * H), draw(H, 4 * H)
    x_NI = [draw(T * B, H if layer else work.embed_size) for layer in range(work.num_layers)]
    w_x_IZ = [draw(x.shape[1], 4 * H) for x in x_NI]

    def recurrent(start, kernel, width):
        def step(a, _):
            return (a @ kernel)[:, :width], None

        return lax.scan(step, start, None, length=T)[0]

    @jax.jit
    def products(y_NH, dlogits_NV, kernel_HV, z_BZ, dz_NZ, w_h_HZ, x_NI, w_x_IZ):
        w_h_ZH = lax.optimization_barrier(w_h_HZ.T)
        results = [y_NH @ kernel_HV, y_NH.T @ dlogits_NV, dlogits_NV @ kernel_HV.T]
        for x, w_x in zip(x_NI, w_x_IZ, strict=True):
            x, z_BZ, dz_NZ = lax.optimization_barrier((x, z_BZ, dz_NZ))  # a layer's own, not shared
            results += [x @ w_x, x.T @ dz_NZ, dz_NZ @ w_x.T, y_NH.T @ dz_NZ]
            results += [recurrent(y_NH[:B], w_h_HZ, H), _recurrent_back(z_BZ, w_h_ZH, T)]
        return results

    arguments = (y_NH, dlogits_NV, kernel_HV, z_BZ, dz_NZ, w_h_HZ, x_NI, w_x_IZ)

    def step() -> float:
        jax.block_until_ready(products(*arguments))
        return 0.0

    return step


def _recurrent_back(dz_BZ: jax.Array, w_h_ZH: jax.Array, num_steps: int) -> jax.Array:
    def step(dz_BZ, _):
        return jnp.tile(dz_BZ @ w_h_ZH, 4), None

    return lax.scan(step, dz_BZ, None, length=num_steps)[0]


def main() -> None:
    """Serves steps."""
    work, kind = WORKS[sys.argv[1]], sys.argv[2]
    if kind == "matmuls":
        serve(make_matmuls(work))
    else:
        serve(make_training_step(work, {"scan": scan_layer, "flax": flax_layer}[kind]))


if __name__ == "__main__":
    main()
