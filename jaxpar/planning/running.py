"""Steps that run: how long they take beside each other, and which share of a batch each group should have."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import STAGE
from jaxpar.base.checks import require
from jaxpar.base.timing import seconds_of, take_turns
from jaxpar.base.trees import zeros
from jaxpar.config import Parallel, TrainConfig
from jaxpar.data.batches import Batches, place_batch, put_batch
from jaxpar.facts import ModelFacts
from jaxpar.hosts.agree import together
from jaxpar.setup import Setup
from jaxpar.state import init_state
from jaxpar.step import batch_sharding, make_train_step
from jaxpar.task import Task

_MOST_PARTS = 8  # of a batch, that a group takes: each is a microbatch of its own


def time_steps(setups: Sequence[Setup], num_rounds: int, num_steps: int = 3) -> list[list[float]]:
    """Seconds of a training step of each setup, [setups][rounds], on the state and batches of a run.

    Setups take turns, so that what slows the machine for a while slows all of them. Only one has a state at a
    time: what fits alone can be timed.

    Args:
      num_steps: in a row of each, after one that is not counted; the quickest counts, since disturbances only
        add time.
    Raises:
      ValueError: there are several processes.
    """
    check_alone()
    seconds: list[list[float]] = [[] for _ in setups]
    for round_number in range(num_rounds):
        for setup, found in zip(setups, seconds, strict=True):
            step = _stepper(setup, batch_of_run(setup, round_number))
            step()
            found.append(min(seconds_of(step) for _ in range(num_steps)))
            del step  # and its state
    return seconds


def check_alone() -> None:
    """Raises where each of several processes would measure, and choose, for itself."""
    if jax.process_count() > 1:
        raise ValueError(
            f"steps are measured by one process, and there are {jax.process_count()}; plan for a machine by "
            f"its name, such as h100:1x2x8, or let --elastic choose by arithmetic"
        )


def batch_of_run(setup: Setup, step: int) -> Any:
    """The batch that a run would have in a step."""
    batches = setup.keep(
        _batches_of_run, setup.train.seed
    )  # data are read once, not in every round
    return place_batch(batches, step, batch_sharding(setup))


def _batches_of_run(setup: Setup, seed: int) -> Batches:
    return setup.task.make_batches("train", seed)


def propose_shares(seconds: Sequence[float]) -> tuple[int, ...]:
    """One integer per group, none above 8, so that all groups end as nearly together as possible.

    Args:
      seconds: what each data-parallel group needs for the same work.
    Raises:
      ValueError: `seconds` is empty, or has a value that is not positive and finite.
    """
    _check_seconds(seconds, "group", "measure_groups")
    times = np.asarray(seconds, np.float64)

    def wasted(shares: np.ndarray) -> float:
        """Fraction of the groups' time that they spend waiting for the slowest."""
        ends = shares * (times / times.max())
        return 1 - float(ends.mean() / ends.max())

    candidates = [
        np.maximum(np.rint(times.min() / times * most), 1).astype(int)
        for most in range(1, _MOST_PARTS + 1)
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
    _check_num_steps(num_steps)
    setup = Setup.of(task, parallel, train, mesh)
    parallel, mesh = setup.parallel, setup.mesh
    parts = sum(parallel.group_shares) * parallel.pipeline.num_microbatches
    pipeline = dataclasses.replace(parallel.pipeline, num_microbatches=parts)
    seconds = []
    for devices in mesh.devices.reshape(parallel.mesh.data, -1):
        ids = tuple(jax.devices().index(device) for device in devices)
        own_mesh = dataclasses.replace(parallel.mesh, data=1, devices=ids)
        alone = dataclasses.replace(parallel, mesh=own_mesh, pipeline=pipeline, shares=None)
        of_group = Setup.of(setup.task, alone, setup.train, facts=setup.layout.facts)
        [measured] = take_turns([make_stepper(of_group)], num_steps)
        seconds.append(statistics.median(measured))
    return seconds


def measure_stages(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
    *,
    num_steps: int = 3,
) -> list[float]:
    """Seconds that each stage's devices need for the same: a layer of each kind, forward and backward.

    All devices of a stage do it for a whole batch, at the same time, so the slowest counts; stages run
    one after the other. Of several processes, which all call it, each measures its own devices, and all get
    the same numbers.

    Args:
      task, parallel, train, mesh: as for `make_stepper`.
      num_steps: how many are measured, after a warm-up; the quickest counts, since disturbances only add
        time.
    Raises:
      ValueError: the task does not fit the mesh, or `num_steps` is not positive.
      hosts.agree.SharedError: it failed in some processes.
    """
    _check_num_steps(num_steps)
    setup = Setup.of(task, parallel, train, mesh)
    run, args = _one_of_each(setup.layout.facts)

    def measure() -> list[float]:
        seconds = [0.0] * setup.parallel.mesh.stage
        for stage in range(len(seconds)):
            devices = setup.mesh.devices[:, stage].flat
            if own := [each for each in devices if each.process_index == jax.process_index()]:
                on_all = NamedSharding(Mesh(np.array(own), (STAGE,)), P())
                [measured] = take_turns(
                    [functools.partial(run, jax.device_put(args, on_all))], num_steps
                )
                seconds[stage] = min(measured)
        return seconds

    return together(measure, lambda told: [max(each) for each in zip(*told.values(), strict=True)])


def propose_speeds(seconds: Sequence[float]) -> tuple[float, ...]:
    """How fast each stage is beside the slowest, to two digits.

    Args:
      seconds: what each stage needs for the same work.
    Raises:
      ValueError: `seconds` is empty, or has a value that is not positive and finite.
    """
    _check_seconds(seconds, "stage", "measure_stages")
    return tuple(float(f"{max(seconds) / value:.2g}") for value in seconds)


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
    return _stepper(setup, put_batch(setup.task.example_batch(), batch_sharding(setup)))


def _stepper(setup: Setup, batch: Any) -> Callable[[], Any]:
    train_step, state = make_train_step(setup), init_state(setup)

    def step() -> Any:
        nonlocal state
        state, metrics = train_step.run(state, batch)
        jax.block_until_ready(state)
        return metrics

    return step


def _one_of_each(facts: ModelFacts) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer of each kind forward and backward, and arguments: numbers that are none in particular."""
    totals = facts.layer_totals

    def filled(leaf: Any) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.full(leaf.shape, 0.01, leaf.dtype) if is_float else zeros(leaf)

    @jax.jit
    def run(args: Any) -> Any:
        return [jax.grad(total)(*own) for (total, _), own in zip(totals, args, strict=True)]

    return run, jax.tree.map(filled, [shapes for _, shapes in totals])


def _check_num_steps(num_steps: int) -> None:
    require(num_steps > 0, f"num_steps={num_steps}: must be positive; 3 are usual")


def _check_seconds(seconds: Sequence[float], of: str, measure: str) -> None:
    require(
        len(seconds) > 0 and all(0 < value < math.inf for value in seconds),
        f"seconds={tuple(seconds)}: give a time above 0 for every {of}, and below infinity, as {measure} "
        f"does",
    )
