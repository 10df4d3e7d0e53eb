"""A small task with two kinds of layers, and a measured step whose times are known."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpar
from jaxpar import (
    ArrayBatches,
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
)
from jaxpar.analysis import MeasuredStep, Span
from jaxpar.pipeline import make_schedule

# Parts of a tick, as a `Span` names them.
FORWARD, HEAD, BACKWARD = "forward", "head", "backward"


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, carry, x, at):
        return carry, jnp.tanh(self.linear(x))


class Summing(nnx.Module):
    def initial_carry(self, rows):
        return jnp.zeros((rows, 4))

    def __call__(self, carry, x, at):
        y = carry[None] + jnp.cumsum(x, axis=0)
        return y[-1], y


class Model(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(4))
        self.layers = Stack([Dense, lambda rngs: Summing(), Dense], rngs=rngs)

    def first(self, batch, at):
        return batch["x"] * self.scale[...][None, None]

    def last(self, y, batch, at):
        return Sums(jnp.sum(y**2), jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Own(jaxpar.Task):
    """A task of two kinds of layers, one without parameters, and a batch that is a dict."""

    optimizer: OptimizerConfig = OptimizerConfig()
    frozen = nnx.PathContains("scale")
    parallel = Parallel(MeshConfig(stage=3, devices=(0, 1, 2)), PipelineConfig(num_microbatches=2))

    def make_model(self, rngs):
        return Model(rngs)

    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": np.ones((8, 3, 4), np.float32)}, 4, seed)


def make_measured(heads=(0, 1), **changes):
    """Exactly what the schedule predicts: a forward takes 2 s, a head 1, a backward 4.

    Args:
      heads: the stages that have one, together after the forward of the last.
    """
    schedule = make_schedule("1f1b", 2, 3)
    unit_TS = np.where(np.isin([0, 1], heads), schedule.forward.unit[:, 1:], -1)
    schedule = dataclasses.replace(schedule, head=schedule.forward._replace(unit=unit_TS))
    spans, start = [], 0.0
    for tick in range(schedule.num_ticks):
        for parts in ([(schedule.forward, FORWARD, 0.5), (schedule.forward, FORWARD, 1.5)],
                      [(schedule.head, HEAD, 1.0), (schedule.backward, BACKWARD, 4.0)]):  # fmt: skip
            ends = [start, start]
            for lane, part, seconds in parts:
                for stage in np.flatnonzero(lane.unit[tick] >= 0).tolist():
                    spans.append(Span(stage, tick, part, ends[stage], seconds))
                    ends[stage] += seconds
            start = max(ends)
    step = MeasuredStep(schedule, tuple(spans), start, start + 3, start + 4, start + 3.5, 2, 2)
    return dataclasses.replace(step, **changes)
