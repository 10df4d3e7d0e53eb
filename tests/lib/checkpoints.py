"""Saves and restores of a small model."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
    init_state,
    make_train_step,
)
from jaxpar.data.batches import put_batch
from jaxpar.lm import LM, Batch
from jaxpar.partition.by_layer import abstract_by_layer, from_layers
from jaxpar.sharding import is_variable
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding
from jaxpar.training.checkpoint import Checkpoints

# Another mesh sums in another order: float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5


@dataclasses.dataclass(frozen=True)
class Toy(LM):
    """Of another name."""


TASK = Toy(
    num_layers=8, hidden_size=16, embed_size=16, vocab_size=64, dropout=0.1, batch_size=8, seq_len=4,
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
)  # fmt: skip


TRAIN = TrainConfig(num_steps=30)


def make_setup(mesh=(1, 1, 1), placement="even", task=TASK, num_groups=1, **layout):
    """A task and its layout on devices."""
    num_devices = int(np.prod(mesh))
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    schedule = "1f1b" if num_groups == 1 else "interleaved"
    pipeline = PipelineConfig(schedule, num_chunks=4, num_groups=num_groups, placement=placement)
    return task, Parallel(MeshConfig(*mesh, devices=devices), pipeline, **layout)


def batch_of(step, task, parallel, mesh):
    shape = (2, task.batch_size, task.seq_len)
    tokens = np.random.default_rng(step).integers(0, task.vocab_size, shape, np.int32)
    return put_batch(
        Batch(*tokens, starts=step == 0), batch_sharding(Setup.of(task, parallel, mesh=mesh))
    )


def variables(state):
    for path, leaf in jax.tree.leaves_with_path(state, is_leaf=is_variable):
        value = np.array(leaf.get_value() if is_variable(leaf) else leaf)
        dims = leaf.get_metadata("out_sharding") if is_variable(leaf) else ()
        yield jax.tree_util.keystr(path), value, dims


def canonical(state, task, parallel):
    """Host copies; stacked layers in the order of the layers."""
    [rows] = Setup.of(task, parallel).partition.slots.rows
    order = [rows.index(layer) for layer in range(task.num_layers)]
    return {
        name: value[order] if "layers" in dims else value for name, value, dims in variables(state)
    }


def assert_bit_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@functools.cache
def step_of(setup):
    mesh = setup[1].mesh.build()
    return mesh, make_train_step(*setup, TRAIN, mesh)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """setup -> (folder, the state after two steps, the losses of the next ones): each run once."""
    runs = {}

    def run_once(setup):
        if setup not in runs:
            folder = tmp_path_factory.mktemp("run") / "checkpoints"
            mesh, step = step_of(setup)
            state = init_state(*setup, mesh=mesh)
            for number in range(2):
                state, _ = step(state, batch_of(number, *setup, mesh))
            arrays = canonical(state, *setup)
            with Checkpoints(folder, Setup.of(*setup).replace(keep_checkpoints=1)) as checkpoints:
                checkpoints.save(state)
                # The state is donated to the third step while it is being written.
                losses = next_losses(setup, state)
            runs[setup] = folder, arrays, losses
        return runs[setup]

    return run_once


def next_losses(setup, state):
    """Of the 20 steps after the second."""
    mesh, step = step_of(setup)
    losses = []
    for number in range(2, 22):
        state, metrics = step(state, batch_of(number, *setup, mesh))
        losses.append(float(metrics.loss))
    return losses


def restore(folder, setup, step=None):
    return Checkpoints(folder, Setup.of(*setup).replace(keep_checkpoints=1)).restore(step)


def with_parameters(state, layout, arrays):
    """The state with other parameters, on the host, named (without "params/") as `by_layer` gives them."""
    placed = {
        name: jax.device_put(arrays[name], wanted.sharding)
        for name, wanted in abstract_by_layer(state.params, layout).items()
    }
    return dataclasses.replace(state, params=from_layers(state.params, layout, placed))


def latest_step(checkpoints):
    """The newest step of which there is a whole checkpoint; None if there is none."""
    checkpoints.close()
    return max(checkpoints.steps(), default=None)
