"""The gradients of a memory in chunks of time, or step by step; see `speed`.

python -m benchmarks.matrix_memories.jaxpar_side mlstm chunks '[2048, 8, 4, 64]'
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.sides import serve
from jaxpar.nn.gated_delta import gated_delta
from jaxpar.nn.matrix_memory import CHUNK, NOTHING
from jaxpar.nn.mlstm import MLSTMCarry, mlstm


def outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b^T."""
    return a[..., :, None] * b[..., None, :]


def read(c: jax.Array, q: jax.Array) -> jax.Array:
    """C^T q."""
    return jnp.einsum("bnkv,bnk->bnv", c, q)


def mlstm_step(state: MLSTMCarry, inputs: Any) -> tuple[MLSTMCarry, jax.Array]:
    """One step of an mLSTM."""
    (c, n, m), (q, k, v, log_i, log_f) = state, inputs
    after = lax.stop_gradient(jnp.maximum(log_f + m, log_i))
    f, i = jnp.exp(log_f + lax.stop_gradient(m) - after), jnp.exp(log_i - after)
    c = f[..., None, None] * c + i[..., None, None] * outer(k, v)
    n = f[..., None] * n + i[..., None] * k
    divisor = jnp.maximum(jnp.abs(jnp.sum(n * q, -1)), jnp.exp(-after))
    return MLSTMCarry(c, n, after), read(c, q) / divisor[..., None]


def delta_step(s: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
    """One step of a gated DeltaNet."""
    q, k, v, log_a, b = inputs
    s = jnp.exp(log_a)[..., None, None] * s
    s = s + outer(k, b[..., None] * (v - read(s, k)))
    return s, read(s, q)


def by_segments(step: Any, carry: Any, xs: Any) -> tuple[Any, jax.Array]:
    """A scan over steps, the residuals of a segment of which are made again in the backward pass."""

    @jax.checkpoint
    def segment(carry: Any, xs: Any) -> tuple[Any, jax.Array]:
        return lax.scan(step, carry, xs)

    segments = jax.tree.map(lambda a: a.reshape(-1, CHUNK, *a.shape[1:]), xs)
    carry, y = lax.scan(segment, carry, segments)
    return carry, y.reshape(-1, *y.shape[2:])


def main() -> None:
    """Serves steps of the side that the arguments name."""
    name, how, sizes = sys.argv[1:]
    T, B, N, D = json.loads(sizes)
    rng = np.random.default_rng(0)
    q, k, v, dy = (jnp.asarray(a, jnp.float32) for a in rng.normal(size=(4, T, B, N, D)))
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    a, b = (jnp.asarray(gate, jnp.float32) for gate in rng.normal(size=(2, T, B, N)))
    zeros = jnp.zeros((B, N, D, D), jnp.float32)
    if name == "mlstm":
        carry: Any = MLSTMCarry(zeros, zeros[..., 0], zeros[..., 0, 0] + NOTHING)
        gates, chunked, step = (a, jax.nn.log_sigmoid(b)), mlstm, mlstm_step
    else:
        gates, carry = (-jax.nn.softplus(a), jax.nn.sigmoid(b)), zeros
        chunked, step = gated_delta, delta_step

    def loss(xs: Any, dy: jax.Array) -> jax.Array:
        ways = {
            "steps": lambda: lax.scan(step, carry, xs),
            "segments": lambda: by_segments(step, carry, xs),
            "chunks": lambda: chunked(*xs, carry),
        }
        return jnp.sum(ways[how]()[1] * dy)

    gradients, xs = jax.jit(jax.value_and_grad(loss)), (q, k, v, *gates)
    serve(lambda: jax.block_until_ready(gradients(xs, dy))[0])


if __name__ == "__main__":
    main()
