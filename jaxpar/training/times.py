"""Where the time of a run goes, and how much of its devices it uses."""

import collections
import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxpar.base.sheets import peak_flops
from jaxpar.step.setup import Setup


class Times:
    """Seconds of a process since it was made, by what its host did or waited for; each counts once.

    Devices compute while the host goes on: what a step takes is known only where the host waits for it.

      steps: queueing them, and waiting for what they give, at each line of progress; on simulated devices
        after every step
      compiling: the call of a step whose batch has shapes that none had before: it is traced and compiled
      input: reading, checking and placing batches, while devices may compute the steps before
      evaluation: all of it, its input and its compiling too
      checkpoints: copying states, and waiting for a save before to end; else it goes on beside the steps
      other: reports, metrics, and what else is between these
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._seconds = collections.defaultdict[str, float](float)
        self._shapes = set[Any]()

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """What is done within is that; not in another one of these."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - begin

    def of_step(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        """The call of a step: steps, or compiling."""
        shapes = tuple(map(np.shape, jax.tree.leaves(batch)))
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        return self.of("compiling" if is_new else "steps")

    @property
    def seconds(self) -> float:
        """In all."""
        return time.perf_counter() - self._begin

    def parts(self) -> dict[str, float]:
        """By what they were spent on; their sum is all."""
        names = ("steps", "compiling", "input", "evaluation", "checkpoints")
        parts = {name: self._seconds[name] for name in names}
        return {**parts, "other": self.seconds - sum(parts.values())}


class Utilization:
    """The share of the devices' peak that the model's FLOPs are, if that is known (MFU).

    As in PaLM (arXiv:2204.02311, appendix B): the FLOPs of the matrix products of the model's forward and
    backward pass, without what is computed again, over those that the devices could do in that time at their
    best.
    Padding counts; a batch of fewer time steps by its share of the numbers in a full one.
    """

    def __init__(self, setup: Setup):
        self._facts = facts = setup.facts
        dtype = str(jax.tree.leaves(facts.passed)[0].dtype)
        peaks = [peak_flops(device, dtype) for device in setup.mesh.devices.flat]
        self._peak = None if None in peaks else sum(filter(None, peaks))
        self._full = _size(facts.batch)
        self._batches = 0.0

    def add(self, batch: Any) -> None:
        """Counts a batch."""
        if self._peak is not None:
            self._batches += _size(batch) / self._full

    def take(self, seconds: float) -> float | None:
        """The share of the peak in which the batches since the last call took so long; None: unknown."""
        batches, self._batches = self._batches, 0.0
        if self._peak is None:
            return None
        return self._facts.step_flops * batches / (self._peak * seconds)


def _size(batch: Any) -> int:
    return sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(batch))
