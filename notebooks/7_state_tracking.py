# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. State tracking: what can a layer count?
#
# Some layers use their state to decide how to update it; others use only their inputs. The second kind is faster, since it computes a
# window with one matrix product or one prefix sum. What does that cost? This notebook is a short version of
# `benchmarks/state_tracking`.

# %%
import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar import OptimizerConfig, Stack, Sums, TrainConfig

jaxpar.simulate_devices(2)

# %% [markdown]
# ## Parity
#
# The model reads bits. After each bit it must say whether the number of ones so far is odd. Every batch has new random words, made
# from a seed and the number of the step. `starts` tells jaxpar that no word continues in the next batch.


# %%
@dataclasses.dataclass(frozen=True)
class Words:
    seed: tuple[int, int]
    seq_len: int
    batch_size: int = 64
    num_windows: int = 4

    def batch(self, step, rows=slice(None)):
        shape = (self.batch_size, self.seq_len)
        bits = np.random.default_rng([*self.seed, step]).integers(2, size=shape, dtype=np.int32)
        odd = bits.cumsum(axis=1, dtype=np.int32) % 2
        return {"bits": bits[rows], "odd": odd[rows], "starts": True}


word = Words((0, 0), seq_len=16, batch_size=1).batch(0)
for name in ("bits", "odd"):
    print(f"{name:4}", *word[name][0])

# %% [markdown]
# ## A model that takes any layer
#
# Only the layers in the middle differ.


# %%
class Reader(nnx.Module):
    def __init__(self, kind, width, num_layers, *, rngs):
        self.embed, self.out = nnx.Embed(2, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)
        self.layers = Stack([lambda rngs: kind(width, rngs=rngs)] * num_layers, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["bits"])

    def last(self, y, batch, at):
        logits = self.out(y)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["odd"])
        right = jnp.sum(logits.argmax(-1) == batch["odd"])
        return Sums(jnp.sum(nll), nll.size, {"accuracy": right})

    def predict(self, y, batch, at):
        return {"odd": self.out(y).argmax(-1)}


@dataclasses.dataclass(frozen=True)
class Parity(jaxpar.Task):
    layer: str = "LSTM"
    num_layers: int = 2
    width: int = 32
    seq_len: int = 16
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2, lr_schedule="constant")

    def make_model(self, rngs):
        return Reader(getattr(jaxpar.nn, self.layer), self.width, self.num_layers, rngs=rngs)

    def make_batches(self, split, seed=None):
        return Words((("train", "valid", "test").index(split), seed or 0), self.seq_len)


# %% [markdown]
# ## Two layers on two stages
#
# The models learn from words of 16 bits. First an LSTM, whose gates see its state:

# %%
train = TrainConfig(num_steps=150, log_every=50)
lstm = jaxpar.fit(Parity(), "pp2", train)

# %% [markdown]
# The state of a minGRU can only be scaled by numbers between 0 and 1 and added to, and both depend only on its inputs:

# %%
mingru = jaxpar.fit(Parity("MinGRU"), "pp2", train)

# %% [markdown]
# ## Longer words
#
# A task with another sequence length has the same parameters. How good are both models on words of 64 bits, after training on 16?


# %%
def accuracy_by_length(result):
    longer = dataclasses.replace(result.setup.task, seq_len=64)
    batch = longer.make_batches("test").batch(0)
    _, found = jaxpar.make_predict_step(longer, "pp2")(result.state, batch)
    return np.mean(np.asarray(found["odd"]) == batch["odd"], axis=0)


found = {"LSTM": accuracy_by_length(lstm), "minGRU": accuracy_by_length(mingru)}
print("bits  " + "".join(f"{n + 1:>4}-{n + 8}" for n in range(0, 64, 8)))
for name, accuracy in found.items():
    print(f"{name:6}" + "".join(f"{a:7.2f}" for a in accuracy.reshape(8, 8).mean(axis=1)))

# %% [markdown]
# ## Recap
#
# - Parity needs a state that each input can flip. An LSTM learns this from short words, and it works for long ones.
# - A minGRU memorizes at most the first few bits, and guesses the others.
# - [Choose a recurrent layer](../docs/build/recurrent-layers.md) lists for each layer of `jaxpar.nn` whether it can count parities.
#   `benchmarks/state_tracking` tests them, also with arithmetic and permutations.
