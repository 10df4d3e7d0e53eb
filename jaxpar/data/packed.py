"""Sequences of any length packed into the rows of batches, so that little is padding.

A row is a stream of windows of T steps. A sequence no longer than a window lies in one window, several in
a row where they fit; a longer one begins a window and continues in the next ones of its row, from the state
that is carried between them. With T=4, two rows and sequences of 6, 3, 2, 1 and 1 steps:

    row 0    a a a a|a a c c         resets are where a letter is seen for the first time
    row 1    b b b d|e _ _ _         _ is padding

By length, the longest first, each goes where it first fits ("first-fit decreasing"). What fits where is a
matter of lengths alone, and the same in every epoch; which of the sequences of one length lies there, in
which row and when, is drawn. Dims: S sequences, sorted by their length, Q strips (windows of one row that lie
together), B batch rows, T time steps.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpar.base.parts import LENGTHS, RESETS, STARTS
from jaxpar.data.order import BatchIndices, check_at_least
from jaxpar.data.sequences import SequenceBatches


class PackedBatches(SequenceBatches):
    """Sequences of any length, packed into rows, for models that reset their state where `at.resets` is true.

    With a seed, for training, which sequences lie together, where and when is drawn from (seed, epoch);
    without one, for evaluation, the order is plain as far as lengths allow. Every epoch has every sequence
    once.

    Args:
      arrays: [steps, ...] each, such as inputs and targets of every step.
      lengths: the steps of each sequence; empty ones are left out.
      batch_size: B, over all processes.
      seq_len: T, the steps of a window.
      seed: None for evaluation.
      starts: the step of the arrays with which each sequence begins; by default they lie one after the other.
    Attributes:
      num_sequences: in an epoch.
      num_long: sequences that continue in further windows.
      padding: the share of an epoch's positions that is padding.
    Raises:
      ValueError: a number is out of range, no sequence has a step, or the arrays do not have the steps of the
        sequences.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        seq_len: int,
        seed: int | None = None,
        *,
        starts: Sequence[int] | np.ndarray | None = None,
    ):
        super().__init__(arrays, lengths, batch_size, seed, starts)
        check_at_least(1, seq_len=seq_len)
        self.seq_len = seq_len
        by_length = np.argsort(-self.lengths_S, kind="stable")
        self._ids_S = by_length[: np.count_nonzero(self.lengths_S)]
        self._lengths_S = self.lengths_S[self._ids_S]
        self._strip_S, self._first_S, self._windows_Q = _first_fit(self._lengths_S, seq_len)
        self._rows_Q, self.num_windows = _spread(self._windows_Q, batch_size)
        self.num_sequences = len(self._ids_S)
        self.num_long = int(np.count_nonzero(self._lengths_S > seq_len))
        positions = self.num_windows * batch_size * seq_len
        self.padding = 1 - int(self._lengths_S.sum()) / positions

    def window(self, drawn: tuple[np.ndarray, ...], window: int, rows: slice) -> BatchIndices:
        """The steps that lie there."""
        begins_S, ids_S, lengths_S = drawn
        T = self.seq_len
        row_B1 = np.arange(self.batch_size)[rows, None]
        at_BT = (row_B1 * self.num_windows + window) * T + np.arange(T)
        which_BT = np.maximum(np.searchsorted(begins_S, at_BT, side="right") - 1, 0)
        step_BT = at_BT - begins_S[which_BT]  # of the sequence
        inside_BT = (step_BT >= 0) & (step_BT < lengths_S[which_BT])
        index_BT = np.where(inside_BT, self.starts_S[ids_S[which_BT]] + step_BT, 0)
        # Padding is what is left at the end of a window.
        lengths_B = np.count_nonzero(inside_BT, axis=1).astype(np.int32)
        resets_BT = inside_BT & (step_BT == 0)
        marks = {RESETS: resets_BT, STARTS: window == 0, LENGTHS: lengths_B}
        return BatchIndices(index_BT, inside_BT, marks)

    def to_text(self) -> str:
        """How many sequences in how many batches, and how many positions are padding."""
        long = f" ({self.num_long:,} longer than a window)" * bool(self.num_long)
        return (
            f"{self.num_sequences:,} sequences{long} in {self.num_windows:,} batches; "
            f"{self.padding:.1%} of positions are padding"
        )

    def draw(self, epoch: int) -> tuple[np.ndarray, ...]:
        """Where each sequence begins in all rows, one after the other; its number; and its length."""
        ids_S, order_Q = self._ids_S, np.arange(len(self._windows_Q))
        turn_Q = order_Q
        if self.seed is not None:
            rng = self.rng(epoch)
            ids_S = _shuffle_equal(rng, ids_S, self._lengths_S)
            order_Q = _shuffle_equal(rng, order_Q, self._windows_Q)
            turn_Q = rng.permutation(len(order_Q))
        rows_Q = np.empty_like(self._rows_Q)
        rows_Q[order_Q] = self._rows_Q
        # The windows of a strip follow those of the strips before it in its row.
        in_turn = np.lexsort((turn_Q, rows_Q))
        windows = self._windows_Q[in_turn]
        ends = np.cumsum(windows)
        of_row = np.concatenate([[0], ends])[np.searchsorted(rows_Q[in_turn], rows_Q[in_turn])]
        first_window_Q = np.empty_like(windows)
        first_window_Q[in_turn] = ends - windows - of_row
        window_Q = rows_Q * self.num_windows + first_window_Q
        begins_S = window_Q[self._strip_S] * self.seq_len + self._first_S
        by_begin = np.argsort(begins_S)
        return begins_S[by_begin], ids_S[by_begin], self._lengths_S[by_begin]


def _first_fit(lengths_S: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of falling lengths its strip and where in it it begins; the windows of each strip."""
    windows = [-(-lengths_S[lengths_S > T] // T)]
    num_long = len(windows[0])
    # A strip's last window has room for more.
    room_Q = windows[0] * T - lengths_S[:num_long]
    end_Q = windows[0] * T
    strips, firsts = [np.arange(num_long)], [np.zeros(num_long, np.int64)]
    values, counts = np.unique(lengths_S[num_long:], return_counts=True)
    for length, count in zip(values[::-1], counts[::-1], strict=True):
        fits_Q = room_Q // length
        missing = max(count - int(fits_Q.sum()), 0)
        num_new = -(-missing // (T // length))
        room_Q, end_Q = (np.concatenate([a, np.full(num_new, T)]) for a in (room_Q, end_Q))
        windows.append(np.ones(num_new, np.int64))
        fits_Q = np.concatenate([fits_Q, np.full(num_new, T // length)])
        before_Q = np.cumsum(fits_Q) - fits_Q
        taken_Q = np.clip(count - before_Q, 0, fits_Q)
        strip = np.repeat(np.arange(len(taken_Q)), taken_Q)
        strips.append(strip)
        firsts.append((end_Q - room_Q)[strip] + (np.arange(count) - before_Q[strip]) * length)
        room_Q -= taken_Q * length
    return np.concatenate(strips), np.concatenate(firsts), np.concatenate(windows)


def _spread(windows_Q: np.ndarray, num_rows: int) -> tuple[np.ndarray, int]:
    """The row of each strip, whose windows fall in number, so that all get about as many; and the most."""
    loads = [(0, row) for row in range(num_rows)]
    num_long = int(np.count_nonzero(windows_Q > 1))
    rows_long = np.zeros(num_long, np.int64)
    for strip in range(num_long):
        load, row = heapq.heappop(loads)
        rows_long[strip] = row
        heapq.heappush(loads, (load + int(windows_Q[strip]), row))
    load_B = np.asarray([load for load, _ in sorted(loads, key=lambda pair: pair[1])])
    # Strips of one window fill the rows from below.
    num_short = len(windows_Q) - num_long
    depth = np.arange(int(load_B.max()) + -(-num_short // num_rows))
    cells = np.argwhere(depth[:, None] >= load_B)[:num_short]
    load_B += np.bincount(cells[:, 1], minlength=num_rows)
    return np.concatenate([rows_long, cells[:, 1]]), int(load_B.max())


def _shuffle_equal(rng: np.random.Generator, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The values in another order, among those of equal keys; the keys fall."""
    order = rng.permutation(len(values))
    return values[order[np.argsort(-keys[order], kind="stable")]]
