"""Mamba-2 of the package mamba2-jax, as it stands: the next character of Python's documentation.

The package knows nothing of jaxpar. The blocks of its model are in `model.backbone.layers`, and each stage
holds some of them. The model returns a dict, and the loss uses its logits. Data, metrics and the guess to
compare with are those of `transformer.py`.

    python -m jaxpar train examples/mamba.py:Mamba --simulate 8 --mesh dp2pp4
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import optax
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM
from transformer import NUM_CHARACTERS, Characters

import jaxpar


@dataclasses.dataclass(frozen=True)
class Mamba(Characters):
    """A language model of characters.

    Attributes:
      state_size: numbers that each unit of a head remembers.
      block_size: time steps that the package computes at once.
    """

    state_size: int = 16
    block_size: int = 16

    layers: ClassVar[str] = "backbone.layers"

    def make_model(self, rngs):
        """The package's model."""
        config = Mamba2Config(
            NUM_CHARACTERS,
            hidden_size=self.width,
            state_size=self.state_size,
            head_dim=2 * self.width // self.num_heads,
            chunk_size=self.block_size,
            num_hidden_layers=self.num_layers,
        )
        return Mamba2ForCausalLM(config, rngs=rngs)

    def loss(self, model, batch):
        """The mean over characters, and how many of them are right."""
        logits, wanted = model(batch["given"])["logits"], batch["wanted"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        right = jnp.float32(logits.argmax(-1) == wanted)
        return jaxpar.mean(nll, batch["weight"], accuracy=right)

    def predict(self, model, batch):
        """Logits of the characters that follow."""
        return {"logits": model(batch["given"])["logits"]}
