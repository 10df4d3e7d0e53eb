"""Functions timed in turns, so that what disturbs a machine for a while disturbs all of them."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpar.base.timing import seconds_of


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
