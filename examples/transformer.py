"""A transformer that predicts the next character of Python's documentation.

Attention heads and the hidden units of the perceptrons have names, "heads" and "mlp"; the task's rules say
that `tensor` splits both. Every head then lives on one device, and a block needs two sums over `tensor`.

    python -m jaxpar train examples/transformer.py:Characters --simulate 8 --mesh dp2pp2tp2
"""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import (
    RULES,
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Rules,
    Task,
    TrainConfig,
)

# --- The model, in plain Flax. Activations are [rows, time, width].

lecun, named = nnx.initializers.lecun_normal(), nnx.with_partitioning


class Block(nnx.Module):
    """Causal attention and a perceptron, each added to what it is given."""

    def __init__(self, width, num_heads, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            num_heads,
            width,
            kernel_init=named(lecun, (None, "heads", None)),
            out_kernel_init=named(lecun, ("heads", None, None)),
            use_bias=False,
            decode=False,
            rngs=rngs,
        )
        up, down = named(lecun, (None, "mlp")), named(lecun, ("mlp", None))
        bias = named(nnx.initializers.zeros, ("mlp",))
        self.up = nnx.Linear(width, 4 * width, kernel_init=up, bias_init=bias, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=down, rngs=rngs)

    def __call__(self, x, mask):
        """The next x."""
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """Characters and their places in, blocks, logits out."""

    def __init__(self, vocab_size, seq_len, width, num_heads, num_layers, *, rngs):
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.places = nnx.Embed(seq_len, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, num_heads, rngs=rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        """Logits of the next character, [rows, time, vocabulary]."""
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))[None]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


# --- The task: its fields are options of the command line.

NUM_CHARACTERS = 128  # ASCII


@dataclasses.dataclass(frozen=True)
class Characters(Task):
    """A language model of characters.

    Attributes:
      num_layers: blocks.
      width: of what moves between them.
      num_heads: of each block's attention.
      batch_size: windows of text in a batch.
      seq_len: characters of a window.
      optimizer: how it learns.
    """

    num_layers: int = 4
    width: int = 64
    num_heads: int = 4
    batch_size: int = 32
    seq_len: int = 32
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=6e-3)

    unit: ClassVar[str] = "characters"
    layers: ClassVar[str] = "blocks"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=400, log_every=100)
    parallel: ClassVar[Parallel] = Parallel(pipeline=PipelineConfig(num_microbatches=4))
    rules: ClassVar[Rules] = RULES.replace({"heads": "tensor", "mlp": "tensor"})

    def make_model(self, rngs):
        """The network, with its initial values."""
        sizes = NUM_CHARACTERS, self.seq_len, self.width, self.num_heads, self.num_layers
        return Transformer(*sizes, rngs=rngs)

    def loss(self, model, batch):
        """The mean over characters, and how many of them are right."""
        logits, wanted = model(batch["given"]), batch["wanted"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
        right = jnp.float32(logits.argmax(-1) == wanted)
        return jaxpar.mean(nll, batch["weight"], accuracy=right)

    def make_batches(self, split, seed=None):
        """Windows of the text, each with the characters that follow."""
        text = load_text(split, self.seq_len)
        arrays = {"given": text[:, :-1], "wanted": text[:, 1:]}
        return ArrayBatches(arrays, self.batch_size, seed)

    def metrics(self, loss, means):
        """What a person reads."""
        return {"loss": loss, "bits per character": loss / float(np.log(2)), **means}

    def baseline(self, split):
        """What who knows the last character alone can reach."""
        train, text = load_text("train", self.seq_len), load_text(split, self.seq_len)
        counts = np.ones((NUM_CHARACTERS, NUM_CHARACTERS))
        np.add.at(counts, (train[:, :-1], train[:, 1:]), 1)
        chances = counts / counts.sum(axis=1, keepdims=True)
        bits = -np.mean(np.log2(chances[text[:, :-1], text[:, 1:]]))
        return {"bigrams' bits per character": float(bits)}


@functools.cache
def load_text(split, seq_len):
    """Windows of the text, int32 [N, seq_len + 1]. Of every 20, 18 are for train."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    ids = np.frombuffer(text, np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(ids, seq_len + 1)[::seq_len]
    place = np.arange(len(windows)) % 20
    return windows[{"train": place < 18, "valid": place == 18, "test": place == 19}[split]]
