"""Batches of a text, with the next token as the target of each.

As one stream, with 13 tokens a..m, batch_size=2, seq_len=3 (evaluation):

    tokens   a b c d e f g h i j k l m
    row 0    a b c|d e f             inputs; the targets are b c d|e f g
    row 1                g h i|j k l         the targets are h i j|k l m

By lines, a line begins with the separator before it, from which its first word is predicted, and ends with
its own. In buckets of 3 and 5 steps (`_` is padding):

    text               a b . c d e f . g . h i . j k l .
    bucket of 3 steps  a b _ | . g _            inputs; the targets are b . _ | g . _
                       _ _ _ | . h i                                    _ _ _ | h i .
    bucket of 5 steps  . c d e f                                        c d e f .
                       . j k l _                                        j k l . _

Dims: S lines, B batch rows, T time steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxpar.base.parts import STARTS
from jaxpar.data.bucketed import BucketedBatches
from jaxpar.data.order import BatchIndices, DrawnBatches, require_unmasked
from jaxpar.data.packed import PackedBatches
from jaxpar.data.streams import SeriesBatches
from jaxpar.lm.vocabulary import check_tokens

if TYPE_CHECKING:
    from jaxpar.lm.drawing import Draw

TOKENS = "tokens"
IGNORE = -1
"""A target that counts in no loss.

Example:
  targets = np.array([[3, 7, jaxpar.lm.IGNORE]])  # the last one counts in no loss
"""


class Batch(NamedTuple):
    """One step's window of every stream.

    Attributes:
      inputs_BT: int32.
      targets_BT: int32, the tokens that follow the inputs; `IGNORE` where there is none.
      starts: this is the first window of an epoch, and carried state must be reset.
      resets: bool [B, T], where a line begins, from the initial state; None if none does within the text.
      draw: how tokens are drawn that follow the inputs, where they are; see `drawing`.
      lengths: int32 [B], how many steps of each row are not padding; None if the text is one long stream.

    Example:
      tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
      batch = jaxpar.lm.Batch(tokens, tokens + 1, starts=True)
    """

    inputs_BT: np.ndarray | jax.Array
    targets_BT: np.ndarray | jax.Array
    starts: bool
    resets: np.ndarray | jax.Array | None = None
    draw: Draw | None = None
    lengths: np.ndarray | jax.Array | None = None


class TextBatches(DrawnBatches):
    """Batches of a text: `arrays` are its tokens."""

    lookahead = 1

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked.

        Raises:
          ValueError: step is negative.
        """
        at_BT, inside_BT, marks = self.indices(step, rows)
        tokens = self.arrays[TOKENS]
        inputs_BT, after_BT = tokens[at_BT], tokens[(at_BT + 1) % self.length]
        return Batch(
            inputs_BT=np.where(inside_BT, inputs_BT, 0).astype(np.int32),
            targets_BT=np.where(inside_BT, after_BT, IGNORE).astype(np.int32),
            **marks,
        )


class TokenStreams(TextBatches, SeriesBatches):
    """The batches of a text as one long stream.

    It is read as a series of all tokens but the last, which is only a target; see `SeriesBatches`. In
    evaluation every token but the first of the text is a target exactly once, whatever the batch size; ends
    are padded with `IGNORE`, and so are rows for which the text has no token left.

    Args:
      tokens: integers [tokens], 0 or more; may be a memory map.
      batch_size: B, the number of streams, over all processes.
      seq_len: T, the steps of a window.
      seed: None for evaluation.
    Raises:
      ValueError: a number is out of range, or the text is too short for them.

    Example:
      batches = jaxpar.lm.TokenStreams(np.arange(200) % 10, batch_size=4, seq_len=8, seed=0)
    """

    unit = "tokens"

    def __init__(
        self, tokens: np.ndarray, batch_size: int, seq_len: int, seed: int | None = None
    ) -> None:
        tokens = check_text(tokens)
        super().__init__({TOKENS: tokens}, batch_size, seq_len, seed)

    def window(self, drawn: int, window: int, rows: slice) -> BatchIndices:
        """As of `SeriesBatches`, without `lengths`: a stream of text is predicted from what came before."""
        indices = super().window(drawn, window, rows)
        return indices._replace(marks={STARTS: indices.marks[STARTS]})


class PackedText(TextBatches, PackedBatches):
    """The lines of a text, each read from the initial state, packed into rows; see `line_places`."""


class BucketedText(TextBatches, BucketedBatches):
    """The lines of a text in buckets of similar lengths; see `line_places`.

    A piece of a line that is cut begins with the last token of the one before: no target is lost.
    """


def check_batch(batch: Batch, num_words: int) -> None:
    """Nothing, if all inputs are ids of words, and all targets are, or `IGNORE`.

    Raises:
      ValueError: names the first that is not.
    """
    inputs, targets = np.asarray(batch.inputs_BT), np.asarray(batch.targets_BT)
    check_tokens(inputs, num_words, "inputs")
    check_tokens(np.where(targets == IGNORE, 0, targets), num_words, "targets")


def line_places(tokens: np.ndarray, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the lines of a text begin, and their steps. Every token but the first is a target exactly once.

    A line begins with the separator before it and ends with its own; neighbours share it. It has one step
    fewer than tokens, since the last is only a target.

    Args:
      tokens: integers [tokens], 0 or more; may be a memory map.
      separator: the token that ends a line, e.g. the id of `<eos>`.
    Returns:
      integers [S] and [S].
    Raises:
      ValueError: the tokens are not token ids, or the separator is not among them.
    """
    tokens = check_text(tokens)
    separators = np.flatnonzero(tokens == separator)
    if not separators.size:
        fact = f"separator={separator} is not one of the {len(tokens)} tokens."
        raise ValueError(f"{fact}\nFix: give the token that ends a line, such as the id of <eos>.")
    bounds = np.unique(np.concatenate([[0], separators, [len(tokens) - 1]]))
    return bounds[:-1], np.diff(bounds)


def check_text(tokens: np.ndarray) -> np.ndarray:
    """The tokens, if they are integers in one dim, all of them 0 or more.

    Raises:
      ValueError: says what they are, or names the first that is negative.
    """
    require_unmasked("tokens", tokens)
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        fact = f"tokens of shape {tokens.shape} and type {tokens.dtype} are not text."
        raise ValueError(f"{fact}\nFix: give integers in one dim.")
    if tokens.size and tokens.min() < 0:
        position = int(np.argmax(tokens < 0))
        fact = f"token {tokens[position]} at position {position} is negative."
        raise ValueError(f"{fact}\nFix: encode the text with a vocabulary.")
    return tokens
