"""An adopted model costs as much as the same model in the layer form; and how its parameters are drawn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api

import jaxpar
from jaxpar import ArrayBatches, OptimizerConfig, Parallel, PipelineConfig, Stack, Task
from jaxpar.nn import LSTM, Stateless

VOCAB, WIDTH, TIME, ROWS = 256, 64, 32, 16
IDS = np.zeros((40, TIME), np.int32)


def mean_nll(logits, batch, *, time_major=False):
    weight = batch["weight"][None] if time_major else batch["weight"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jaxpar.mean(nll, jnp.broadcast_to(weight, nll.shape) if time_major else weight)


class Block(nnx.Module):
    """A perceptron after a mix of earlier steps."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.att = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.att(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(x)))


def recurrent(rngs):
    return nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs))


class Plain(nnx.Module):
    """As people write it."""

    def __init__(self, rngs, make, depth):
        self.embed, self.out = (
            nnx.Embed(VOCAB, WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, VOCAB, rngs=rngs),
        )
        self.blocks = nnx.List([make(rngs) for _ in range(depth)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Layered(jaxpar.Model):
    """The same in the layer form."""

    def __init__(self, rngs, make, depth, time_major):
        self.time_major = time_major
        self.embed, self.out = (
            nnx.Embed(VOCAB, WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, VOCAB, rngs=rngs),
        )
        self.layers = Stack([make] * depth, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        return mean_nll(self.out(y), batch, time_major=self.time_major)


@dataclasses.dataclass(frozen=True)
class InLayers(Task):
    kind: str = "attention"
    depth: int = 6
    optimizer: OptimizerConfig = OptimizerConfig()

    def make_model(self, rngs):
        if self.kind == "lstm":
            return Layered(rngs, lambda rngs: LSTM(WIDTH, rngs=rngs), self.depth, True)
        return Layered(rngs, lambda rngs: Stateless(Block(rngs)), self.depth, False)

    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": IDS, "y": IDS}, ROWS, seed)


def plain(make, depth, optimizer=OptimizerConfig()):
    return jaxpar.adopt(
        lambda rngs: Plain(rngs, make, depth),
        lambda model, batch: mean_nll(model(batch["x"]), batch),
        batches=lambda split, seed: ArrayBatches({"x": IDS, "y": IDS}, ROWS, seed),
        optimizer=optimizer,
    )


MESHES = {
    "dp1": Parallel("dp1"),
    "pp2": Parallel("pp2", PipelineConfig(num_microbatches=4)),
    "chunks": Parallel("pp2", PipelineConfig(num_microbatches=2, num_chunks=2)),
}
PAIRS = {"attention": (Block, 6), "lstm": (recurrent, 12)}
more = pytest.mark.more
CASES = [
    ("attention", "pp2"),
    ("lstm", "chunks"),
    pytest.param("attention", "dp1", marks=more),
    pytest.param("lstm", "pp2", marks=more),
]


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_costs_as_much_as_in_the_layer_form(kind, mesh):
    make, depth = PAIRS[kind]
    costs = []
    for task in (plain(make, depth), InLayers(kind, depth)):
        batch, state = (
            task.make_batches("train", 0).batch(0),
            api.abstract_state(task, MESHES[mesh]),
        )
        step = jaxpar.make_train_step(task, MESHES[mesh])
        cost = step.lower(state, batch).compile().cost_analysis()
        costs.append([cost["flops"], cost["bytes accessed"]])
    adopted, layered = costs
    np.testing.assert_allclose(adopted, layered, rtol=0.02)


@functools.cache
def drawing(depth):
    """The program that draws the first state for four stages, and the bytes of all parameters."""
    task, parallel = plain(Block, depth, OptimizerConfig("sgd")), Parallel("pp4")
    params = api.abstract_state(task, parallel).params
    num_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    return api.compiled_init(task, parallel), num_bytes


def test_the_program_that_draws_does_not_grow_with_the_blocks():
    few, many = (len(drawing(depth)[0].as_text().splitlines()) for depth in (4, 24))
    assert many < 1.5 * few


def test_no_device_draws_all_blocks():
    program, num_bytes = drawing(24)
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes < 0.35 * num_bytes
    assert memory.temp_size_in_bytes < 0.6 * num_bytes
