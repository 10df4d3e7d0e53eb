"""The pipeline engine: the loss of stacked layers on stages, and its gradients, on one schedule.

The schedule is data, a table of ticks (`tables`): one loop looks up what this stage does at this tick, and
in which slots things lie, and it runs as many ticks as the table says. So one program serves any number of
microbatches and chunks that its slots hold. The state of a layer and its cotangent stay on their stage
between the chunks of a sequence; activations [t, b, ...] are all that crosses a link.

    spec    what is run
    stage   what one device has of it, and does with a unit
    walk    through the layers of a stage
    kept    what is kept of a unit for its backward pass
    loop    what runs when, and what stages exchange
    order   what a compiler may not move

Legend: T time, B batch, t = T / K steps of a chunk, b rows of a microbatch.
"""

import dataclasses
import math
from collections.abc import Callable
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import DATA, STAGE
from jaxpar.base.trees import (
    add,
    axes_in,
    has_time,
    same_along,
    summed,
    time_steps,
    timed_leaves,
    zeros,
)
from jaxpar.base.types import Arrays, Batch, Carry, Cotangents, Index, Specs, Tree
from jaxpar.pipeline.kept import Inputs, Residuals
from jaxpar.pipeline.loop import BACKWARD, Loop, State, run_segments
from jaxpar.pipeline.placement import make_slots
from jaxpar.pipeline.spec import PipelineParams, Spec
from jaxpar.pipeline.stage import Stage, Unit
from jaxpar.pipeline.store import stack
from jaxpar.pipeline.tables import TickTable
from jaxpar.pipeline.walk import SlotArrays
from jaxpar.sharding import by_hand
from jaxpar.trace.counts import used_inputs
from jaxpar.trace.jaxprs import pruned


@dataclasses.dataclass(frozen=True)
class Pipeline(Spec):
    """A pipeline; `sums` runs it. Its attributes are those of `Spec`.

    Example:
      pipeline = jaxpar.pipeline.Pipeline(
        layers=(lambda w, frozen, carry, x, at: (carry, jnp.tanh(x @ w)),),
        first=lambda w, frozen, at: at.batch["x"] @ w,
        last=lambda w, frozen, y, at: (jnp.sum((y @ w) ** 2),),
        mesh=jaxpar.MeshConfig(stage=2, devices=(0, 1)).build(),
        slots=jaxpar.pipeline.make_slots((2, 2)),
        chunk_len=4,
        microbatch_rows=8,
      )
      table = jaxpar.pipeline.make_table([jaxpar.pipeline.make_schedule("1f1b", 2, num_microbatches=2)])
      weights = jnp.broadcast_to(jnp.eye(8), (4, 8, 8))  # of four layers
      params = jaxpar.pipeline.PipelineParams(jnp.eye(8), (weights,), jnp.eye(8))
      batch = {"x": jnp.ones((4, 16, 8))}  # [time, rows, width]
      (loss,), carry, _ = jax.jit(pipeline.sums)(params, (jnp.zeros((4, 16)),), batch, table)
    """

    @property
    def nothing_frozen(self) -> PipelineParams:
        """Frozen parameters where there are none."""
        return PipelineParams((), ((),) * len(self.layers), ())

    def sums(
        self,
        params: PipelineParams,
        carry: Carry,
        batch: Batch,
        table: TickTable,
        *,
        frozen: PipelineParams | None = None,
        key: jax.Array | None = None,
        d_loss: Callable[[Arrays], Arrays] | None = None,
    ) -> tuple[Any, Any, jax.Array]:
        """What `last` gives, summed over all units; the loss is differentiable with respect to `params`.

        Its gradients are computed by the schedule, together with the loss; the evaluation of the sums
        alone runs the forward units only. The carry is not differentiated (truncated backpropagation).

        Args:
          carry: a tree for every kind of layer, leaves [rows, B, ...], sharded over `stage` and `data`.
          batch: leaves [T, B, ...], sharded over `data` on B; [B] without time, [1, B, ...] the same for all
            chunks, and scalars, whole for every unit. Without a `chunk_len`, leaves [B, ...]. The units of
            data-parallel group d are cut from its own part of B; what no unit covers is not computed.
          table: what runs when.
          frozen: as `params`, for which no gradient is wanted.
          key: of this step's dropout, for `LayerContext`.
          d_loss: the sums -> the cotangent of the loss, with which the backward pass of each unit begins. Of
            the sums it reads those that `last` computes from the batch alone. None begins with 1.
        Returns:
          the sums; the carry after the window; and what the loop counted while it ran: units that each stage
          did as forward, as W beside it, as backward, as W after it, int32 [data, ticks, 4, stage].
        Raises:
          ValueError: table, mesh, slots, chunks, rows and shapes do not fit together; or a gradient is asked
            for and the table has no backward pass.
        """
        frozen = frozen or self.nothing_frozen
        carry = lax.stop_gradient(carry)
        self._check(params, frozen, carry, batch, table)
        rest = (frozen, carry, batch, table, key)
        dtypes = jax.tree.map(lambda param: param.dtype, params)

        @jax.custom_vjp
        def run(params):
            return self._run(params, *rest)[:3]

        def run_forward(params):
            if not table.num_slots:
                raise ValueError(
                    "the table has no backward pass.\nFix: make its schedules with backward=True."
                )
            *out, grads, begun = self._run(params, *rest, d_loss or (lambda _: jnp.float32(1)))
            return tuple(out), (grads, begun)

        def run_backward(saved, cotangents):
            grads, begun = saved
            scale = jax.tree.leaves(cotangents[0])[0] / begun  # 1 if it is what `d_loss` said

            def scaled(grad, dtype):
                return (grad * scale.astype(grad.dtype)).astype(dtype)

            return (jax.tree.map(scaled, grads, dtypes),)

        run.defvjp(run_forward, run_backward)
        return run(params)

    def forward(
        self,
        params: PipelineParams,
        carry: Carry,
        batch: Batch,
        table: TickTable,
        *,
        frozen: PipelineParams | None = None,
        key: jax.Array | None = None,
    ) -> tuple[Any, Any, jax.Array]:
        """`sums` without its own gradients; or the rows that `last` gives, [T, B, ...] or [B, ...].

        Arguments as of `sums`; the table has no backward pass. If it has concrete values, autodiff
        differentiates the loop and keeps every residual: the GPipe schedule as autodiff gives it for free, an
        oracle for tests and a baseline for benchmarks.
        """
        frozen = frozen or self.nothing_frozen
        self._check(params, frozen, carry, batch, table)
        return self._run(params, frozen, carry, batch, table, key)[:3]

    def _run(self, params, frozen, carry, batch, table, key, d_loss: Any = None) -> Arrays:
        with_gradients = d_loss is not None
        if self.remat and with_gradients:
            table = table.with_remat()
        parts = zip(self.first_specs, self.layer_specs, self.last_specs, strict=True)
        specs, of_frozen = (PipelineParams(*own, P(STAGE)) for own in parts)
        rows = tuple(jnp.asarray(rows, jnp.int32) for rows in self.slots.rows)
        stored = tuple(store.arrays for store in self.stores)
        slots = (self.slots.layers, self.slots.kinds, self.slots.places)
        arguments = (
            (params, specs),
            (frozen, of_frozen),
            (carry, self.carry_specs),
            (batch, jax.tree.map(self._batch_spec, batch, has_time(batch))),
            (SlotArrays(*(jnp.asarray(part, jnp.int32) for part in slots)), P(STAGE)),
            (rows, P(STAGE)),
            (stored, P(STAGE)),
            (jax.tree.map(jnp.asarray, table), table.specs),
            (key, P()),
        )
        # Known where autodiff shall take the loop apart: it needs a fixed number of ticks.
        known = None if isinstance(table.num_ticks, jax.Array) else int(table.num_ticks)

        def run(params, frozen, carry, batch, slots, rows, stored, table, key):
            stage = Stage.of(self, params, frozen, batch, slots, rows, stored, table, key)
            kept = begin = None
            if with_gradients:
                splits = bool(table.weights) and not self.remat
                kept = (Inputs if self.remat else Residuals)(stage, carry, splits=splits)
                begin = self._known(stage, table, d_loss)
            loop = Loop(stage, kept, table, begin)
            if self.num_segments > 1:
                state = run_segments(loop, carry)
            else:
                num_ticks = table.num_ticks if with_gradients or known is None else known
                state = loop.run(loop.start(carry), num_ticks)
            return (*self._results(state, specs), *([begin] if with_gradients else []))

        results = (
            P() if self.collects == "sums" else self._spec_of_rows(),
            self.carry_specs,
            P(DATA, None, None, STAGE),
            *([specs, P()] if with_gradients else []),
        )
        return jax.shard_map(
            run,
            mesh=self.mesh,
            axis_names=by_hand(self.mesh, (DATA, STAGE, *self.own_axes)),
            in_specs=tuple(spec for _, spec in arguments),
            out_specs=results,
            # Without axes to be manual over there are no sums, which the check asks for: XLA refuses a sum
            # over nothing.
            check_vma=self.has_axes,
        )(*(argument for argument, _ in arguments))

    def _known(
        self, stage: Stage, table: TickTable, of_sums: Callable[[Arrays], Arrays]
    ) -> jax.Array:
        """What a function makes of sums over all units that depend on the batch alone.

        Of a unit only what these sums need is computed; y and variables are zeros.
        """
        sums = zeros(stage.sums_shape)
        used, (leaves, structure) = used_inputs(of_sums, sums), jax.tree.flatten(sums)

        def of_unit(number: Index, segment: Index) -> list[Arrays]:
            found = jax.tree.leaves(stage.last_of_zeros(Unit(number, segment)))
            return [jnp.where(number >= 0, a, jnp.zeros_like(a)) for a in compress(found, used)]

        units, segments = (
            jnp.asarray(table.head.unit)[0],
            jnp.arange(self.num_segments, dtype=jnp.int32),
        )
        over_units = jax.vmap(pruned(of_unit, units[0], segments[0]), (0, None))
        parts = jax.vmap(over_units, (None, 0))(units, segments)
        with jax.named_scope("weight"):
            totals = iter(self._sum([jnp.sum(part) for part in parts], DATA, *self.own_axes))
        leaves = [next(totals) if n else a for n, a in zip(used, leaves, strict=True)]
        return of_sums(jax.tree.unflatten(structure, leaves))

    def _results(self, state: State, specs: PipelineParams) -> tuple[Arrays, ...]:
        """What all devices have made together: sums, carry, what was counted, and gradients."""
        groups = (DATA, *self.own_axes)
        over_head = groups if self.head == "sharded" else (*groups, STAGE)
        rest = same_along(
            self.own_axes,
            (state.carry, state.ran_T4[None, ..., None]),
            (self.carry_specs, P(DATA, None, None, STAGE)),
        )
        if self.collects == "rows":
            return self._rows(state.sums), *rest
        sums = self._sum(state.sums, *over_head)
        if self.adds_sums:
            sums = add(sums, self._sum(state.layer_sums, *groups, STAGE))
        if state.grads is None:
            return sums, *rest
        layers = state.grads.layers
        over_first = groups if self.shares_first else (*groups, STAGE)
        with jax.named_scope(BACKWARD), jax.named_scope("gradients"):
            grads = PipelineParams(
                first=self._sum_parts(state.grads.first, specs.first, *over_first),
                layers=self._sum_parts(
                    tuple(map(stack, layers)) if self.unroll else layers, specs.layers, *groups
                ),
                last=self._sum_parts(state.grads.last, specs.last, *over_head),
                outer=self._sum(state.grads.outer, *groups),
            )
        return sums, *rest, grads

    def _sum_parts(self, grads: Cotangents, specs: Specs, *axes: str) -> Arrays:
        """Gradients, summed over those of the axes that do not split their parameters."""
        whole = jax.tree.map(lambda spec, own: jax.tree.map(lambda _: spec, own), specs, grads)
        leaves, structure = jax.tree.flatten(grads)
        over = [tuple(a for a in axes if a not in axes_in(s)) for s in jax.tree.leaves(whole)]
        for those in filter(None, dict.fromkeys(over)):  # in one sum each
            places = [n for n, own in enumerate(over) if own == those]
            sums = self._sum([leaves[n] for n in places], *those)
            for n, total in zip(places, sums, strict=True):
                leaves[n] = total
        return jax.tree.unflatten(structure, leaves)

    def _rows(self, rows: Arrays) -> Arrays:
        """The rows that were collected, on all stages: those of the last layer's stage, zeros on others."""
        is_whole = self.head == "sharded" or not self.has_axes
        rows = rows if is_whole else summed(rows, STAGE)
        return same_along(self.own_axes, rows, self._spec_of_rows())

    def _sum(self, tree: Tree, *axes: str) -> Arrays:
        """The sum over devices."""
        return lax.psum(tree, axes) if self.has_axes else tree

    def _batch_spec(self, leaf: Any, timed: bool) -> P:
        if not jnp.ndim(leaf):
            return P()
        return self._spec_of_rows(timed=timed, splits_time=jnp.shape(leaf)[0] > 1)

    def _spec_of_rows(self, *, timed: bool = True, splits_time: bool = True) -> P:
        """Of arrays [time, rows, ...], or [rows, ...] without time."""
        rows = (DATA, *self.row_axes) if self.row_axes else DATA
        if not (self.rows_dim and timed):
            return P(rows)
        return P(self.time_axes or None if splits_time else None, rows)

    def _check(self, params, frozen, carry, batch, table: TickTable) -> None:
        """Raises a ValueError where sizes do not fit, which would silently give another number."""
        slots, route, sizes = self.slots, table.route, self.mesh.shape
        found, wanted = table.forward.unit.shape[::2], (sizes[DATA], sizes[STAGE])
        fix = "make a schedule of the mesh's stages for each data-parallel group"
        _expect("data, stage of the table", found, wanted, fix)
        assert self.first_rows is None or len(self.first_rows) == sizes[DATA]
        assert self.num_segments == 1 or self.chunk_len is not None
        if self.unroll and (len(self.layers) != 1 or route.num_groups > 1):
            raise ValueError(
                f"unroll=True: expected layers of one kind in one group on a stage, got {len(self.layers)} "
                f"kinds in {route.num_groups} groups.\nFix: use unroll=False."
            )
        fix = "pass kind_of to make_slots"
        _expect("kinds of layers in slots", len(slots.rows), len(self.layers), fix)
        if self.layers:
            fix = "make slots of a placement with stages=table.route.stages"
            _expect("groups in slots", len(slots.placement), len(route.stages), fix)
            kinds = dict(zip(slots.layers, slots.kinds, strict=True))
            kind_of = [kinds[layer] for layer in sorted(kinds) if layer >= 0]
            wanted = make_slots(slots.placement, route.stages, kind_of).layers
            _expect("layers in slots", slots.layers, wanted, fix)
        fix, stacks = "stack layers as slots.rows has them", (params.layers, frozen.layers, carry)
        stacks = stacks if self.stores[0].is_stacked else (carry,)
        for rows, *trees in zip(slots.rows, *stacks, strict=True):
            for leaf in jax.tree.leaves(trees):
                _expect("rows of a stack", leaf.shape[0], len(rows), fix)
        num_rows = sizes[DATA] * table.max_microbatches * self.microbatch_rows
        num_rows *= math.prod(sizes[axis] for axis in self.row_axes)
        for leaf in jax.tree.leaves(carry):
            assert jnp.issubdtype(leaf.dtype, jnp.inexact)
            _expect("dim 1 of a carry", leaf.shape[1], num_rows, "give it the rows of the batch")
        for leaf, timed in timed_leaves(batch):
            rows = leaf.shape[self.rows_dim * timed] if jnp.ndim(leaf) else num_rows
            _expect("rows of a batch", rows, num_rows, "change microbatch_rows, or the batch")
        lengths = {*time_steps(batch, 0).values()}
        has_any = any(timed for _, timed in timed_leaves(batch))
        if (K := table.max_chunks * self.num_segments) > 1 and has_any:
            fix = f"change chunk_len={self.chunk_len}, or the {K} chunks of the table"
            wanted = [K * (self.chunk_len or 0)]
            _expect("time steps of a batch", sorted(lengths), wanted, fix)


def _expect(what: str, found: Any, wanted: Any, fix: str) -> None:
    if found != wanted:
        raise ValueError(f"{what}: expected {wanted}, got {found}.\nFix: {fix}.")
