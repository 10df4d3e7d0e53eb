"""A training step as sizes, read from the task's own model: what devices hold, and how its work is cut.

Legend: t time steps of a chunk (None if the model has no time), b rows of a microbatch.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.axes import BATCH, DATA, LAYERS, STAGE, TENSOR
from jaxpar.config import Parallel, TrainConfig
from jaxpar.layout import Layout, Outer
from jaxpar.mesh import MeshConfig
from jaxpar.model import KIND
from jaxpar.optimizer import Safe
from jaxpar.pipeline.schedule import Schedule
from jaxpar.planning.compiled import simulated_mesh
from jaxpar.setup import Setup
from jaxpar.sharding import (
    Axes,
    Rules,
    check_split,
    dims_of,
    is_variable,
    named_leaves,
)
from jaxpar.state import abstract_state
from jaxpar.step import step_schedule
from jaxpar.task import Settings, Task

Sizes = tuple[tuple[str, int], ...]  # of the mesh's axes
ONE = MeshConfig()


class Part(NamedTuple):
    """A device's part of an array: the mesh axes that split each dim, and the number of elements left."""

    axes: tuple[Axes, ...]
    elements: int


class Array(NamedTuple):
    """An array of the state.

    Attributes:
      itemsize: bytes of an element.
      kind: number of the kind of layers in whose stack it is; None outside of all stacks.
    """

    name: str
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    itemsize: int
    kind: int | None = None

    def of_rows(self, rows: tuple[int, ...]) -> "Array":
        """The same with `rows[kind]` rows in its stack."""
        if self.kind is None:
            return self
        return self._replace(shape=(rows[self.kind], *self.shape[1:]))


@functools.lru_cache(maxsize=1 << 16)
def part_of(array: Array, rules: Rules, sizes: Sizes) -> Part:
    """The part of an array that a device of a mesh holds.

    Raises:
      ValueError: a dim does not divide by the axes that split it.
    """
    on = dict(sizes)
    spec = rules.spec(array.dims, array.shape, on)
    check_split(f"parameter {array.name}", array.dims, array.shape, spec, on)
    axes = tuple((a,) if isinstance(a, str) else tuple(a or ()) for a in spec)
    parts = math.prod(on[axis] for each in axes for axis in each)
    return Part(axes, math.prod(array.shape) // parts)


class ModelShapes:
    """A task's model, whatever the devices; traced once.

    Attributes:
      task: as it runs on any device.
      layout: on one device; `facts` those of the task.
      params, frozen, opt_state, carry: the arrays of the state, all layers of a kind in one stack.
      carry_trees: the carry of every kind, as variables.
      first, last: indices of the parameters that are used before and after the layers.
      num_sums: how many numbers `last` returns.
      checks_update: whether a step asks all devices if the update is finite.
    """

    def __init__(self, task: Task, num_steps: int):
        """Traces shapes; no array is made."""
        train = dataclasses.replace(task.train, num_steps=num_steps)
        setup = Setup.of(task, Parallel(ONE), train, simulated_mesh(ONE))
        self.layout, self.facts, state = setup.layout, setup.layout.facts, abstract_state(setup)
        self.task = setup.task
        self.params, self.frozen, self.opt_state, self.carry = (
            tuple(self._arrays(tree))
            for tree in (state.params, state.frozen, state.opt_state, state.carry)
        )
        self.carry_trees = [state.carry[kind] for kind in self.facts.kinds]
        outer = Outer(self.layout, self.layout.abstract_model())
        self.first, self.last = outer.first[0], outer.last[0]
        self.num_sums = self.facts.traces.num_sums
        self.checks_update = not isinstance(setup.optimizer, Safe)

    def _arrays(self, tree: Any) -> Iterator[Array]:
        for name, leaf in named_leaves(tree):
            kind = leaf.get_metadata(KIND, None) if is_variable(leaf) else None
            value = leaf.get_value() if is_variable(leaf) else leaf
            dims = dims_of(leaf) if is_variable(leaf) else (None,) * len(value.shape)
            number = self.facts.kinds.index(kind) if dims[:1] == (LAYERS,) else None
            yield Array(name, dims, tuple(value.shape), value.dtype.itemsize, number)

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.facts.batch_size

    @property
    def x_itemsize(self) -> int:
        """Bytes of an element of what goes from layer to layer."""
        return jax.tree.leaves(self.facts.traces.x)[0].dtype.itemsize

    @property
    def counted(self) -> int:
        """The size of a full batch in what the task counts (`Task.unit`): rows, or rows times time steps."""
        return self.batch_size * (self.facts.num_steps or 1)


@functools.lru_cache(maxsize=64)
def shapes_of(task: Task, num_steps: int = 1_000_000) -> ModelShapes:
    """The shapes of a task's model; the same object for equal arguments.

    Args:
      num_steps: of the run that the optimizer is made for.
    Raises:
      ValueError: the task's model is not valid; see `layout.Layout`.
    """
    return ModelShapes(task, num_steps)


class StepShape:
    """The sizes of a step; no device is needed.

    Attributes:
      settings: the task, `parallel` and `train` of the step.
      model: of the task.
      sizes: of the mesh's axes.
      shares_head: whether all stages have a part of what follows the layers.
      placement: the number of layers on each stage, group by group.
      rows: for every kind of layers, rows of its stack.
      params, frozen, opt_state, carry: the arrays of the state.
      rules, param_rules, opt_rules, carry_rules: as in `layout.Layout`.
      t, b: time steps and rows of a unit; without units, of everything that a device holds.
    """

    def __init__(
        self,
        task: Task,
        parallel: Parallel | str | None = None,
        train: TrainConfig | None = None,
    ):
        """Reads the sizes of a task on a mesh; what `Task.resolve` fills in must already be there.

        Raises:
          ValueError: sizes do not fit each other.
        """
        parallel, train = Parallel.of(parallel, task.parallel), train or task.train
        if -1 in parallel.mesh.sizes.values():
            parallel = Setup.of(task, parallel, train).parallel
        self.model = model = shapes_of(task, train.num_steps)
        self.settings = Settings(model.task, parallel, train)
        self.train, self.parallel = train, parallel
        layout, facts, self.sizes = Layout(model.facts, parallel), model.facts, parallel.mesh.sizes
        self.shares_head = parallel.mesh.stage > 1 and layout.head == "sharded"
        self.placement = layout.placement
        self.rows = tuple(map(len, layout.slots.rows))
        self.params, self.frozen, self.opt_state, self.carry = (
            tuple(array.of_rows(self.rows) for array in arrays)
            for arrays in (model.params, model.frozen, model.opt_state, model.carry)
        )
        self.rules, self.param_rules = layout.rules, layout.param_rules
        self.opt_rules, self.carry_rules = layout.opt_rules, layout.carry_rules
        self.t = facts.num_steps and facts.num_steps // parallel.num_chunks
        self.b = parallel.microbatch_rows(model.batch_size)
        if not facts.divides_by_hand:
            parts = math.prod(self.sizes[axis] for axis in self.rules.axes_of(BATCH))
            self.b = model.batch_size // parts
        for array in (*self.params, *self.frozen):
            self.part(array, self.param_rules)  # raises if it does not split

    def part(self, array: Array, rules: Rules) -> Part:
        """A device's part of an array."""
        return part_of(array, rules, tuple(self.sizes.items()))

    def bytes_of(self, arrays: tuple[Array, ...], rules: Rules) -> int:
        """Of a device's parts of some arrays."""
        return sum(self.part(array, rules).elements * array.itemsize for array in arrays)

    @property
    def schedule(self) -> Schedule:
        """That of the data-parallel group with the most to do, if the step runs in units."""
        return step_schedule(self.parallel, max(self.parallel.group_shares))

    @property
    def num_ticks(self) -> int:
        """Of a step, in all segments of its window."""
        return self.schedule.num_ticks * self.parallel.num_segments

    @property
    def units(self) -> int:
        """How many the busiest device runs in a step; 1 if the step is not cut into units."""
        share = max(self.parallel.group_shares)
        return share * self.parallel.pipeline.num_microbatches * self.parallel.num_chunks

    @property
    def splits_weights(self) -> bool:
        """Whether W (gradients of weights) runs apart from B."""
        return self.parallel.runs_in_units and self.parallel.zero_bubble != "off"

    @functools.cached_property
    def layers_GSK(self) -> np.ndarray:
        """The number of layers of each group, stage and kind, int [groups, stages, kinds]."""
        kind_of, ends = self.model.facts.kind_of, np.cumsum((0, *self.placement))
        counts = [
            np.bincount(kind_of[start:end], minlength=len(self.rows))
            for start, end in itertools.pairwise(ends)
        ]
        return np.reshape(counts, (self.parallel.num_groups, self.sizes[STAGE], -1)).astype(int)

    @property
    def unit_rows(self) -> tuple[int, ...]:
        """For every kind, rows of its stack that a unit goes through on a stage, empty ones included."""
        places = self.sizes[STAGE] * self.parallel.num_groups
        return tuple(rows // places for rows in self.rows)

    @property
    def row_parts(self) -> int:
        """Parts that axes other than `data` split the batch into."""
        return math.prod(self.sizes[axis] for axis in self.rules.axes_of(BATCH) if axis != DATA)

    def weights_of(self, kind: int) -> int:
        """How many numbers the parameters of one layer have."""
        return sum(math.prod(array.shape[1:]) for array in self.params if array.kind == kind)

    @property
    def tensor(self) -> int:
        """Devices that a layer is split over."""
        return self.sizes[TENSOR]


def least_factor(n: int) -> int:
    """The least prime factor of n; 1 for 1."""
    return next((d for d in range(2, n + 1) if n % d == 0), 1)
