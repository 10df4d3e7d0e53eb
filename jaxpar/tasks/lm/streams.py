"""Batches of a text, for language models that carry their state from window to window.

The text is cut into one contiguous stream for each row of the batch; batch i holds window i of
every stream. With 13 tokens a..m, batch_size=2, seq_len=3 (evaluation):

    tokens   a b c d e f g h i j k l m
    row 0    a b c|d e f             inputs; the targets are b c d|e f g
    row 1                g h i|j k l         the targets are h i j|k l m

Nothing is kept between batches: `batch(step)` is a function of the seed and the step, so a resumed
run continues with the batch that it would have had, and every process reads only its own rows.

Dims: B batch rows, T time steps.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxpar.data.order import Order
from jaxpar.data.streams import Streams

IGNORE = -1  # a target that counts in no loss


class Batch(NamedTuple):
    """One step's window of every stream.

    Attributes:
      inputs_BT: int32.
      targets_BT: int32, the tokens that follow the inputs; `IGNORE` where there is none.
      starts: this is the first window of an epoch, and carried state must be reset.
      resets: bool [B, T], where a line begins, from the initial state; None if none does within the text.
    """

    inputs_BT: np.ndarray | jax.Array
    targets_BT: np.ndarray | jax.Array
    starts: bool
    resets: np.ndarray | jax.Array | None = None


class TextReader(Order):
    """Batches of a text.

    Attributes:
      tokens: integers [tokens].
    """

    tokens: np.ndarray

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked.

        Raises:
          ValueError: step is negative.
        """
        at_BT, inside_BT, marks = self.places(step, rows)
        inputs_BT, after_BT = self.tokens[at_BT], self.tokens[(at_BT + 1) % len(self.tokens)]
        return Batch(
            inputs_BT=np.where(inside_BT, inputs_BT, 0).astype(np.int32),
            targets_BT=np.where(inside_BT, after_BT, IGNORE).astype(np.int32),
            **marks,
        )


class TokenStreams(TextReader, Streams):
    """The batches of a text as one long stream.

    It is read as a series of all tokens but the last, which is only a target; see `data.streams.Streams`. In
    evaluation every token but the first of the text is a target exactly once, whatever the batch size; ends
    are padded with `IGNORE`, and so are rows for which the text has no token left.

    Args:
      tokens: integers [tokens], 0 or more; may be a memory map, batches read what they need.
      batch_size: B, the number of streams, over all processes.
      seq_len: T, the steps of a window.
      seed: None for evaluation.
    Raises:
      ValueError: a number is out of range, or the text is too short for them.
    """

    lookahead = 1
    too_short = "{} tokens are too few", "a longer text"

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        seq_len: int,
        seed: int | None = None,
    ) -> None:
        self.tokens = np.asarray(tokens)
        check_text(self.tokens)
        if seed is None and len(self.tokens) < 2:
            raise ValueError(f"{len(self.tokens)} tokens have no target; give a text of 2 or more")
        super().__init__(len(self.tokens), batch_size, seq_len, seed)

    @property
    def num_targets(self) -> int:
        """Targets in an epoch that are not `IGNORE`."""
        if self.seed is None:
            return len(self.tokens) - 1
        return self.num_windows * self.batch_size * self.seq_len


def check_text(tokens: np.ndarray) -> None:
    """Nothing, if the tokens are integers in one dim, all of them 0 or more.

    Raises:
      ValueError: says what they are, or names the first that is negative.
    """
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"tokens of shape {tokens.shape} and type {tokens.dtype} are not text; "
            f"give integers in one dim"
        )
    if tokens.size and tokens.min() < 0:
        position = int(np.argmax(tokens < 0))
        raise ValueError(
            f"token {tokens[position]} at position {position} is negative and would be ignored "
            f"as a target; encode the text with a vocabulary"
        )
