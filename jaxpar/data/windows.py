"""Windows of random lengths of a series (Merity et al. 2017, arXiv:1708.02182): options, without NumPy."""

import dataclasses
from typing import TYPE_CHECKING

from jaxpar.fields import check_fields, require, require_not_negative, require_rate

if TYPE_CHECKING:
    import numpy as np

LEAST = 5  # steps of a window
PADDING = (
    "padding"  # the part of a batch that says how many steps of the window are before its data
)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Lengths of the windows of training; the learning rate of a step is multiplied by length / mean.

    All windows of a run are arrays of one length, the longest: one program. Shorter ones begin late:

        step of the window   0 1 2 3 4 5 6 7
        steps of the series      d e f g h i     padding=2: before them nothing counts

    Attributes:
      mean: of the normal distribution that lengths are drawn from, in steps; with 0 all are `seq_len` steps
        long. Lengths are from 5 to `seq_len`.
      spread: its standard deviation.
      short: the share of windows for which half the mean is taken.
    """

    mean: int = 0
    spread: float = 5.0
    short: float = 0.05

    def __post_init__(self):
        check_fields(self)
        require(
            self.mean == 0 or self.mean >= LEAST,
            f"mean={self.mean}: windows have {LEAST} steps or more; use {LEAST}, or 0 for one length",
        )
        require_not_negative(self, "spread")
        require_rate(self, "short")

    def expected(self, seq_len: int) -> float:
        """The mean length, ignoring what is cut off at the ends."""
        return self.mean * (1 - self.short / 2) if self.mean else seq_len

    def draw(self, rng: "np.random.Generator", count: int, seq_len: int) -> "np.ndarray":
        """The lengths of `count` windows, integers [count]."""
        import numpy as np

        if not self.mean:
            return np.full(count, seq_len)
        means = np.where(rng.random(count) < self.short, self.mean / 2, self.mean)
        lengths = rng.normal(means, self.spread).astype(np.int64)
        return np.clip(lengths, LEAST, seq_len)
