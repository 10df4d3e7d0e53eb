"""Layers with a matrix for each head: chunks of time against their formulas, step by step, in float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_equivalence import slow

from jaxpar.nn import MLSTM, GatedDeltaNet, MLSTMCarry
from jaxpar.nn.gated_delta import gated_delta
from jaxpar.nn.mlstm import mlstm

# Sums in another order: float64 has 53 bits; float32 24, bfloat16 8, and some tens of roundings add up.
ROUNDING = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 2e-2}


# ---- the formulas ----


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def read(c, q):
    return jnp.einsum("bnkv,bnk->bnv", c, q)


def mlstm_step(state, q, k, v, log_i, log_f):
    c, n, m = state
    after = jax.lax.stop_gradient(jnp.maximum(log_f + m, log_i))
    f, i = jnp.exp(log_f + jax.lax.stop_gradient(m) - after), jnp.exp(log_i - after)
    c = f[..., None, None] * c + i[..., None, None] * outer(k, v)
    n = f[..., None] * n + i[..., None] * k
    divisor = jnp.maximum(jnp.abs(jnp.sum(n * q, -1)), jnp.exp(-after))
    return MLSTMCarry(c, n, after), read(c, q) / divisor[..., None]


def delta_step(s, q, k, v, log_a, b):
    s = jnp.exp(log_a)[..., None, None] * s
    s = s + outer(k, b[..., None] * (v - read(s, k)))
    return s, read(s, q)


def step_by_step(step):
    """A function of the arguments of `mlstm` or `gated_delta`."""

    def run(*arguments):
        *xs, carry, resets, initial = arguments

        def one(state, inputs):
            *x, is_new = inputs

            def choose(old, new):
                return jnp.where(jnp.expand_dims(is_new, range(1, old.ndim)), new, old)

            return step(jax.tree.map(choose, state, initial), *x)

        return jax.lax.scan(one, carry, (*xs, resets))

    return run


class Memory(NamedTuple):
    """One of the two: in chunks, step by step, its layer, and what it is given.

    Attributes:
      gates: of two arrays of any numbers, as the layers make them.
    """

    chunked: object
    step: object
    layer: object
    gates: object


def mlstm_gates(a, b):
    return a, nnx.log_sigmoid(b)


def delta_gates(a, b):
    return -3 * nnx.softplus(a), 2 * nnx.sigmoid(b)


MEMORIES = {
    "mlstm": Memory(mlstm, mlstm_step, MLSTM, mlstm_gates),
    "gated_delta": Memory(
        gated_delta,
        delta_step,
        functools.partial(GatedDeltaNet, negative_eigenvalues=True),
        delta_gates,
    ),
}


def normal_states(rng, name, *shape):
    """States as steps before may have left them, of heads of D units: [*shape, D, D]."""
    *rows, size = shape
    c, n, m = (rng.normal(size=(*rows, *own)) for own in ((size, size), (size,), ()))
    return MLSTMCarry(c, n, m) if name == "mlstm" else c


def draw(name, steps, rows=2, heads=3, size=4, *, gates=None, reset=0.2, seed=0):
    """The arguments of a memory; keys have the length 1."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(3, steps, rows, heads, size))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    drawn = rng.normal(size=(2, steps, rows, heads)) if gates is None else gates(rng)
    carry, initial = (normal_states(rng, name, rows, heads, size) for _ in range(2))
    gates = MEMORIES[name].gates(*map(jnp.asarray, drawn))
    return q, k, v, *gates, carry, rng.random((steps, rows)) < reset, initial


def assert_close(actual, expected, bound):
    """Each array as a whole."""
    pairs = zip(*map(jax.tree.leaves_with_path, (actual, expected)), strict=True)
    for (path, ours), (_, theirs) in pairs:
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        assert ours.shape == theirs.shape
        error, scale = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
        assert error <= bound * scale, f"{path}: error {error:.1e} of {scale:.1e}"


def with_gradients(function, arguments, cotangents=None):
    """What it gives of arguments (*xs, carry, resets, initial), and their cotangents but for the resets'."""
    *before, resets, initial = arguments

    @jax.jit
    def both(before, initial, resets, cotangents):
        out, vjp = jax.vjp(lambda own, new: function(*own, resets, new), before, initial)
        if cotangents is None:
            rng = np.random.default_rng(1)
            cotangents = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), out)
        return out, vjp(cotangents)

    return both(before, initial, resets, cotangents)


# ---- chunks of time ----


@pytest.mark.law
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize(
    ("steps", "chunk", "reset"),
    [
        (13, 5, 0.2), slow(1, 64, 0.0), slow(12, 4, 0.0), slow(12, 4, 1.0), slow(9, 1, 0.2), slow(7, 64, 0.5),
        slow(70, 64, 0.02),
    ],
)  # fmt: skip
def test_chunks_and_their_gradients_equal_steps(name, steps, chunk, reset):
    memory = MEMORIES[name]
    with jax.enable_x64(True):
        arguments = draw(name, steps, reset=reset)
        expected = with_gradients(step_by_step(memory.step), arguments)
        actual = with_gradients(functools.partial(memory.chunked, chunk=chunk), arguments)
        assert_close(actual, expected, ROUNDING["float64"])
        if reset == 0.0:  # the same, where the batch says nothing of resets
            *before, _, initial = arguments
            run = functools.partial(memory.chunked, chunk=chunk)
            assert_close(run(*before), run(*before, arguments[-2], initial), ROUNDING["float64"])
