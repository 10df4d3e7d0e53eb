"""The language model of the laws: its settings on meshes, its batches, and what one device computes."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest

from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Task,
    TrainConfig,
    init_state,
)
from jaxpar.lm import LM, Batch
from lib import api

# A row that goes the same ways as others, and one that `.ci/run` takes beside the default ones.
more = functools.partial(pytest.param, marks=pytest.mark.more)
full = functools.partial(pytest.param, marks=pytest.mark.full)


# Sums in another order differ by float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5
MESHES = [
    (1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 1, 4),
]  # fmt: skip


SGD = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0)
MODEL = LM(
    num_layers=8,
    hidden_size=16,
    embed_size=16,
    vocab_size=96,
    dropout=0.3,
    batch_size=16,
    seq_len=8,
    optimizer=SGD,
)


class Settings(NamedTuple):
    task: Task
    parallel: Parallel
    train: TrainConfig


def on_devices(sizes):
    """A mesh of the first devices, as many as it needs."""
    return MeshConfig(*sizes, devices=tuple(range(int(np.prod(sizes)))))


def make_settings(mesh=(1, 1, 1), units=(1, 1), task=MODEL, *, train=None, layout=None, **pipeline):
    """A task on a mesh; `layout` are fields of `Parallel`, such as shares."""
    pipeline = PipelineConfig(num_microbatches=units[0], num_chunks=units[1], **pipeline)
    parallel = Parallel(on_devices(mesh), pipeline, **(layout or {}))
    return Settings(task, parallel, train or TrainConfig())


@functools.singledispatch
def random_batch(task, rng, shape, starts):
    """Random tokens, some targets ignored; lines begin anywhere where they are packed."""
    inputs, targets = rng.integers(0, task.vocab_size, (2, *shape), dtype=np.int32)
    targets[rng.random(shape) < 0.1] = -1
    batch = Batch(inputs, targets, starts)
    if task.reads_lines:
        batch = batch._replace(lengths=np.full(shape[0], shape[1], np.int32))
    if task.packed:
        batch = batch._replace(resets=rng.random(shape) < 0.1)
    return batch


def make_batch(settings, seed=0, starts=False, length=None):
    """A random batch of the task."""
    task, rng = settings.task, np.random.default_rng(seed)
    return random_batch(task, rng, (task.batch_size, length or task.seq_len), starts)


def state_with_carry(task, parallel):
    """The first state, with a carry as a window before might have left it: the same on every mesh."""
    state = init_state(task, parallel)
    carry = {}
    for name, array in api.stored(task, parallel, state).items():
        if name.startswith("carry/"):
            rows = np.linspace(-0.5, 0.5, int(np.prod(array.shape[1:])), dtype=np.float32)
            if "n_BH" in name:  # an sLSTM's sum of weights, which it divides by
                rows += 1
            carry[name] = np.broadcast_to(rows.reshape(array.shape[1:]), array.shape)
    return api.with_arrays(task, parallel, state, carry)


def loss_and_grads(settings):
    task, parallel, _ = settings
    state = state_with_carry(task, parallel)
    found = api.gradients(task, parallel, make_batch(settings), state)
    return found.loss, found.grads, found.carry


@functools.cache
def plain(task=MODEL):
    """What one device computes: the oracle."""
    return loss_and_grads(make_settings(task=task))


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = np.linalg.norm(actual[name] - value), np.linalg.norm(value)
        assert error <= RELATIVE_ERROR * scale, f"{name}: error {error:.1e} of {scale:.1e}"


def assert_same_as_plain(settings):
    loss, grads, carry = loss_and_grads(settings)
    expected_loss, expected_grads, expected_carry = plain(settings.task)
    assert abs(loss - expected_loss) <= RELATIVE_ERROR * expected_loss
    assert_close(grads, expected_grads)
    assert_close(carry, expected_carry)


@functools.cache
def train_two_steps(settings):
    batches = [make_batch(settings, seed=number, starts=number == 0) for number in range(2)]
    found = api.updates(*settings, batches)
    return found.losses, found.trained


# No law of the state is about dropout, half of what there is to compile.
WITHOUT_MASKS = dataclasses.replace(MODEL, dropout=0.0)


def with_optimizer(name, task=WITHOUT_MASKS, **options):
    config = OptimizerConfig(name=name, **{"learning_rate": 5e-3, "warmup_steps": 0, **options})
    return dataclasses.replace(task, optimizer=config)
