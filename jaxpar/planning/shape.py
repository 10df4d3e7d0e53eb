"""A training step as sizes, read from the task's own model: what devices hold, and how its work is cut.

Legend: t time steps of a chunk (None if the model has no time), b rows of a microbatch.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxpar.axes import BATCH, DATA, LAYERS, MESH_AXES, STAGE, TENSOR
from jaxpar.config import Parallel, TrainConfig
from jaxpar.layout import lay_out, on_devices, rules_of
from jaxpar.mesh import MeshConfig
from jaxpar.model import KIND
from jaxpar.optimizer import Safe
from jaxpar.pipeline.placement import make_slots
from jaxpar.pipeline.schedule import Schedule
from jaxpar.planning.compiled import simulated_mesh
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
    spec = rules.spec_on(array.dims, array.shape, on)
    check_split(f"parameter {array.name}", array.dims, array.shape, spec, on)
    axes = tuple((a,) if isinstance(a, str) else tuple(a or ()) for a in spec)
    parts = math.prod(on[axis] for each in axes for axis in each)
    return Part(axes, math.prod(array.shape) // parts)


class ModelShapes:
    """A task's model, whatever the devices; traced once.

    Attributes:
      task: as it runs on any device.
      layout: on one device.
      params, frozen, opt_state, carry: the arrays of the state, all layers of a kind in one stack.
      carry_trees: the carry of every kind, as variables.
      first, last: indices of the parameters that are used before and after the layers.
      can_share_head: whether all stages can have a part of what follows the layers.
      num_sums: how many numbers `last` returns.
      checks_update: whether a step asks all devices if the update is finite.
    """

    def __init__(self, task: Task, num_steps: int):
        """Traces shapes; no array is made."""
        self.task = task
        self.layout = layout = lay_out(task, Parallel(ONE))
        state = abstract_state(task, Parallel(ONE), simulated_mesh(ONE), num_steps=num_steps)
        self.params, self.frozen, self.opt_state, self.carry = (
            tuple(self._arrays(tree))
            for tree in (state.params, state.frozen, state.opt_state, state.carry)
        )
        self.carry_trees = [state.carry[kind] for kind in layout.kinds]
        model: Any = layout.abstract_model()
        outer = layout.outer(model)
        self.first, self.last, self.num_sums = outer.first, outer.last, layout.num_sums
        self.can_share_head = hasattr(model, "last_part")
        self.checks_update = not isinstance(task.make_optimizer(num_steps), Safe)

    def _arrays(self, tree: Any) -> Iterator[Array]:
        for name, leaf in named_leaves(tree):
            kind = leaf.get_metadata(KIND, None) if is_variable(leaf) else None
            value = leaf.get_value() if is_variable(leaf) else leaf
            dims = dims_of(leaf) if is_variable(leaf) else (None,) * len(value.shape)
            number = self.layout.kinds.index(kind) if dims[:1] == (LAYERS,) else None
            yield Array(name, dims, tuple(value.shape), value.dtype.itemsize, number)

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.layout.batch_size

    @property
    def x_itemsize(self) -> int:
        """Bytes of an element of what goes from layer to layer."""
        return jax.tree.leaves(self.layout.x)[0].dtype.itemsize

    @property
    def counted(self) -> int:
        """The size of a full batch in what the task counts (`Task.unit`): rows, or rows times time steps."""
        return self.batch_size * (self.layout.num_steps or 1)


@functools.lru_cache(maxsize=64)
def shapes_of(task: Task, num_steps: int = 1_000_000) -> ModelShapes:
    """The shapes of a task's model; the same object for equal arguments.

    Args:
      num_steps: of the run that the optimizer is made for.
    Raises:
      ValueError: the task's model is not valid; see `layout.ModelLayout`.
    """
    return ModelShapes(task, num_steps)


@functools.lru_cache(maxsize=4096)
def _rows(placement: tuple[int, ...], groups: int, kind_of: tuple[int, ...]) -> tuple[int, ...]:
    """For every kind of layers, rows of its stack."""
    return tuple(map(len, make_slots(placement, groups, kind_of).rows)) if kind_of else ()


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
      rules, param_rules, opt_rules, carry_rules: as in `layout.ModelLayout`.
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
        parallel = Parallel.of(parallel, task.parallel)
        if -1 in parallel.mesh.sizes.values():
            parallel, _ = on_devices(task, parallel)
        self.parallel = parallel
        self.settings = Settings(task, parallel, train or task.train)
        self.train = self.settings.train
        self.model = model = shapes_of(task, self.train.num_steps)
        layout, self.sizes = model.layout, parallel.mesh.sizes
        parallel.check(model.batch_size, layout.num_steps)
        mesh: Any = AbstractMesh(tuple(self.sizes.values()), MESH_AXES)
        model.task.check(parallel, mesh)
        stages, pipeline = self.sizes[STAGE], parallel.pipeline
        if (
            (pipeline.head == "sharded" and stages > 1 and not model.can_share_head)
            or (stages > 1 and not layout.kind_of)
            or (parallel.runs_in_units and not layout.divides_by_hand)
        ):
            lay_out(model.task, parallel)  # raises, and says what is wrong
        self.shares_head = stages > 1 and model.can_share_head and pipeline.head != "last"
        self.placement = layout.placement_on(parallel, shares_head=self.shares_head)
        self.rows = _rows(self.placement, parallel.num_groups, layout.kind_of)
        self.params, self.frozen, self.opt_state, self.carry = (
            tuple(array.of_rows(self.rows) for array in arrays)
            for arrays in (model.params, model.frozen, model.opt_state, model.carry)
        )
        rules = model.task.rules
        found = rules_of(rules, parallel, head_is_last=stages > 1 and not self.shares_head)
        self.rules, self.param_rules, self.opt_rules, self.carry_rules = found
        self.t = layout.num_steps and layout.num_steps // parallel.num_chunks
        self.b = parallel.microbatch_rows(model.batch_size)
        if not layout.divides_by_hand:
            parts = math.prod(self.sizes[axis] for axis in rules.axes_of(BATCH))
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
        kind_of, ends = self.model.layout.kind_of, np.cumsum((0, *self.placement))
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
