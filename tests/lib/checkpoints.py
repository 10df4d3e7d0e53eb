"""Saves and restores of a small model."""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

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
from jaxpar.lm import LM, Batch
from lib import api

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


def batch_of(step, task):
    shape = (2, task.batch_size, task.seq_len)
    tokens = np.random.default_rng(step).integers(0, task.vocab_size, shape, np.int32)
    return Batch(*tokens, starts=step == 0)


def assert_bit_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@functools.cache
def step_of(setup):
    return make_train_step(*setup, TRAIN)


def leaves_of(state):
    """Host copies of all arrays, as they are on the devices."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


class Saved(NamedTuple):
    """A run of some steps.

    Attributes:
      folder: with the checkpoint after two steps.
      arrays: of the state at that time, by the names of a checkpoint.
      losses: of the next steps.
    """

    folder: Path
    arrays: dict[str, np.ndarray]
    losses: list[float]


def canonical(state, task, parallel):
    return api.stored(task, parallel, state)


def restore(folder, setup):
    return api.restored(folder, *setup)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """setup -> `Saved`: each run once."""
    runs = {}

    def run_once(setup):
        if setup not in runs:
            folder = tmp_path_factory.mktemp("run") / "checkpoints"
            state = init_state(*setup)
            for number in range(2):
                state, _ = step_of(setup)(state, batch_of(number, setup[0]))
            arrays = api.stored(*setup, state)
            with api.saving(folder, *setup, state):
                # The state is donated to the third step while it is being written.
                losses = next_losses(setup, state)
            runs[setup] = Saved(folder, arrays, losses)
        return runs[setup]

    return run_once


def next_losses(setup, state):
    """Of the 20 steps after the second."""
    losses = []
    for number in range(2, 22):
        state, metrics = step_of(setup)(state, batch_of(number, setup[0]))
        losses.append(float(metrics.loss))
    return losses
