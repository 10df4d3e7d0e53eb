"""Times steps side by side, and proposes shares of a batch from the times."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxpar.base.checks import require
from jaxpar.base.timing import seconds_of
from jaxpar.base.types import Batch
from jaxpar.data.batches import Batches, place_batch
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding

_MOST_PARTS = 8  # of a batch, that a group takes: each is a microbatch of its own


def time_steps(setups: Sequence[Setup], num_rounds: int, num_steps: int = 3) -> list[list[float]]:
    """Seconds of a training step of each setup in each round, on the state and batches of a run.

    Setups take turns, so that what slows the machine for a while slows all of them. Only one has a state at a
    time: what fits alone can be timed.

    Args:
      num_steps: in a row of each, after one that is not counted; the quickest counts, since disturbances only
        add time.

    Example:
      setup = jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), quiet=True).setup
      [[seconds]] = jaxpar.planning.time_steps([setup], num_rounds=1)
    """
    rounds = [[_seconds_of_step(s, n, num_steps) for s in setups] for n in range(num_rounds)]
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


def _seconds_of_step(setup: Setup, number: int, num_steps: int) -> float:
    train_step, state = setup.train_step(), setup.init_state()
    batch = batch_of_run(setup, number)

    def step() -> None:
        nonlocal state
        state, _ = train_step.run(state, batch)
        jax.block_until_ready(state)

    step()
    return min(seconds_of(step) for _ in range(num_steps))


def batch_of_run(setup: Setup, step: int) -> Batch:
    """The batch that a run would have in a step."""
    # Data are read once, not in every round.
    batches = setup.cached(_batches_of_run, setup.train.seed)
    return place_batch(batches, step, batch_sharding(setup))


def _batches_of_run(setup: Setup, seed: int) -> Batches:
    return setup.task.make_batches("train", seed)


def propose_shares(seconds: Sequence[float]) -> tuple[int, ...]:
    """Proposes shares of the batch: one integer per group, at most 8, so that all groups finish together.

    Args:
      seconds: what each data-parallel group needs for the same work.
    Raises:
      ValueError: `seconds` is empty, or has a value that is not positive and finite.

    Example:
      print(jaxpar.planning.propose_shares([1.0, 3.0]))  # (3, 1)
    """
    fact = f"seconds={tuple(seconds)}: every group needs a time above 0 and below infinity"
    is_valid = len(seconds) > 0 and all(0 < value < math.inf for value in seconds)
    require(is_valid, f"{fact}\nFix: give what jaxpar.planning.time_steps measures.")
    times = np.asarray(seconds, np.float64)

    def wasted(shares: np.ndarray) -> float:
        """Fraction of the groups' time that they spend waiting for the slowest."""
        ends = shares * (times / times.max())
        return 1 - float(ends.mean() / ends.max())

    parts = times.min() / times * np.arange(1, _MOST_PARTS + 1)[:, None]
    candidates = np.maximum(np.rint(parts), 1).astype(int)
    return tuple(min(candidates, key=lambda shares: round(wasted(shares), 3)).tolist())
