"""Batches of sentences: those of similar length go together, so that little is padding.

Each bucket pads its sentences to its own length, its edge. A sentence begins with the separator
before it and ends with its own. Buckets of 3 and 5 steps, batches of 2 rows (evaluation; `_` is
padding, which counts in no loss):

    text               a b . c d e f . g . h i . j k l .
    bucket of 3 steps  a b _ | . g _            inputs; the targets are b . _ | g . _
                       _ _ _ | . h i                                    _ _ _ | h i .
    bucket of 5 steps  . c d e f                                        c d e f .
                       . j k l _                                        j k l . _

Like the windows of `streams`, `batch(step)` is a function of the seed and the step. A pipeline needs edges
that are multiples of its chunks, `seq_len // num_chunks`.

Dims: S sentences, P pieces of sentences, B batch rows, T time steps, N batches of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.data.order import Places, check_at_least
from jaxpar.data.packed import Packing
from jaxpar.fields import nearest_multiples
from jaxpar.parts import STARTS
from jaxpar.tasks.lm.streams import TextReader, check_text


class Sentences(NamedTuple):
    """Sentences as places in one text.

    Attributes:
      tokens: integers [tokens], 0 or more.
      starts_S: where each sentence begins.
      lengths_S: the time steps that it takes: one fewer than its tokens, since the last is only a target.
    """

    tokens: np.ndarray
    starts_S: np.ndarray
    lengths_S: np.ndarray

    @classmethod
    def split(cls, tokens: np.ndarray, separator: int) -> Sentences:
        """The lines of a text. Every token but the first of the text is a target exactly once.

        A line begins with the separator before it, from which its first word is predicted, and ends
        with its own; neighbours share it. Nothing is copied, `tokens` may be a memory map.

        Args:
          tokens: integers [tokens], 0 or more.
          separator: the token that ends a line, e.g. the id of `<eos>`.

        Raises:
          ValueError: the tokens are not token ids, or the separator is not among them.
        """
        tokens = np.asarray(tokens)
        check_text(tokens)
        separators = np.flatnonzero(tokens == separator)
        if not separators.size:
            raise ValueError(
                f"separator={separator} is none of the {len(tokens)} tokens; give the token that "
                f"ends a line, such as the id of <eos>"
            )
        bounds = np.unique(np.concatenate([[0], separators, [len(tokens) - 1]]))
        return cls(tokens, starts_S=bounds[:-1], lengths_S=np.diff(bounds))


def choose_edges(
    lengths_S: np.ndarray, num_buckets: int, multiple: int, max_len: int, batch_size: int = 1
) -> tuple[int, ...]:
    """The edges with the least padding, in the sentences and in the rows that no sentence fills.

    By dynamic programming over the histogram of lengths: the best k buckets for the sentences up to
    a length are the best k - 1 up to some smaller length, and one more bucket for the rest.

    Args:
      lengths_S: time steps of each sentence; what is longer than max_len counts as its pieces.
      num_buckets: the most edges; fewer come back if more would not help.
      multiple: of which every edge is one, e.g. `seq_len // num_chunks` of a pipeline.
      max_len: the longest edge allowed.
      batch_size: B of the batches, over all processes. A bucket's last batch costs its missing rows
        too, so big batches of few sentences call for few buckets; 1 ignores this.

    Returns:
      increasing edges; the last is max_len, or what the longest sentence needs if that is less.

    Raises:
      ValueError: a number is out of range, or no sentence has a target.
    """
    check_at_least(
        1, num_buckets=num_buckets, multiple=multiple, max_len=max_len, batch_size=batch_size
    )
    if max_len % multiple:
        raise ValueError(
            f"max_len={max_len} is not a multiple of {multiple}; use "
            f"max_len={nearest_multiples(max_len, multiple)}"
        )
    lengths_P = _cut(np.asarray(lengths_S), max_len).lengths_P
    edges, counts = np.unique(-(-lengths_P // multiple) * multiple, return_counts=True)
    seen = np.append(0, np.cumsum(counts))  # seen[i]: sentences below candidate i
    # steps[k, i]: T of all batches, for the sentences below candidate i in exactly k buckets.
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
    num_sentences: int
    num_batches: int
    padding: float


class BucketedSentences(TextReader):
    """The batches of sentences; each is of one bucket, with `starts` True.

    Every epoch holds every sentence exactly once. A batch is as long as the edge of its bucket.
    The rows that a bucket's sentences do not fill are padding, spread over the bucket's batches: none
    is left with a single sentence while others are full.

    With a seed, for training: sentences are shuffled within their bucket, and batches across all
    buckets, by (seed, epoch). Without one, for evaluation: short buckets first, each in the order
    of the text.

    A sentence longer than the last edge is cut into pieces of that length and a rest. Each piece
    begins with the last token of the one before, so that no target is lost, but is read without
    the state of what came before. A sentence without a target (fewer than 2 tokens) is left out.

    Args:
      sentences: such as `Sentences.split` gives.
      batch_size: B, over all processes.
      edges: the time steps of each bucket, increasing; see `choose_edges`.
      seed: None for evaluation.

    Attributes:
      num_cut: sentences that were cut into pieces; a piece counts as a sentence in a bucket.
      num_left_out: sentences without a target.
      num_targets: targets in an epoch that are not `IGNORE`.
      num_windows: batches in an epoch.
      buckets: what an epoch reads from each bucket.

    Raises:
      ValueError: a number is out of range, the edges do not increase, or no sentence has a target.
    """

    def __init__(
        self,
        sentences: Sentences,
        batch_size: int,
        edges: Sequence[int],
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed)
        edges = tuple(edges)
        if not edges or edges[0] < 1 or any(np.diff(edges) < 1):
            raise ValueError(
                f"edges={edges} do not increase from 1 or more; use edges such as those of "
                f"choose_edges"
            )
        self.sentences, self.tokens, self.edges = sentences, sentences.tokens, edges
        sentence_P, first_P, self._lengths_P = _cut(sentences.lengths_S, edges[-1])
        self._starts_P = sentences.starts_S[sentence_P] + first_P
        self._bucket_P = np.searchsorted(edges, self._lengths_P)
        self.num_cut = int(np.count_nonzero(sentences.lengths_S > edges[-1]))
        self.num_left_out = int(np.count_nonzero(sentences.lengths_S < 1))
        self.num_targets = int(self._lengths_P.sum())
        self.buckets = tuple(map(self._bucket, range(len(edges))))
        self.num_windows = sum(bucket.num_batches for bucket in self.buckets)

    @property
    def padding(self) -> float:
        """The share of an epoch's time steps that is padding, in rows with and without a sentence."""
        batches = sum(bucket.num_batches * bucket.length for bucket in self.buckets)
        return _padding(self.num_targets, batches * self.batch_size)

    def to_text(self) -> str:
        """The buckets as a table, their total, and what was cut or left out."""
        total = sum(bucket.num_sentences for bucket in self.buckets)
        lines = ["length  sentences  batches  padding"]
        for length, num_sentences, num_batches, padding in (
            *self.buckets,
            ("total", total, self.num_windows, self.padding),
        ):
            lines.append(f"{length:>6}  {num_sentences:>9,}  {num_batches:>7,}  {padding:>7.1%}")
        if self.num_cut:
            lines.append(f"cut into pieces, longer than {self.edges[-1]}: {self.num_cut:,}")
        if self.num_left_out:
            lines.append(f"left out, without a target: {self.num_left_out:,}")
        return "\n".join(lines)

    def window(self, drawn: np.ndarray, window: int, rows: slice) -> Places:
        """The pieces of a row each, as long as the edge of their bucket."""
        pieces_B = drawn[window]
        times = np.arange(self.edges[self._bucket_P[pieces_B.max()]])
        pieces_B = pieces_B[rows]
        inside_BT = times < np.where(pieces_B < 0, 0, self._lengths_P[pieces_B])[:, None]
        places_BT = np.where(inside_BT, self._starts_P[pieces_B, None] + times, 0)
        return Places(places_BT, inside_BT, {STARTS: True})

    def draw(self, epoch: int) -> np.ndarray:
        """The piece in each row of each batch of an epoch; -1 for none."""
        rng = None if self.seed is None else self.rng(epoch)
        epoch_NB = np.full((self.num_windows, self.batch_size), -1)
        first = 0
        for i, bucket in enumerate(self.buckets):
            pieces = np.flatnonzero(self._bucket_P == i)
            # A batch fills as many rows as the next one, or one less; none is without a sentence.
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
        padding = _padding(int(lengths_P.sum()), num_steps)
        return Bucket(self.edges[i], len(lengths_P), num_batches, padding)


class PackedSentences(TextReader, Packing):
    """The batches of sentences, each read from the initial state; see `data.packed.Packing`.

    Args:
      sentences: such as `Sentences.split` gives.
      batch_size: B, over all processes.
      seq_len: T, the steps of a window.
      seed: None for evaluation.

    Raises:
      ValueError: a number is out of range, or no sentence has a target.
    """

    def __init__(
        self, sentences: Sentences, batch_size: int, seq_len: int, seed: int | None = None
    ) -> None:
        super().__init__(sentences.starts_S, sentences.lengths_S, batch_size, seq_len, seed)
        self.tokens = sentences.tokens


class _Pieces(NamedTuple):
    sentence_P: np.ndarray
    first_P: np.ndarray  # step of the sentence with which the piece begins
    lengths_P: np.ndarray


def _cut(lengths_S: np.ndarray, longest: int) -> _Pieces:
    """The pieces of sentences, each as long as allowed; a sentence without a step has none."""
    counts_S = -(-lengths_S // longest)
    if not (counts_S > 0).any():
        raise ValueError(
            f"none of {len(lengths_S)} sentences has a target; give one of 2 tokens or more"
        )
    sentence_P = np.repeat(np.arange(len(lengths_S)), counts_S)
    before_S = np.cumsum(counts_S) - counts_S
    first_P = (np.arange(len(sentence_P)) - before_S[sentence_P]) * longest
    return _Pieces(sentence_P, first_P, np.minimum(lengths_S[sentence_P] - first_P, longest))


def _padding(num_targets: int, num_steps: int) -> float:
    return 1 - num_targets / num_steps if num_steps else 0.0
