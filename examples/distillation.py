"""A deep teacher and a small student on one mesh, with one loss between them: handwritten digits.

The teacher is told every label, the student one in ten; of all digits it learns what the teacher says of
them (Hinton et al. 2015, arXiv:1503.02531). Both learn at the same time, by one optimizer. The task has none,
for the loop is in this file. The same student without a teacher is printed beside them.

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
from jaxpar.step.setup import Setup
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
        beside = {
            "is_told": is_told.astype(np.float32),
            "chances": np.zeros((len(number), 10), "f4"),
        }
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


# --- The loop. A pair is a teacher and a student: tasks, states, batches, gradients.


def make_pair_step(pair, parallel):
    """(states, batches) -> ((loss, states), gradients): one loss for both, each of the others a pair.

    What the teacher says of the student's digits becomes part of the student's batch. It is a target: the
    student's loss has no gradient with respect to the teacher.
    """
    ask = jaxpar.make_predict_step(pair[0], parallel)
    teach, learn = (jaxpar.value_and_grad(task, parallel) for task in pair)

    def run(states, batches):
        teacher, student = states
        _, said = ask(teacher, batches[1])
        (first, (teacher, _)), of_teacher = teach(teacher, batches[0])
        (second, (student, _)), of_student = learn(student, {**batches[1], **said})
        return (first + second, (teacher, student)), (of_teacher, of_student)

    return run


def train(run, states, batches, num_steps):
    """The states after so many steps by one optimizer for all of their parameters."""
    rate = optax.cosine_decay_schedule(3e-3, num_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(params, grads, opt_state):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = tuple(state.params for state in states)
    opt_state = optimizer.init(params)  # each number lies where its parameter does
    for step in range(num_steps):
        (loss, states), grads = run(states, tuple(own.batch(step) for own in batches))
        params, opt_state = update(params, grads, opt_state)
        states = tuple(
            dataclasses.replace(state, params=own)
            for state, own in zip(states, params, strict=True)
        )
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{num_steps}  loss {float(loss):.3f}")
    return states


def main(mesh="dp2pp2", num_steps=300):
    """Trains a teacher and a student, then the same student alone; the rows of a table."""
    parallel = Parallel(mesh, PipelineConfig(num_microbatches=2))
    teacher, student = Digits(num_layers=8, width=64), Digits(told=10)
    learn = jaxpar.value_and_grad(student, parallel)

    def run_alone(states, batches):
        (loss, (state, _)), grads = learn(*states, *batches)
        return (loss, (state,)), (grads,)

    def trained(tasks, run):
        states = tuple(jaxpar.init_state(task, parallel) for task in tasks)
        batches = [task.make_batches("train", seed=0) for task in tasks]
        return train(run, states, batches, num_steps)

    both = trained((teacher, student), make_pair_step((teacher, student), parallel))
    (alone,) = trained((student,), run_alone)
    rows = {
        "teacher": (teacher, both[0]),
        "student": (student, both[1]),
        "student without teacher": (student, alone),
    }
    for name, (task, state) in rows.items():
        metrics = evaluate(Setup.of(task, parallel), state, "test").metrics
        print(f"{name:24}", *(f"{key} {value:.3f}" for key, value in metrics.items()), sep="  ")


if __name__ == "__main__":
    jaxpar.simulate_devices(4)  # leave this out on real devices
    main()
