"""A GRU that forecasts next week's carbon dioxide on Mauna Loa, and how sure it is.

The weekly means of 1958 to 2001 come with statsmodels. From the last change and the season the network
predicts a mean and a variance of the next change, and is trained on the likelihood of what came. Its state is
carried from window to window; windows move through the stages in chunks of time.

    python -m jaxpar train examples/forecaster.py:Forecast --simulate 8 --mesh pp4dp2
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar import (
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    TrainConfig,
)
from jaxpar.nn import named_param

# --- The model. Activations are [time, rows, width].


class GRU(nnx.Module):
    """A gated recurrent layer (Cho et al. 2014). What its dims are called splits it over devices."""

    def __init__(self, width, *, rngs):
        init, shape = nnx.initializers.lecun_normal(0, (1, 2)), (width, 3, width)
        self.w_x = named_param(init(rngs.params(), shape), ("input", "gates", "hidden"))
        self.w_h = named_param(init(rngs.params(), shape), ("input", "gates", "hidden"))
        self.b = named_param(jnp.zeros((3, width)), ("gates", "hidden"))

    def initial_carry(self, rows):
        """The state before the first step."""
        return jnp.zeros((rows, self.b.shape[-1]))

    def __call__(self, h, x, at):
        """The layer over a window of time: the state after it, and the outputs."""
        zx = jnp.einsum("tbi,igh->tbgh", x, self.w_x[...]) + self.b[...][None, None]

        def step(h, zx):
            zh = jnp.einsum("bi,igh->bgh", h, self.w_h[...])
            reset, keep = nnx.sigmoid(zx[:, 0] + zh[:, 0]), nnx.sigmoid(zx[:, 1] + zh[:, 1])
            h = keep * h + (1 - keep) * jnp.tanh(zx[:, 2] + reset * zh[:, 2])
            return h, h

        h, y = jax.lax.scan(step, h, zx)
        return h, x + y


class Forecaster(nnx.Module):
    """A linear layer in, GRUs, a linear layer out: mean and log-variance."""

    def __init__(self, num_features, width, num_layers, *, rngs):
        self.embed = nnx.Linear(num_features, width, rngs=rngs)
        self.layers = Stack([lambda rngs: GRU(width, rngs=rngs)] * num_layers, rngs=rngs)
        self.out = nnx.Linear(width, 2, rngs=rngs)

    def first(self, batch, at):
        """What goes into the first layer."""
        return self.embed(batch["seen"])

    def last(self, y, batch, at):
        """The loss of what comes out of the last layer, summed."""
        mean, log_var = jnp.moveaxis(self.out(y), -1, 0)
        error, weight = batch["next"] - mean, batch["weight"] * batch["known"]
        nll = 0.5 * (jnp.log(2 * jnp.pi) + log_var + error**2 * jnp.exp(-log_var))
        return Sums(
            loss=jnp.sum(weight * nll),
            weight=jnp.sum(weight),
            metrics={"mae": jnp.sum(weight * jnp.abs(error))},
        )


# --- The task: its fields are options of the command line.

PPM = 0.5  # what a change of 1 means to the network, in parts per million
CONTEXT = 52  # weeks before those that are evaluated, which a stream reads first


@dataclasses.dataclass(frozen=True)
class Forecast(Task):
    """Forecasts of the next week.

    Attributes:
      num_layers: GRUs.
      width: their units.
      batch_size: streams that the series is cut into.
      seq_len: weeks of a window.
      optimizer: how it learns.
    """

    num_layers: int = 4
    width: int = 32
    batch_size: int = 16
    seq_len: int = 24
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    unit: ClassVar[str] = "weeks"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=300, log_every=100)
    parallel: ClassVar[Parallel] = Parallel(pipeline=PipelineConfig(num_chunks=4))

    def make_model(self, rngs):
        """The network, with its initial values."""
        return Forecaster(3, self.width, self.num_layers, rngs=rngs)

    def make_batches(self, split, seed=None):
        """Windows of the series."""
        sizes, warmup = (self.batch_size, self.seq_len), CONTEXT if seed is None else 0
        return SeriesBatches(load_series(split), *sizes, seed, warmup=warmup)

    def metrics(self, loss, means):
        """What a person reads."""
        return {"loss": loss, "mae (ppm)": PPM * means["mae"]}

    def baseline(self, split):
        """The errors of who says that next week is as this week, and of a linear autoregression."""
        series = {name: a[CONTEXT:] for name, a in load_series(split).items()}
        errors = {
            "last value": series["next"],
            "linear autoregression": series["next"] - autoregress(split),
        }
        return {
            f"{name}'s mae (ppm)": PPM * float(np.average(abs(error), weights=series["known"]))
            for name, error in errors.items()
        }


def autoregress(split):
    """The next changes by the last 8 and four waves of the year, linearly, as fits train best: [weeks]."""

    def inputs(series):
        change, sine, cosine = series["seen"].T
        last = [np.roll(change, weeks) for weeks in range(8)]
        angles = np.arctan2(sine, cosine) * np.arange(1, 5)[:, None]
        return np.stack([*last, *np.sin(angles), *np.cos(angles), np.ones_like(change)], axis=1)

    train = load_series("train")
    counts = train["known"] > 0
    counts[:CONTEXT] = False
    weights, *_ = np.linalg.lstsq(inputs(train)[counts], train["next"][counts])
    return inputs(load_series(split))[CONTEXT:] @ weights


@functools.cache
def load_series(split):
    """What is seen by a week, the change to the next, and whether that is known: arrays [weeks, ...].

    The first 80 % of the weeks are for train, the next 10 % for valid, the last for test; the first `CONTEXT`
    weeks of valid and test are those before. Weeks without a measurement are interpolated, and do not count.
    """
    from statsmodels.datasets import co2

    weeks = co2.load().data["co2"]
    names, ends = ["train", "valid", "test"], np.array([0, 80, 90, 100]) * len(weeks) // 100
    first, end = ends[names.index(split)], ends[names.index(split) + 1]
    part = slice(max(first - CONTEXT, 0), end)
    season = 2 * np.pi * weeks.index.day_of_year.to_numpy()[part] / 365.25
    change = np.diff(weeks.interpolate().to_numpy()[part]) / PPM
    measured = weeks.notna().to_numpy()[part]
    seen = np.stack([change[:-1], np.sin(season[1:-1]), np.cos(season[1:-1])], axis=-1)
    return {
        "seen": seen.astype(np.float32),
        "next": change[1:].astype(np.float32),
        "known": (measured[1:-1] & measured[2:]).astype(np.float32),
    }
