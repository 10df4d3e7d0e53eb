"""The law for adopted models: loss and gradients on a mesh, and those of the plain Flax model."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jaxpar import (
    RULES,
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Task,
    init_state,
    value_and_grad,
)
from jaxpar.step.setup import Setup
from lib import flax_models as models
from lib.api import by_name
from lib.laws import RELATIVE_ERROR, SGD

TENSOR = {"heads": "tensor", "mlp": "tensor"}  # what dims of flax_models are called


@dataclasses.dataclass(frozen=True)
class Adopted(Task):
    """Any Flax model, and a loss.

    Attributes:
      where: its blocks.
      by_path: dims of parameters, as items.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    where: str | None = "blocks"
    loss_of: Callable = models.text_loss
    batch_of: Callable = models.text_batch
    by_path: tuple = ()
    unused: tuple[str, ...] = ()
    optimizer: OptimizerConfig = SGD

    @property
    def layers(self):
        return self.where

    @property
    def dims(self):
        return dict(self.by_path)

    @property
    def frozen(self):
        return bool(self.unused) and nnx.Any(*map(nnx.PathContains, self.unused))

    @property
    def rules(self):
        return RULES.replace(TENSOR)

    def make_model(self, rngs):
        return self.make(rngs)

    def loss(self, model, batch):
        return self.loss_of(model, batch)

    def make_batches(self, split, seed=None):
        arrays = self.batch_of(np.random.default_rng(0))
        return ArrayBatches(arrays, len(arrays["x"]), seed)


@dataclasses.dataclass(frozen=True)
class WithOptimizer(Adopted):
    """With an optimizer of optax, which a function makes."""

    own: Callable = None

    def make_optimizer(self, num_steps):
        return self.own()


MESHES = {
    "dp8": Parallel("dp8"),
    "pp4": Parallel("pp4", PipelineConfig(num_microbatches=4)),
    "dp2pp2tp2": Parallel("dp2pp2tp2", PipelineConfig(num_microbatches=4)),
    "interleaved": Parallel(
        "dp2pp2", PipelineConfig(num_microbatches=4, schedule="interleaved", num_groups=2)
    ),
    "zero-bubble": Parallel("dp2pp4", PipelineConfig(num_microbatches=4, zero_bubble=True)),
    "interleaved, zero-bubble": Parallel(
        "dp2pp2",
        PipelineConfig(num_microbatches=4, schedule="interleaved", num_groups=2, zero_bubble=True),
    ),
    "remat": Parallel("dp2pp4", PipelineConfig(num_microbatches=4, remat=True)),
    "chunks": Parallel("dp2pp2", PipelineConfig(num_microbatches=2, num_chunks=4)),
}


def plain_model(task):
    """The user's model of seed 0, without jaxpar."""
    with nnx.use_eager_sharding(False):
        return task.make(nnx.Rngs(0))


def named(state):
    return {".".join(map(str, p)): np.asarray(leaf[...]) for p, leaf in nnx.to_flat_state(state)}


def batch_of(task):
    return task.make_batches("train", 0).batch(0)


@functools.lru_cache(maxsize=4)
def plainly(task):
    """Loss and gradients of the plain model, and its weights, by name."""
    graphdef, params, others = nnx.split(plain_model(task), nnx.Param, ...)
    batch = batch_of(task)

    def mean(params):
        loss, weight = task.loss_of(nnx.merge(graphdef, params, others, copy=True), batch)[:2]
        return loss / weight

    value, grads = jax.jit(jax.value_and_grad(mean))(params)
    return float(value), named(grads), named(params)


def on_mesh(task, parallel):
    """Loss and gradients, and initial weights, by name."""
    setup = Setup.of(task, parallel)
    state = init_state(setup)
    (loss, _), grads = value_and_grad(setup)(state, batch_of(task))
    return (float(loss), *(by_name(setup, own, state.frozen) for own in (grads, state.params)))


def assert_near(found, expected):
    """By norm; what is zero but for rounding is compared with the largest."""
    assert found.keys() == expected.keys()
    largest = max(np.linalg.norm(a) for a in expected.values())
    for name, value in expected.items():
        scale = max(np.linalg.norm(value), 1e-4 * largest)
        error = np.linalg.norm(found[name] - value)
        assert error <= RELATIVE_ERROR * scale, f"{name}: error {error:.1e} of {scale:.1e}"


def assert_as_plain(task, parallel, expected=None):
    """Loss, gradients and initial weights."""
    loss, grads, weights = on_mesh(task, parallel)
    expected_loss, expected_grads, expected_weights = expected or plainly(task)
    trained = [name for name in weights if not {*name.split(".")} & {*task.unused}]
    assert abs(loss - expected_loss) <= RELATIVE_ERROR * expected_loss
    assert_near(weights, expected_weights)
    assert_near(*({name: own[name] for name in trained} for own in (grads, expected_grads)))
