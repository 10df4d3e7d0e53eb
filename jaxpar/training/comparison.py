"""Two layouts side by side: how far their steps are apart, and where two runs part."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.base.checks import require
from jaxpar.config import Parallel, TrainConfig
from jaxpar.data.batches import place_batch
from jaxpar.data.order import check_at_least
from jaxpar.mesh import MeshConfig
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Task
from jaxpar.partition.by_layer import abstract_by_layer, by_layer, from_layers
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, abstract_state
from jaxpar.step.step import batch_sharding


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare_meshes` found, by step; `print` it.

    Attributes:
      losses: losses of two runs, one on each mesh.
      apart: relative difference of these losses.
      of_step: the same of a step that both meshes take from one state, or of its gradient's norm, the larger.
      rounding: what rounding can make of one step.
    """

    losses: tuple[list[float], list[float]]
    apart: list[float]
    of_step: list[float]
    rounding: float

    @property
    def is_rounding(self) -> bool:
        """Whether steps from one state differ by rounding alone."""
        return max(self.of_step) <= self.rounding

    def __str__(self) -> str:
        lines = [f"{'step':>6}  {'losses':<24}  apart    one step from the same state"]
        rows = [*enumerate(zip(*self.losses, self.apart, self.of_step, strict=True), 1)]
        for step, (first, second, apart, own) in [*rows[:-1][:: -(-len(rows) // 12)], rows[-1]]:
            lines.append(f"{step:6}  {first:<11.6g} {second:<11.6g}   {apart:.0e}    {own:.0e}")
        worst = max(self.of_step)
        if self.is_rounding:
            lines.append(
                f"From the same state, steps differ by {worst:.0e} at most: this is rounding."
            )
            lines.append(
                "Training amplifies such a difference from step to step, also on one mesh."
            )
        else:
            step = next(n for n, own in enumerate(self.of_step, 1) if own > self.rounding)
            lines.append(
                f"Step {step} differs from the same state: more than rounding ({self.rounding:.0e})."
            )
            lines.append(
                "Fix: make the model independent of the shape of a block and of other rows."
            )
        return "\n".join(lines)

    __repr__ = __str__


def compare_meshes(
    task: Task,
    first: Parallel | MeshConfig | str,
    second: Parallel | MeshConfig | str,
    num_steps: int = 20,
    train: TrainConfig | None = None,
) -> Comparison:
    """Compares the first steps of a run on two meshes, and tells rounding differences from errors.

    Each mesh trains independently. In addition, the second takes each step from the state that the first has
    before it: what differs there is of one step, and can't have grown.

    Args:
      task, train: as `fit` takes them.
      first, second: layouts, or meshes such as "dp1" and "dp2pp2"; both states are held at once.
      num_steps: number of steps.
    Raises:
      ValueError: a layout does not fit, or there are several processes.

    Example:
      print(jaxpar.compare_meshes(task, "dp1", "dp2pp2", num_steps=3))
    """
    check_at_least(1, num_steps=num_steps)
    require(jax.process_count() == 1, "compare_meshes runs in one process.\nFix: start only one.")
    setups = [Setup.of(task, parallel, train) for parallel in (first, second)]
    steps = [setup.train_step() for setup in setups]
    states = [setup.init_state() for setup in setups]
    batches = setups[0].task.make_batches("train", setups[0].train.seed)
    losses, of_step = ([], []), []
    for number in range(num_steps):
        placed = [place_batch(batches, number, batch_sharding(setup)) for setup in setups]
        same = _moved(states[0], *setups)
        _, found = steps[1](same, placed[1])
        for mesh in range(2):
            states[mesh], metrics = steps[mesh](states[mesh], placed[mesh])
            losses[mesh].append(float(metrics.loss))
            if mesh == 0:
                pairs = (metrics.loss, found.loss), (metrics.grad_norm, found.grad_norm)
                of_step.append(max(_apart(float(a), float(b)) for a, b in pairs))
    apart = [*map(_apart, *losses)]
    return Comparison(losses, apart, of_step, _precision(setups[0].facts) ** 0.5)


def _moved(state: TrainState, setup: Setup, to: Setup) -> TrainState:
    """A copy of a state, on the mesh of another setup."""
    target, arrays = abstract_state(to), jax.device_get(by_layer(state, setup.storage))
    wanted = abstract_by_layer(target, to.storage)
    placed = {name: jax.device_put(arrays[name], leaf.sharding) for name, leaf in wanted.items()}
    return jax.tree.map(jnp.copy, from_layers(target, to.storage, placed))  # a step consumes it


def _apart(first: float, second: float) -> float:
    if math.isfinite(first) and math.isfinite(second):
        return abs(first - second) / max(abs(first), 1e-30)
    return 0.0 if math.isfinite(first) == math.isfinite(second) else math.inf


def _precision(facts: ModelFacts) -> float:
    """The coarsest that a step computes with."""
    leaves = jax.tree.leaves((facts.params, facts.traces.x, facts.traces.y))
    floats = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    products = 0.0  # GPUs and TPUs take fewer digits of float32
    config: Any = jax.config
    if facts.platform != "cpu" and config.jax_default_matmul_precision is None:
        products = 2.0**-8
    return max(products, *(float(jnp.finfo(dtype).eps) for dtype in floats))
