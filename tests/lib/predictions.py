"""What a language model predicts of a text."""

import jax
import numpy as np

from jaxpar import init_state
from jaxpar.lm import LM
from lib import api

WORDS, SEPARATOR = 11, 0
TASK = LM(
    num_layers=4, hidden_size=8, embed_size=6, vocab_size=16, num_words=WORDS, batch_size=4, seq_len=8
)  # fmt: skip


def text_of(num_tokens=117):
    """Tokens of lines of drawn lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, WORDS, num_tokens, dtype=np.int32)
    tokens[rng.random(num_tokens) < 0.15] = SEPARATOR
    return tokens


def plain(task, tokens):
    """The log-likelihood of every token but the first: piece after piece, by the model called as it is."""
    model = api.model(task, "dp1", init_state(task, "dp1", seed=3))
    B, T, num_steps = task.batch_size, task.seq_len, len(tokens) - 1
    bounds = np.arange(B + 1) * num_steps // B
    starts, lengths = bounds[:-1], np.diff(bounds)
    if task.reads_lines:
        ends = np.unique([0, *np.flatnonzero(tokens == SEPARATOR), num_steps])
        starts, lengths = ends[:-1], np.diff(ends)
    if task.num_buckets:  # what is longer than a batch begins anew
        pieces = [
            (s + n, min(T, m - n))
            for s, m in zip(starts, lengths, strict=True)
            for n in range(0, m, T)
        ]
        starts, lengths = zip(*pieces, strict=True)
    found, longest = np.full(len(tokens), np.nan, np.float32), max(lengths)
    run = jax.jit(lambda tokens_T: jax.nn.log_softmax(model(tokens_T[None])[0]))
    for start, length in zip(starts, lengths, strict=True):
        piece = np.zeros(longest, np.int32)  # what follows a token changes nothing
        piece[:length] = tokens[start : start + length]
        targets = tokens[start + 1 : start + length + 1]
        found[start : start + length] = run(piece)[np.arange(length), targets]
    return found


def predicted(task, parallel, batches=None, **options):
    """Of all rows of a text, or of other batches."""
    batches = task.batches_of(text_of(), SEPARATOR) if batches is None else batches
    state = init_state(task, parallel, seed=3)
    return api.epoch_predictions(task, parallel, state, batches, **options)
