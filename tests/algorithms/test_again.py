"""What differs in a program that is traced a second time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.trace.again import difference

COUNT = itertools.count(1)
TABLE = np.arange(3.0, dtype=np.float32)
KEYS = [jax.random.key(0), jax.random.key(1)]


def traced(function):
    return jax.make_jaxpr(lambda x: function(x))(jnp.ones(3))


def random():
    return np.random.normal(size=3).astype(np.float32)  # noqa: NPY002 - as users have it


# A function, and which of its outputs differ.
PROGRAMS = {
    "arithmetic": (lambda x: (jnp.tanh(x) * TABLE, jnp.where(x > 0, x, 0.0)), []),
    "draws": (lambda x: jax.random.normal(jax.random.key(0), x.shape), []),
    "a loop": (lambda x: jax.lax.scan(lambda c, a: (c + a, jnp.sin(c)), x[0], x), []),
    "functions with a gradient": (lambda x: (jax.nn.relu(x), jax.checkpoint(jnp.sin)(x)), []),
    "a key": (lambda x: jax.random.key(3), []),
    "a key from outside": (lambda x: jax.random.normal(KEYS[0], x.shape), []),
    "nan": (lambda x: x * np.float32(np.nan), []),
    "noise": (lambda x: (x * 2, jnp.tanh(x + random())), [1]),
    "a number": (lambda x: (x * 2, x * float(random()[0])), [1]),
    "a constant": (lambda x: (x, random()), [1]),
    "noise in a loop": (lambda x: jax.lax.scan(lambda c, a: (c + a, c * random()[0]), x[0], x), [0, 1]),
    "noise in a call": (lambda x: (x, jax.jit(lambda x: x + random())(x)), [1]),
    "a count of steps": (lambda x: functools.reduce(jnp.add, [x] * next(COUNT)), [0]),
    "a place": (lambda x: x[next(COUNT) % 2 :][:2], [0]),
    "another order": (lambda x: (x - TABLE, TABLE - x)[next(COUNT) % 2], [0]),
    "another key": (lambda x: jax.random.key(next(COUNT)), [0]),
    "another key from outside": (lambda x: (x, jax.random.normal(KEYS[next(COUNT) % 2], x.shape)), [1]),
    "another operation": (lambda x: (jnp.sin, jnp.cos)[next(COUNT) % 2](x), [0]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_differs_when_it_is_traced_again_is_found(name):
    function, outputs = PROGRAMS[name]
    found = difference(traced(function), traced(function))
    assert (found.outputs if found else []) == outputs
    if "noise" in name:
        assert found.source_line.startswith("test_again.py, line ")
