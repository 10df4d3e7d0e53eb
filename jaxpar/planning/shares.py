"""Shares of a batch for devices of different speeds, measured on the user's own step."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.batches import put_batch
from jaxpar.config import Parallel, TrainConfig
from jaxpar.setup import Setup
from jaxpar.state import init_state
from jaxpar.step import batch_sharding, make_train_step
from jaxpar.task import Task
from jaxpar.timing import take_turns


def propose_shares(seconds: Sequence[float], max_parts: int = 8) -> tuple[int, ...]:
    """One integer per group, none above `max_parts`, so that all groups end as nearly together as possible.

    Args:
      seconds: what each data-parallel group needs for the same work.
    Raises:
      ValueError: `seconds` is empty, or has a value that is not positive and finite; or `max_parts` is not
        positive.
    """
    if not seconds or not all(0 < value < math.inf for value in seconds):
        raise ValueError(
            f"seconds={tuple(seconds)}: give a time above 0 for every group, and below infinity, as "
            f"measure_groups does"
        )
    if max_parts < 1:
        raise ValueError(f"max_parts={max_parts}: must be positive; 8 is usual")
    times = np.asarray(seconds, np.float64)

    def wasted(shares: np.ndarray) -> float:
        """Fraction of the groups' time that they spend waiting for the slowest."""
        ends = shares * (times / times.max())
        return 1 - float(ends.mean() / ends.max())

    candidates = [
        np.maximum(np.rint(times.min() / times * most), 1).astype(int)
        for most in range(1, max_parts + 1)
    ]
    return tuple(min(candidates, key=lambda shares: round(wasted(shares), 3)).tolist())


def measure_groups(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
    *,
    num_steps: int = 3,
) -> list[float]:
    """Seconds per training step of each data-parallel group by itself, all on the same batch.

    One after the other, each group runs the whole batch on its own devices, in microbatches of the usual size
    and with a state of its own.

    Args:
      task, parallel, train, mesh: as for `make_stepper`.
      num_steps: how many are measured, after a warm-up step; the median counts.
    Raises:
      ValueError: the task does not fit the mesh, or `num_steps` is not positive.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: must be positive; 3 are usual")
    setup = Setup.of(task, parallel, train, mesh)
    parallel, mesh = setup.parallel, setup.mesh
    parts = sum(parallel.group_shares) * parallel.pipeline.num_microbatches
    pipeline = dataclasses.replace(parallel.pipeline, num_microbatches=parts)
    seconds = []
    for devices in mesh.devices.reshape(parallel.mesh.data, -1):
        ids = tuple(jax.devices().index(device) for device in devices)
        own_mesh = dataclasses.replace(parallel.mesh, data=1, devices=ids)
        alone = dataclasses.replace(parallel, mesh=own_mesh, pipeline=pipeline, shares=None)
        [measured] = take_turns([make_stepper(setup.task, alone, setup.train)], num_steps)
        seconds.append(statistics.median(measured))
    return seconds


def make_stepper(
    task: Task | Setup,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> Callable[[], Any]:
    """A function that runs a training step on the task's example and a state of its own, and waits for it.

    Args:
      parallel, train: None takes the task's own.
      mesh: that of `parallel`; None builds it.
    Returns:
      The function; it returns the step's metrics.
    Raises:
      ValueError: the task does not fit the mesh.
    """
    setup = Setup.of(task, parallel, train, mesh)
    train_step, state = make_train_step(setup), init_state(setup)
    batch = put_batch(setup.task.example_batch(), batch_sharding(setup))

    def step() -> Any:
        nonlocal state
        state, metrics = train_step.run(state, batch)
        jax.block_until_ready(state)
        return metrics

    return step
