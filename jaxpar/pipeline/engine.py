"""The pipeline engine: the loss of stacked layers on stages, and its gradients, on one schedule.

    tick            one turn of the loop, the same program on every stage
      forward       x from the stage below (at first: from the batch) -> layers -> y, residuals
      head          y of the last stage -> loss, dy
      backward      dy from the stage above (at last: from the head), residuals -> layers -> dx
      exchange      y goes up, dx goes down: two ppermutes

The schedule is data: the loop looks up what this stage does at this tick, and in which slots things
lie, and it runs as many ticks as it is told. So one program serves any number of microbatches and
chunks that its slots hold. The state of a layer and its cotangent stay on their stage between the
chunks of a sequence; activations [t, b, W] are all that crosses a link.

Legend: T time, B batch, t = T / K steps of a chunk, b rows of a microbatch, W width of activations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxpar.axes import DATA, STAGE
from jaxpar.nn.dropout import Position
from jaxpar.nn.stack import Layer, SavingLayers, add, run_layers, vary_like, zeros
from jaxpar.pipeline.schedule import Lane
from jaxpar.pipeline.ticks import Plan

Head = Literal["last", "sharded"]

# The parts of a tick, as named scopes of the program.
FORWARD, HEAD, BACKWARD = "forward", "head", "backward"

# Before the first layer: (its parameters, inputs [t, b, ...], where they lie) -> x [t, b, W].
First = Callable[[Any, Any, Position], jax.Array]
# After the last layer: (its parameters, y [t, b, W], targets [t, b, ...], where they lie) -> loss,
# a float32 scalar that is summed over all units. y is float32 if the head is sharded.
Last = Callable[[Any, jax.Array, Any, Position], jax.Array]
# Adds what `first` contributes: (gradients so far, parameters, inputs, where they lie, dx) -> gradients.
FirstGradient = Callable[[Any, Any, Any, Position, jax.Array], Any]


class PipelineParams(NamedTuple):
    """Parameters of what a pipeline runs; any pytrees of float32 arrays.

    Attributes:
      first: of the function before the layers; replicated over `stage`.
      layers: every leaf stacked, [slots, ...], slots sharded over `stage`.
      last: of the function after the layers.
    """

    first: Any
    layers: Any
    last: Any


class Stats(NamedTuple):
    """What the loop counted while it ran: int32 [data, stage].

    Attributes:
      forward_units, backward_units: units that each stage ran.
      forward_ticks, backward_ticks: ticks in which any stage of its data-parallel group ran one.
    """

    forward_units: jax.Array
    backward_units: jax.Array
    forward_ticks: jax.Array
    backward_ticks: jax.Array


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Functions, a mesh, and how the work is cut; `loss` runs it.

    Attributes:
      layer: one layer, see `nn.Layer`; it must not use collectives of its own over `stage` or `data`.
      first, last: before the first and after the last layer; see `First` and `Last`.
      layer_ids: the layer in each slot, -1 for an empty slot (`placement.slots`).
      chunk_len: t, time steps of a chunk.
      microbatch_rows: b, rows of a microbatch on one data-parallel device.
      head: "last" runs `last` on the last stage only; with "sharded" every stage runs it on its part of
        the parameters, and `last` combines the parts by collectives over `stage`.
      last_specs: partition specs of `params.last` over `stage`; for "sharded" only.
      remat: keep a unit's input and state instead of its residuals, and run it again before its backward.
      first_gradient: adds the gradient of `first` in place; None derives it from `first`.
      first_rows: where each data-parallel group's rows begin in the batch, for `Position`; None if all
        have as many.
      buffer_fill: initial value of all buffers; a test fills them with NaN.
    """

    layer: Layer
    first: First
    last: Last
    mesh: Mesh
    layer_ids: tuple[int, ...]
    chunk_len: int
    microbatch_rows: int
    head: Head = "last"
    last_specs: Any = None
    remat: bool = False
    first_gradient: FirstGradient | None = None
    first_rows: tuple[int, ...] | None = None
    buffer_fill: float = 0.0

    def loss(
        self, params: PipelineParams, carry: Any, inputs: Any, targets: Any, plan: Plan
    ) -> tuple[jax.Array, Any, Stats]:
        """The loss summed over all units; differentiable with respect to `params`.

        Its gradients are computed by the schedule, together with the loss; the evaluation of the loss
        alone runs the forward units only. The carry is not differentiated (truncated backpropagation).

        Args:
          carry: leaves [slots, B, ...], sharded over `stage` and `data`.
          inputs, targets: leaves [T, B, ...], sharded over `data` on B. The units of data-parallel group
            d are cut from its own part of B; what no unit covers is not computed.
          plan: what runs when.
        Returns:
          the loss, float32; the carry after the window; what the loop counted.
        """
        carry = lax.stop_gradient(carry)
        dtypes = jax.tree.map(lambda param: param.dtype, params)

        @jax.custom_vjp
        def run(params):
            return self._run(params, carry, inputs, targets, plan, with_gradients=False)[:3]

        def run_forward(params):
            *out, grads = self._run(params, carry, inputs, targets, plan, with_gradients=True)
            return tuple(out), grads

        def run_backward(grads, cotangents):
            d_loss = cotangents[0]
            return (jax.tree.map(lambda g, dtype: (g * d_loss).astype(dtype), grads, dtypes),)

        run.defvjp(run_forward, run_backward)
        return run(params)

    def _run(self, params, carry, inputs, targets, plan, *, with_gradients: bool):
        specs = PipelineParams(P(), P(STAGE), self.last_specs if self.head == "sharded" else P())
        rows, lanes = P(None, DATA), P(DATA, None, STAGE)
        arguments = (
            (params, specs),
            (carry, P(STAGE, DATA)),
            (inputs, rows),
            (targets, rows),
            (jnp.asarray(self.layer_ids, jnp.int32), P(STAGE)),
            (
                jax.tree.map(jnp.asarray, plan),
                dataclasses.replace(
                    plan, forward=lanes, backward=lanes, head=P(DATA), num_ticks=P(), num_chunks=P()
                ),
            ),
        )
        results = (P(), P(STAGE, DATA), P(DATA, STAGE), *([specs] if with_gradients else []))
        return jax.shard_map(
            lambda *parts: _Device(self, *parts).run(with_gradients),
            mesh=self.mesh,
            axis_names={DATA, STAGE},
            in_specs=tuple(spec for _, spec in arguments),
            out_specs=results,
            # Without axes to be manual over there are no sums, which the check asks for: XLA refuses a sum
            # over nothing.
            check_vma=self.mesh.shape[DATA] * self.mesh.shape[STAGE] > 1,
        )(*(argument for argument, _ in arguments))


class _State(NamedTuple):
    """What the loop carries from tick to tick; the backward half is None in evaluation.

    Where a slot or buffer is numbered -1, one that nobody reads is written: there is one more than needed.
    """

    carry: Any  # [slots, B, ...]
    arrived_x: Any  # activations that wait for their tick, [buffers + 1, t, b, W]
    busy_T2: Any  # whether this stage ran a forward, and a backward unit at each tick
    loss: Any = None
    kept: Any = None  # for the backward of a unit, leaves [residual slots + 1, ...]
    head_dy: Any = None  # cotangents that the head made, [residual slots + 1, t, b, W]
    arrived_dy: Any = None  # cotangents that wait for their tick, [buffers + 1, t, b, W]
    d_carry: Any = None  # of the sequence whose chunks are on their way back, [slots, b, ...]
    grads: Any = None  # PipelineParams


class _Device:
    """One device's part of everything, and what it does at a tick."""

    def __init__(self, pipe: Pipeline, params, carry, inputs, targets, layer_ids, plan: Plan):
        self.pipe, self.plan = pipe, plan
        self.carry, self.inputs, self.targets = carry, inputs, targets
        self.stage, self.last_stage = lax.axis_index(STAGE), pipe.mesh.shape[STAGE] - 1
        # A value that differs over both axes, as everything does that is cast to be like it. Casting the
        # parameters before the loop puts the sums of their gradients over `data` and `stage` after it.
        self.here = self.stage + lax.axis_index(DATA)
        sharded_head = pipe.head == "sharded"
        self.params = PipelineParams(
            first=vary_like(params.first, self.here),
            layers=vary_like(params.layers, self.here),
            last=vary_like(params.last, lax.axis_index(DATA) if sharded_head else self.here),
        )
        self.layer_ids = vary_like(layer_ids, self.here)
        num_rows = jax.tree.leaves(inputs)[0].shape[1]
        first_rows = pipe.first_rows or range(0, pipe.mesh.shape[DATA] * num_rows, num_rows)
        self.first_row = jnp.asarray(first_rows, jnp.int32)[lax.axis_index(DATA)]
        self.layers = SavingLayers(pipe.layer, has_empty_slots=-1 in pipe.layer_ids)

    def run(self, with_gradients: bool):
        """The loop, and the sums after it."""
        state = lax.fori_loop(
            0,
            self.plan.num_ticks,
            functools.partial(self.tick, with_gradients),
            self.initial_state(with_gradients),
        )
        over_head = (DATA,) if self.pipe.head == "sharded" else (DATA, STAGE)
        busy_T2 = state.busy_T2.astype(jnp.int32)
        units, ticks = busy_T2.sum(0), (self.sum(busy_T2, STAGE) > 0).sum(0, dtype=jnp.int32)
        counts = (*units, *vary_like(ticks, self.here))
        stats = Stats(*(count[None, None] for count in counts))
        out = (self.sum(state.loss, *over_head), state.carry, stats)
        if not with_gradients:
            return out
        with jax.named_scope(BACKWARD), jax.named_scope("gradients"):
            grads = PipelineParams(
                first=self.sum(state.grads.first, DATA, STAGE),
                layers=self.sum(state.grads.layers, DATA),
                last=self.sum(state.grads.last, *over_head),
            )
        return (*out, grads)

    def initial_state(self, with_gradients: bool) -> _State:
        def buffers(count, shape):
            """One more than `count`: where slot -1 is written."""
            shape, dtype = (count + 1, *shape.shape), shape.dtype
            return jnp.full(shape, self.pipe.buffer_fill).astype(dtype)

        plan, unit = self.plan, jnp.int32(0)
        x = jax.eval_shape(lambda: self.first(unit))
        state = _State(
            carry=self.carry,
            arrived_x=buffers(plan.num_forward_buffers, x),
            busy_T2=jnp.zeros((plan.forward.unit.shape[1], 2), bool),
        )
        if with_gradients:
            run = functools.partial(self.layers_forward, True, unit, jnp.int32(0))
            carry = self.read_carry(self.carry, jnp.int32(0), jnp.int32(0))
            kept = jax.eval_shape(lambda: run(carry, self.first(unit)))[2]
            rows = self.pipe.microbatch_rows
            state = state._replace(
                kept=jax.tree.map(functools.partial(buffers, plan.num_slots), kept),
                head_dy=buffers(plan.num_slots, x),
                arrived_dy=buffers(plan.num_backward_buffers, x),
                d_carry=jax.tree.map(
                    lambda a: jnp.full_like(a[:, :rows], self.pipe.buffer_fill), self.carry
                ),
            )
        state = vary_like(state, self.here)
        # A sharded head's loss is the same on all stages, and so differs over `data` alone.
        head_like = lax.axis_index(DATA) if self.pipe.head == "sharded" else self.here
        state = state._replace(loss=vary_like(jnp.zeros(()), head_like))
        if with_gradients:
            grads = jax.tree.map(
                lambda a: vary_like(jnp.zeros(a.shape, jnp.float32), a), self.params
            )
            state = state._replace(grads=grads)
        return state

    def tick(self, with_gradients: bool, number: jax.Array, state: _State) -> _State:
        """Forward, head, backward, exchange."""
        forward, backward = (
            vary_like(jax.tree.map(lambda a: a[0, number, 0], lane), self.here)
            for lane in (self.plan.forward, self.plan.backward)
        )
        state, y_tbW = self.forward(with_gradients, forward, state)
        unit, slot = self.plan.head[0, number]
        state = self.head(with_gradients, unit, slot, y_tbW, state)
        arrived_x = self.exchange(y_tbW, +1, state.arrived_x, forward.arrival)
        if with_gradients:
            state, dx_tbW = self.backward(backward, state)
            arrived_dy = self.exchange(dx_tbW, -1, state.arrived_dy, backward.arrival)
            state = state._replace(arrived_dy=arrived_dy)
        busy_2 = jnp.stack([forward.unit >= 0, backward.unit >= 0])
        busy_T2 = lax.dynamic_update_slice_in_dim(state.busy_T2, busy_2[None], number, 0)
        return state._replace(arrived_x=arrived_x, busy_T2=busy_T2)

    @jax.named_scope(FORWARD)
    def forward(self, with_gradients: bool, at: Lane, state: _State) -> tuple[_State, jax.Array]:
        unit, m = jnp.maximum(at.unit, 0), self.microbatch(at.unit)
        x_tbW = lax.cond(
            (at.unit >= 0) & (at.source < 0),
            lambda: self.first(unit),
            lambda: read(state.arrived_x, at.source),
        )
        before = self.read_carry(state.carry, at.group, m)
        run = functools.partial(self.layers_forward, with_gradients, unit, at.group, before, x_tbW)
        kept = jax.eval_shape(run)[2]
        after, y_tbW, kept = lax.cond(
            at.unit >= 0,
            lambda: vary_like(run(), self.here),
            lambda: vary_like((before, x_tbW, zeros(kept)), self.here),
        )
        state = state._replace(carry=self.write_carry(state.carry, after, at.group, m))
        if with_gradients:
            state = state._replace(kept=write(state.kept, kept, at.slot))
        return state, y_tbW

    @jax.named_scope(HEAD)
    def head(self, with_gradients: bool, unit, slot, y_tbW: jax.Array, state: _State) -> _State:
        """Loss and cotangent of the unit that has just left the last layer, if there is one."""
        on_last, dtype = self.stage == self.last_stage, y_tbW.dtype
        if self.pipe.head == "sharded":
            active = unit >= 0
            # In float32, for the parts of dy are summed (the transpose of `vary_like`) before they are
            # rounded; and XLA's CPU compiler aborts on a sum of bfloat16.
            y_tbW = jnp.where(on_last & active, y_tbW, jnp.zeros_like(y_tbW))
            y_tbW = lax.psum(y_tbW.astype(jnp.float32), STAGE)
        else:
            unit, slot = vary_like((unit, slot), self.here)
            active = (unit >= 0) & on_last

        def loss_of(params, y_tbW):
            y_tbW = vary_like(y_tbW, self.here)
            return self.pipe.last(params, y_tbW, self.cut(self.targets, unit), self.position(unit))

        if not with_gradients:
            loss = lax.cond(
                active,
                lambda: vary_like(state.loss + loss_of(self.params.last, y_tbW), y_tbW),
                lambda: state.loss,
            )
            return state._replace(loss=loss)

        def run():
            loss, (d_last, dy_tbW) = jax.value_and_grad(loss_of, (0, 1))(self.params.last, y_tbW)
            return vary_like((state.loss + loss, dy_tbW), y_tbW), add(state.grads.last, d_last)

        (loss, dy_tbW), grads = lax.cond(
            active, run, lambda: ((state.loss, jnp.zeros_like(y_tbW)), state.grads.last)
        )
        slot = jnp.where(on_last & active, slot, -1)
        return state._replace(
            loss=loss,
            grads=state.grads._replace(last=grads),
            head_dy=write(state.head_dy, vary_like(dy_tbW, self.here).astype(dtype), slot),
        )

    @jax.named_scope(BACKWARD)
    def backward(self, at: Lane, state: _State) -> tuple[_State, jax.Array]:
        unit = jnp.maximum(at.unit, 0)
        is_last_chunk = unit % self.plan.num_chunks == self.plan.num_chunks - 1
        dy_tbW = jnp.where(
            at.source < 0, read(state.head_dy, at.slot), read(state.arrived_dy, at.source)
        )

        def run():
            weights, layer_ids = self.of_group((self.params.layers, self.layer_ids), at.group)
            d_carry = jax.tree.map(
                lambda a: jnp.where(is_last_chunk, jnp.zeros_like(a), a),
                self.of_group(state.d_carry, at.group),
            )
            kept = read(state.kept, at.slot)
            if self.pipe.remat:
                position = self.position(unit)
                carry, x_tbW = kept
                kept = self.layers.forward(weights, carry, x_tbW, position, layer_ids)[2]
            grads = self.of_group(state.grads.layers, at.group)
            grads, d_carry, dx_tbW = self.layers.backward(
                weights, kept, d_carry, dy_tbW, grads, layer_ids
            )
            return (
                self.into_group(state.grads.layers, grads, at.group),
                self.into_group(state.d_carry, d_carry, at.group),
                dx_tbW,
            )

        layer_grads, d_carry, dx_tbW = lax.cond(
            at.unit >= 0,
            lambda: vary_like(run(), self.here),
            lambda: (state.grads.layers, state.d_carry, dy_tbW),
        )
        first_grads = lax.cond(
            (at.unit >= 0) & (self.stage == 0) & (at.group == 0),
            lambda: vary_like(self.first_gradient(state.grads.first, unit, dx_tbW), self.here),
            lambda: state.grads.first,
        )
        grads = state.grads._replace(layers=layer_grads, first=first_grads)
        return state._replace(d_carry=d_carry, grads=grads), dx_tbW

    def exchange(self, a_tbW: jax.Array, step: int, arrived: jax.Array, slot: ArrayLike):
        """Sends to the stage above (+1) or below (-1); puts what comes from the other side into a buffer."""
        n = self.last_stage + 1
        ring = self.plan.num_groups > 1
        if n == 1:
            return arrived
        pairs = [(s, (s + step) % n) for s in range(n) if ring or 0 <= s + step < n]
        with jax.named_scope(FORWARD if step > 0 else BACKWARD), jax.named_scope("exchange"):
            return write(arrived, lax.ppermute(a_tbW, STAGE, pairs), slot)

    def sum(self, tree, *axes: str):
        """The sum over devices."""
        sizes = self.pipe.mesh.shape
        return lax.psum(tree, axes) if sizes[DATA] * sizes[STAGE] > 1 else tree

    # ---- pieces of a unit ----

    def microbatch(self, unit):
        return jnp.maximum(unit, 0) // self.plan.num_chunks

    def position(self, unit) -> Position:
        unit = jnp.maximum(unit, 0)
        t, b = self.pipe.chunk_len, self.pipe.microbatch_rows
        chunk = unit % self.plan.num_chunks
        return Position(layer=0, time=chunk * t, row=self.first_row + self.microbatch(unit) * b)

    def cut(self, tree, unit):
        """The part of arrays [T, B, ...] that a unit has, [t, b, ...]."""
        t, b = self.pipe.chunk_len, self.pipe.microbatch_rows
        unit = jnp.maximum(unit, 0)
        start = ((unit % self.plan.num_chunks) * t, self.microbatch(unit) * b)

        def cut(a):
            return lax.dynamic_slice(a, (*start, *[0] * (a.ndim - 2)), (t, b, *a.shape[2:]))

        return jax.tree.map(cut, tree)

    def first(self, unit) -> jax.Array:
        x = self.pipe.first(self.params.first, self.cut(self.inputs, unit), self.position(unit))
        return vary_like(x, self.here)

    def first_gradient(self, grads, unit, dx_tbW):
        inputs, position = self.cut(self.inputs, unit), self.position(unit)
        if self.pipe.first_gradient is not None:
            return self.pipe.first_gradient(grads, self.params.first, inputs, position, dx_tbW)
        _, vjp = jax.vjp(
            lambda params: self.pipe.first(params, inputs, position), self.params.first
        )
        return add(grads, vjp(dx_tbW)[0])

    def layers_forward(self, with_gradients: bool, unit, group, carry, x_tbW):
        """The layers over a unit, and what is kept for its backward."""
        weights, layer_ids = self.of_group((self.params.layers, self.layer_ids), group)
        position = self.position(unit)
        if with_gradients and not self.pipe.remat:
            return self.layers.forward(weights, carry, x_tbW, position, layer_ids)
        after, y_tbW = run_layers(
            self.pipe.layer,
            weights,
            carry,
            x_tbW,
            position,
            layer_ids,
            has_empty_slots=-1 in self.pipe.layer_ids,
        )
        return after, y_tbW, (carry, x_tbW) if with_gradients else ()

    def read_carry(self, carry, group, m):
        b = self.pipe.microbatch_rows
        rows = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, m * b, b, 1), carry)
        return self.of_group(rows, group)

    def write_carry(self, carry, part, group, m):
        starts = (group * self.slots_of_group, m * self.pipe.microbatch_rows)
        return jax.tree.map(
            lambda a, p: lax.dynamic_update_slice(a, p, (*starts, *[0] * (a.ndim - 2))), carry, part
        )

    # ---- groups of layers (interleaved schedules) ----

    @property
    def slots_of_group(self) -> int:
        return self.layer_ids.shape[0] // self.plan.num_groups

    def of_group(self, tree, group):
        if self.plan.num_groups == 1:
            return tree
        n = self.slots_of_group
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, group * n, n), tree)

    def into_group(self, tree, part, group):
        if self.plan.num_groups == 1:
            return part
        start = group * self.slots_of_group
        return jax.tree.map(
            lambda a, p: lax.dynamic_update_slice_in_dim(a, p, start, 0), tree, part
        )


def read(buffers: Any, slot: ArrayLike) -> Any:
    """What lies in one slot of buffers [slots + 1, ...]; anything for slot -1."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, slot, keepdims=False), buffers)


def write(buffers: Any, values: Any, slot: ArrayLike) -> Any:
    """Puts values into one slot of buffers [slots + 1, ...]; slot -1 is the last, which nobody reads."""
    return jax.tree.map(
        lambda a, value: lax.dynamic_update_index_in_dim(
            a, value, jnp.where(jnp.asarray(slot) < 0, a.shape[0] - 1, slot), 0
        ),
        buffers,
        values,
    )
