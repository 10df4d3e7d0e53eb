"""One long series of steps in windows, for models that carry their state from window to window.

The series is cut into one contiguous stream for each row of the batch; batch i holds window i of every
stream. Dims: B batch rows, T time steps.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from jaxpar.base.checks import require, require_instance
from jaxpar.base.parts import LENGTHS, STARTS
from jaxpar.data.order import BatchIndices, DrawnBatches, check_at_least


class SeriesBatches(DrawnBatches):
    """Batches of windows from one long series, for models that carry state from window to window.

    The series is cut into one contiguous stream for each row of the batch; batch i holds window i of every
    stream. With a seed, for training: every epoch begins at another step, drawn from (seed, epoch), and reads
    the series round from there, so that the windows fall differently each time. All windows are full; what
    does not fill one at the end of a stream is left to other epochs. Without a seed, for evaluation: every
    step counts once, in plain order; the ends of streams are padded with steps whose weight is 0, and so are
    rows for which no step is left. There a stream may first read what comes before it, so that its state is
    not an initial one:

        warmup=2, batch_size=2     a b c d e f g h
        row 0                      - - c d e
        row 1                            - - f g h      -: its weight is 0

    Args:
      arrays: [steps, ...] each, such as inputs and targets of every step.
      batch_size: B, the number of streams.
      seq_len: T, the steps of a window.
      seed: None for evaluation.
      warmup: steps that each stream of an evaluation reads first; the first so many of the series are for
        that alone.
    Raises:
      ValueError: a number is out of range, arrays differ in their steps, or the series is too short.

    Example:
      wave = np.sin(np.arange(1001) / 5).astype(np.float32)
      batches = jaxpar.SeriesBatches({"x": wave[:-1], "y": wave[1:]}, batch_size=4, seq_len=25, seed=0)
    """

    unit: ClassVar[str] = "steps"

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        batch_size: int,
        seq_len: int,
        seed: int | None = None,
        *,
        warmup: int = 0,
    ):
        super().__init__(arrays, batch_size, seed)
        check_at_least(1, seq_len=seq_len)
        require_instance("warmup", warmup, int | np.integer, "a whole number")
        fact = f"warmup={warmup} with seed={seed}."
        is_valid = warmup == 0 or (warmup > 0 and seed is None)
        require(is_valid, f"{fact}\nFix: use 0 in training, and 0 or more without a seed.")
        num_steps = self.length - self.lookahead
        needed = warmup + 1 if seed is None else batch_size * seq_len
        require(
            num_steps >= needed,
            f"{self.length} {self.unit} are fewer than the {needed + self.lookahead} that "
            f"batch_size={batch_size}, seq_len={seq_len} and warmup={warmup} need.\n"
            f"Fix: use smaller ones, or more {self.unit}.",
        )
        self.seq_len, self.warmup = seq_len, warmup
        # Stream b has the steps from bounds[b] to bounds[b + 1]; lengths differ by one at most.
        self._bounds = warmup + np.arange(batch_size + 1) * (num_steps - warmup) // batch_size
        if seed is None:
            longest = math.ceil((num_steps - warmup) / batch_size)
            self.num_windows = math.ceil((warmup + longest) / seq_len)
        else:
            self.num_windows = num_steps // batch_size // seq_len

    def draw(self, epoch: int) -> int:
        """The index of its first step."""
        return 0 if self.seed is None else int(self.rng(epoch).integers(self.length))

    def window(self, drawn: int, window: int, rows: slice) -> BatchIndices:
        """The same steps of every stream."""
        times_T = window * self.seq_len + np.arange(self.seq_len) - self.warmup
        at_BT = self._bounds[:-1][rows, None] + times_T
        is_real_BT = inside_BT = np.ones(at_BT.shape, bool)
        if self.seed is None:
            is_real_BT = at_BT < self._bounds[1:][rows, None]
            inside_BT = is_real_BT & (times_T >= 0)
        lengths_B = np.count_nonzero(is_real_BT, axis=1).astype(np.int32)
        marks = {STARTS: window == 0, LENGTHS: lengths_B}
        return BatchIndices((at_BT + drawn) % self.length, inside_BT, marks)
