"""Seconds of functions that run on devices: every clock over a compiled program is one of these.

What disturbs a machine only ever adds; what is compared takes turns, so that a disturbance meets all of it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def seconds_of(run: Callable[[], Any], times: int = 1) -> float:
    """Seconds of a call, until its results are there; of several calls in a row, of one of them.

    Args:
      run: returns arrays of its own. One that gives its results away, such as a step that donates its
        state, waits for them itself.
      times: calls that are put into the devices' queues one after the other.
    """
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(times)])
    return (time.perf_counter() - start) / times


def take_turns(
    runs: Sequence[Callable[[], Any]], num_rounds: int, *, times: int = 1
) -> list[list[float]]:
    """Seconds of a call of each function in every round, [functions][rounds], after one that compiles.

    Args:
      runs, times: as of `seconds_of`; functions take turns.
    """
    for run in runs:
        seconds_of(run)
    rounds = [[seconds_of(run, times) for run in runs] for _ in range(num_rounds)]
    return [list(column) for column in zip(*rounds, strict=True)]
