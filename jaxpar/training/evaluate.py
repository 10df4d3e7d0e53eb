"""Evaluation: the loss and metrics of a state on a split. On any mesh, every row counts once."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxpar.base.checks import require
from jaxpar.base.parts import LOSS, SPLITS, WEIGHT, check_batches, check_metrics, part_of, starts_of
from jaxpar.base.types import Arrays, Batch
from jaxpar.config import Parallel
from jaxpar.data.batches import Batches, place_batch, windows
from jaxpar.data.order import DrawnBatches
from jaxpar.model.model import Sums
from jaxpar.model.task import Task
from jaxpar.sharding import named_leaves
from jaxpar.step.functions import make_eval_step
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, zero_carry
from jaxpar.step.step import batch_sharding, check_arrays
from jaxpar.training.progress import Evaluation

# From a state and a batch to the state for the next batch, and the sums of this one.
Step = Callable[[TrainState, Batch], tuple[TrainState, Sums]]


def evaluate(
    setup: Setup,
    state: TrainState,
    split: str,
    before_batch: Callable[[], None] = lambda: None,
    step: Step | None = None,
) -> Evaluation:
    """Loss and metrics on a split.

    Args:
      setup: setup that the state was made with.
      state: state with the parameters; it is not changed.
      split: "valid" or "test", or another one that the task knows.
      before_batch: called before each batch; it may raise an error.
      step: computes the sums of a batch, for your own kind of evaluation. None uses `make_eval_step`, and
        carries the recurrent state to the next batch.
    Raises:
      ValueError: its batches differ in size from those of training, or nothing in it counts; or as of
        `check_reported`.
    """
    task = setup.task
    sums = sum_batches(setup, state, task.make_batches(split), before_batch, step)
    fact = f"split {split!r}: its weights must be above 0, got {sums.weight} in all"
    require(bool(sums.weight > 0), f"{fact}\nFix: give weights, or rows that count")
    loss, means = mean_of(sums)
    metrics, baseline = task.metrics(loss, means), task.baseline(split)
    check_reported(task, loss, metrics, baseline)
    return Evaluation(split, loss, metrics, baseline)


def sum_batches(
    setup: Setup,
    state: TrainState,
    batches: Batches,
    before_batch: Callable[[], None] = lambda: None,
    step: Step | None = None,
) -> Sums:
    """The sums of all batches of an epoch, as Python numbers; arguments as of `evaluate`.

    Raises:
      ValueError: batches differ in size from those of training, or the first one continues a recurrent state.
    """
    checked, sums = _Counted(setup, batches), list[Sums]()
    sharding = batch_sharding(setup)
    step = step or _counting(setup)
    for window in windows(batches):
        before_batch()
        batch = place_batch(checked, window, sharding)
        if not window:
            check_begins(batch)
        state, window_sums = step(state, batch)
        sums.append(window_sums)  # they stay on the device
        do_not_run_ahead(setup.mesh, window_sums)
    require(bool(sums), "no batch to evaluate\nFix: give more rows, or smaller batches")
    return jax.tree.map(lambda *parts: math.fsum(map(float, parts)), *jax.device_get(sums))


def check_begins(batch: Batch) -> None:
    """Raises a ValueError if the first batch of an epoch continues a recurrent state."""
    require(
        bool(starts_of(batch)),
        "starts must be True in the first batch; False would continue the recurrent state of training\n"
        "Fix: return starts=True",
    )


def _counting(setup: Setup) -> Step:
    run = make_eval_step(setup).run

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        carry, sums = run(state, batch)
        return dataclasses.replace(state, carry=carry), sums

    return step


def in_batches(setup: Setup, state: TrainState, **sizes: int) -> tuple[Setup, TrainState]:
    """A setup and its state, for batches of other sizes.

    Args:
      sizes: values of the task's fields, such as batch_size=1.
    Raises:
      ValueError: the task has no such field, the model depends on it, or the size does not fit.
    """
    task, parallel = setup.task, setup.parallel
    numbers = [f for f in dataclasses.fields(task) if isinstance(getattr(task, f.name), int)]
    # A task does not need to mark the fields that are free.
    known = [f.name for f in numbers if f.metadata.get("free")] or [f.name for f in numbers]
    for name, size in sizes.items():
        fact = f"{name}={size!r} is not a size of the data of task {task.name}"
        require(name in known, f"{fact}\nFix: use one of {known}")
    if parallel.mesh.stage == 1:  # the size of a batch does not move the layers
        pipeline = dataclasses.replace(parallel.pipeline, num_microbatches=1, num_chunks=1)
        parallel = dataclasses.replace(parallel, pipeline=pipeline)
    before = _shapes(setup)
    setup = setup.cached(_setup_of, dataclasses.replace(task, **sizes), parallel)
    require(
        _shapes(setup) == before,
        f"{sizes} changes the parameters of the model\n"
        f"Fix: use sizes of the data, such as batch_size",
    )
    return setup, dataclasses.replace(state, carry=zero_carry(setup))


def _setup_of(setup: Setup, task: Task, parallel: Parallel) -> Setup:
    return Setup.of(task, parallel, setup.train, setup.mesh)


def _shapes(setup: Setup) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shapes and types of the variables of a setup's model."""
    variables = named_leaves(nnx.state(setup.facts.model))
    return {name: (leaf.shape, leaf.dtype) for name, leaf in variables}


def mean_of(sums: Sums) -> tuple[float, dict[str, float]]:
    """Loss and metrics divided by the weight; if that is 0, the sums."""
    weight = float(sums.weight) or 1.0
    return float(sums.loss) / weight, {k: float(v) / weight for k, v in sums.metrics.items()}


def check_reported(
    task: Task, loss: float, metrics: Mapping[str, float], baseline: Iterable[str] = ()
) -> None:
    """Checks the names and the loss that a task reports.

    Raises:
      ValueError: another number of a run has one of the names, or the loss is another one.
    """
    names = [name for name in metrics if name != LOSS]
    check_metrics([*names, *baseline], task.unit, f"task {task.name}")
    if not np.array_equal(metrics.get(LOSS, loss), loss, equal_nan=True):
        raise ValueError(
            f"metrics of task {task.name} returns {metrics[LOSS]:.6g} as {LOSS!r}, but the loss is "
            f"{loss:.6g}\nFix: use another name for that metric"
        )


class CheckedBatches:
    """The batches of a task; jaxpar and the task check each one before it goes onto a mesh."""

    def __init__(self, setup: Setup, batches: Batches):
        check_batches(batches, setup.task.name)
        self._setup, self._batches = setup, batches
        self.batch_size = batches.batch_size
        _check_edges(setup, getattr(batches, "edges", ()))

    @property
    def num_windows(self) -> int | None:
        """Number of batches in an epoch, if it is known."""
        return self._batches.num_windows

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step.

        Raises:
          ValueError: it has other arrays than the task's, or a value that would give wrong results.
        """
        batch = self._batches.batch(step, rows)
        check_arrays(self._setup.facts, batch)
        self._setup.task.check_batch(batch)
        return batch


class _Counted(CheckedBatches):
    """Batches whose loss is wanted."""

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        batch = super().batch(step, rows)
        check_padding(self._setup, batch)
        return batch


def check_last_batches(setup: Setup) -> None:
    """`check_padding` of the last batch of each evaluation, before a run, where batches have a number."""
    for split in SPLITS[1:] if setup.facts.counts_padding else ():
        batches = setup.task.make_batches(split)
        if isinstance(batches, DrawnBatches):
            check_padding(setup, batches.batch(batches.num_windows - 1))


def check_padding(setup: Setup, batch: Batch) -> None:
    """Checks that rows and steps which only fill a batch do not count in the loss.

    Raises:
      ValueError: the batch has some, and the loss does not depend on its weights or lengths.
    """
    weight = part_of(batch, WEIGHT)
    if weight is None or np.all(weight) or not setup.facts.counts_padding:
        return
    end = setup.facts.ends[1]
    empty = f"{np.sum(weight == 0)} of {np.size(weight)} weights in a batch are 0"
    raise ValueError(
        f"{end} of task {setup.task.name} does not read batch['weight']: {empty}.\n"
        f"These places only fill the batch, but would count in the loss.\n"
        f"Fix: return jaxpar.mean(losses, batch['weight']), or Sums of losses times these weights."
    )


def _check_edges(setup: Setup, edges: Sequence[int]) -> None:
    """Raises a ValueError if lengths of buckets do not fit the task and its chunks of time."""
    name, chunk_len = setup.task.name, setup.partition.chunk_len or 1
    require(
        len(edges) < 2 or setup.task.variable_length,
        f"batches of task {name} have {len(edges)} lengths, of edges={edges}.\n"
        f"Fix: write variable_length = True in the task.",
    )
    bad = [edge for edge in edges if setup.parallel.num_chunks > 1 and edge % chunk_len]
    require(
        not bad,
        f"num_chunks={setup.parallel.num_chunks} makes time chunks of {chunk_len} steps, but batches have "
        f"{bad[:1]}, of edges={edges}.\nFix: use edges that are multiples of {chunk_len}, or num_chunks=1.",
    )


def do_not_run_ahead(mesh: Mesh, outputs: Arrays) -> None:
    """Waits for a step on simulated devices; on other devices the host queues the next step.

    The CPU devices of a process share their threads. With several steps in their queues, XLA can give all
    threads to devices that wait in a collective for one without a thread, and abort.
    """
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(outputs)
