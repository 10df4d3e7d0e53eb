"""Sequences of similar length together in a batch, so that little is padding.

Each bucket pads its sequences to its own length, its edge. Buckets of 3 and 5 steps, batches of 2 rows
(evaluation; `_` is padding):

    sequences          a b|c d e f g|h i|j k l|m n o p
    bucket of 3 steps  a b _ | h i _
                       _ _ _ | j k l
    bucket of 5 steps  c d e f g
                       m n o p _

Chunks of time need edges that are multiples of a chunk, the longest edge / num_chunks. A task with such
batches says `variable_length = True`.

Dims: S sequences, P pieces of sequences, B batch rows, T time steps, N batches of an epoch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.base.checks import check_divides, require
from jaxpar.base.parts import LENGTHS, STARTS, STATIC
from jaxpar.data.order import BatchIndices, check_at_least, checked_arrays, map_arrays
from jaxpar.data.sequences import SequenceBatches, check_lengths


def choose_edges(
    lengths_S: np.ndarray, num_buckets: int, multiple: int, max_len: int, batch_size: int = 1
) -> tuple[int, ...]:
    """The edges with the least padding, in the sequences and in the rows that no sequence fills.

    By dynamic programming over the histogram of lengths: the best k buckets for the sequences up to
    a length are the best k - 1 up to some smaller length, and one more bucket for the rest.

    Args:
      lengths_S: time steps of each sequence; what is longer than max_len counts as its pieces.
      num_buckets: the most edges; fewer come back if more would not help.
      multiple: of which every edge is one, e.g. `seq_len // num_chunks` of a pipeline.
      max_len: the longest edge allowed.
      batch_size: B of the batches, over all processes. A bucket's last batch costs its missing rows
        too, so big batches of few sequences call for few buckets; 1 ignores this.

    Returns:
      increasing edges; the last is max_len, or what the longest sequence needs if that is less.

    Raises:
      ValueError: a number is out of range, or no sequence has a step.
    """
    check_at_least(1, num_buckets=num_buckets, multiple=multiple)
    check_at_least(1, max_len=max_len, batch_size=batch_size)
    check_divides("max_len", max_len, {"multiple": multiple})
    lengths_P = _cut(check_lengths(lengths_S), max_len)[2]
    edges, counts = np.unique(-(-lengths_P // multiple) * multiple, return_counts=True)
    seen = np.append(0, np.cumsum(counts))  # seen[i]: sequences below candidate i
    # steps[k, i]: T of all batches, for the sequences below candidate i in exactly k buckets.
    steps = np.full((min(num_buckets, len(edges)) + 1, len(edges) + 1), np.inf)
    steps[0, 0] = 0
    split_at = np.zeros(steps.shape, np.int64)  # where the last of these buckets begins
    for i in range(1, len(edges) + 1):
        num_batches = -((seen[:i] - seen[i]) // batch_size)
        totals = steps[:-1, :i] + num_batches * edges[i - 1]
        split_at[1:, i] = totals.argmin(axis=1)
        steps[1:, i] = totals.min(axis=1)
    chosen, i = [], len(edges)
    for k in range(int(steps[:, -1].argmin()), 0, -1):
        chosen.append(int(edges[i - 1]))
        i = split_at[k, i]
    return tuple(reversed(chosen))


class Bucket(NamedTuple):
    """What an epoch reads from a bucket.

    Attributes:
      length: T of its batches.
      padding: the share of its time steps that is padding.
    """

    length: int
    num_sequences: int
    num_batches: int
    padding: float


class BucketedBatches(SequenceBatches):
    """Sequences of any length in batches; each is of one bucket, with `starts` True.

    Every epoch holds every sequence exactly once. A batch is as long as the edge of its bucket.
    The rows that a bucket's sequences do not fill are padding, spread over the bucket's batches: none
    is left with a single sequence while others are full.

    With a seed, for training: sequences are shuffled within their bucket, and batches across all
    buckets, by (seed, epoch). Without one, for evaluation: short buckets first, each in its plain order.

    A sequence longer than the last edge is cut into pieces of that length and a rest; each is read without
    the state of what came before.

    Args:
      arrays: [steps, ...] each, such as inputs and targets of every step; and `static`, an array or a dict of
        arrays [sequences, ...] without time, such as a label for each sequence.
      lengths: the steps of each sequence; empty ones are left out.
      batch_size: B, over all processes.
      edges: the time steps of each bucket, increasing; see `choose_edges`.
      seed: None for evaluation.
      starts: the step of the arrays with which each sequence begins; by default they lie one after the other.

    Attributes:
      num_cut: sequences that were cut into pieces; a piece counts as a sequence in a bucket.
      num_left_out: sequences without a step.
      buckets: what an epoch reads from each bucket.
      padding: the share of an epoch's time steps that is padding, in rows with and without a sequence.

    Raises:
      ValueError: a number is out of range, the edges do not increase, no sequence has a step, or the arrays
        do not have the steps of the sequences.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        edges: Sequence[int],
        seed: int | None = None,
        *,
        starts: Sequence[int] | np.ndarray | None = None,
    ):
        static = {}
        if isinstance(arrays, Mapping) and STATIC in arrays:
            static = {STATIC: arrays[STATIC]}
            arrays = {name: own for name, own in arrays.items() if name != STATIC}
        super().__init__(arrays, lengths, batch_size, seed, starts)
        self._static = checked_arrays({**static, LENGTHS: self.lengths_S})
        del self._static[LENGTHS]
        edges = tuple(edges)
        increase = bool(edges) and edges[0] >= 1 and all(np.diff(edges) >= 1)
        message = f"edges={edges} do not increase from 1 or more.\nFix: use choose_edges."
        require(increase, message)
        self.edges = edges
        self._sequence_P, first_P, self._lengths_P = _cut(self.lengths_S, edges[-1])
        self._starts_P = self.starts_S[self._sequence_P] + first_P
        self._bucket_P = np.searchsorted(edges, self._lengths_P)
        self.num_cut = int(np.count_nonzero(self.lengths_S > edges[-1]))
        self.num_left_out = int(np.count_nonzero(self.lengths_S == 0))
        self.buckets = tuple(map(self._bucket, range(len(edges))))
        self.num_windows = sum(bucket.num_batches for bucket in self.buckets)
        steps = sum(bucket.num_batches * bucket.length for bucket in self.buckets) * batch_size
        self.padding = 1 - int(self._lengths_P.sum()) / steps

    def to_text(self) -> str:
        """The buckets as a table, their total, and what was cut or left out."""
        total = sum(bucket.num_sequences for bucket in self.buckets)
        rows = (*self.buckets, ("total", total, self.num_windows, self.padding))
        line = "{:>6}  {:>9,}  {:>7,}  {:>7.1%}"
        lines = ["length  sequences  batches  padding", *(line.format(*row) for row in rows)]
        if self.num_cut:
            lines.append(f"cut into pieces, longer than {self.edges[-1]}: {self.num_cut:,}")
        if self.num_left_out:
            lines.append(f"left out, without a step: {self.num_left_out:,}")
        return "\n".join(lines)

    def window(self, drawn: np.ndarray, window: int, rows: slice) -> BatchIndices:
        """The pieces of a row each, as long as the edge of their bucket."""
        pieces_B = drawn[window]
        times = np.arange(self.edges[self._bucket_P[pieces_B.max()]])
        pieces_B = pieces_B[rows]
        lengths_B = np.where(pieces_B < 0, 0, self._lengths_P[pieces_B]).astype(np.int32)
        inside_BT = times < lengths_B[:, None]
        index_BT = np.where(inside_BT, self._starts_P[pieces_B, None] + times, 0)
        static = map_arrays(lambda name, own: own[self._sequence_P[pieces_B]], self._static)
        return BatchIndices(index_BT, inside_BT, {STARTS: True, LENGTHS: lengths_B, **static})

    @property
    def longest(self) -> int:
        """The step of a batch that no other one is longer than, for `Task.example_batch`."""
        return int(self._bucket_P[self._drawn(0).max(axis=1)].argmax())

    def draw(self, epoch: int) -> np.ndarray:
        """The piece in each row of each batch of an epoch; -1 for none."""
        rng = None if self.seed is None else self.rng(epoch)
        epoch_NB = np.full((self.num_windows, self.batch_size), -1)
        first = 0
        for i, bucket in enumerate(self.buckets):
            pieces = np.flatnonzero(self._bucket_P == i)
            # A batch fills as many rows as the next one, or one less; none is without a sequence.
            bounds = np.arange(bucket.num_batches + 1) * len(pieces) // max(bucket.num_batches, 1)
            filled_NB = np.arange(self.batch_size) < np.diff(bounds)[:, None]
            batches_NB = epoch_NB[first : first + bucket.num_batches]
            batches_NB[filled_NB] = pieces if rng is None else rng.permutation(pieces)
            first += bucket.num_batches
        return epoch_NB if rng is None else rng.permutation(epoch_NB)

    def _bucket(self, i: int) -> Bucket:
        lengths_P = self._lengths_P[self._bucket_P == i]
        num_batches = -(-len(lengths_P) // self.batch_size)
        num_steps = num_batches * self.batch_size * self.edges[i]
        padding = 1 - int(lengths_P.sum()) / num_steps if num_steps else 0.0
        return Bucket(self.edges[i], len(lengths_P), num_batches, padding)


def _cut(lengths_S: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts sequences into pieces, each as long as allowed; a sequence without a step has none.

    Returns:
      Of each piece: its sequence, the step of the sequence with which it begins, and its steps.
    """
    counts_S = -(-lengths_S // longest)
    sequence_P = np.repeat(np.arange(len(lengths_S)), counts_S)
    before_S = np.cumsum(counts_S) - counts_S
    first_P = (np.arange(len(sequence_P)) - before_S[sequence_P]) * longest
    return sequence_P, first_P, np.minimum(lengths_S[sequence_P] - first_P, longest)
