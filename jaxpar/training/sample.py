"""Text from a trained model, token by token from the carried state."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.config import Config
from jaxpar.data.corpus import EOS, check_tokens
from jaxpar.mesh import MeshConfig
from jaxpar.state import make_model
from jaxpar.training.run_folder import ONE_DEVICE, RunFolder


def sample(
    run_dir: str | Path,
    prompt: str = "",
    *,
    length: int = 50,
    temperature: float = 1.0,
    seed: int = 0,
    mesh: MeshConfig = ONE_DEVICE,
    best: bool = False,
) -> str:
    """A text that begins with the prompt and goes on as the model of a run would.

    Args:
      run_dir: the folder that `fit` wrote.
      prompt: words of the run's vocabulary; the model reads it as the start of a line.
      length: tokens to add.
      temperature: logits are divided by it; 0 takes the likeliest token every time.
      seed: the same seed gives the same text.
      best: of the state with the lowest validation loss, not the newest.
    Raises:
      ValueError: a word is outside the vocabulary, or a number is out of range.
      FileNotFoundError: no run, or no checkpoint in it.
    """
    folder = RunFolder(run_dir)
    vocabulary = folder.vocabulary()
    start = vocabulary.encode([EOS])
    tokens = np.concatenate([start, vocabulary.encode(prompt, strict=True)])
    config, _, state = folder.restore(mesh, best=best)
    assert isinstance(config, Config)
    new = sample_tokens(
        config,
        state.params,
        tokens,
        num_words=len(vocabulary),
        length=length,
        temperature=temperature,
        seed=seed,
    )
    return vocabulary.decode(np.concatenate([tokens, new])[len(start) :])


def sample_tokens(
    config: Config,
    params: nnx.State,
    prompt: np.ndarray,
    *,
    num_words: int,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """The tokens that follow a prompt, int32 [length].

    Args:
      params: of `config`'s model, on any mesh.
      prompt: token ids [tokens], at least one.
      num_words: ids from here on are padding of the vocabulary and never drawn.
    Raises:
      ValueError: a token is outside the vocabulary, or a number is out of range.
    """
    if length < 1 or temperature < 0 or seed < 0 or not len(prompt):
        raise ValueError(
            f"length={length}, temperature={temperature}, seed={seed}, {len(prompt)} tokens "
            f"of prompt: use a length and a prompt of 1 or more, and no negative number"
        )
    check_tokens(prompt, num_words)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config)))

    @jax.jit
    def step(params, carry, token, key):
        model = nnx.merge(graphdef, params)
        carry, logits_TBV = model.unroll(token[None, None], carry)
        logits_V = logits_TBV[0, 0, :num_words]
        if temperature == 0:
            return carry, jnp.argmax(logits_V).astype(jnp.int32)
        drawn = jax.random.categorical(key, logits_V / temperature)
        return carry, drawn.astype(jnp.int32)

    carry = jax.jit(lambda params: nnx.merge(graphdef, params).initial_carry(1))(params)
    keys = jax.random.split(jax.random.key(seed), length)
    for known in prompt[:-1]:
        carry, _ = step(params, carry, jnp.int32(known), keys[0])
    token, tokens = jnp.int32(prompt[-1]), []
    for key in keys:
        carry, token = step(params, carry, token, key)
        tokens.append(token)  # on the device: nothing waits for it here
    return np.asarray(jax.device_get(tokens), np.int32)
