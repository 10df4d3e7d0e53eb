"""Tokens as a language model draws them by its definition."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from lib import api


class Draw(NamedTuple):
    """How tokens are drawn."""

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    separator: int | None = None


def larger(state, times=5):
    """With larger weights, so that what is carried counts."""
    return dataclasses.replace(state, params=jax.tree.map(lambda a: times * a, state.params))


def by_definition(model, prompt, tokens, row, draw):
    """What is drawn after each token of a text, and by how much the best score is ahead of the next."""
    text = np.concatenate([prompt, tokens]).astype(np.int32)
    starts = [0] if draw.separator is None else np.flatnonzero(text == draw.separator)
    logits_TV = np.concatenate(
        [
            np.asarray(model(part[None])[0], np.float64)
            for part in np.split(text, [n for n in starts if n > 0])
        ]
    )
    best, ahead = [], []
    for time in range(len(prompt) - 1, len(text) - 1):
        scores = logits_TV[time] / (draw.temperature or 1.0)
        order = np.argsort(-scores, kind="stable")
        if draw.top_k:
            scores[order[draw.top_k :]] = -np.inf
        weights = np.exp(scores - scores.max())
        before = np.cumsum((weights / weights.sum())[order])
        scores[order[1:][before[:-1] >= draw.top_p]] = -np.inf
        if draw.temperature:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(draw.seed), row), time)
            scores += np.asarray(jax.random.gumbel(key, scores.shape))
        best.append(scores.argmax())
        ahead.append(np.diff(np.sort(scores)[-2:])[0])
    return np.array(best), np.array(ahead)


def assert_drawn_by_definition(task, parallel, state, draw, lengths):
    """For prompts of so many tokens: what follows each of them is what the model's definition draws."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(11, size=n, dtype=np.int32) for n in lengths]
    found = api.sampled(task, parallel, state, prompts, 7, **draw._asdict())
    model = api.model(task, parallel, state)
    for row, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        best, ahead = by_definition(model, prompt, tokens, row, draw)
        sure = ahead > 1e-3
        assert sure.sum() > 4
        np.testing.assert_array_equal(tokens[sure], best[sure])
    assert len(np.unique(found)) > 3


# The promise: bfloat16 has 8 bits, float32 24, and the roundings of some tens of operations add up.
RELATIVE_ERRORS = {"float32": 1e-5, "bfloat16": 2e-2}
# Of an mLSTM's numbers between two programs in float32: a divisor may be a small difference.
FAR_APART = 1e-4
