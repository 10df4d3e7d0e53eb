"""A small regression, adopted and as a task whose fields each change another kind of thing."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import OptimizerConfig, TrainConfig

X = 3 * np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs, width=8, slope=1.0):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.head, self.slope = nnx.Linear(8, width, rngs=rngs), slope

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.slope * self.head(x)


def loss(model, batch):
    return jaxpar.mean(jnp.square(model(batch["x"])).sum(-1), batch["weight"])


def make_task(optimizer):
    return jaxpar.adopt(Net, loss, "blocks", batches={"x": X}, batch_size=16, optimizer=optimizer)


@dataclasses.dataclass(frozen=True)
class Regression(jaxpar.Task):
    rate: float = 0.001
    slope: float = 1.0  # changes what the model computes, but no shape
    width: int = 8  # changes a shape
    shift: float = 0.0  # changes the data
    num_valid: int = 64  # changes how many batches of `valid` there are, but not the first one
    batch_size: int = 16  # changes the batches
    rows: int = dataclasses.field(default=16, metadata={"free": True})  # likewise, and may do so
    optimizer: OptimizerConfig = OptimizerConfig()  # which is not used
    layers = "blocks"

    def make_model(self, rngs):
        return Net(rngs, self.width, self.slope)

    def loss(self, model, batch):
        return loss(model, batch)

    def make_batches(self, split, seed=None):
        x = X[: self.num_valid] if split == "valid" else X
        return jaxpar.ArrayBatches({"x": x + self.shift}, min(self.batch_size, self.rows), seed)

    def make_optimizer(self, num_steps):
        return optax.sgd(self.rate)


def fit(task, folder, num_steps, mesh="dp1", **options):
    """A quiet run that reports each step."""
    train = {"log_every": 1, "checkpoint_every": 0} | options.pop("train", {})
    config = TrainConfig(num_steps=num_steps, out_dir=str(folder), **train)
    return jaxpar.fit(task, mesh, config, quiet=True, **options)
