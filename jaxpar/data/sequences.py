"""Sequences of any length among the steps of arrays. Dims: S sequences."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxpar.base.checks import require
from jaxpar.data.order import DrawnBatches, require_unmasked


class SequenceBatches(DrawnBatches):
    """Batches of sequences.

    Attributes:
      starts_S: the place of each sequence's first step.
      lengths_S: its steps; what has none is in no batch.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        seed: int | None,
        starts: Sequence[int] | np.ndarray | None,
    ):
        """Takes them; see `PackedBatches`.

        Raises:
          ValueError: a number is out of range, no sequence has a step, or one does not lie within the arrays.
        """
        super().__init__(arrays, batch_size, seed)
        self.lengths_S = lengths_S = check_lengths(lengths)
        if starts is None:
            starts = np.cumsum(lengths_S) - lengths_S
            total = (
                f"arrays of {self.length} steps for sequences of {lengths_S.sum()} steps in total"
            )
            require(
                lengths_S.sum() == self.length, f"{total}.\nFix: give lengths that add up to it."
            )
        require_unmasked("starts", starts)
        self.starts_S = starts_S = np.asarray(starts)
        fact = f"{len(starts_S)} starts for {len(lengths_S)} lengths."
        require(len(starts_S) == len(lengths_S), f"{fact}\nFix: give one start for each length.")
        ends_S = starts_S + lengths_S + self.lookahead
        outside_S = (lengths_S > 0) & ((starts_S < 0) | (ends_S > self.length))
        if outside_S.any():
            which = int(np.argmax(outside_S))
            raise ValueError(
                f"sequence {which} of {lengths_S[which]} steps begins at step {starts_S[which]} of "
                f"{self.length}.\nFix: give starts and lengths within the arrays."
            )

    def to_text(self) -> str:
        """How many sequences in how many batches, and how much is padding."""
        raise NotImplementedError


def check_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """The steps of each sequence, integers [S].

    Raises:
      ValueError: they are no whole numbers, one is negative, or all are 0.
    """
    require_unmasked("lengths", lengths)
    lengths_S = np.asarray(lengths)
    fact = f"lengths of shape {lengths_S.shape} and type {lengths_S.dtype}."
    is_valid = lengths_S.ndim == 1 and np.issubdtype(lengths_S.dtype, np.integer)
    require(is_valid, f"{fact}\nFix: give one whole number for each sequence.")
    nothing = f"none of {len(lengths_S)} sequences has a step.\nFix: give one of 1 step or more."
    require(bool(lengths_S.any()), nothing)
    require(lengths_S.min() >= 0, f"a length of {lengths_S.min()}.\nFix: give 0 or more.")
    return lengths_S.astype(np.int64)
