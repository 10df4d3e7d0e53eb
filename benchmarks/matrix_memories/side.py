"""One side: the gradients of a matrix memory over a window, in chunks of steps or step by step.

python -m benchmarks.matrix_memories.side mlstm 64

Legend: T time, B batch, N heads, D units of a head.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from benchmarks.sides import serve
from jaxpar.nn import MLSTM, GatedDeltaNet, MLSTMCarry
from jaxpar.nn.gated_delta import gated_delta
from jaxpar.nn.mlstm import mlstm

T, B, N, D = 2048, 8, 4, 64
SEGMENT = 64  # steps, of which one scan over steps keeps the state before the first alone


def mlstm_step(carry: MLSTMCarry, q: Any, k: Any, v: Any, log_i: Any, log_f: Any):
    """One step of all rows and heads."""
    c, n, m = carry
    after = lax.stop_gradient(jnp.maximum(log_f + m, log_i))
    f, i = jnp.exp(log_f + lax.stop_gradient(m) - after), jnp.exp(log_i - after)
    c = f[..., None, None] * c + (i[..., None] * k)[..., None] * v[..., None, :]
    n = f[..., None] * n + i[..., None] * k
    divisor = jnp.maximum(jnp.abs(jnp.sum(n * q, -1)), jnp.exp(-after))
    return MLSTMCarry(c, n, after), jnp.einsum("bnkv,bnk->bnv", c, q) / divisor[..., None]


def delta_step(s: Any, q: Any, k: Any, v: Any, log_a: Any, b: Any):
    """One step of all rows and heads."""
    s = jnp.exp(log_a)[..., None, None] * s
    u = b[..., None] * (v - jnp.einsum("bnkv,bnk->bnv", s, k))
    s = s + k[..., None] * u[..., None, :]
    return s, jnp.einsum("bnkv,bnk->bnv", s, q)


def by_steps(step: Callable[..., Any], segment: int) -> Callable[..., Any]:
    """A scan over steps, within one over segments whose residuals are made again."""

    def run(*arguments: Any) -> Any:
        *xs, carry = arguments

        @jax.checkpoint
        def part(carry: Any, xs: Any) -> Any:
            return lax.scan(lambda carry, x: step(carry, *x), carry, xs)

        parts = [a.reshape(-1, segment, *a.shape[1:]) for a in xs]
        carry, y = lax.scan(part, carry, tuple(parts))
        return carry, y.reshape(-1, *y.shape[2:])

    return run


def main() -> None:
    """Serves gradients of the mean square of the outputs; its loss is that."""
    name, way = sys.argv[1:]
    chunked, step, layer = {
        "mlstm": (mlstm, mlstm_step, MLSTM),
        "gated_delta": (gated_delta, delta_step, GatedDeltaNet),
    }[name]
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, T, B, N, D)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a, b = rng.normal(size=(2, T, B, N)).astype(np.float32)
    # Of an mLSTM the logarithms of its gates; of a gated DeltaNet log a and b.
    gates = (
        (a, nnx.log_sigmoid(b + 4)) if name == "mlstm" else (-nnx.softplus(a - 4), nnx.sigmoid(b))
    )
    xs = [jnp.asarray(x) for x in (q, k, v, *gates)]
    carry = layer(N * D, num_heads=N, rngs=nnx.Rngs(0)).initial_carry(B)

    def run(*xs: Any) -> Any:
        if way == "steps":
            return by_steps(step, T)(*xs, carry)
        if way == "segments":
            return by_steps(step, SEGMENT)(*xs, carry)
        return chunked(*xs, carry, chunk=int(way))

    def loss(*xs: Any) -> jax.Array:
        return jnp.mean(jnp.square(run(*xs)[1]))

    gradients = jax.jit(jax.value_and_grad(loss, range(len(xs))))

    def both() -> jax.Array:
        value, grads = gradients(*xs)
        return jax.block_until_ready((value, grads))[0]

    serve(both)


if __name__ == "__main__":
    main()
