"""Convolutions by data, dense layers by model: two strategies in one network, by the names of its dims.

Convolutions have few weights and many activations, so devices share the images and add up the gradients;
dense layers have many weights and few activations, so devices share the weights and add up the outputs
(Krizhevsky 2014, arXiv:1404.5997). Both are splits over `data`: rules say of which dims. Where the two meet,
an all-to-all turns some images whole into a part of every image.

    python -m jaxpar train examples/hybrid.py:Digits --simulate 8 --mesh dp8
    python -m jaxpar inspect examples/hybrid.py:Digits --simulate 8 --mesh dp8 --dense data
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import optax
from flax import nnx
from mixed import load_digits

from jaxpar import RULES, ArrayBatches, OptimizerConfig, Stack, Sums, Task, TrainConfig
from jaxpar.nn import Conv, Linear

# The dims that are split: images in convolutions ("batch") and in dense layers, features between these.
ALL = ("data", "tensor")
HYBRID = RULES.replace({"batch": ALL, "dense_batch": None, "features": ALL})
BY_DATA = RULES.replace({"batch": ALL, "dense_batch": ALL, "features": None})


class ConvNet(nnx.Module):
    """Two convolutions and two dense layers; arrays are [images, ...], so there is no time."""

    time_major = False

    def __init__(self, width, rngs):
        self.convs = nnx.List(
            Conv(*sizes, (3, 3), dims=(None,) * 4, rngs=rngs) for sizes in ((1, 32), (32, 64))
        )
        self.layers = Stack([], rngs=rngs)  # no stages here
        self.hidden = Linear(64 * 4 * 4, width, dims=("features", None), rngs=rngs)
        self.out = Linear(width, 10, dims=(None, None), rngs=rngs)

    def first(self, batch, at):
        """The convolutions, [images, features]; channels come first, so that a part of them are a few."""
        x = batch["image"][..., None]
        for conv in self.convs:
            x = nnx.relu(conv(x))
        x = at.layout(nnx.max_pool(x, (2, 2), (2, 2)), "batch", None, None, None)
        return jnp.moveaxis(x, -1, 1).reshape(len(x), -1)

    def last(self, x, batch, at):
        """The dense layers, and the loss, summed."""
        x = at.layout(x, "dense_batch", "features")  # the all-to-all
        logits = self.out(nnx.relu(at.layout(self.hidden(x), "dense_batch", None)))
        label, weight = (at.layout(batch[name], "dense_batch") for name in ("label", "weight"))
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        right = jnp.sum(weight, where=jnp.argmax(logits, axis=-1) == label)
        return Sums(jnp.sum(weight * nll), jnp.sum(weight), {"accuracy": right})


@dataclasses.dataclass(frozen=True)
class Digits(Task):
    """Which digit is it?

    Attributes:
      dense: what devices share of the dense layers: the "model", their weights, or the "data", as everywhere.
      width: of the dense layer.
      batch_size: digits in a batch.
      optimizer: how it learns.
    """

    dense: Literal["model", "data"] = "model"
    width: int = 512
    batch_size: int = 128
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3)

    unit: ClassVar[str] = "digits"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=100)

    @property
    def rules(self):
        """Which dims `data` splits."""
        return HYBRID if self.dense == "model" else BY_DATA

    def make_model(self, rngs):
        """The network, with its initial values."""
        return ConvNet(self.width, rngs)

    def make_batches(self, split, seed=None):
        """Digits with their labels."""
        return ArrayBatches(load_digits(split), self.batch_size, seed)
