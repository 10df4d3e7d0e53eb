"""Modules with random streams in the layer form: each row has its own keys, on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.law.check import assert_near

import jaxpar
from jaxpar import (
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    init_state,
)

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
def gradients(task, parallel):
    return api.gradients(task, parallel, task.make_batches("train", 0).batch(0))


QUICK = {("dp2", False), ("zero-bubble", True), ("chunks", True)}
CASES = [
    pytest.param(mesh, time_major, marks=() if (mesh, time_major) in QUICK else pytest.mark.more)
    for mesh in MESHES
    for time_major in (True, False)
    if time_major or mesh != "chunks"
]


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize(("mesh", "time_major"), CASES)
def test_masks_are_the_same_on_every_mesh(mesh, time_major):
    task = Own(time_major=time_major)
    expected, found = gradients(task, Parallel("dp1")), gradients(task, MESHES[mesh])
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    assert_near(found.grads, expected.grads, 1e-5)


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
        init_state(Own(layer=layer), "dp1")
    assert "Fix: draw" in str(error.value)
