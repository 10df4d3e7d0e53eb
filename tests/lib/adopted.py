"""Any Flax model as a task, and what the plain model gives for its batch."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jaxpar import RULES, ArrayBatches, OptimizerConfig, Parallel, PipelineConfig, Task
from lib import api
from lib import flax_models as models
from lib.law import plain
from lib.law.check import ERRORS, assert_near

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
    optimizer: OptimizerConfig = OptimizerConfig("sgd", 0.1, warmup_steps=0)

    @property
    def layers(self):
        return self.where

    @property
    def dims(self):
        return dict(self.by_path)

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


def batch_of(task):
    return task.make_batches("train", 0).batch(0)


def named(state):
    """Arrays by the names of the user's model."""
    return {plain.name_of(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}


@functools.lru_cache(maxsize=4)
def plainly(task):
    """Loss, gradients and initial weights of the plain model, by name."""
    with nnx.use_eager_sharding(False):
        graphdef, params, others = nnx.split(task.make_model(nnx.Rngs(0)), nnx.Param, ...)
    batch = batch_of(task)

    def mean(params):
        loss, weight, _ = task.loss(nnx.merge(graphdef, params, others, copy=True), batch)
        return loss / weight

    loss, grads = jax.jit(jax.value_and_grad(mean))(params)
    return float(loss), named(grads), named(params)


def assert_as_plain(task, parallel, expected=None):
    """Loss, gradients and initial weights; `expected` are those of `plainly`."""
    found, error = api.gradients(task, parallel, batch_of(task)), ERRORS["float32"]
    loss, grads, weights = expected or plainly(task)
    assert_near({"loss": found.loss}, {"loss": loss}, error)
    assert_near(found.weights, weights, error)
    assert_near({name: found.grads[name] for name in grads}, grads, error)
