"""Measures the time of functions that run on devices."""

import time
from collections.abc import Callable

import jax

from jaxpar.base.types import Arrays


def seconds_of(run: Callable[[], Arrays], times: int = 1) -> float:
    """Seconds of a call, until its results are there; of several calls in a row, of one of them.

    Args:
      run: returns arrays of its own. One that gives its results away, such as a step that donates its
        state, waits for them itself.
      times: calls that are put into the devices' queues one after the other.
    """
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(times)])
    return (time.perf_counter() - start) / times
