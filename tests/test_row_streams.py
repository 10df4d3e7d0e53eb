"""Modules with random streams in the layer form: each row has its own keys, on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar
from jaxpar import (
    ArrayBatches,
    LayerContext,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
)
from jaxpar.model.row_streams import STREAMS, as_run
from jaxpar.nn import Stateless
from jaxpar.partition.by_layer import by_layer
from jaxpar.step.setup import Setup

ROWS, TIME, WIDTH, DEPTH = 8, 4, 6, 4
DRAWN = np.random.default_rng(0)
ARRAYS = {"x": DRAWN.standard_normal((2 * ROWS, TIME, WIDTH)).astype(np.float32)}
MESHES = {
    "dp2": Parallel("dp2"),
    "pp2": Parallel("pp2", PipelineConfig(num_microbatches=4)),
    "zero-bubble": Parallel("dp2pp2", PipelineConfig(num_microbatches=2, zero_bubble=True)),
    "remat": Parallel("pp4", PipelineConfig(num_microbatches=2, remat=True)),
    "chunks": Parallel("pp2", PipelineConfig(num_microbatches=2, num_chunks=2)),
}


class Layer(nnx.Module):
    """A perceptron with two dropouts."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.first = nnx.Dropout(0.3, rngs=rngs)
        self.second = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, carry, x, at):
        return carry, x + self.second(nnx.tanh(self.linear(self.first(x))))


class Model(jaxpar.Model):
    """Dropout before, in and after the layers."""

    def __init__(self, rngs, time_major, layer):
        self.time_major = time_major
        self.embed, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.layers = Stack([lambda rngs: KINDS[layer](rngs)] * DEPTH, rngs=rngs)

    def first(self, batch, at):
        return self.drop(self.embed(batch["x"]))

    def last(self, y, batch, at):
        y = self.out(self.drop(y))
        return Sums(jnp.sum(y**2 * batch["weight"][..., None]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Own(Task):
    time_major: bool = True
    layer: str = "layer"
    optimizer: OptimizerConfig = OptimizerConfig()

    def make_model(self, rngs):
        return Model(rngs, self.time_major, self.layer)

    def make_batches(self, split, seed=None):
        weight = np.ones((2 * ROWS, TIME), np.float32)
        return ArrayBatches({**ARRAYS, "weight": weight}, ROWS, seed)


@functools.cache
def loss_and_gradients(task, parallel):
    setup = Setup.of(task, parallel)
    state, batch = setup.init_state(), task.make_batches("train", 0).batch(0)
    (loss, _), grads = setup.value_and_grad()(state, batch)
    arrays = by_layer(grads, setup.storage)
    return float(loss), {name: np.asarray(a) for name, a in arrays.items()}


QUICK = {("dp2", False), ("zero-bubble", True), ("chunks", True)}
CASES = [
    pytest.param(mesh, time_major, marks=() if (mesh, time_major) in QUICK else pytest.mark.more)
    for mesh in MESHES
    for time_major in (True, False)
    if time_major or mesh != "chunks"
]


@pytest.mark.parametrize(("mesh", "time_major"), CASES)
def test_masks_are_the_same_on_every_mesh(mesh, time_major):
    task = Own(time_major=time_major)
    loss, grads = loss_and_gradients(task, Parallel("dp1"))
    own_loss, own_grads = loss_and_gradients(task, MESHES[mesh])
    np.testing.assert_allclose(own_loss, loss, rtol=1e-6)
    for name, grad in grads.items():
        scale = np.max(np.abs(grad))
        np.testing.assert_allclose(own_grads[name], grad, atol=1e-5 * scale, err_msg=name)


def test_a_row_at_a_time_step_is_as_plain_flax_draws_it():
    layer = as_run(Layer(nnx.Rngs(0)), ["__call__"])
    x = jnp.asarray(ARRAYS["x"][:ROWS]).swapaxes(0, 1)
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
    x = jnp.asarray(ARRAYS["x"])
    _, y = layer((), x, LayerContext(*map(jnp.int32, (0, 0, 0)), batch={"x": x}))
    plain = Layer(nnx.Rngs(0))
    plain.eval()
    np.testing.assert_array_equal(y, plain((), x, None)[1])


@pytest.mark.parametrize("draws", [True, False])
def test_streams_that_nothing_depends_on_are_read(draws):
    """By `nnx.RNN`, for a state of zeros."""
    rnn = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0)), time_major=True, rngs=nnx.Rngs(1))
    x = jnp.asarray(ARRAYS["x"][:ROWS]).swapaxes(0, 1)
    with jax.numpy_rank_promotion("allow"):
        wanted, layer = rnn(x), as_run(Stateless(rnn), ["__call__"])
        key = jax.random.key(7) if draws else None
        at = LayerContext(*map(jnp.int32, (0, 0, 0)), key=key, batch={"x": x})
        np.testing.assert_allclose(layer((), x, at)[1], wanted, rtol=1e-6)


class Noisy(Layer):
    """Draws in a loop."""

    def __call__(self, carry, x, at):
        def body(n, x):
            return x + jax.random.normal(jax.random.fold_in(key, n), x.shape)

        key = self.first.rngs()
        return carry, jax.lax.fori_loop(0, 3, body, x)


class Shared(Layer):
    """All rows have one mask."""

    def __call__(self, carry, x, at):
        drop = nnx.Dropout(0.5, broadcast_dims=(0, 1), deterministic=at.key is None)
        return carry, drop(x, rngs=self.first.rngs)


class Always(Layer):
    """Draws in evaluation as well."""

    def __call__(self, carry, x, at):
        return carry, x + jax.random.normal(self.first.rngs(), x.shape)


KINDS = {"layer": Layer, "noisy": Noisy, "shared": Shared, "always": Always}
REFUSED = {
    "noisy": "draws random numbers in a loop",
    "shared": "in a shape without time steps and rows first",
    "always": "draws random numbers in evaluation",
}


@pytest.mark.parametrize("layer", REFUSED)
def test_refused(layer):
    with pytest.raises(ValueError, match=REFUSED[layer]) as error:
        _ = Setup.of(Own(layer=layer), "dp1").facts.traces
    assert "Fix: draw" in str(error.value)
