"""Three kinds of layers in one stack: handwritten digits, read from the top to the bottom.

A digit of scikit-learn's is 8 rows of 8 pixels: 8 steps in time. Convolutions along time see the last three
rows, LSTMs remember all of them, dense layers conclude. What is known after the last row counts. Each kind
of layer has its own parameters and its own state, and a stage holds those of its layers only.

    python -m jaxpar train examples/mixed.py:Digits --simulate 8 --mesh dp2pp2tp2
"""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import (
    RULES,
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Rules,
    Task,
    TrainConfig,
)

# --- The model, in plain Flax. Activations are [rows, time, width].

drawn = nnx.initializers.lecun_normal()
named = functools.partial(nnx.with_partitioning, drawn)


class Conv(nnx.RNNCellBase):
    """A convolution over this step and the two before it, which are its state."""

    num_feature_axes = 1

    def __init__(self, width, *, rngs):
        self.in_features, init = width, drawn
        general = functools.partial(nnx.LinearGeneral, axis=(-2, -1), kernel_init=init, rngs=rngs)
        self.linear = general((3, width), width)

    def initialize_carry(self, shape, rngs=None):
        """Nothing before the first step."""
        return (jnp.zeros(shape),) * 2

    def __call__(self, past, x):
        """The last two inputs, and the next x."""
        return (past[1], x), x + nnx.relu(self.linear(jnp.stack([*past, x], axis=-2)))


class Dense(nnx.Module):
    """A perceptron for every step."""

    def __init__(self, width, *, rngs):
        up, down = named((None, "units")), named(("units", None))
        self.up = nnx.Linear(width, 2 * width, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        """The next x."""
        return x + self.down(nnx.relu(self.up(x)))


class Reader(nnx.Module):
    """A row of pixels in, the blocks, logits of the classes out."""

    def __init__(self, width, num_convs, num_lstms, num_denses, *, rngs):
        self.embed = nnx.Linear(8, width, rngs=rngs)
        cells = [Conv(width, rngs=rngs) for _ in range(num_convs)]
        cells += [nnx.OptimizedLSTMCell(width, width, rngs=rngs) for _ in range(num_lstms)]
        denses = [Dense(width, rngs=rngs) for _ in range(num_denses)]
        self.blocks = nnx.List([*map(nnx.RNN, cells), *denses])
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images):
        """Logits after each row of pixels, [rows, time, 10]."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# --- The task: its fields are options of the command line.


@dataclasses.dataclass(frozen=True)
class Digits(Task):
    """Which digit is it?

    Attributes:
      width: of what moves between layers.
      num_convs: convolutions, the first layers.
      num_lstms: LSTMs, which follow.
      num_denses: dense layers, the last ones.
      batch_size: digits in a batch.
      optimizer: how it learns.
    """

    width: int = 32
    num_convs: int = 2
    num_lstms: int = 2
    num_denses: int = 2
    batch_size: int = 64
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-3)

    unit: ClassVar[str] = "digits"
    layers: ClassVar[str] = "blocks"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=300, log_every=100)
    parallel: ClassVar[Parallel] = Parallel(pipeline=PipelineConfig(num_chunks=4))
    rules: ClassVar[Rules] = RULES.replace({"units": "tensor"})

    def make_model(self, rngs):
        """The network, with its initial values."""
        sizes = self.width, self.num_convs, self.num_lstms, self.num_denses
        return Reader(*sizes, rngs=rngs)

    def loss(self, model, batch):
        """The mean over rows of pixels by their weights."""
        logits = model(batch["image"])
        label = jnp.broadcast_to(batch["label"][:, None], logits.shape[:2])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        right = jnp.float32(logits.argmax(-1) == label)
        return jaxpar.mean(nll, batch["weight"], accuracy=right)

    def make_batches(self, split, seed=None):
        """Digits with their labels; the last of their rows of pixels counts."""
        digits = load_digits(split)
        weight = np.tile(np.float32([0] * 7 + [1]), (len(digits["label"]), 1))
        return ArrayBatches({**digits, "weight": weight}, self.batch_size, seed)

    def baseline(self, split):
        """The accuracy of the nearest of ten mean images."""
        train, digits = load_digits("train"), load_digits(split)
        means = np.stack([train["image"][train["label"] == n].mean(axis=0) for n in range(10)])
        distance = np.sum((digits["image"][:, None] - means) ** 2, axis=(2, 3))
        return {"nearest mean's accuracy": float(np.mean(distance.argmin(1) == digits["label"]))}


@functools.cache
def load_digits(split):
    """Images [N, 8, 8] from 0 to 1, labels [N]. Of every 10, 8 are for train."""
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    place = np.arange(len(labels)) % 10
    mine = {"train": place < 8, "valid": place == 8, "test": place == 9}[split]
    images = (pixels[mine] / 16).astype(np.float32).reshape(-1, 8, 8)
    return {"image": images, "label": labels[mine].astype(np.int32)}
