"""What has no gradient is named before a run, and what has one is not refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib.models import SGD

import jaxpar
from jaxpar import ArrayBatches, Stack, Sums, Task, TrainConfig, init_state, nn, value_and_grad

W = 4


class Adds(nnx.Module):
    """A layer that adds to the loss."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(W, W, rngs=rngs)

    def __call__(self, carry, x, at):
        return carry, jax.lax.stop_gradient(x), Sums(jnp.sum(self.linear(x) ** 2), 0)


class Starts(nnx.Module):
    """A layer whose only parameter is the state that it begins with."""

    def __init__(self, rngs):
        self.start = nnx.Param(jnp.ones(W))

    def initial_carry(self, rows):
        return jnp.broadcast_to(self.start[...], (rows, W))

    def __call__(self, carry, x, at):
        return carry, x + carry


def same(rngs):
    return nn.Stateless(lambda x: x)


LAYERS = {
    "gru": lambda rngs: nn.Stateless(nnx.Linear(W, W, rngs=rngs)),
    "adds": Adds,
    "starts": Starts,
    "cuts": lambda rngs: nn.Stateless(jax.lax.stop_gradient),
    "same": same,
}
LOSSES = {
    "all": lambda model, y: jnp.sum(model.out(y) ** 2),
    "y": lambda model, y: jnp.sum(y**2),
    "stop": lambda model, y: jnp.sum(jax.lax.stop_gradient(model.out(y))),
    "argmax": lambda model, y: jnp.sum(jnp.argmax(model.out(y), -1).astype(jnp.float32)),
    "round": lambda model, y: jnp.sum(jax.jit(jnp.round)(model.out(y))),
    "count": lambda model, y: jnp.sum(model.out(y) > 0),
    "constant": lambda model, y: 1.0,
    "linear": lambda model, y: jnp.sum(model.out.kernel[...]),
    "complex": lambda model, y: jnp.sum(jax.lax.complex(y, y)),
}


class Net(nnx.Module):
    time_major = False

    def __init__(self, task, rngs):
        self.embed, self.out = nnx.Linear(W, W, rngs=rngs), nnx.Linear(W, W, rngs=rngs)
        self.layers = Stack([LAYERS[name] for name in task.layers], rngs=rngs)
        self.loss = LOSSES[task.loss]
        if task.dtype:
            self.extra = nnx.Param(jnp.zeros(3, task.dtype))

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        return Sums(self.loss(self, y), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Tiny(Task):
    loss: str = "all"
    layers: tuple[str, ...] = ("same",)
    trained: str = ""
    dtype: str = ""
    optimizer: Any = SGD

    @property
    def frozen(self):
        return nnx.Not(nnx.PathContains(self.trained)) if self.trained else nnx.Nothing()

    def make_model(self, rngs):
        return Net(self, rngs)

    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": np.ones((8, W), np.float32)}, 4, seed)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"loss": "y"},
        {"loss": "linear"},
        {"loss": "all", "trained": "embed"},
        {"loss": "y", "trained": "module", "layers": ("same", "gru", "same")},
        {"loss": "y", "trained": "embed", "layers": ("same", "gru", "same")},
        {"loss": "y", "trained": "start", "layers": ("same", "starts")},
        {"loss": "stop", "layers": ("adds", "same")},
        {"loss": "stop", "trained": "embed", "layers": ("same", "adds")},
    ],
)
def test_a_loss_with_a_gradient_passes(fields):
    task = Tiny(**fields)
    step = value_and_grad(task, "dp1")
    (_, grads) = step(init_state(task, "dp1"), {"x": np.ones((4, W)), "weight": np.ones(4)})
    assert any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": "stop"},
        {"loss": "argmax"},
        {"loss": "round"},
        {"loss": "count"},
        {"loss": "constant"},
        {"loss": "y", "trained": "out"},
        {"loss": "y", "trained": "embed", "layers": ("same", "cuts", "same")},
        {"loss": "y", "trained": "module", "layers": ("gru", "cuts")},
        {"loss": "linear", "trained": "module", "layers": ("gru", "same")},
    ],
)
def test_a_loss_without_any_gradient_is_refused(fields, tmp_path):
    message = "loss of model Net does not depend on any trained parameter"
    with pytest.raises(ValueError, match=message) as raised:
        value_and_grad(Tiny(**fields), "dp1")
    assert len(str(raised.value).split()) <= 40
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        jaxpar.fit(Tiny(**fields), "dp1", TrainConfig(out_dir=str(folder)), quiet=True)
    assert not folder.exists()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_a_parameter_of_whole_numbers_is_refused_where_it_is_trained(dtype):
    with pytest.raises(ValueError, match=rf"parameter extra of task Tiny is {dtype}, which has no"):
        init_state(Tiny(dtype=dtype), "dp1")
    init_state(Tiny(dtype=dtype, trained="out"), "dp1")


def test_a_complex_loss_is_refused():
    with pytest.raises(ValueError, match=r"`last` of Net returns complex64 as 'loss' of its Sums"):
        init_state(Tiny("complex"), "dp1")
