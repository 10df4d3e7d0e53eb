"""Loops with sums over devices keep their order: devices would wait for each other forever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from lib.exchanges import pairs_without_order

from jaxpar import MeshConfig
from jaxpar.trace.loops import loops_in_order

TENSOR = "tensor"


def of_known_length(step, x):
    return lax.scan(lambda h, _: (step(h), None), x, length=3)[0]


def of_unknown_length(step, x):
    return lax.while_loop(lambda h: jnp.all(h < 9), step, x)


def of_a_branch(step, x):
    return lax.cond(jnp.all(x > 0), lambda x: of_known_length(step, x), lambda x: x, x)


def text_of(run, x):
    return run.lower(x).compile().as_text()


@pytest.mark.law
@pytest.mark.parametrize("loop", [of_known_length, of_unknown_length, of_a_branch])
def test_loops_of_every_kind_are_written_out_in_order(loop):
    """Two of them, each with a sum over devices."""

    def step(h):
        return lax.pcast(lax.psum(h, TENSOR), TENSOR, to="varying")

    def two(x):
        return loop(step, x) - loop(step, 2 * x)

    mesh = MeshConfig(tensor=2, devices=(0, 1)).build()
    x = jnp.arange(1.0, 5.0)
    plain, ordered = (
        jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(TENSOR), out_specs=P(TENSOR)))
        for run in (two, lambda x: loops_in_order(two, x))
    )
    assert len(pairs_without_order(text_of(plain, x))) == 1
    assert pairs_without_order(text_of(ordered, x)) == []
    np.testing.assert_array_equal(ordered(x), plain(x))
