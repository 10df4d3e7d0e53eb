"""Rows of arrays in batches. Dims: N rows in all, B batch rows."""

from collections.abc import Mapping

import numpy as np

from jaxpar.base.checks import require
from jaxpar.data.order import BatchIndices, DrawnBatches
from jaxpar.data.shuffle import Shuffle

HELD = 2**22  # rows whose order is drawn at once and held: 32 MiB


class ArrayBatches(DrawnBatches):
    """Batches of rows from arrays in memory. Each row is a whole example or sequence.

    With a seed, for training: every epoch has a different order, drawn from (seed, epoch), and all batches
    are full; rows that do not fill one are left to other epochs. Without a seed, for evaluation: plain order,
    every row once, the last batch padded with copies of row 0 whose weight is 0.

    Args:
      arrays: [N, ...] each, and those without time in a dict, `static`. A `weight` [N] or [N, T] of yours
        multiplies that of the batch.
      batch_size: B.
      seed: None for evaluation.
    Raises:
      ValueError: a number is out of range, arrays differ in their rows, or there are too few of them.

    Example:
      def make_batches(split, seed):
        return jaxpar.ArrayBatches({"x": x, "y": y}, batch_size=16, seed=seed)

      task = jaxpar.adopt(Net, loss, batches=make_batches)
    """

    index_dims = 1

    def __init__(self, arrays: Mapping[str, np.ndarray], batch_size: int, seed: int | None = None):
        super().__init__(arrays, batch_size, seed)
        fact = f"batch_size={batch_size} is more than the {self.length} rows."
        is_valid = seed is None or batch_size <= self.length
        require(is_valid, f"{fact}\nFix: use {self.length} or less.")
        whole, rest = divmod(self.length, batch_size)
        self.num_windows = whole + (seed is None and rest > 0)

    def draw(self, epoch: int) -> np.ndarray | Shuffle | None:
        """The rows in their order, which of many rows is not held; None if it is plain."""
        if self.seed is None:
            return None
        rng = self.rng(epoch)
        return rng.permutation(self.length) if self.length <= HELD else Shuffle(self.length, rng)

    def window(self, drawn: np.ndarray | Shuffle | None, window: int, rows: slice) -> BatchIndices:
        """The next B of them."""
        at_B = np.arange(window * self.batch_size, (window + 1) * self.batch_size)[rows]
        there_B = at_B < self.length
        at_B = np.where(there_B, at_B, 0)
        return BatchIndices(at_B if drawn is None else drawn[at_B], there_B, {})
