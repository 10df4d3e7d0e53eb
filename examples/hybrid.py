"""Convolutions by data, dense layers by model: two strategies in one network, by the names of its dims.

Convolutions have few weights and many activations, so devices share the images and add up the gradients;
dense layers have many weights and few activations, so devices share the weights and add up the outputs
(Krizhevsky 2014, arXiv:1404.5997). Both are splits over `data`: rules say of which dims. Where the two meet,
an all-to-all turns some images whole into a part of every image.

    python -m jaxpar train examples/hybrid.py:Digits --simulate 8 --mesh dp8
    python -m jaxpar inspect examples/hybrid.py:Digits --simulate 8 --mesh dp8 --strategy data
"""

import dataclasses
import itertools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from mixed import load_digits

from jaxpar import RULES, ArrayBatches, OptimizerConfig, Stack, Sums, Task, TrainConfig
from jaxpar.nn import Conv, Linear

# What all devices split: images in convolutions ("batch") and in dense layers, outputs of convolutions
# ("channels"), and widths of dense layers, which are features and units in turn. A split of features makes a
# dense layer row-parallel, with an all-to-all before it; one of units makes it column-parallel, with an
# all-gather.
SPLITS = {
    "hybrid": ("batch", "features"),
    "hybrid-gather": ("batch", "units"),
    "data": ("batch", "dense_batch"),
    "model": ("channels", "features"),
}
DIMS = ("batch", "dense_batch", "channels", "features", "units")
STRATEGIES = {
    name: RULES.replace({dim: ("data", "tensor") if dim in split else None for dim in DIMS})
    for name, split in SPLITS.items()
}


class ConvNet(nnx.Module):
    """Convolutions and dense layers; arrays are [images, ...], so there is no time."""

    time_major = False

    def __init__(self, channels, widths, rngs):
        self.convs = nnx.List(
            Conv(*sizes, (3, 3), dims=(None, None, None, "channels"), rngs=rngs)
            for sizes in itertools.pairwise((1, *channels))
        )
        self.layers = Stack([], rngs=rngs)  # no stages here
        widths = (channels[-1] * 4 * 4, *widths, 10)
        names = itertools.islice(itertools.cycle(("features", "units")), len(widths) - 1)
        self.dims = (*names, None)
        self.dense = nnx.List(
            Linear(*sizes, dims=dims, rngs=rngs)
            for sizes, dims in zip(
                itertools.pairwise(widths), itertools.pairwise(self.dims), strict=True
            )
        )

    def first(self, batch, at):
        """The convolutions, [images, features]; channels come first, so that a part of them are a few."""
        x = batch["image"][..., None]
        for conv in self.convs:
            x = at.layout(nnx.relu(conv(x)), "batch", None, None, "channels")
        x = at.layout(nnx.max_pool(x, (2, 2), (2, 2)), "batch", None, None, "channels")
        return jnp.moveaxis(x, -1, 1).reshape(len(x), -1)

    def classify(self, x, at):
        """The dense layers: logits [images, classes]."""
        for dense, dim in zip(self.dense, self.dims[:-1], strict=True):
            x = dense(at.layout(x, "dense_batch", dim))  # before the first: the all-to-all
            x = nnx.relu(x) if dense is not self.dense[-1] else x
        return at.layout(x, "dense_batch", None)

    def last(self, x, batch, at):
        """The dense layers, and the loss, summed."""
        logits = self.classify(x, at)
        label, weight = (at.layout(batch[name], "dense_batch") for name in ("label", "weight"))
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        right = jnp.sum(weight, where=jnp.argmax(logits, axis=-1) == label)
        return Sums(jnp.sum(weight * nll), jnp.sum(weight), {"accuracy": right})

    def predict(self, x, batch, at):
        """The probability of each class."""
        return {"probabilities": jax.nn.softmax(self.classify(x, at))}


@dataclasses.dataclass(frozen=True)
class Digits(Task):
    """Which digit is it?

    Attributes:
      strategy: what devices split: "data" the images, "model" the weights, "hybrid" the images of
        convolutions and the weights of dense layers, with an all-to-all between them or ("hybrid-gather") an
        all-gather.
      channels: of each convolution.
      widths: of the dense layers before the last.
      batch_size: digits in a batch.
      optimizer: how it learns.
    """

    strategy: Literal["hybrid", "hybrid-gather", "data", "model"] = dataclasses.field(
        default="hybrid", metadata={"free": True}
    )
    channels: tuple[int, ...] = (32, 64)
    widths: tuple[int, ...] = (512,)
    batch_size: int = dataclasses.field(default=128, metadata={"free": True})
    optimizer: OptimizerConfig = dataclasses.field(
        default=OptimizerConfig(learning_rate=2e-3), metadata={"free": True}
    )

    unit: ClassVar[str] = "digits"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=100)

    @property
    def rules(self):
        """Which dims devices split."""
        return STRATEGIES[self.strategy]

    def make_model(self, rngs):
        """The network, with its initial values."""
        return ConvNet(self.channels, self.widths, rngs)

    def make_batches(self, split, seed=None):
        """Digits with their labels."""
        return ArrayBatches(load_digits(split), self.batch_size, seed)
