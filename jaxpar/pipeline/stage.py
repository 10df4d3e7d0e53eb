"""A stage: its part of a pipeline, and its work for one unit. It knows no ticks.

    first      part of the batch -> x
    forward    x through the layers of one of its groups
    last       y -> sums
    pieces     of the batch, of the carry, of a group's rows

Inside of the engine x is a pair: what layers pass on, and the sums that layers add, () if they add none. Sums
ride along from layer to layer; from stage to stage x alone is sent.

Legend: t time steps of a chunk, b rows of a microbatch, B rows of the device's part of the batch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.at import LayerContext, Processor
from jaxpar.base.axes import DATA, STAGE, TENSOR
from jaxpar.base.trees import add, has_time, in_float32, time_steps, vary_like, zeros
from jaxpar.base.types import (
    Activations,
    Arrays,
    Batch,
    Carry,
    Cotangents,
    Index,
    Outputs,
    Params,
    Shapes,
    Tree,
)
from jaxpar.pipeline.buffers import corner, make_buffers
from jaxpar.pipeline.spec import PipelineParams, Spec
from jaxpar.pipeline.store import Store, rows_of_group, unstack, with_rows_of_group
from jaxpar.pipeline.tables import TickTable
from jaxpar.pipeline.walk import Scan, SlotArrays, Switch, run_layers, with_sums


class Unit(NamedTuple):
    """A unit of work.

    Attributes:
      number: m K + k within its segment; -1 for none.
      segment: of the window.
    """

    number: Index
    segment: Index = 0


@dataclasses.dataclass(frozen=True)
class Stage:
    """One device's part of everything.

    Attributes:
      params, frozen: of this stage.
      batch: of this data-parallel group; `batch_on_all` is the same, for what all stages compute alike.
      slots: of this stage.
      rows: for every kind the layer in each row of its stack.
      stores: how parameters and frozen ones are stored.
      key: of dropout.
      number: of the stage; `first_row` of the device in the batch, and `first_step` in the window.
      here: a value that differs over all axes, as everything does that is cast to be like it; `group` over
        all but `stage`.
      num_chunks: K of the batch, at most `max_chunks`; `num_groups` V, of layers; `num_rows` B.
      x_shape, sums_shape: of what layers pass on, and of what `last` gives of a unit.
    """

    spec: Spec
    params: PipelineParams
    frozen: PipelineParams
    batch: Batch
    batch_on_all: Batch
    slots: SlotArrays
    rows: tuple[jax.Array, ...]
    stores: tuple[Store, ...]
    key: jax.Array | None
    number: jax.Array
    first_row: jax.Array
    first_step: Index
    here: jax.Array
    group: jax.Array
    num_chunks: Any
    max_chunks: int
    num_groups: int
    num_rows: int
    x_shape: Shapes = None
    sums_shape: Shapes = None

    @classmethod
    def of(
        cls,
        spec: Spec,
        params: Params,
        frozen: Params,
        batch: Batch,
        slots: Any,
        rows: Arrays,
        stored: Params,
        table: TickTable,
        key,
    ) -> "Stage":
        """The stage of this device, inside of the engine's `shard_map`."""
        number = lax.axis_index(STAGE)
        # Casting the parameters before the loop puts the sums of their gradients over `data` and `stage`
        # after it.
        group, sharded_head = lax.axis_index(DATA), spec.head == "sharded"
        for axis in spec.own_axes:
            group = group + lax.axis_index(axis)
        here = number + group

        def vary(parts):  # parts of an end combine what is the same on all stages
            return PipelineParams(
                first=vary_like(parts.first, group if spec.shares_first else here),
                layers=vary_like(parts.layers, here),
                last=vary_like(parts.last, group if sharded_head else here),
                outer=vary_like(parts.outer, here),
            )

        params, frozen = vary(params), vary(frozen)
        if spec.unroll:
            params, frozen = (
                tree._replace(layers=tuple(unstack(own, len(rows[0])) for own in tree.layers))
                for tree in (params, frozen)
            )
        # Likewise, for autodiff through `forward`.
        batches = vary_like(batch, here), vary_like(batch, group)
        slots, rows, stored = vary_like((slots, rows, stored), here)
        stores = tuple(store.bind(each) for store, each in zip(spec.stores, stored, strict=True))
        num_rows = table.max_microbatches * spec.microbatch_rows
        in_group = num_rows * math.prod(spec.mesh.shape[axis] for axis in spec.row_axes)
        first_rows = spec.first_rows or range(0, spec.mesh.shape[DATA] * in_group, in_group)
        first_row = jnp.asarray(first_rows, jnp.int32)[lax.axis_index(DATA)]
        if spec.row_axes:
            first_row = first_row + lax.axis_index(spec.row_axes) * num_rows
        first_step = 0
        if spec.time_axes:
            steps = max(time_steps(batch, 0).values(), default=1)
            first_step = lax.axis_index(spec.time_axes) * steps
        sizes = table.num_chunks, table.max_chunks, table.route.num_groups, num_rows
        own = spec, params, frozen, *batches, slots, rows, stores, key
        stage = cls(*own, number, first_row, first_step, here, group, *sizes)
        unit = Unit(jnp.int32(0))
        x = jax.eval_shape(lambda: stage.first(unit))

        def last():
            y = vary_like(zeros(x), here)
            params = stage.of_end(1, stage.params)
            return stage.last(params, stage.over_stages(y) if sharded_head else y, unit)

        return dataclasses.replace(stage, x_shape=x, sums_shape=jax.eval_shape(last))

    # ---- what is done with a unit ----

    def first(self, unit: Unit) -> Arrays:
        """Before the layers."""
        at = self.at(unit, on_all=self.spec.shares_first)
        own = self.of_end(0, self.params), self.of_end(0, self.frozen)
        return vary_like(self.spec.first(*own, at), self.here)

    def first_gradient(self, grads: Cotangents, unit: Unit, dx: Cotangents) -> Arrays:
        """The gradients of what comes before the layers, with what a unit adds."""
        params, at = self.of_end(0, self.params), self.at(unit, on_all=self.spec.shares_first)
        frozen = self.of_end(0, self.frozen)
        if self.spec.first_gradient is not None:
            return self.spec.first_gradient(grads, params, frozen, at, dx)
        _, vjp = jax.vjp(lambda params: vary_like(self.spec.first(params, frozen, at), dx), params)
        return add(grads, vjp(dx)[0])

    def forward(
        self, unit: Unit, group: Index, carry: Carry, x: Activations
    ) -> tuple[Arrays, Arrays]:
        """The layers of a group: the carry, and y."""
        params, frozen, slots = self.own(group)
        walk, at = self.walk(group), self.at(unit)
        return run_layers(walk, self.layers, params, frozen, carry, x, at, slots)

    def over_stages(self, y: Activations) -> Arrays:
        """The sum of all stages' y.

        In float32 at least, for the parts of dy are summed (the transpose of `vary_like`) before they are
        rounded; and XLA's CPU compiler aborts on a sum of bfloat16.
        """
        return lax.psum(in_float32(y), STAGE)

    def last(self, params: Params, y: Activations, unit: Unit) -> Arrays:
        """The sums of a unit, or its rows."""
        frozen = self.of_end(1, self.frozen)
        if self.spec.head == "sharded":
            return self.spec.last(params, frozen, y, self.at(unit, on_all=True))
        return self.spec.last(params, frozen, vary_like(y, self.here), self.at(unit))

    def last_of_zeros(self, unit: Unit) -> Arrays:
        """What `last` gives of a unit if y and all variables are 0; the same on all stages."""
        own = (zeros(self.of_end(1, parts)) for parts in (self.params, self.frozen))
        # A loop in `last` may begin with an array like y, and add what depends on the batch.
        params, frozen, y = vary_like((*own, zeros(self.x_shape)), self.group)
        is_shared = self.spec.head == "sharded"
        y = in_float32(y) if is_shared else y
        return self.spec.last(params, frozen, y, self.at(unit, on_all=True))

    @property
    def nothing_collected(self) -> Arrays:
        """What `last` has given before the first unit: zeros, of rows all that the device has."""
        if self.spec.collects == "sums":
            return zeros(self.sums_shape)
        num_chunks, rows_dim = self.max_chunks * self.spec.num_segments, self.spec.rows_dim

        def whole(a):
            steps = [size * num_chunks for size in a.shape[:rows_dim]]
            return jnp.zeros((*steps, self.num_rows, *a.shape[rows_dim + 1 :]), a.dtype)

        return jax.tree.map(whole, self.sums_shape)

    def collect(self, so_far: Outputs, of_unit: Outputs, unit: Unit) -> Arrays:
        """What `last` has given so far, with what it gives of a unit."""
        if self.spec.collects == "sums":
            return add(so_far, of_unit)
        place = self.place(unit)[1 - self.spec.rows_dim :]  # (time, row), or (row,) without time

        def put(a, part):
            return lax.dynamic_update_slice(a, part, corner(a, *place))

        return jax.tree.map(put, so_far, of_unit)

    @property
    def layers(self) -> tuple[Arrays, ...]:
        """The functions of the layers, which add sums to those that ride along."""
        return tuple(map(with_sums, self.spec.layers))

    @property
    def no_sums(self) -> Arrays:
        """What layers have added before the first of them."""
        return vary_like(zeros(self.sums_shape), self.here) if self.spec.adds_sums else ()

    # ---- the variables of `first` and `last` ----

    def of_end(self, end: int, parts: PipelineParams) -> Arrays:
        """All parameters of `first` (end 0) or `last` (1), on the stage that runs it; or what is frozen."""
        store = self.stores[0 if parts is self.params else 1]
        return store.pick_outer(
            getattr(parts, store.outer_field), end, (parts.first, parts.last)[end]
        )

    def is_stored(self, end: int) -> bool:
        """Whether parameters of `first` (end 0) or `last` (1) are stored on one stage alone."""
        return self.stores[0].has_outer(end)

    def untouched(self, end: int) -> tuple[str, ...]:
        """The fields of gradients that `add_to_end` does not change; all stages may share the other end."""
        own = {
            ("first", "last")[end],
            *([self.stores[0].outer_field] if self.is_stored(end) else []),
        }
        return tuple(name for name in PipelineParams._fields if name not in own)

    def add_to_end(
        self, end: int, grads: PipelineParams, add_to: Callable[[Arrays], Arrays]
    ) -> PipelineParams:
        """Gradients with those of `first` (end 0) or `last` (1) changed.

        Args:
          add_to: all of its gradients -> the same, changed.
        """
        store, name = self.stores[0], ("first", "last")[end]
        stored, own = getattr(grads, store.outer_field), getattr(grads, name)
        values = add_to(store.pick_outer(stored, end, own))
        own, stored = store.put_outer(stored, end, own, values)
        return grads._replace(**{store.outer_field: stored, name: own})

    # ---- pieces of a unit ----

    def buffers(self, count: int, shapes: Shapes, *, on_host: bool = False) -> Arrays:
        """Buffers of so many slots, for what has these shapes.

        Args:
          on_host: whether they go to the host's memory, where XLA makes only what is filled.
        """
        fill = self.spec.buffer_fill
        if fill is None and on_host:
            fill = 0.0
        in_parts = self.spec.platform == "gpu" and self.spec.mesh.shape[TENSOR] > 1
        return make_buffers(count, shapes, fill=fill, in_parts=in_parts)

    def microbatch(self, number: Index) -> Arrays:
        """Which one a unit is of."""
        return jnp.maximum(number, 0) // self.num_chunks

    def place(self, unit: Unit) -> tuple[Arrays, Arrays]:
        """The first time step of a unit within the window, and its first row within the device's."""
        number = jnp.maximum(unit.number, 0)
        k, row = number % self.num_chunks, self.microbatch(number) * self.spec.microbatch_rows
        chunk = unit.segment * self.max_chunks + k if self.spec.num_segments > 1 else k
        return chunk * (self.spec.chunk_len or 0), row

    def at(self, unit: Unit, *, on_all: bool = False) -> LayerContext:
        """Where a unit lies, and its part of the batch.

        Args:
          on_all: whether all stages do the same with it.
        """
        t, b = self.spec.chunk_len or 0, self.spec.microbatch_rows
        time, row = self.place(unit)
        K = self.max_chunks * self.spec.num_segments

        def cut(a, timed):
            if not jnp.ndim(a):
                return a
            if self.spec.chunk_len is None or not timed:
                return lax.dynamic_slice_in_dim(a, row, b, 0)
            # What has one step is the same for all chunks, and one chunk has all steps, however many.
            is_cut = K > 1 and a.shape[0] > 1
            steps = t if is_cut else a.shape[0]
            start = time if steps != a.shape[0] else 0
            return lax.dynamic_slice(a, corner(a, start, row), (steps, b, *a.shape[2:]))

        batch = self.batch_on_all if on_all else self.batch
        batch = jax.tree.map(cut, batch, has_time(batch))
        return LayerContext(
            layer=0,
            time=self.first_step + time,
            row=self.first_row + row,
            key=self.key,
            batch=batch,
            layout=self.spec.layout,
            time_major=self.spec.chunk_len is not None,
            processor=Processor.of(self.spec.mesh),
        )

    def read_carry(self, carry: Carry, group: Index, microbatch: Index) -> Arrays:
        """A microbatch's rows of a carry [rows of the stack, B, ...], in a group's layers."""
        b = self.spec.microbatch_rows
        rows = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, microbatch * b, b, 1), carry)
        return self.of_group(rows, group)

    def write_carry(self, carry: Carry, part: Any, group: Index, microbatch: Index) -> Arrays:
        """The carry with these rows changed."""
        row = microbatch * self.spec.microbatch_rows

        def write(a, p):
            start = group * (a.shape[0] // self.num_groups)
            return lax.dynamic_update_slice(a, p, corner(a, start, row))

        return jax.tree.map(write, carry, part)

    # ---- groups of layers ----

    def own(self, group: Index) -> tuple[Any, Any, SlotArrays]:
        """Parameters, frozen ones and slots of a group."""
        layers, V = (self.params.layers, self.frozen.layers), self.num_groups
        own = (
            store.take_group(each, group, V)
            for store, each in zip(self.stores, layers, strict=True)
        )
        return *own, self.of_group(self.slots, group)

    def walk(self, group: Index) -> Scan:
        """The way through the layers of a group."""
        walk = self.spec.walk
        if not isinstance(walk, Switch):
            return walk
        stores = tuple(store.of_group(group, self.num_groups) for store in self.stores)
        return dataclasses.replace(walk, stores=stores)

    def of_group(self, tree: Tree, group: Index) -> Arrays:
        """A group's rows of every stacked array."""
        return rows_of_group(tree, group, self.num_groups)

    def into_group(self, tree: Tree, part: Any, group: Index) -> Arrays:
        """Stacked arrays with a group's rows changed."""
        return with_rows_of_group(tree, part, group, self.num_groups)
