"""Samples tokens from logits.

What is drawn depends on the seed, the number of the prompt, the place in its text and the word alone: the
Gumbel noise of a word is added to its logit, and the largest sum wins, the lowest id among equals.

Legend of the dim suffixes: T time, B rows, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH, STAGE
from jaxpar.base.checks import require, require_instance
from jaxpar.base.keys import new_key
from jaxpar.base.trees import vary_like
from jaxpar.base.types import Index, Number
from jaxpar.data.order import check_at_least

TOKEN = "token"  # what is drawn, as `predict` gives it
NOWHERE = -1  # no token that a line begins after
# The temperatures above 0 that float32 holds with all of its digits.
COLDEST, HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Draw(NamedTuple):
    """How tokens are drawn: scalars.

    Attributes:
      seed: int32.
      temperature: float32, which logits are divided by; 0 takes the likeliest token.
      top_k: int32, only so many of the likeliest words, and those as likely as the last of them; 0: all.
      top_p: float32, only the likeliest words that together have this probability; 1: all.
      separator: int32, the token after which the model begins from its initial state; `NOWHERE`: none.
      place: int32, that of the window's first token in its text.
    """

    seed: Number
    temperature: Number
    top_k: Number
    top_p: Number
    separator: Number
    place: Number

    @classmethod
    def of(
        cls,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        separator: int | None = None,
    ) -> "Draw":
        """Of numbers.

        Raises:
          ValueError: one is out of range.
        """
        check_at_least(0, seed=seed, top_k=top_k)
        require(seed < 2**31, f"seed={seed} is too large.\nFix: use less than {2**31}.")
        real = int | float | np.integer | np.floating
        require_instance("temperature", temperature, real, "a number")
        if not isinstance(temperature, int):  # a float16 cannot be compared with the limits
            temperature = float(temperature)
        fact = f"temperature={temperature} must be 0, or from {COLDEST:.2g} to {HOTTEST:.2g}."
        is_valid = temperature == 0 or COLDEST <= temperature <= HOTTEST
        require(is_valid, f"{fact}\nFix: use 1, or 0 for the likeliest token.")
        require_instance("top_p", top_p, real, "a number")
        fact = f"top_p={top_p} is not a probability above 0."
        require(0 < top_p <= 1, f"{fact}\nFix: use 1 for all words.")
        top_k = min(top_k, 2**31 - 1)  # no vocabulary has more words
        own = np.int32(seed), np.float32(temperature), np.int32(top_k), np.float32(top_p)
        return cls(*own, np.int32(NOWHERE if separator is None else separator), np.int32(0))


def draw_tokens(
    logits_TBV: jax.Array, draw: Draw, at: LayerContext, *, num_words: int
) -> jax.Array:
    """A token for every place, int32 [T, B].

    Args:
      num_words: ids from here on are padding, which is never drawn.
    """
    logits_TBV = at.layout(logits_TBV, None, BATCH, None)
    T, B, V = logits_TBV.shape
    is_word_11V = (jnp.arange(V) < num_words)[None, None]
    logits_TBV = jnp.where(is_word_11V, logits_TBV, -jnp.inf)
    # The best word has 0, so that no temperature makes the scores of several words infinite.
    below_TBV = logits_TBV - jnp.max(logits_TBV, axis=-1, keepdims=True)
    scores_TBV = below_TBV / jnp.where(draw.temperature > 0, draw.temperature, 1.0)
    # The compiler may multiply by 1 / temperature, which can be 0: minus infinity becomes NaN.
    scores_TBV = jnp.where(is_word_11V, scores_TBV, -jnp.inf)
    is_limited = (draw.top_k > 0) | (draw.top_p < 1)
    limit = functools.partial(_limited, draw=draw)
    scores_TBV = lax.cond(is_limited, limit, lambda scores: scores, scores_TBV)
    key = new_key(draw.seed)

    def noise(time: Index, row: Index) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, row), time)
        return jax.random.gumbel(own, (V,), jnp.float32)

    over_rows = jax.vmap(noise, (None, 0))
    places_T = draw.place + at.time + jnp.arange(T)
    noise_TBV = jax.vmap(over_rows, (0, None))(places_T, at.row + jnp.arange(B))
    drawn_TBV = jnp.where(draw.temperature > 0, scores_TBV + noise_TBV, logits_TBV)
    return jnp.argmax(drawn_TBV, -1).astype(jnp.int32)


def _limited(scores_TBV: jax.Array, draw: Draw) -> jax.Array:
    """Minus infinity for words that `top_k` and `top_p` leave out."""
    V = scores_TBV.shape[-1]
    sorted_TBV = -jnp.sort(-scores_TBV, axis=-1)
    rank_11V = jnp.arange(V)[None, None]
    is_in = (draw.top_k == 0) | (rank_11V < draw.top_k)
    weights_TBV = jax.nn.softmax(jnp.where(is_in, sorted_TBV, -jnp.inf), axis=-1)
    before_TBV = jnp.cumsum(weights_TBV, axis=-1) - weights_TBV
    is_in = is_in & ((before_TBV < draw.top_p) | (rank_11V == 0))
    least_TB1 = jnp.min(jnp.where(is_in, sorted_TBV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scores_TBV >= least_TB1, scores_TBV, -jnp.inf)


def whole_logits(part_TBV: jax.Array) -> jax.Array:
    """The logits of all words, on every stage, from each stage's part of them."""
    size, stages = part_TBV.shape[-1], lax.axis_size(STAGE)
    whole = vary_like(jnp.zeros((*part_TBV.shape[:-1], stages * size), part_TBV.dtype), part_TBV)
    start = lax.axis_index(STAGE) * size
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, part_TBV, start, axis=2), STAGE)
