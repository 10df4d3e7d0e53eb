"""One long series of steps in windows, for models that carry their state from window to window.

The series is cut into one contiguous stream for each row of the batch; batch i holds window i of every
stream. Dims: B batch rows, T time steps, W windows of an epoch.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from jaxpar.data.order import DrawnBatches, Places, check_at_least
from jaxpar.data.windows import PADDING, Windows
from jaxpar.fields import require_instance
from jaxpar.parts import RATE, STARTS


class SeriesBatches(DrawnBatches):
    """One long series in windows, for models that carry their state from window to window.

    The series is cut into one contiguous stream for each row of the batch; batch i holds window i of every
    stream. With a seed, for training: every epoch begins at another step, drawn from (seed, epoch), and reads
    the series round from there, so that the windows fall differently each time. All windows are full; what
    does not fill one at the end of a stream is left to other epochs. Where their lengths are drawn, from
    (seed, epoch), an epoch has as many as read the series once in the mean. Without a seed, for evaluation:
    every step counts once, in plain order; the ends of streams are padded with places whose weight is 0, and
    so are rows for which no step is left. There a stream may first read what comes before it, so that its
    state is not an initial one:

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
      windows: how long they are in training, T at most.
    Raises:
      ValueError: a number is out of range, arrays differ in their steps, or the series is too short.
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
        windows: Windows = Windows(),
    ):
        super().__init__(arrays, batch_size, seed)
        check_at_least(1, seq_len=seq_len)
        require_instance("warmup", warmup, int | np.integer, "a whole number")
        if warmup < 0 or (warmup and seed is not None):
            raise ValueError(
                f"warmup={warmup} with seed={seed}: it is 0 in training, whose streams go on from window to "
                f"window, and 0 or more without a seed"
            )
        num_steps = self.length - self.lookahead
        needed, ways = warmup + 1, {}
        if seed is not None:
            needed = batch_size * seq_len
            ways = {"batch_size": num_steps // seq_len, "seq_len": num_steps // batch_size}
        if num_steps < needed:
            remedies = [f"{name}={size} or less" for name, size in ways.items() if size > 0]
            more = f", warmup={warmup}" * bool(warmup)
            raise ValueError(
                f"{self.length} {self.unit} are too few for batch_size={batch_size}, seq_len={seq_len}"
                f"{more}, which need {needed + self.lookahead}; use "
                f"{', '.join([*remedies, f'more {self.unit}'])}"
            )
        self.seq_len, self.warmup, self.windows = seq_len, warmup, windows
        # Stream b has the steps from bounds[b] to bounds[b + 1]; lengths differ by one at most.
        self._bounds = warmup + np.arange(batch_size + 1) * (num_steps - warmup) // batch_size
        if seed is None:
            longest = math.ceil((num_steps - warmup) / batch_size)
            self.num_windows = math.ceil((warmup + longest) / seq_len)
        else:
            self.num_windows = max(int(num_steps // batch_size / windows.expected(seq_len)), 1)

    def draw(self, epoch: int) -> tuple[int, np.ndarray]:
        """The place of its first step, and where each of its windows ends in a stream."""
        if self.seed is None:
            return 0, self.seq_len * np.arange(1, self.num_windows + 1)
        first = int(self.rng(epoch).integers(self.length))
        lengths_W = self.windows.draw(self.rng(epoch, 1), self.num_windows, self.seq_len)
        return first, np.cumsum(lengths_W)

    def window(self, drawn: tuple[int, np.ndarray], window: int, rows: slice) -> Places:
        """The same steps of every stream."""
        first, ends_W = drawn
        length = int(ends_W[window] - (ends_W[window - 1] if window else 0))
        steps_T = np.arange(self.seq_len) - self.seq_len
        times_T = ends_W[window] + steps_T - self.warmup
        at_BT = self._bounds[:-1][rows, None] + times_T
        inside_BT = np.broadcast_to(steps_T >= -length, at_BT.shape)
        if self.seed is None:
            inside_BT = (times_T >= 0) & (at_BT < self._bounds[1:][rows, None])
        marks = {STARTS: window == 0}
        if self.windows.mean:
            marks |= {PADDING: self.seq_len - length, RATE: length / self.windows.mean}
        return Places((at_BT + first) % self.length, inside_BT, marks)
