"""A mixture of experts that predicts the next character of Python's documentation.

Between recurrent layers each character goes to one of several small networks. Experts lie on an axis of their
own, which splits the rows of a batch as well: a layer sends each character to the device of its expert by one
all-to-all, and gets it back by another.

    python -m jaxpar train examples/experts.py:Experts --simulate 8 --mesh dp2pp2expert2

With --split tensor they lie on `tensor`, by a rule: all devices see all characters, and the compiler adds up.
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

from jaxpar import (
    RULES,
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    TrainConfig,
)
from jaxpar.nn import GRU, Embedding, named_param

# --- The model. Legend: T time, B rows, W width, E experts, C places of a row at an expert, I inner units.


class Mixture(nnx.Module):
    """One expert for each character, chosen by a router; what it makes is added, times the router's weight.

    An expert has places for twice the mean of its share of a row. Characters beyond that go on as they are
    (Fedus et al. 2021, arXiv:2101.03961), which the balancing loss makes rare. Both go by rows alone, so that
    every mesh computes the same (the loss as in DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).
    """

    whole_window = True  # places are counted over it

    def __init__(self, width, num_experts, balance, by_exchange, *, rngs):
        self.balance, self.by_exchange = balance, by_exchange
        self.router = nnx.Linear(width, num_experts, rngs=rngs)
        up = jax.random.normal(rngs.params(), (num_experts, width, 4 * width)) * width**-0.5
        down = jax.random.normal(rngs.params(), (num_experts, 4 * width, width)) * width**-0.5 / 2
        self.up = named_param(up, ("experts", None, None))
        self.down = named_param(down, ("experts", None, None))

    def __call__(self, carry, x_TBW, at):
        """The layer; it has no state, so `carry` is empty."""
        chance_TBE = jax.nn.softmax(self.router(x_TBW))
        T, _, E = chance_TBE.shape
        is_chosen_TBE = jax.nn.one_hot(jnp.argmax(chance_TBE, -1), E)
        # The place of each character at its expert, counted within its row; none beyond the last.
        places = 2 * T // E
        number_TBE = jnp.cumsum(is_chosen_TBE, 0) * is_chosen_TBE - 1
        to_place_TBEC = jax.nn.one_hot(number_TBE.astype(jnp.int32), places)
        sent_EBCW = jnp.einsum("tbec,tbw->ebcw", to_place_TBEC, x_TBW)
        if self.by_exchange:  # from all experts of own rows to own experts of all rows
            sent_EBCW = lax.all_to_all(sent_EBCW, "expert", 0, 1, tiled=True)
        inner_EBCI = jax.nn.gelu(jnp.einsum("ebcw,ewi->ebci", sent_EBCW, self.up[...]))
        made_EBCW = jnp.einsum("ebci,eiw->ebcw", inner_EBCI, self.down[...])
        if self.by_exchange:
            made_EBCW = lax.all_to_all(made_EBCW, "expert", 1, 0, tiled=True)
        weight_TBE = chance_TBE * is_chosen_TBE
        y_TBW = jnp.einsum("ebcw,tbec,tbe->tbw", made_EBCW, to_place_TBEC, weight_TBE)
        share_BE, mean_BE = is_chosen_TBE.mean(0), chance_TBE.mean(0)
        row_weight_B = at.batch["weight"] * T
        unbalanced = jnp.sum(E * jnp.sum(share_BE * mean_BE, -1) * row_weight_B)
        lost_TB = 1 - jnp.sum(to_place_TBEC, (-2, -1))
        lost = jnp.sum(lost_TB * at.batch["weight"][None])
        # The weight is that of `last`; the loss counts once for each character.
        sums = Sums(self.balance * unbalanced, 0.0, {"balance": unbalanced, "lost": lost})
        return carry, x_TBW + y_TBW, sums


class Characters(nnx.Module):
    """Characters in, recurrent layers and mixtures in turns, logits out."""

    def __init__(self, task, *, rngs):
        W, by_exchange = task.width, task.split == "expert"
        self.embed = Embedding(NUM_CHARACTERS, W, rngs=rngs)
        self.head = nnx.Linear(W, NUM_CHARACTERS, rngs=rngs)
        makers = [
            lambda rngs: GRU(W, rngs=rngs),
            lambda rngs: Mixture(W, task.num_experts, task.balance_weight, by_exchange, rngs=rngs),
        ]
        self.layers = Stack(makers * task.num_pairs, rngs=rngs)

    def first(self, batch, at):
        """What goes into the first layer."""
        return self.embed(batch["given"])

    def last(self, y, batch, at):
        """The loss of what comes out of the last layer, summed."""
        wanted = batch["wanted"]
        weight = jnp.broadcast_to(batch["weight"], wanted.shape)
        nll = optax.softmax_cross_entropy_with_integer_labels(self.head(y), wanted)
        total = jnp.sum(weight * nll)
        return Sums(total, jnp.sum(weight), {"nll": total})


# --- The task: its fields are options of the command line.


@dataclasses.dataclass(frozen=True)
class Experts(Task):
    """A language model of characters.

    Attributes:
      num_pairs: of a recurrent layer and a mixture.
      num_experts: of each mixture.
      width: of what moves between layers.
      balance_weight: of the balancing loss.
      split: the axis of the mesh that experts lie on.
      batch_size: windows of text in a batch.
      seq_len: characters of a window.
      optimizer: how it learns.
    """

    num_pairs: int = 2
    num_experts: int = 8
    width: int = 64
    balance_weight: float = 0.01
    split: Literal["expert", "tensor"] = "expert"
    batch_size: int = 32
    seq_len: int = 32
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=6e-3)

    unit: ClassVar[str] = "characters"
    axes: ClassVar[tuple[str, ...]] = ("expert",)
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=400, log_every=100)
    parallel: ClassVar[Parallel] = Parallel(pipeline=PipelineConfig(num_microbatches=4))

    @property
    def rules(self):
        """Which axes split experts, and rows."""
        rows = ("data", "expert") if self.split == "expert" else "data"
        return RULES.replace({"experts": self.split, "batch": rows})

    def make_model(self, rngs):
        """The network, with its initial values."""
        return Characters(self, rngs=rngs)

    def make_batches(self, split, seed=None):
        """Windows of the text, each with the characters that follow."""
        text = load_text(split, self.seq_len)
        arrays = {"given": text[:, :-1], "wanted": text[:, 1:]}
        return ArrayBatches(arrays, self.batch_size, seed)

    def metrics(self, loss, means):
        """What a person reads; a layer that uses all experts alike has a `balance` of 1."""
        each = {name: means[name] / self.num_pairs for name in ("balance", "lost")}
        return {"loss": loss, "bits per character": means["nll"] / float(np.log(2)), **each}
