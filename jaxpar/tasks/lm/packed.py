"""Batches of sentences packed into rows, several to a row; long ones continue in the next window."""

import numpy as np

from jaxpar.packing import Packing
from jaxpar.tasks.lm.buckets import Sentences
from jaxpar.tasks.lm.streams import IGNORE, Batch


class PackedSentences:
    """The batches of sentences, each read from the initial state; see `packing.Packing`.

    Args:
      sentences: from `Sentences.split` or `Sentences.join`.
      batch_size: B, over all processes.
      seq_len: T, the steps of a window.
      seed: None for evaluation.

    Attributes:
      packing: where they lie.
      num_windows: batches in an epoch.

    Raises:
      ValueError: a number is out of range, or no sentence has a target.
    """

    def __init__(
        self, sentences: Sentences, batch_size: int, seq_len: int, seed: int | None = None
    ) -> None:
        self.sentences, self.batch_size = sentences, batch_size
        self.packing = Packing(sentences.starts_S, sentences.lengths_S, batch_size, seq_len, seed)
        self.num_windows = self.packing.num_windows

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked.

        Raises:
          ValueError: step is negative.
        """
        at, tokens = self.packing.places(step, rows), self.sentences.tokens
        return Batch(
            inputs_BT=np.where(at.inside_BT, tokens[at.place_BT], 0).astype(np.int32),
            targets_BT=np.where(at.inside_BT, tokens[at.place_BT + 1], IGNORE).astype(np.int32),
            starts=at.starts,
            resets=at.resets_BT,
        )

    def to_text(self) -> str:
        """How many sentences in how many batches, and how many positions are padding."""
        return self.packing.to_text()
