"""A process of a group of two whose layers take three times as long in process 1 as in process 0.

It times a step with the layers in equal numbers and as the speeds have it; it prints JSON.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is run by its path

import jaxpar
from jaxpar import (
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    init_state,
    make_train_step,
)
from lib import api

TURNS = (16, 48)  # of products beside each pass of a layer, in each process
SIZE, WIDTH, ROWS, STEPS = 256, 8, 4, 8
ROUNDS = 5  # by turns: other work on the machine comes and goes


def busy(x, seed):
    """x, after products of which nothing is kept; the compiler does not know that."""
    start = jnp.full((SIZE, SIZE), seed)
    turns = TURNS[jax.process_index()]
    end = jax.lax.fori_loop(0, turns, lambda _, a: jnp.tanh(a @ a), start)
    return x + 0 * end[0, 0]


@jax.custom_vjp
def slowed(x, seed):
    """x, later; and so in the backward pass."""
    return busy(x, seed)


slowed.defvjp(
    lambda x, seed: (busy(x, seed), seed), lambda seed, dy: (busy(dy, seed), jnp.zeros_like(seed))
)


class Layer(nnx.Module):
    """One that takes its time."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, carry, x, at):
        seed = self.linear.kernel[...][0, 0]
        return carry, slowed(jnp.tanh(self.linear(x)), seed)


class Model(nnx.Module):
    """Eight layers, and a sum of squares."""

    def __init__(self, *, rngs):
        self.layers = Stack([lambda rngs: Layer(rngs=rngs)] * 8, rngs=rngs)

    def first(self, batch, at):
        return jnp.asarray(batch["x"])

    def last(self, y, batch, at):
        error = jnp.square(y - batch["y"]).sum(-1)
        return Sums(jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Task(jaxpar.Task):
    """Noise."""

    optimizer: OptimizerConfig = OptimizerConfig("sgd", warmup_steps=0)

    def make_model(self, rngs):
        return Model(rngs=rngs)

    def make_batches(self, split, seed=None):
        values = np.random.default_rng(0).normal(size=(2, 200, WIDTH)).astype(np.float32)
        return SeriesBatches({"x": values[0], "y": values[1]}, ROWS, STEPS, seed)


def losses_of(task, parallel):
    """Of two steps."""
    step, state, losses = make_train_step(task, parallel), init_state(task, parallel), []
    batches = task.make_batches("train", 0)
    for number in range(2):
        state, metrics = step(state, batches.batch(number))
        losses.append(float(metrics.loss))
    return losses


def main():
    api.start_processes()
    task, units = Task(), PipelineConfig(num_microbatches=2, num_chunks=2)
    even = Parallel("pp2", units)
    layouts = even, dataclasses.replace(even, speeds=(3, 1))
    times = [min(seconds) for seconds in api.step_seconds(task, layouts, ROUNDS)]
    placements = [api.placement(task, parallel) for parallel in layouts]
    losses = [losses_of(task, parallel) for parallel in layouts]
    found = {"placements": placements, "losses": losses, "times": times}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
