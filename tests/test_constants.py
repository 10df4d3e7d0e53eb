"""Arrays that a model keeps as they are: as good as variables that are not trained, wherever they lie."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.law.check import assert_near
from lib.laws import more, on_devices
from lib.models import FEATURES, WIDTH, Regress

import jaxpar
from jaxpar import LayerContext, Parallel, Stack, Sums, TrainConfig

KEEP = {"variable": lambda a: nnx.Variable(jnp.asarray(a)), "jax": jnp.asarray, "numpy": np.asarray}


class Scale(nnx.Module):
    """Within another module: numbers, which of them to take, and whether."""

    def __init__(self, keep, size):
        self.table = keep(np.linspace(0.5, 1.5, size, dtype=np.float32))
        self.items = nnx.List([keep(np.arange(size, dtype=np.int32)[::-1].copy())])
        self.mask = keep(np.arange(size) % 2 == 0)

    def __call__(self, x):
        order = self.items[0][...]
        return jnp.where(self.mask[...], self.table[...][order], 1.0)[None, None] * x


class Scaled(nnx.Module):
    def __init__(self, keep, number, *, rngs):
        self.linear, self.scale = nnx.Linear(WIDTH, WIDTH, rngs=rngs), Scale(keep, WIDTH)
        self.start = keep(np.full(WIDTH, number, np.float32))

    def initial_carry(self, rows):
        return jnp.broadcast_to(self.start[...], (rows, WIDTH))

    def __call__(self, carry, x, at: LayerContext):
        if not isinstance(self.start, nnx.Variable):
            assert isinstance(self.scale.table, jax.Array)  # what its author would have it be
        return 0.5 * carry + x[-1], jnp.tanh(self.linear(self.scale(x)) + carry[None])


class Kept(nnx.Module):
    def __init__(self, keep, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, rngs=rngs)
        self.before, self.after = Scale(keep, FEATURES), Scale(keep, FEATURES)
        makers = [lambda rngs, n=n: Scaled(keep, n / 4, rngs=rngs) for n in range(2)]
        self.layers = Stack(makers, rngs=rngs)

    def first(self, batch, at):
        return self.inputs(self.before(batch["x"]))

    def last(self, y, batch, at):
        error = self.after(self.outputs(y)) - batch["y"]
        return Sums(jnp.sum(error**2 * batch["weight"][..., None]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Keeping(Regress):
    keep: str = "jax"

    def make_model(self, rngs):
        return Kept(KEEP[self.keep], rngs=rngs)


def step_of(task, mesh):
    batch = task.make_batches("train", 0).batch(0)
    return api.gradients(task, Parallel(on_devices(mesh)), batch)


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize(
    ("keep", "mesh"),
    [("jax", (2, 1, 1)), ("numpy", (1, 2, 1)), more("jax", (2, 2, 2)), more("numpy", (2, 2, 2))],
)
def test_plain_arrays_are_constants(keep, mesh):
    found, expected = (
        step_of(Keeping(keep=keep), mesh),
        step_of(Keeping(keep="variable"), (1, 1, 1)),
    )
    trained = [name for name in expected.grads if "linear" in name or "puts" in name]
    assert len(trained) == 8
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    grads = [{name: own.grads[name] for name in trained} for own in (found, expected)]
    assert_near(*grads, 1e-5)


def test_a_run_keeps_them(tmp_path):
    """Its checks before the first step, and what it saves, take them as well."""
    train = TrainConfig(num_steps=2, out_dir=str(tmp_path / "run"))
    result = jaxpar.fit(Keeping(), "dp1", train, quiet=True)
    model = result.model()
    assert np.array_equal(model.layers.layer(1).start[...], np.full(WIDTH, 0.25))
