"""Text from a trained model, token by token from the carried state."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.setup import Setup
from jaxpar.state import TrainState
from jaxpar.tasks.lm.corpus import EOS, Vocabulary, check_tokens
from jaxpar.tasks.lm.task import LM


def sample_text(
    setup: Setup,
    state: TrainState,
    vocabulary: Vocabulary,
    prompt: str,
    **numbers: Any,
) -> str:
    """A text that begins with the prompt and continues as the model would.

    Args:
      setup: that the state was made with.
      prompt: words of the vocabulary; the model reads it as the start of a line.
      numbers: `length`, `temperature` and `seed`, as of `sample_tokens`.
    """
    assert isinstance(setup.task, LM)
    tokens = read_prompt(vocabulary, prompt)
    separator = int(tokens[0]) if setup.task.reads_lines else None
    ends = {"separator": separator, "num_words": len(vocabulary)}
    new = sample_tokens(setup, state, tokens, **ends, **numbers)
    return vocabulary.decode(np.concatenate([tokens, new])[1:])


def read_prompt(vocabulary: Vocabulary, prompt: str) -> np.ndarray:
    """Its tokens, after one `<eos>`: the model reads it as the start of a line."""
    return np.concatenate([vocabulary.encode([EOS]), vocabulary.encode(prompt, strict=True)])


def sample_tokens(
    setup: Setup,
    state: TrainState,
    prompt: np.ndarray,
    *,
    num_words: int,
    separator: int | None = None,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """The tokens that follow a prompt, int32 [length].

    Args:
      setup: that the state was made with.
      prompt: token ids [tokens], at least one.
      num_words: ids from here on are never drawn.
      separator: the token after which the model starts a line afresh; None if there is none.
    Raises:
      ValueError: a token is outside the vocabulary, or a number is out of range.
    """
    _check_numbers(len(prompt), length, temperature, seed)
    check_tokens(prompt, num_words)
    layout = setup.layout

    @jax.jit
    def step(params, carry, token, key):
        model = layout.merge(params, state.frozen)
        token_BT = token[None, None]
        resets_BT = None if separator is None else token_BT == separator
        carry, logits_TBV = model.unroll(token_BT, carry, resets_BT)
        logits_V = logits_TBV[0, 0, :num_words]
        if temperature == 0:
            return carry, jnp.argmax(logits_V).astype(jnp.int32)
        drawn = jax.random.categorical(key, logits_V / temperature)
        return carry, drawn.astype(jnp.int32)

    carry = layout.merge(state.params, state.frozen).layers.initial_carry(1)
    keys = jax.random.split(jax.random.key(seed), length)
    for known in prompt[:-1]:
        carry, _ = step(state.params, carry, jnp.int32(known), keys[0])
    token, tokens = jnp.int32(prompt[-1]), []
    for key in keys:
        carry, token = step(state.params, carry, token, key)
        tokens.append(token)  # on the device: nothing waits for it here
    return np.asarray(jax.device_get(tokens), np.int32)


def _check_numbers(prompt_length: int, length: int, temperature: float, seed: int) -> None:
    is_finite = math.isfinite(temperature)
    if length < 1 or not is_finite or temperature < 0 or seed < 0 or not prompt_length:
        raise ValueError(
            f"length={length}, temperature={temperature}, seed={seed}, {prompt_length} tokens "
            f"of prompt: use a length and a prompt of 1 or more, no negative number, and a finite temperature"
        )
