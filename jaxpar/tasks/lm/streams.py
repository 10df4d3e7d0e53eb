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

import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.batches import check_at_least, place_of
from jaxpar.tasks.lm.windows import Windows

IGNORE = -1  # a target that counts in no loss


class Batch(NamedTuple):
    """One step's window of every stream.

    Attributes:
      inputs_BT: int32.
      targets_BT: int32, the tokens that follow the inputs; `IGNORE` where there is none.
      starts: this is the first window of an epoch, and carried state must be reset.
      resets: bool [B, T], where a line begins, from the initial state; None if none does within the text.
      padding: steps before the text of a window that begins late; None if none does.
      rate: what the learning rate is multiplied by; None is 1.
    """

    inputs_BT: np.ndarray | jax.Array
    targets_BT: np.ndarray | jax.Array
    starts: bool
    resets: np.ndarray | jax.Array | None = None
    padding: int | None = None
    rate: float | None = None


class TokenStreams:
    """The batches of a text.

    With a seed, for training: every epoch begins at another token, drawn from (seed, epoch), and
    reads the text round from there, so that the windows fall differently each time. All windows
    are full; what does not fill one at the end of a stream is left to other epochs. Where their lengths are
    drawn, from (seed, epoch), an epoch has as many as read the text once in the mean.

    Without a seed, for evaluation: plain order, and every token but the first of the text is a
    target exactly once, whatever the batch size. Ends are padded with `IGNORE`, and so are rows for
    which the text has no token left.

    Args:
      tokens: integers [tokens], 0 or more; may be a memory map, batches read what they need.
      batch_size: B, the number of streams, over all processes.
      seq_len: T, the steps of a window.
      seed: None for evaluation.
      windows: how long they are, T at most; in evaluation all have T steps.

    Raises:
      ValueError: a number is out of range, or the text is too short for them.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        seq_len: int,
        seed: int | None = None,
        windows: Windows = Windows(),
    ) -> None:
        tokens = np.asarray(tokens)
        check_at_least(1, batch_size=batch_size, seq_len=seq_len)
        check_at_least(0, seed=0 if seed is None else seed)
        check_text(tokens)
        num_targets = len(tokens) - 1
        if num_targets < (1 if seed is None else batch_size * seq_len):
            raise ValueError(_too_short(num_targets + 1, batch_size, seq_len, seed))
        self.tokens, self.batch_size, self.seq_len, self.seed = tokens, batch_size, seq_len, seed
        self.windows = windows
        # Stream b holds the inputs from bounds[b] to bounds[b + 1]; lengths differ by one at most.
        self._bounds = np.arange(batch_size + 1) * num_targets // batch_size
        self._epoch = functools.lru_cache(maxsize=2)(self._draw_epoch)

    @property
    def num_windows(self) -> int:
        """Batches in an epoch."""
        longest = math.ceil((len(self.tokens) - 1) / self.batch_size)
        if self.seed is None:
            return math.ceil(longest / self.seq_len)
        steps = (len(self.tokens) - 1) // self.batch_size
        return max(int(steps / self.windows.expected(self.seq_len)), 1)

    @property
    def num_targets(self) -> int:
        """Targets in an epoch that are not `IGNORE`; in the mean of them, where lengths are drawn."""
        if self.seed is None:
            return len(self.tokens) - 1
        return int(self.num_windows * self.batch_size * self.windows.expected(self.seq_len))

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked.

        Returns:
          inputs and targets of shape [rows, seq_len].

        Raises:
          ValueError: step is negative.
        """
        epoch, window = place_of(step, self.num_windows)
        first, ends_W = self._epoch(epoch)
        length = int(ends_W[window] - (ends_W[window - 1] if window else 0))
        padding = self.seq_len - length
        times = ends_W[window] - self.seq_len + np.arange(self.seq_len)
        places_BT = self._bounds[:-1][rows, None] + times
        inside_BT = np.broadcast_to(np.arange(self.seq_len) >= padding, places_BT.shape)
        if self.seed is None:
            inside_BT = inside_BT & (places_BT < self._bounds[1:][rows, None])
        places_BT += first
        inputs_BT = self.tokens[places_BT % len(self.tokens)]
        targets_BT = self.tokens[(places_BT + 1) % len(self.tokens)]
        return Batch(
            inputs_BT=np.where(inside_BT, inputs_BT, 0).astype(np.int32),
            targets_BT=np.where(inside_BT, targets_BT, IGNORE).astype(np.int32),
            starts=window == 0,
            padding=padding if self.windows.mean else None,
            rate=self.windows.rate(length) if self.windows.mean else None,
        )

    def _draw_epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """The place of its first token, and where each of its windows ends in a stream."""
        if self.seed is None:
            return 0, self.seq_len * np.arange(1, self.num_windows + 1)
        first = int(np.random.default_rng([self.seed, epoch]).integers(len(self.tokens)))
        rng = np.random.default_rng([self.seed, epoch, 1])
        return first, np.cumsum(self.windows.draw(rng, self.num_windows, self.seq_len))


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


def _too_short(num_tokens: int, batch_size: int, seq_len: int, seed: int | None) -> str:
    if seed is None:
        return f"{num_tokens} tokens have no target; give a text of 2 or more"
    fits = {
        "batch_size": (num_tokens - 1) // seq_len,
        "seq_len": (num_tokens - 1) // batch_size,
    }
    ways = [f"{name}={most} or less" for name, most in fits.items() if most > 0]
    return (
        f"{num_tokens} tokens are too few for batch_size={batch_size}, seq_len={seq_len}, which need "
        f"{batch_size * seq_len + 1}; use {', '.join([*ways, 'a longer text'])}"
    )
