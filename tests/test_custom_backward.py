"""Functions with a backward pass of their own receive the gradient of the mean loss on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_equivalence import RELATIVE_ERROR, assert_close, by_layer, make_settings, slow

import jaxpar
from jaxpar import At, OptimizerConfig, SeriesBatches, Stack, Sums
from jaxpar.nn import GRU
from jaxpar.setup import Setup
from jaxpar.state import init_state
from jaxpar.step import value_and_grad

WIDTH = 8
C = 1e-3  # of the size of the gradients


def with_backward(change):
    """The identity, whose gradient is changed."""

    def backward(_, g):
        return (change(g),)

    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), backward)
    return function


CHANGES = {
    "clip": lambda g: jnp.clip(g, -C, C),
    "sign": lambda g: C * jnp.sign(g),
    "limit": lambda g: g / jnp.maximum(1, abs(g) / C),
    "round": lambda g: C * jnp.round(4 * g / C) / 4,
}
FUNCTIONS = {name: with_backward(change) for name, change in CHANGES.items()}


def changed(x):
    """Each feature goes through one of the functions."""
    number = jnp.arange(x.shape[-1]) % len(FUNCTIONS)
    masks = [(number == n).astype(x.dtype)[None, None] for n in range(len(FUNCTIONS))]
    return sum(f(x * mask) for f, mask in zip(FUNCTIONS.values(), masks, strict=True))


class Layer(nnx.Module):
    carry_dims = ("batch", "hidden")

    def __init__(self, change, rngs):
        self.gru, self.change = GRU(WIDTH, rngs=rngs), change

    def initial_carry(self, rows):
        return self.gru.initial_carry(rows)

    def __call__(self, carry, x, at: At):
        carry, y = self.gru(carry, self.change(x), at)
        penalty = jnp.sum(y**2, -1) * at.batch["weight"]
        return carry, y, Sums(jnp.sum(penalty) / 100, 0)


class Net(nnx.Module):
    """Its loss does not depend on the batch's weights, of which there may be none."""

    def __init__(self, task, rngs):
        make = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.embed, self.out, self.task = make(1, WIDTH), make(WIDTH, 1), task
        self.layers = Stack([lambda rngs: Layer(task.in_layers, rngs)] * 4, rngs=rngs)

    def first(self, batch, at):
        return self.task.in_first(self.embed(batch["x"]))

    def last(self, y, batch, at):
        error = (self.out(self.task.in_last(y)) - batch["y"])[..., 0]
        return Sums(jnp.sum(error**2), self.task.weigh(y, batch))


def same(x):
    return x


def known(y, batch):
    return jnp.sum(batch["weight"])


@dataclasses.dataclass(frozen=True)
class Own(jaxpar.Task):
    in_first: object = same
    in_layers: object = same
    in_last: object = same
    weigh: object = known
    optimizer: OptimizerConfig = OptimizerConfig()

    def make_model(self, rngs):
        return Net(self, rngs)

    def make_batches(self, split, seed=None):
        wave = np.sin(np.arange(601) / 5)[:, None].astype(np.float32)
        arrays = {"x": wave[:-1], "y": wave[1:]}
        return SeriesBatches(arrays, batch_size=8, seq_len=8, seed=seed)


EVERYWHERE = Own(changed, changed, changed)


def gradients(settings, batch):
    state, step = init_state(*settings), value_and_grad(*settings)
    (loss, (_, sums)), grads = step(state, batch)
    return float(loss), float(sums.weight), by_layer(grads, settings)


def batches(task):
    """With weights that differ from row to row and from step to step; and with none."""
    batch = task.example_batch()
    weight = np.random.default_rng(0).integers(0, 5, batch["weight"].shape).astype(np.float32)
    return [{**batch, "weight": weight}, {**batch, "weight": 0 * weight}]


@pytest.fixture(scope="module")
def on_one_device():
    settings = make_settings(task=EVERYWHERE)
    return [gradients(settings, batch) for batch in batches(EVERYWHERE)]


@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "options"),
    [
        ((1, 1, 2), (2, 2), {"zero_bubble": True, "head": "sharded"}),
        ((2, 1, 2), (2, 2), {"head": "last"}),
        slow((1, 1, 2), (2, 2), {"zero_bubble": True, "schedule": "interleaved", "num_groups": 2}),
        slow((1, 1, 1), (2, 1), {}),
        slow((2, 1, 1), (1, 1), {}),
        slow((2, 1, 1), (2, 1), {"layout": {"shares": (1, 3)}}),
        slow((1, 2, 2), (2, 2), {}),
        slow((1, 1, 2), (2, 2), {"remat": True}),
        slow((1, 1, 2), (1, 4), {"remat": True, "remat_keeps": "carries"}),
        slow((1, 1, 4), (2, 2), {"schedule": "v", "head": "last"}),
    ],
)
def test_the_gradient_is_that_of_the_mean_loss_on_every_mesh(on_one_device, mesh, units, options):
    settings = make_settings(mesh, units, EVERYWHERE, **options)
    for batch, expected in zip(batches(EVERYWHERE), on_one_device, strict=True):
        found = gradients(settings, batch)
        np.testing.assert_allclose(found[:2], expected[:2], rtol=RELATIVE_ERROR)
        assert_close(found[2], expected[2])
