"""A network for images: convolutions, then dense layers.

Legend of the dim suffixes: B batch, H height, W width, C channels, F features, V classes.
"""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import At
from jaxpar.base.axes import BATCH, INPUT
from jaxpar.base.parts import WEIGHT
from jaxpar.model import Stack, Sums
from jaxpar.nn.conv import Conv
from jaxpar.nn.dropout import dropout
from jaxpar.nn.linear import Linear

if TYPE_CHECKING:
    from jaxpar.tasks.images.task import Images

# Keys of a batch.
IMAGE, LABEL = "image", "label"

PROBABILITIES = "probabilities"  # what is predicted

# Dims, besides those in `axes`.
CHANNELS = "channels"  # what a convolution computes
FEATURES = "features"  # widths of dense layers, in turn: what enters the first of them is features,
UNITS = "units"  # what it computes is units, what the next computes is features again
DENSE_BATCH = "dense_batch"  # the batch again, in the dense layers

Batch = Mapping[str, jax.Array]


class HybridConvNet(nnx.Module):
    """Convolutions and poolings, then dense layers: a small AlexNet (Krizhevsky et al. 2012).

    Its dims have enough names that "one weird trick" (arXiv:1404.5997), and what it is compared with, are
    nothing but tables of rules: see `strategies.STRATEGIES`.

        images [B, H, W, C]   conv, conv, pool ...   features [B, F]   dense     dense   logits
        batch                 batch, channels        dense_batch, features  -> units -> features ...
    """

    time_major: ClassVar[bool] = False

    def __init__(self, task: "Images", *, rngs: nnx.Rngs):
        """Draws the parameters of the network that a task describes."""
        self.dropout = task.dropout
        self.layers = Stack([], rngs=rngs)
        sizes = (task.image_shape[-1], *task.channels)
        self.convs = nnx.List(
            Conv(*pair, (3, 3), dims=(None, None, INPUT, CHANNELS), rngs=rngs)
            for pair in itertools.pairwise(sizes)
        )
        widths = (task.num_features, *task.hidden_sizes, task.num_classes)
        names = itertools.islice(itertools.cycle((FEATURES, UNITS)), len(widths) - 1)
        # The classes have no name: they are few, and every device has the whole logits.
        self.widths = (*names, None)
        self.dense = nnx.List(
            Linear(*pair, dims=dims, rngs=rngs)
            for pair, dims in zip(
                itertools.pairwise(widths), itertools.pairwise(self.widths), strict=True
            )
        )

    def first(self, batch: Batch, at: At) -> jax.Array:
        """The convolutions: [B, F]."""
        x_BHWC = batch[IMAGE]
        for number, conv in enumerate(self.convs):
            with jax.named_scope(f"conv{number}"):
                x_BHWC = at.layout(nnx.relu(conv(x_BHWC)), BATCH, None, None, CHANNELS)
                if number % 2:
                    x_BHWC = nnx.max_pool(x_BHWC, (2, 2), (2, 2))
                    x_BHWC = at.layout(x_BHWC, BATCH, None, None, CHANNELS)
        # Channels first, so that what is split by channels is split by features as well.
        return x_BHWC.transpose(0, 3, 1, 2).reshape(x_BHWC.shape[0], -1)

    def last(self, x_BF: jax.Array, batch: Batch, at: At) -> Sums:
        """Negative log-likelihood of the labels, and how many images are classified correctly."""
        logits_BV = self.classify(x_BF, at)
        with jax.named_scope("loss"):
            labels_B, weight_B = (at.layout(batch[key], DENSE_BATCH) for key in (LABEL, WEIGHT))
            is_label_BV = (
                labels_B[:, None] == jnp.arange(logits_BV.shape[1], dtype=labels_B.dtype)[None]
            )
            logit_B = jnp.sum(jnp.where(is_label_BV, logits_BV, 0.0), axis=1)
            nll_B = jax.nn.logsumexp(logits_BV, axis=1) - logit_B
            is_right_B = jnp.argmax(logits_BV, axis=1).astype(labels_B.dtype) == labels_B
            return Sums(
                jnp.sum(weight_B * nll_B),
                jnp.sum(weight_B),
                {"accuracy": jnp.sum(weight_B * is_right_B.astype(weight_B.dtype))},
            )

    def predict(self, x_BF: jax.Array, batch: Batch, at: At) -> dict[str, jax.Array]:
        """The probability of each class: float32 [B, V]."""
        return {PROBABILITIES: jax.nn.softmax(self.classify(x_BF, at), axis=-1)}

    def classify(self, x_BF: jax.Array, at: At) -> jax.Array:
        """The dense layers: float32 logits [B, V]."""
        for number, (dense, dim) in enumerate(zip(self.dense, self.widths[:-1], strict=True)):
            with jax.named_scope(f"dense{number}"):
                x_BF = at.layout(x_BF if number == 0 else nnx.relu(x_BF), DENSE_BATCH, dim)
                x_BF = dense(dropout(x_BF, self.dropout, at, number=number))
        return at.layout(x_BF, DENSE_BATCH, None)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Images -> float32 logits [B, V], without dropout."""
        at = At(layer=0, time=0, row=0, time_major=False)
        return self.classify(self.first({IMAGE: images_BHWC}, at), at)
