"""Attention over a long context, whose time steps lie on several devices.

The rule "time" -> "context" gives every device of that axis its part of each window. Layers that look at one
step at a time need nothing more; attention needs all of it:

    all_gather    keys and values of all steps come to every device, which has the queries of its own
    all_to_all    every device gets all steps of some heads, and gives back its own steps of all of them
                  (Jacobs et al. 2023, arXiv:2309.14509); fewer bytes, and heads must divide

    python -m jaxpar train examples/long_context.py:LongContext --simulate 8 --mesh dp2pp2context2
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from transformer import NUM_CHARACTERS, load_text

from jaxpar import RULES, ArrayBatches, OptimizerConfig, Rules, Stack, Sums, Task, TrainConfig

# --- The model. Legend: T time steps of a device, S of all devices, B rows, W width, N heads, D their width.


class Block(nnx.Module):
    """Causal attention and a perceptron, each added to what it is given."""

    whole_window = True

    def __init__(self, width, num_heads, exchange, *, rngs):
        self.num_heads, self.exchange = num_heads, exchange
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = (
            nnx.Linear(width, 3 * width, rngs=rngs),
            nnx.Linear(width, width, rngs=rngs),
        )
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, carry, x_TBW, at):
        """The block; it has no state, so `carry` is empty."""
        T, B, W = x_TBW.shape
        qkv = self.qkv(self.norms[0](x_TBW)).reshape(T, B, 3, self.num_heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)  # [T, B, N, D]
        if self.exchange == "all_gather":
            k, v = (lax.all_gather(a, "context", tiled=True) for a in (k, v))
            mixed_TBND = attend(q, k, v, at.time)
        else:  # from own steps of all heads to all steps of own heads
            q, k, v = (lax.all_to_all(a, "context", 2, 0, tiled=True) for a in (q, k, v))
            mixed_TBND = lax.all_to_all(attend(q, k, v, 0), "context", 0, 2, tiled=True)
        x_TBW = x_TBW + self.out(mixed_TBND.reshape(T, B, W))
        return carry, x_TBW + self.down(nnx.gelu(self.up(self.norms[1](x_TBW))))


def attend(q_TBND, k_SBND, v_SBND, first):
    """Attention of each step to those up to it; `first` is the number of the first of the queries."""
    step_T, step_S = first + jnp.arange(len(q_TBND)), jnp.arange(len(k_SBND))
    score_BNTS = jnp.einsum("tbnd,sbnd->bnts", q_TBND, k_SBND) * q_TBND.shape[-1] ** -0.5
    is_past_TS = step_T[:, None] >= step_S[None]
    weight_BNTS = jax.nn.softmax(jnp.where(is_past_TS[None, None], score_BNTS, -1e30))
    return jnp.einsum("bnts,sbnd->tbnd", weight_BNTS, v_SBND)


class Transformer(nnx.Module):
    """Characters and their places in, blocks, logits out."""

    def __init__(self, task, *, rngs):
        W = task.width
        self.embed = nnx.Embed(NUM_CHARACTERS, W, rngs=rngs)
        self.places = nnx.Embed(task.seq_len, W, rngs=rngs)
        self.norm = nnx.LayerNorm(W, rngs=rngs)
        self.head = nnx.Linear(W, NUM_CHARACTERS, rngs=rngs)

        def block(rngs):
            return Block(W, task.num_heads, task.exchange, rngs=rngs)

        self.layers = Stack([block] * task.num_layers, rngs=rngs)

    def first(self, batch, at):
        """What goes into the first block."""
        places_T = at.time + jnp.arange(len(batch["given"]))  # of this device's steps
        return self.embed(batch["given"]) + self.places(places_T)[:, None]

    def last(self, y, batch, at):
        """The loss of what comes out of the last block, summed."""
        wanted = batch["wanted"]
        weight = jnp.broadcast_to(batch["weight"], wanted.shape)
        nll = optax.softmax_cross_entropy_with_integer_labels(self.head(self.norm(y)), wanted)
        return Sums(jnp.sum(weight * nll), jnp.sum(weight))


# --- The task: its fields are options of the command line.


@dataclasses.dataclass(frozen=True)
class LongContext(Task):
    """A language model of characters.

    Attributes:
      num_layers: blocks.
      width: of what moves between them.
      num_heads: of each block's attention.
      exchange: how attention gets what lies on other devices.
      batch_size: windows of text in a batch.
      seq_len: characters of a window.
      optimizer: how it learns.
    """

    num_layers: int = 2
    width: int = 64
    num_heads: int = 4
    exchange: Literal["all_gather", "all_to_all"] = "all_gather"
    batch_size: int = 16
    seq_len: int = 128
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=6e-3)

    unit: ClassVar[str] = "characters"
    axes: ClassVar[tuple[str, ...]] = ("context",)
    rules: ClassVar[Rules] = RULES.replace({"time": "context"})
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=400, log_every=100)

    def make_model(self, rngs):
        """The network, with its initial values."""
        return Transformer(self, rngs=rngs)

    def make_batches(self, split, seed=None):
        """Windows of the text, each with the characters that follow."""
        text = load_text(split, self.seq_len)
        arrays = {"given": text[:, :-1], "wanted": text[:, 1:]}
        return ArrayBatches(arrays, self.batch_size, seed)

    def metrics(self, loss, means):
        """What a person reads."""
        return {"loss": loss, "bits per character": loss / float(np.log(2))}
