"""What NumPy makes of a traced program is what JAX makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.trace.evaluate import evaluate


def several(x, y):
    whole = jnp.sum(x, axis=0) + jnp.max(y) - x.mean()
    return (
        whole,
        x.T[1:, ::2],
        x[..., None] ** 3,
        jnp.where(x > y, x, -y),
        (x @ y.T).astype(jnp.int32),
    )


def branches(x, y):
    return lax.cond(x[0, 0] > 0, lambda: (x, 1), lambda: (y, 2)), jax.nn.relu(x)


def loops(x, y):
    def turn(total, row):
        return total + row, total * 2

    both = [lax.scan(turn, y[0], x, reverse=reverse) for reverse in (False, True)]
    return (
        both,
        lax.fori_loop(0, 3, lambda n, a: a + n, x),
        lax.while_loop(lambda a: a.sum() < 99, lambda a: a * 2, x),
    )


def numbers(x, y):
    logical = jnp.isfinite(x).all() & ~jnp.any(y > 3) | (x != y)
    pieces = (
        jnp.sqrt(jnp.abs(x)),
        lax.rsqrt(jnp.square(y)),
        jnp.exp(x),
        jnp.log(jnp.abs(y)),
        jnp.sign(x),
    )
    return logical, pieces, jnp.power(jnp.abs(x), y), lax.bitcast_convert_type(x, jnp.uint32) >> 9


@pytest.mark.parametrize("function", [several, branches, loops, numbers])
def test_a_program_gives_what_jax_gives(function):
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    x[0, 0] = 1.0
    program = jax.make_jaxpr(function)(x, y)
    found, expected = evaluate(program, [x, y]), jax.tree.leaves(jax.jit(function)(x, y))
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_prints_are_left_out_and_random_bits_are_zeros(capfd):
    def function(key, x):
        jax.debug.print("x is {}", x)
        first, second = jax.random.split(key)
        return jax.random.bits(first, x.shape), jnp.where(True, second, key)

    key = jax.random.key(1)
    bits, after = evaluate(
        jax.make_jaxpr(function)(key, jnp.ones(3)), [key, np.ones(3, np.float32)]
    )
    assert not bits.any()
    assert jnp.all(after == jax.random.split(key)[1])
    assert not capfd.readouterr().out
