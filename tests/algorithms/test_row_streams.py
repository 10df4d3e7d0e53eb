"""Random streams of a module: each row has its own keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar import LayerContext
from jaxpar.model.row_streams import STREAMS, as_run
from jaxpar.nn import Stateless

ROWS, TIME, WIDTH = 8, 4, 6
X = np.random.default_rng(0).standard_normal((ROWS, TIME, WIDTH)).astype(np.float32)


class Layer(nnx.Module):
    """A perceptron with two dropouts."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.first = nnx.Dropout(0.3, rngs=rngs)
        self.second = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, carry, x, at):
        return carry, x + self.second(nnx.tanh(self.linear(self.first(x))))


def test_a_row_at_a_time_step_is_as_plain_flax_draws_it():
    layer = as_run(Layer(nnx.Rngs(0)), ["__call__"])
    x = jnp.asarray(X).swapaxes(0, 1)
    at = LayerContext(*map(jnp.int32, (2, 3, 5)), key=jax.random.key(7), batch={"x": x})
    _, y = layer((), x, at)
    plain = Layer(nnx.Rngs(0))
    for time in range(TIME):
        for row in range(ROWS):
            key = functools.reduce(jax.random.fold_in, (2, 3 + time, 5 + row), at.key)
            keys = [jax.random.split(jax.random.fold_in(key, STREAMS + n))[1] for n in range(2)]
            one = x[time : time + 1, row : row + 1]
            hidden = nnx.tanh(plain.linear(plain.first(one, rngs=keys[0])))
            want = one + plain.second(hidden, rngs=keys[1])
            np.testing.assert_allclose(y[time, row], want[0, 0], rtol=1e-6, atol=1e-6)


def test_nothing_is_drawn_in_evaluation():
    layer = as_run(Layer(nnx.Rngs(0)), ["__call__"])
    x = jnp.asarray(X)
    _, y = layer((), x, LayerContext(*map(jnp.int32, (0, 0, 0)), batch={"x": x}))
    plain = Layer(nnx.Rngs(0))
    plain.eval()
    np.testing.assert_array_equal(y, plain((), x, None)[1])


@pytest.mark.parametrize("draws", [True, False])
def test_streams_that_nothing_depends_on_are_read(draws):
    """By `nnx.RNN`, for a state of zeros."""
    rnn = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0)), time_major=True, rngs=nnx.Rngs(1))
    x = jnp.asarray(X).swapaxes(0, 1)
    with jax.numpy_rank_promotion("allow"):
        wanted, layer = rnn(x), as_run(Stateless(rnn), ["__call__"])
        key = jax.random.key(7) if draws else None
        at = LayerContext(*map(jnp.int32, (0, 0, 0)), key=key, batch={"x": x})
        np.testing.assert_allclose(layer((), x, at)[1], wanted, rtol=1e-6)
