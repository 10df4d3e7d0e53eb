"""A deep teacher and a small student on one mesh, with one loss between them: handwritten digits.

The teacher is told every label, the student one in ten; of all digits it learns what the teacher says of them
(Hinton et al. 2015, arXiv:1503.02531). Both learn at the same time, by one optimizer: the tasks have none, for
the loop is in this file. What is printed at the end has the same student beside it, without a teacher.

    python examples/distillation.py
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import ArrayBatches, Parallel, PipelineConfig, Stack, Sums, Task
from jaxpar.setup import Setup
from jaxpar.training.evaluate import evaluate

# --- The model. Activations are [rows, width].


class Block(nnx.Module):
    """A perceptron, added to what it is given."""

    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, carry, x, at):
        """The block; it has no state, so `carry` is empty."""
        return carry, x + self.down(nnx.relu(self.up(x)))


class Reader(nnx.Module):
    """Pixels in, blocks, logits of the classes out."""

    time_major = False

    def __init__(self, width, num_layers, *, rngs):
        self.embed = nnx.Linear(64, width, rngs=rngs)
        self.layers = Stack([lambda rngs: Block(width, rngs=rngs)] * num_layers, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def first(self, batch, at):
        """What goes into the first block."""
        return self.embed(batch["image"])

    def last(self, y, batch, at):
        """The loss by the labels that are told, and by what a teacher says, summed."""
        logits, label, weight = self.head(y), batch["label"], batch["weight"]
        told = optax.softmax_cross_entropy_with_integer_labels(logits, label) * batch["is_told"]
        taught = optax.softmax_cross_entropy(logits, batch["chances"])
        right = jnp.sum(weight, where=jnp.argmax(logits, axis=-1) == label)
        return Sums(jnp.sum(weight * (told + taught)), jnp.sum(weight), {"accuracy": right})

    def predict(self, y, batch, at):
        """What a teacher says of each digit."""
        return {"chances": nnx.softmax(self.head(y))}


@dataclasses.dataclass(frozen=True)
class Digits(Task):
    """Which digit is it?

    Attributes:
      num_layers: blocks.
      width: of what moves between them.
      batch_size: digits in a batch.
      told: in training the label of one digit in so many is told.
    """

    num_layers: int = 2
    width: int = 32
    batch_size: int = 64
    told: int = 1

    unit: ClassVar[str] = "digits"

    def make_model(self, rngs):
        """The network, with its initial values."""
        return Reader(self.width, self.num_layers, rngs=rngs)

    def make_batches(self, split, seed=None):
        """Digits with their labels; no teacher says anything yet, and zeros add nothing to the loss."""
        digits = load_digits(split)
        number = np.arange(len(digits["label"]))
        is_told = number % (self.told if split == "train" else 1) == 0
        beside = {"is_told": is_told.astype(np.float32), "chances": np.zeros((len(number), 10), "f4")}
        return ArrayBatches({**digits, **beside}, self.batch_size, seed)


@functools.cache
def load_digits(split):
    """Images [N, 64] from 0 to 1, labels [N]. Of every 10, 8 are for train."""
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    place = np.arange(len(labels)) % 10
    mine = {"train": place < 8, "valid": place == 8, "test": place == 9}[split]
    images = (pixels[mine] / 16).astype(np.float32)
    return {"image": images, "label": labels[mine].astype(np.int32)}


# --- The loop. A pair is a teacher and a student.


def make_pair_step(tasks, parallel):
    """(states, batches) -> ((loss, states), gradients), each of a pair: one loss for both.

    What the teacher says is part of the student's batch. It is a target: the student's loss does not teach
    the teacher.
    """
    ask = jaxpar.make_predict_step(tasks[0], parallel)
    steps = [jaxpar.value_and_grad(task, parallel) for task in tasks]

    def run(states, batches):
        _, said = ask(states[0], batches[1])  # of the student's digits
        found = map(lambda run, *args: run(*args), steps, states, (batches[0], {**batches[1], **said}))
        ((first, (teacher, _)), of_teacher), ((second, (student, _)), of_student) = found
        return (first + second, (teacher, student)), (of_teacher, of_student)

    return run
