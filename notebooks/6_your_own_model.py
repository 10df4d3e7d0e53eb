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
# # 6. Your own model: what does jaxpar have to know about it?
#
# Nothing here comes from jaxpar's own models. You write a forecaster for a real series in plain Flax, as a layer, a model and a
# task, and train it on eight devices. `examples/forecaster.py` is the same code as a file, for the command line.

# %%
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from statsmodels.datasets import co2

import jaxpar
from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, Stack, Sums, TrainConfig

jaxpar.simulate_devices(8)

# %% [markdown]
# ## A layer
#
# A layer takes its recurrent state, its inputs, and `at` (their place in the batch). It returns its new state and its outputs.
# Arrays are [time, rows, width]. The dims of a parameter have names, and a table of rules says which axis of a mesh shards
# "hidden".


# %%
class GRU(nnx.Module):
    def __init__(self, width, *, rngs):
        init, shape = nnx.initializers.lecun_normal(0, (1, 2)), (width, 3, width)
        named = functools.partial(jaxpar.nn.named_param, dims=("input", "gates", "hidden"))
        self.w_x, self.w_h = named(init(rngs.params(), shape)), named(init(rngs.params(), shape))

    def initial_carry(self, rows):
        return jnp.zeros((rows, self.w_h.shape[-1]))

    def __call__(self, h, x, at):
        def step(h, zx):
            zh = jnp.einsum("bi,igh->bgh", h, self.w_h[...])
            reset, keep = nnx.sigmoid(zx[:, 0] + zh[:, 0]), nnx.sigmoid(zx[:, 1] + zh[:, 1])
            h = keep * h + (1 - keep) * jnp.tanh(zx[:, 2] + reset * zh[:, 2])
            return h, h

        h, y = jax.lax.scan(step, h, jnp.einsum("tbi,igh->tbgh", x, self.w_x[...]))
        return h, x + y


# %% [markdown]
# It is an ordinary module, so you can try it alone, on one row of five steps:

# %%
gru = GRU(4, rngs=nnx.Rngs(0))
h, y = gru(gru.initial_carry(rows=1), jnp.ones((5, 1, 4)), at=None)
print("state", h.shape, "outputs", y.shape)

# %% [markdown]
# ## A model
#
# A model has input layers (`first`), a `Stack` of layers, and an output part (`last`). `last` returns sums: of the loss, of the weight
# of each row, and of any metrics you want. Here the network predicts a mean and a variance. The metric `inside` counts how often
# the truth is within one standard deviation of the mean.


# %%
class Forecaster(nnx.Module):
    def __init__(self, width, num_layers, *, rngs):
        self.embed = nnx.Linear(3, width, rngs=rngs)
        self.layers = Stack([lambda rngs: GRU(width, rngs=rngs)] * num_layers, rngs=rngs)
        self.out = nnx.Linear(width, 2, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["seen"])

    def last(self, y, batch, at):
        mean, log_var = jnp.moveaxis(self.out(y), -1, 0)
        error, weight = batch["next"] - mean, batch["weight"]
        nll = 0.5 * (jnp.log(2 * jnp.pi) + log_var + error**2 * jnp.exp(-log_var))
        inside = jnp.sum(weight, where=error**2 < jnp.exp(log_var))
        mae = jnp.sum(weight * abs(error))
        return Sums(jnp.sum(weight * nll), jnp.sum(weight), {"mae": mae, "inside": inside})


# %% [markdown]
# ## A task
#
# A task defines the model and its data. It is a frozen dataclass, and its fields are its options. The series is the carbon dioxide
# over Mauna Loa, week by week from 1958 to 2001. The model forecasts the change to the next week, from the last change and the
# season.


# %%
@dataclasses.dataclass(frozen=True)
class Forecast(jaxpar.Task):
    num_layers: int = 4
    width: int = 32
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    def make_model(self, rngs):
        return Forecaster(self.width, self.num_layers, rngs=rngs)

    def make_batches(self, split, seed=None):
        return jaxpar.SeriesBatches(load(split), batch_size=16, seq_len=24, seed=seed)

    def baseline(self, split):
        return {"mae of no change": float(np.mean(abs(load(split)["next"])))}


@functools.cache
def load(split):
    weeks = co2.load().data["co2"].interpolate()
    first, last = {"train": (0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1)}[split]
    weeks = weeks.iloc[int(first * len(weeks)) : int(last * len(weeks))]
    season, change = 2 * np.pi * weeks.index.day_of_year / 365.25, np.diff(weeks)
    seen = np.stack([change[:-1], np.sin(season[1:-1]), np.cos(season[1:-1])], axis=-1)
    return {"seen": seen.astype(np.float32), "next": change[1:].astype(np.float32)}


# %% [markdown]
# ## Train on eight devices
#
# The mesh has four stages with one layer each, in two data-parallel groups. A window of 24 weeks moves through the stages in four
# time chunks.

# %%
eight = Parallel("dp2pp4", PipelineConfig(num_chunks=4))
train = TrainConfig(num_steps=300, out_dir="eight")
result = jaxpar.fit(Forecast(), eight, train)

# %% [markdown]
# The forecast is better than expecting no change. Its uncertainty is realistic, too: 68% of a normal distribution are within one
# standard deviation.
#
# ## The same on one device
#
# jaxpar keeps its promise for a model that it has never seen. Compare the losses of both runs, step by step:

# %%
one = Parallel(MeshConfig(devices=(0,)))
alone = jaxpar.fit(Forecast(), one, dataclasses.replace(train, out_dir="one"), quiet=True)
for step in (1, 100, 200, 300):
    print(
        f"step {step:3}  eight devices {result.losses[step - 1]:.6f}  one {alone.losses[step - 1]:.6f}"
    )

# %% [markdown]
# ## Where everything is stored
#
# The layers are one stack, whose leading dim `layers` is sharded over the stages. With `tensor` in the mesh, the dim named
# "hidden" is sharded as well:

# %%
jaxpar.show(jaxpar.init_state(Forecast(), Parallel("dp2pp2tp2")))

# %% [markdown]
# ## Mistakes are reported early
#
# jaxpar checks the model before it compiles anything. One mistake is a dim name that the rules don't know. Another is a layer whose
# outputs have another shape than its inputs:


# %%
class Narrow(GRU):
    def __call__(self, h, x, at):
        h, y = super().__call__(h, x, at)
        return h, y[..., :-1]


class NarrowForecast(Forecast):
    def make_model(self, rngs):
        model = super().make_model(rngs)
        model.layers = Stack([lambda rngs: Narrow(self.width, rngs=rngs)] * 4, rngs=rngs)
        return model


try:
    jaxpar.init_state(NarrowForecast(), eight)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Recap
#
# - A layer is `(state, inputs, at) -> (state, outputs)`. A model is `first`, a `Stack` and `last`. A task makes the model and the
#   batches.
# - Names of dims are all that a model says about devices. You choose mesh, stages, microbatches and time chunks separately.
# - Any mesh gives the losses of a single device.
# - Mistakes are reported before anything is compiled.
# - In a file, the same is a command: `python -m jaxpar train forecaster.py:Forecast --mesh pp4dp2`.
