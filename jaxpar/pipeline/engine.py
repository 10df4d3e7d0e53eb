"""The pipeline engine: the loss of stacked layers on stages, and its gradients, on one schedule.

    tick            one turn of the loop, the same program on every stage
      forward       x from the stage below (at first: from the batch) -> layers -> y, residuals
      head          y of the last stage -> loss, dy
      backward      dy from the stage above (at last: from the head), residuals -> layers -> dx
      weights       W, what is left of backward units where the schedule splits it off; also before the head
      exchange      y goes up, dx goes down: two ppermutes

With `remat` a unit's input and carry are all that is kept: its forward pass is recomputed before its backward
pass, and the head waits for that.

The schedule is data: the loop looks up what this stage does at this tick, and in which slots things
lie, and it runs as many ticks as the plan says. So one program serves any number of microbatches and
chunks that its slots hold. The state of a layer and its cotangent stay on their stage between the
chunks of a sequence; activations [t, b, ...] are all that crosses a link.

A long window can be cut into segments, each a loop over ticks of its own. They run forward, for the carries
between them alone, and once more, the last first, forward and backward: residuals are those of one segment.

Legend: T time, B batch, t = T / K steps of a chunk, b rows of a microbatch, G segments.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxpar.at import At, anywhere
from jaxpar.axes import DATA, STAGE
from jaxpar.pipeline.layers import SlotArrays, SplitLayers, run_layers, stack, unstack
from jaxpar.pipeline.placement import Slots, make_slots
from jaxpar.pipeline.schedule import Lane
from jaxpar.pipeline.split import Layer
from jaxpar.pipeline.ticks import Plan
from jaxpar.trees import add, vary_like, zeros

Head = Literal["last", "sharded"]

# The parts of a tick, as named scopes of the program.
FORWARD, HEAD, BACKWARD = "forward", "head", "backward"


def scope_of_weights(number: int) -> str:
    """Of the W in a lane: number 0 is beside forwards, others are after backwards."""
    return f"weights{number}"


# Before the first layer: (its parameters, what of them is frozen, where the unit lies) -> x.
First = Callable[[Any, Any, At], Any]
# After the last layer: (its parameters, what of them is frozen, y, where the unit lies) -> sums, a tree of
# float32 scalars whose first leaf is the loss. y is float32 if the head is sharded.
Last = Callable[[Any, Any, Any, At], Any]
# Adds what `first` contributes: (gradients so far, parameters, frozen, where the unit lies, dx) -> gradients.
FirstGradient = Callable[[Any, Any, Any, At, Any], Any]


class PipelineParams(NamedTuple):
    """Parameters of what a pipeline runs; any pytrees of floating-point arrays.

    Attributes:
      first: of the function before the layers; replicated over `stage`.
      layers: a tree for every kind of layer, every leaf stacked, [rows, ...], rows sharded over `stage`.
      last: of the function after the layers.
    """

    first: Any
    layers: Any
    last: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Functions, a mesh, and how the work is cut; `sums` runs it.

    Attributes:
      layers: a function for every kind of layer, see `layers.Layer`; none may use collectives of its own
        over `stage` or `data`.
      first, last: before the first and after the last layer; see `First` and `Last`.
      slots: where each layer lies (`placement.make_slots`).
      chunk_len: t, time steps of a chunk; None if the model has no time, and blocks are [rows, ...].
      microbatch_rows: b, rows of a microbatch on one data-parallel device.
      head: "last" runs `last` on the last stage only; with "sharded" every stage runs it on its part of
        the parameters, and `last` combines the parts by collectives over `stage`.
      last_specs: partition specs over `stage` of `params.last`, and of what is frozen of it; for "sharded".
      remat: keep a unit's input and state instead of its residuals, and recompute it before its backward.
      keeps_on_host: keep them in the memory of the host.
      num_segments: G, of a window, each of as many chunks as the plan says.
      unroll: unroll the layers of a stage, each with weights of its own that are laid out for the backward
        pass once a step; otherwise they are a loop. For layers of one kind, in one group.
      first_gradient: adds the gradient of `first` in place; None derives it from `first`.
      first_rows: where each data-parallel group's rows begin in the batch, for `At`; None if all
        have as many.
      layout: for `At`.
      buffer_fill: initial value of all buffers; a test fills them with NaN.
    """

    layers: tuple[Layer, ...]
    first: First
    last: Last
    mesh: Mesh
    slots: Slots
    chunk_len: int | None
    microbatch_rows: int
    head: Head = "last"
    last_specs: tuple[Any, Any] = (P(), P())
    remat: bool = False
    keeps_on_host: bool = False
    num_segments: int = 1
    unroll: bool = False
    first_gradient: FirstGradient | None = None
    first_rows: tuple[int, ...] | None = None
    layout: Callable[..., Any] = anywhere
    buffer_fill: float = 0.0

    @property
    def platform(self) -> str:
        """Of the mesh's devices, as JAX calls it."""
        return self.mesh.devices.flat[0].platform

    @property
    def rows_dim(self) -> int:
        """Which dim of a batch's arrays are its rows."""
        return 0 if self.chunk_len is None else 1

    @property
    def nothing_frozen(self) -> PipelineParams:
        """Frozen parameters where there are none."""
        return PipelineParams((), ((),) * len(self.layers), ())

    def sums(
        self,
        params: PipelineParams,
        carry: Any,
        batch: Any,
        plan: Plan,
        *,
        frozen: PipelineParams | None = None,
        key: jax.Array | None = None,
    ) -> tuple[Any, Any, jax.Array]:
        """What `last` gives, summed over all units; the loss is differentiable with respect to `params`.

        Its gradients are computed by the schedule, together with the loss; the evaluation of the sums
        alone runs the forward units only. The carry is not differentiated (truncated backpropagation).

        Args:
          carry: a tree for every kind of layer, leaves [rows, B, ...], sharded over `stage` and `data`.
          batch: leaves [T, B, ...], sharded over `data` on B; [B] without time, [1, B, ...] the same for all
            chunks, and scalars, whole for every unit. Without a `chunk_len`, leaves [B, ...]. The units of
            data-parallel group d are cut from its own part of B; what no unit covers is not computed.
          plan: what runs when.
          frozen: as `params`, for which no gradient is wanted.
          key: of this step's dropout, for `At`.
        Returns:
          the sums; the carry after the window; and what the loop counted while it ran: units that each stage
          did as forward, as W beside it, as backward, as W after it, int32 [data, ticks, 4, stage].
        Raises:
          ValueError: plan, mesh, slots, chunks, rows and shapes do not fit together; or a gradient is asked
            for and the plan has no backward pass.
        """
        frozen = frozen or self.nothing_frozen
        carry = lax.stop_gradient(carry)
        self._check(params, frozen, carry, batch, plan)
        rest = (frozen, carry, batch, plan, key)
        dtypes = jax.tree.map(lambda param: param.dtype, params)

        @jax.custom_vjp
        def run(params):
            return self._run(params, *rest, with_gradients=False)[:3]

        def run_forward(params):
            if not plan.num_slots:
                raise ValueError(
                    "gradients of a plan without a backward pass; make its schedules with backward=True"
                )
            *out, grads = self._run(params, *rest, with_gradients=True)
            return tuple(out), grads

        def run_backward(grads, cotangents):
            d_loss = jax.tree.leaves(cotangents[0])[0]
            return (jax.tree.map(lambda g, dtype: (g * d_loss).astype(dtype), grads, dtypes),)

        run.defvjp(run_forward, run_backward)
        return run(params)

    def forward(
        self,
        params: PipelineParams,
        carry: Any,
        batch: Any,
        plan: Plan,
        *,
        frozen: PipelineParams | None = None,
        key: jax.Array | None = None,
    ) -> tuple[Any, Any, jax.Array]:
        """`sums` without its own gradients: autodiff differentiates the loop and keeps every residual.

        This is the GPipe schedule as autodiff gives it for free: an oracle for tests, and a baseline for
        benchmarks. Arguments as of `sums`; the plan has no backward pass, and concrete values.
        """
        frozen = frozen or self.nothing_frozen
        self._check(params, frozen, carry, batch, plan)
        return self._run(params, frozen, carry, batch, plan, key, with_gradients=False)[:3]

    def _run(self, params, frozen, carry, batch, plan, key, *, with_gradients: bool):
        if self.remat and with_gradients:
            plan = dataclasses.replace(plan, head=_head_again(plan.backward))
        layers = (P(STAGE),) * len(self.layers)
        of_last = self.last_specs if self.head == "sharded" else (P(), P())
        specs = PipelineParams(P(), layers, of_last[0])
        lanes = P(DATA, None, STAGE)
        rows = tuple(jnp.asarray(rows, jnp.int32) for rows in self.slots.rows)
        arguments = (
            (params, specs),
            (frozen, PipelineParams(P(), layers, of_last[1])),
            (carry, P(STAGE, DATA)),
            (batch, jax.tree.map(self._batch_spec, batch)),
            (
                SlotArrays(
                    *(
                        jnp.asarray(part, jnp.int32)
                        for part in (self.slots.layers, self.slots.kinds, self.slots.places)
                    )
                ),
                P(STAGE),
            ),
            (rows, P(STAGE)),
            (
                jax.tree.map(jnp.asarray, plan),
                dataclasses.replace(
                    plan,
                    forward=lanes,
                    backward=lanes,
                    weights=(lanes,) * len(plan.weights),
                    slot_of=None if plan.slot_of is None else P(DATA, STAGE),
                    head=P(DATA),
                    num_ticks=P(),
                    num_chunks=P(),
                ),
            ),
            (key, P()),
            (_ticks_of(plan.forward) if self.num_segments > 1 else None, P()),
        )
        # Known where autodiff shall take the loop apart.
        num_ticks = plan.num_ticks if isinstance(plan.num_ticks, jax.Array) else int(plan.num_ticks)
        results = (
            P(),
            P(STAGE, DATA),
            P(DATA, None, None, STAGE),
            *([specs] if with_gradients else []),
        )
        return jax.shard_map(
            lambda *parts: _Device(self, *parts).run(
                with_gradients, None if isinstance(num_ticks, jax.Array) else num_ticks
            ),
            mesh=self.mesh,
            axis_names={DATA, STAGE},
            in_specs=tuple(spec for _, spec in arguments),
            out_specs=results,
            # Without axes to be manual over there are no sums, which the check asks for: XLA refuses a sum
            # over nothing.
            check_vma=self.mesh.shape[DATA] * self.mesh.shape[STAGE] > 1,
        )(*(argument for argument, _ in arguments))

    def _batch_spec(self, leaf: Any) -> P:
        if not jnp.ndim(leaf):
            return P()
        return P(None, DATA) if self.rows_dim and jnp.ndim(leaf) > 1 else P(DATA)

    def _check(self, params, frozen, carry, batch, plan: Plan) -> None:
        """Raises where sizes do not fit, which would silently give another number."""
        data, stages = self.mesh.shape[DATA], self.mesh.shape[STAGE]
        of_plan = plan.forward.unit.shape[0], plan.forward.unit.shape[2]
        if of_plan != (data, stages):
            raise ValueError(
                f"the plan is for data={of_plan[0]} x stage={of_plan[1]}, the mesh has data={data} x "
                f"stage={stages}; make a schedule of num_stages={stages}, and a plan of {data} of them"
            )
        if self.first_rows is not None and len(self.first_rows) != data:
            raise ValueError(
                f"first_rows={self.first_rows} are {len(self.first_rows)} numbers for data={data}; give one "
                f"to every data-parallel group"
            )
        self._check_slots(stages, plan.num_groups)
        if self.unroll and (len(self.layers) != 1 or plan.num_groups > 1):
            raise ValueError(
                f"unroll: {len(self.layers)} kinds of layers in {plan.num_groups} groups on a stage; only "
                f"layers of one kind in one group can be written out: use unroll=False"
            )
        for what, trees in (
            ("params", params.layers),
            ("frozen parameters", frozen.layers),
            ("carry", carry),
        ):
            if len(trees) != len(self.layers):
                raise ValueError(
                    f"{what} of {len(trees)} kinds of layers for {len(self.layers)} functions; give one "
                    f"tree for each"
                )
            for rows, tree in zip(self.slots.rows, trees, strict=True):
                for leaf in jax.tree.leaves(tree):
                    if leaf.shape[:1] != (len(rows),):
                        raise ValueError(
                            f"{what} of shape {tuple(leaf.shape)} in a stack of {len(rows)} rows; stack "
                            f"the layers as slots.rows gives them"
                        )
        if self.num_segments > 1 and (self.chunk_len is None or plan.zero_bubble == "microbatch"):
            raise ValueError(
                f"num_segments={self.num_segments} with chunk_len={self.chunk_len} and "
                f"zero_bubble={plan.zero_bubble!r}; segments are chunks of time, and have no W for all of a "
                f"microbatch: use num_segments=1, or a chunk_len and 'unit'"
            )
        num_units, b = data * plan.max_microbatches, self.microbatch_rows
        self._check_batch(
            [leaf for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)], plan, num_units
        )
        for leaf in jax.tree.leaves(carry):
            if leaf.ndim < 2 or leaf.shape[1] != num_units * b:
                raise ValueError(
                    f"a carry of shape {tuple(leaf.shape)} for batches of {num_units * b} rows; its second "
                    f"dim must be these"
                )
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"a carry of {leaf.dtype}: what layers carry must be floating-point numbers"
                )

    def _check_slots(self, stages: int, num_groups: int) -> None:
        slots, places = self.slots, stages * num_groups
        if len(slots.rows) != len(self.layers):
            raise ValueError(
                f"slots of {len(slots.rows)} kinds of layers for {len(self.layers)} functions; make slots "
                f"with kind_of, the number of each layer's function"
            )
        if not self.layers:
            return
        if len(slots.placement) != places:
            raise ValueError(
                f"the plan has num_groups={num_groups} groups of layers on each of {stages} stages, the "
                f"slots {len(slots.placement)} groups in all; make slots of a placement of {places} "
                f"numbers with num_groups={num_groups}"
            )
        kinds = dict(zip(slots.layers, slots.kinds, strict=True))
        kind_of = [kinds[layer] for layer in sorted(kinds) if layer >= 0]
        wanted = make_slots(slots.placement, num_groups, kind_of).layers
        if slots.layers != wanted:
            raise ValueError(
                f"slots with the layers {slots.layers}, a plan of num_groups={num_groups} groups on each of "
                f"{stages} stages needs {wanted}; make slots of placement={slots.placement} with "
                f"num_groups={num_groups}"
            )

    def _check_batch(self, sized: list[Any], plan: Plan, num_units: int) -> None:
        K, b, t = plan.max_chunks * self.num_segments, self.microbatch_rows, self.chunk_len
        if not sized:
            raise ValueError("the batch has no array with rows; give one or more")
        for leaf in sized:
            rows = leaf.shape[min(self.rows_dim, leaf.ndim - 1)]
            if rows != num_units * b:
                fits = f"microbatch_rows={rows // num_units}, or " * (rows % num_units == 0)
                raise ValueError(
                    f"a batch with an array of {rows} rows for data={self.mesh.shape[DATA]} x "
                    f"{plan.max_microbatches} microbatches of microbatch_rows={b}; use {fits}batches of "
                    f"{num_units * b} rows"
                )
        if K == 1:  # has all time steps, however many
            return
        if t is None:
            raise ValueError(f"{K} chunks of time in the plan, but no chunk_len; give one")
        lengths = [leaf.shape[0] for leaf in sized if leaf.ndim > 1]
        wrong = [steps for steps in lengths if steps not in (1, K * t)]
        if wrong or (lengths and K * t not in lengths):
            steps = max(wrong or lengths)
            fits = f"chunk_len={steps // K}, or " * (steps % K == 0)
            raise ValueError(
                f"a batch with an array of {steps} time steps for {K} chunks of chunk_len={t}; use {fits}"
                f"batches of {K * t} steps"
            )


class _State(NamedTuple):
    """What the loop carries from tick to tick; the backward half is None in evaluation.

    Where a slot or buffer is numbered -1, one that nobody reads is written: there is one more than needed.
    """

    carry: Any  # for every kind, [rows, B, ...]
    arrived_x: Any  # activations that wait for their tick, [buffers + 1, t, b, ...]
    ran_T4: Any  # units that this stage did in each part of a tick
    sums: Any = None
    kept: Any = None  # for the backward of a unit, leaves [residual slots + 1, ...]
    head_dy: Any = (
        None  # cotangents that the head made, [slots + 1, t, b, ...]; with remat just one
    )
    arrived_dy: Any = None  # cotangents that wait for their tick, [buffers + 1, t, b, W]
    d_carry: Any = None  # of the sequence on its way back, [rows, b, ...]; of all between segments
    grads: Any = None  # PipelineParams


class _Device:
    """One device's part of everything, and what it does at a tick."""

    def __init__(
        self,
        pipe: Pipeline,
        params,
        frozen,
        carry,
        batch,
        slots,
        rows,
        plan: Plan,
        key,
        forward_ticks,
    ):
        self.pipe, self.plan, self.key = pipe, plan, key
        self.forward_ticks = forward_ticks
        self.segment: Any = 0  # number of the one that is traced
        self.carry = carry
        self.stage, self.last_stage = lax.axis_index(STAGE), pipe.mesh.shape[STAGE] - 1
        # A value that differs over both axes, as everything does that is cast to be like it. Casting the
        # parameters before the loop puts the sums of their gradients over `data` and `stage` after it.
        self.here = self.stage + lax.axis_index(DATA)
        sharded_head = pipe.head == "sharded"

        def vary(parts):
            head_like = lax.axis_index(DATA) if sharded_head else self.here
            return PipelineParams(
                *vary_like((parts.first, parts.layers), self.here),
                last=vary_like(parts.last, head_like),
            )

        self.params, self.frozen = vary(params), vary(frozen)
        if pipe.unroll:
            self.params, self.frozen = (
                tree._replace(layers=tuple(unstack(own, len(rows[0])) for own in tree.layers))
                for tree in (self.params, self.frozen)
            )
        # Likewise, for autodiff through `forward`; parts of a head combine what is the same on all stages.
        self.batch = batch if sharded_head else vary_like(batch, self.here)
        self.slots, self.rows = vary_like((slots, rows), self.here)
        num_rows = plan.max_microbatches * pipe.microbatch_rows
        first_rows = pipe.first_rows or range(0, pipe.mesh.shape[DATA] * num_rows, num_rows)
        self.first_row = jnp.asarray(first_rows, jnp.int32)[lax.axis_index(DATA)]

    def run(self, with_gradients: bool, num_ticks: int | None):
        """The loop, and the sums after it."""
        unit = jnp.int32(0)
        self.x = jax.eval_shape(lambda: self.first(unit))
        if with_gradients:
            self.layers = self.split_layers()
            layers = self.params.layers, self.frozen.layers
            # As the backward pass takes the weights.
            if self.pipe.unroll:
                self.prepared = self.layers.prepare(*layers)
            else:
                self.prepared = tuple(zip(*layers, strict=True))
        if self.pipe.num_segments > 1:
            state = self.segments(with_gradients)
        else:
            state = self.ticks(with_gradients, num_ticks, self.initial_state(with_gradients))
        over_head = (DATA,) if self.pipe.head == "sharded" else (DATA, STAGE)
        out = (self.sum(state.sums, *over_head), state.carry, state.ran_T4[None, ..., None])
        if not with_gradients:
            return out
        with jax.named_scope(BACKWARD), jax.named_scope("gradients"):
            grads = PipelineParams(
                first=self.sum(state.grads.first, DATA, STAGE),
                layers=self.sum(self.stacked(state.grads.layers), DATA),
                last=self.sum(state.grads.last, *over_head),
            )
        return (*out, grads)

    def segments(self, with_gradients: bool) -> _State:
        """All segments: forward, and then once more with their gradients, the last first."""
        numbers = jnp.arange(self.pipe.num_segments)

        def forward(carried, number, has_head):
            self.segment = number
            carry, sums = carried
            state = self.initial_state(False)._replace(carry=carry, sums=sums)
            tick = functools.partial(self.tick, False, has_head=has_head)
            state = lax.fori_loop(0, self.forward_ticks, tick, state)
            return (state.carry, state.sums), (carry, state.ran_T4)

        def joined(ran_GT4):
            return ran_GT4.reshape(-1, 4)

        start = self.initial_state(with_gradients)
        if not with_gradients:
            run = functools.partial(forward, has_head=True)
            (carry, sums), (_, ran) = lax.scan(run, (self.carry, start.sums), numbers)
            return start._replace(carry=carry, sums=sums, ran_T4=joined(ran))

        run = functools.partial(forward, has_head=False)
        carried = self.carry, start.sums
        (last_carry, _), (carry_G, _) = lax.scan(run, carried, numbers[:-1])
        carry_G = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), carry_G, last_carry)

        def backward(carried, inputs):
            sums, grads, d_carry, after = carried
            self.segment, carry = inputs
            state = self.initial_state(True)._replace(
                carry=carry, sums=sums, grads=grads, d_carry=d_carry
            )
            state = self.ticks(True, None, state)
            is_last = self.segment == numbers[-1]
            after = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), state.carry, after)
            return (state.sums, state.grads, state.d_carry, after), state.ran_T4

        d_carry = jax.tree.map(jnp.zeros_like, start.d_carry)
        carried = start.sums, start.grads, vary_like(d_carry, self.here), self.carry
        carried, ran = lax.scan(backward, carried, (numbers, carry_G), reverse=True)
        sums, grads, d_carry, carry = carried
        return start._replace(
            sums=sums, grads=grads, d_carry=d_carry, carry=carry, ran_T4=joined(ran)
        )

    def ticks(self, with_gradients: bool, num_ticks: int | None, state: _State) -> _State:
        """All ticks. Without gradients their number is fixed where it is known: autodiff needs that."""
        length = self.plan.num_ticks if with_gradients or num_ticks is None else num_ticks
        return lax.fori_loop(0, length, functools.partial(self.tick, with_gradients), state)

    def stacked(self, layers: tuple[Any, ...]) -> tuple[Any, ...]:
        """Layers that are written out as one tree again."""
        return tuple(map(stack, layers)) if self.pipe.unroll else layers

    @property
    def meets_once(self) -> bool:
        """Whether the exchanges of a tick wait for all its work: on CPU each is a meeting of all devices."""
        return self.pipe.platform == "cpu"

    def split_layers(self) -> SplitLayers:
        """The layers as forward and backward, for a unit."""
        zero, K = jnp.int32(0), self.plan.max_chunks
        params, frozen = (self.stacked(tree.layers) for tree in (self.params, self.frozen))
        carry, x = self.first_block()
        splits, whole = bool(self.plan.weights) and not self.pipe.remat, None
        if splits and self.plan.zero_bubble == "microbatch" and K > 1:
            long = jax.tree.map(lambda a: jnp.concatenate([a] * K), x)
            whole = long, self.at(zero, is_whole=True), K
        return SplitLayers(
            self.pipe.layers,
            *(params, frozen, carry, x, self.at(zero)),
            has_empty_slots=self.pipe.slots.has_empty_slots,
            splits=splits,
            whole=whole,
        )

    def first_block(self) -> tuple[Any, Any]:
        """The carry and an input of a unit, to trace layers with."""
        zero = jnp.int32(0)
        return self.read_carry(self.carry, zero, zero), vary_like(zeros(self.x), self.here)

    def initial_state(self, with_gradients: bool) -> _State:
        def buffers(count, shapes):
            """One more than `count`: where slot -1 is written."""
            return jax.tree.map(
                lambda a: jnp.full((count + 1, *a.shape), self.pipe.buffer_fill).astype(a.dtype),
                shapes,
            )

        plan, unit = self.plan, jnp.int32(0)
        state = _State(
            carry=self.carry,
            arrived_x=buffers(plan.num_forward_buffers, self.x),
            ran_T4=jnp.zeros((plan.forward.unit.shape[1], 4), jnp.int32),
        )
        if with_gradients:
            rows = self.pipe.microbatch_rows if self.pipe.num_segments == 1 else None
            if self.pipe.remat:  # the state and the input of a unit
                kept = jax.eval_shape(self.first_block)
            else:
                kept = tuple(map(self.room, self.layers.saved, self.rows))
            state = state._replace(
                kept=self.to_host(buffers(plan.num_slots, kept)),
                head_dy=buffers(0 if self.pipe.remat else plan.num_slots, self.x),
                arrived_dy=buffers(plan.num_backward_buffers, self.x),
                d_carry=jax.tree.map(
                    lambda a: jnp.full_like(a[:, :rows], self.pipe.buffer_fill), self.carry
                ),
            )
        state = vary_like(state, self.here)
        # A sharded head's sums are the same on all stages, and so differ over `data` alone.
        head_like = lax.axis_index(DATA) if self.pipe.head == "sharded" else self.here

        def last():
            y = self.head_input(vary_like(zeros(self.x), self.here), unit)
            return self.last(self.params.last, y, unit)

        sums = jax.eval_shape(last)
        state = state._replace(sums=vary_like(zeros(sums), head_like))
        if with_gradients:
            grads = jax.tree.map(
                lambda a: vary_like(jnp.zeros(a.shape, jnp.float32), a), self.params
            )
            state = state._replace(grads=grads)
        return state

    def room(self, saved: list[Any], rows: jax.Array) -> list[Any]:
        """Shapes of what is kept of a unit's layers of one kind: of one layer -> of all in a group."""
        if self.pipe.unroll:
            return [saved] * len(rows)
        n = len(rows) // self.plan.num_groups
        return [jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype) for leaf in saved]

    def tick(
        self,
        with_gradients: bool,
        number: jax.Array,
        state: _State,
        *,
        has_head: bool = True,
    ) -> _State:
        """Forward, head, backward, weights, exchange.

        Args:
          has_head: False where the carry alone is wanted.
        """
        forward, backward, *weights = (
            vary_like(jax.tree.map(lambda a: a[0, number, 0], lane), self.here)
            for lane in (self.plan.forward, self.plan.backward, *self.plan.weights)
        )
        state, y = self.forward(with_gradients, forward, state)
        if with_gradients and weights:
            # B writes over what is read here. XLA does not know the order, and would copy all that is kept.
            state, done = self.weights(weights[0], state, 0)
            backward = backward._replace(slot=backward.slot + done)
        unit, slot = self.plan.head[0, number]
        y_of_head, kept = y, None
        if with_gradients and self.pipe.remat:
            y_of_head, kept = self.again(backward, state)
        if has_head:
            state = self.head(with_gradients, unit, slot, y_of_head, state)
        dx = None
        if with_gradients:
            state, dx = self.backward(backward, kept, state)
            if weights:
                state, _ = self.weights(weights[1], state, 1)
        if self.meets_once:
            y, dx = lax.optimization_barrier((y, dx))
        arrived_x = self.exchange(y, +1, state.arrived_x, forward.arrival)
        if with_gradients:
            arrived_dy = self.exchange(dx, -1, state.arrived_dy, backward.arrival)
            state = state._replace(arrived_dy=arrived_dy)
        beside, after = (jnp.sum(lane.unit >= 0) for lane in weights) if weights else (0, 0)
        ran = (forward.unit >= 0, beside, backward.unit >= 0, after)
        ran_4 = jnp.stack([jnp.asarray(n, jnp.int32) for n in vary_like(ran, self.here)])
        ran_T4 = lax.dynamic_update_slice_in_dim(state.ran_T4, ran_4[None], number, 0)
        return state._replace(arrived_x=arrived_x, ran_T4=ran_T4)

    @jax.named_scope(FORWARD)
    def forward(self, with_gradients: bool, at: Lane, state: _State) -> tuple[_State, Any]:
        unit, m = jnp.maximum(at.unit, 0), self.microbatch(at.unit)
        x = lax.cond(
            (at.unit >= 0) & (at.source < 0),
            lambda: self.first(unit),
            lambda: read(state.arrived_x, at.source),
        )
        before = self.read_carry(state.carry, at.group, m)
        run = functools.partial(self.layers_forward, with_gradients, unit, at.group, before, x)
        kept = jax.eval_shape(run)[2]
        after, y, kept = _if(
            at.unit >= 0,
            lambda: vary_like(run(), self.here),
            lambda: vary_like((before, x, zeros(kept)), self.here),
        )
        state = state._replace(carry=self.write_carry(state.carry, after, at.group, m))
        if with_gradients:
            state = state._replace(kept=self.keep(state.kept, kept, at.slot))
        return state, y

    def head_input(self, y: Any, unit: jax.Array) -> Any:
        """What `last` takes: for a sharded head the last stage's y, on all stages."""
        if self.pipe.head != "sharded":
            return y
        is_there = (self.stage == self.last_stage) & (unit >= 0)
        # In float32, for the parts of dy are summed (the transpose of `vary_like`) before they are
        # rounded; and XLA's CPU compiler aborts on a sum of bfloat16.
        y = jax.tree.map(lambda a: jnp.where(is_there, a, jnp.zeros_like(a)), y)
        return lax.psum(jax.tree.map(lambda a: a.astype(jnp.float32), y), STAGE)

    @jax.named_scope(HEAD)
    def head(self, with_gradients: bool, unit, slot, y: Any, state: _State) -> _State:
        """Sums and cotangent of the unit that has just left the last layer, if there is one."""
        on_last, dtypes = self.stage == self.last_stage, jax.tree.map(lambda a: a.dtype, y)
        if self.pipe.head == "sharded":
            active = unit >= 0
        else:
            unit, slot = vary_like((unit, slot), self.here)
            active = (unit >= 0) & on_last
        y = self.head_input(y, unit)

        if not with_gradients:
            sums = _if(
                active,
                lambda: vary_like(add(state.sums, self.last(self.params.last, y, unit)), y),
                lambda: state.sums,
            )
            return state._replace(sums=sums)

        def loss(params, y):
            sums = self.last(params, y, unit)
            return jax.tree.leaves(sums)[0], sums

        def run():
            (_, sums), (d_last, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
                self.params.last, y
            )
            return vary_like((add(state.sums, sums), dy), y), add(state.grads.last, d_last)

        (sums, dy), grads = _if(
            active,
            run,
            lambda: ((state.sums, jax.tree.map(jnp.zeros_like, y)), state.grads.last),
        )
        slot = 0 if self.pipe.remat else jnp.where(on_last & active, slot, -1)
        dy = jax.tree.map(lambda a, dtype: a.astype(dtype), vary_like(dy, self.here), dtypes)
        return state._replace(
            sums=sums,
            grads=state.grads._replace(last=grads),
            head_dy=write(state.head_dy, dy, slot),
        )

    @jax.named_scope(BACKWARD)
    def again(self, at: Lane, state: _State) -> tuple[Any, Any]:
        """The output and the residuals of the unit whose backward comes, from its input and its carry."""
        carry, x = self.to_device(read(state.kept, at.slot))

        def run():
            params, frozen, slots = self.own(at.group)
            return self.layers.forward(params, frozen, carry, x, self.at(at.unit), slots)[1:]

        out = jax.eval_shape(run)
        return _if(
            at.unit >= 0,
            lambda: vary_like(run(), self.here),
            lambda: vary_like(zeros(out), self.here),
        )

    @jax.named_scope(BACKWARD)
    def backward(self, at: Lane, kept: Any, state: _State) -> tuple[_State, Any]:
        """Cotangents of a unit's input and carry, and the gradients of its weights or what W needs.

        Args:
          kept: the unit's residuals; None if they lie in its slot.
        """
        unit, in_segments = jnp.maximum(at.unit, 0), self.pipe.num_segments > 1
        is_last_chunk = unit % self.plan.num_chunks == self.plan.num_chunks - 1
        dy = jax.tree.map(
            lambda head, arrived: jnp.where(at.source < 0, head, arrived),
            read(state.head_dy, 0 if self.pipe.remat else at.slot),
            read(state.arrived_dy, at.source),
        )

        def run(kept=kept):
            _, _, slots = self.own(at.group)
            if in_segments:
                d_carry = self.read_carry(state.d_carry, at.group, self.microbatch(unit))
            else:
                d_carry = jax.tree.map(
                    lambda a: jnp.where(is_last_chunk, jnp.zeros_like(a), a),
                    self.of_group(state.d_carry, at.group),
                )
            kept = read(state.kept, at.slot) if kept is None else kept
            own, prepared = self.of_group((grads, self.prepared), at.group)
            own, d_carry, dx, later = self.layers.backward(prepared, kept, d_carry, dy, own, slots)
            return (
                self.into_group(grads, own, at.group),
                self.write_carry(state.d_carry, d_carry, at.group, self.microbatch(unit))
                if in_segments
                else self.into_group(state.d_carry, d_carry, at.group),
                dx,
                later,
            )

        # Of kinds whose W is apart there is no gradient here.
        grads = tuple(
            () if kind.has_weights else own
            for kind, own in zip(self.layers.kinds, state.grads.layers, strict=True)
        )
        later = jax.eval_shape(run)[3]
        grads, d_carry, dx, later = _if(
            at.unit >= 0,
            lambda: vary_like(run(), self.here),
            lambda: vary_like((grads, state.d_carry, dy, zeros(later)), self.here),
        )
        layer_grads = tuple(
            before if kind.has_weights else own
            for kind, own, before in zip(self.layers.kinds, grads, state.grads.layers, strict=True)
        )
        first_grads = lax.cond(
            (at.unit >= 0) & (self.stage == 0) & (at.group == 0),
            lambda: vary_like(self.first_gradient(state.grads.first, unit, dx), self.here),
            lambda: state.grads.first,
        )
        grads = state.grads._replace(layers=layer_grads, first=first_grads)
        kept = self.keep_for_weights(state.kept, later, at.slot)
        return state._replace(d_carry=d_carry, grads=grads, kept=kept), dx

    def keep(self, buffers: Any, kept: Any, slot: ArrayLike) -> Any:
        """What a forward saved, into a slot; the room for W stays as it is."""
        if self.pipe.remat:
            return write(buffers, self.to_host(kept), slot)

        return self.of_kinds(functools.partial(write_saved, slot=slot), buffers, kept)

    def to_host(self, kept: Any) -> Any:
        """What is kept, in the memory where it is kept."""
        return jax.device_put(kept, jax.memory.Space.Host) if self.pipe.keeps_on_host else kept

    def to_device(self, kept: Any) -> Any:
        """What was kept, where it is computed with."""
        return jax.device_put(kept, jax.memory.Space.Device) if self.pipe.keeps_on_host else kept

    def keep_for_weights(self, buffers: Any, later: Any, slot: ArrayLike) -> Any:
        """What W needs of a backward, into its slot."""
        if not any(kind.has_weights for kind in self.layers.kinds):
            return buffers

        places = [kind.places for kind in self.layers.kinds]
        return self.of_kinds(functools.partial(write_later, slot=slot), buffers, later, places)

    def of_kinds(self, function: Callable[..., Any], kept: Any, values: Any, *more: Any) -> Any:
        """What a function makes of every kind's buffers; of every row's, if layers are written out."""
        if not self.pipe.unroll:
            return tuple(map(function, kept, values, *more))
        own = [each[0] for each in more]
        return ([function(*row, *own) for row in zip(kept[0], values[0], strict=True)],)

    def weights(self, at: Lane, state: _State, first: int) -> tuple[_State, jax.Array]:
        """W of the units of this part of a tick; gradients are changed in place. And 0.

        Args:
          first: number of the first lane; of the lane 0, beside forwards, the 0 comes when it is done.
        """
        layers, done = state.grads.layers, vary_like(jnp.int32(0), self.here)
        if not any(kind.has_weights for kind in self.layers.kinds):
            return state, done
        for place in range(at.unit.shape[0]):
            here = jax.tree.map(lambda a, place=place: a[place], at)

            def run(here=here, layers=layers, done=done):
                after = tuple(
                    self.weights_of(n, here, state.kept[n], own) if kind.has_weights else own
                    for n, (kind, own) in enumerate(zip(self.layers.kinds, layers, strict=True))
                )
                if first:  # nothing in this tick waits for it
                    return after, done
                # 0, whatever the sum is; the compiler cannot know it before. Over parts of an array it takes
                # an exchange, of one number.
                some = jnp.sum(min(jax.tree.leaves(after), key=jnp.size))
                return after, (some * 0 == 1).astype(jnp.int32)

            def skip(layers=layers, done=done):
                return layers, done

            # Not a loop over places: what is kept would be copied into it.
            with jax.named_scope(scope_of_weights(first + place)):
                layers, done = _if(here.unit >= 0, run, skip)
        return state._replace(grads=state.grads._replace(layers=layers)), done

    def weights_of(self, kind: int, at: Lane, buffers: Any, grads: Any) -> Any:
        """W of a kind's layers over a unit, or over all chunks of a microbatch."""
        part, K, slot_of = self.layers.kinds[kind], self.plan.max_chunks, self.plan.slot_of
        is_there_K = jnp.arange(K) < self.plan.num_chunks

        def of_slot(leaf, place, slot):
            if self.pipe.unroll:
                return read(buffers[place][leaf], slot)
            a = buffers[leaf]
            part = lax.dynamic_slice(a, _corner(a, slot, place), (1, 1, *a.shape[2:]))
            return part.reshape(a.shape[2:])

        def of_microbatch(leaf, place, *, from_above: bool):
            """All chunks, one after the other; a shorter batch is filled up with its first, and zeros."""
            chunk_K = jnp.where(is_there_K, jnp.arange(K), 0)
            slot_K = vary_like(jnp.asarray(slot_of)[0, 0, at.group, at.unit + chunk_K], self.here)
            parts = [of_slot(leaf, place, slot_K[k]) for k in range(K)]
            if from_above:  # W is linear in it
                parts = [
                    jnp.where(is_there_K[k], a, jnp.zeros_like(a)) for k, a in enumerate(parts)
                ]
            return jnp.concatenate(parts)

        def kept(place):
            if slot_of is None or K == 1:
                return [
                    [of_slot(leaf, place, at.slot) for leaf in own]
                    for own in (part.needed, part.places)
                ]
            needed = [of_microbatch(leaf, place, from_above=False) for leaf in part.needed]
            return needed, [of_microbatch(leaf, place, from_above=True) for leaf in part.places]

        num_rows = len(self.rows[kind]) // self.plan.num_groups
        rows = at.group * num_rows, num_rows
        return self.layers.weights(kind, self.prepared[kind], kept, grads, self.rows[kind], rows)

    def exchange(self, blocks: Any, step: int, arrived: Any, slot: ArrayLike):
        """Sends to the stage above (+1) or below (-1); puts what comes from the other side into a buffer."""
        n = self.last_stage + 1
        ring = self.plan.num_groups > 1
        if n == 1:
            return arrived
        pairs = [(s, (s + step) % n) for s in range(n) if ring or 0 <= s + step < n]
        with jax.named_scope(FORWARD if step > 0 else BACKWARD), jax.named_scope("exchange"):
            return write(arrived, lax.ppermute(blocks, STAGE, pairs), slot)

    def sum(self, tree, *axes: str):
        """The sum over devices."""
        sizes = self.pipe.mesh.shape
        return lax.psum(tree, axes) if sizes[DATA] * sizes[STAGE] > 1 else tree

    # ---- pieces of a unit ----

    def microbatch(self, unit):
        return jnp.maximum(unit, 0) // self.plan.num_chunks

    def at(self, unit, *, is_whole: bool = False) -> At:
        """Where a unit lies, and its part of the batch; or that of all chunks of its microbatch."""
        unit = jnp.maximum(unit, 0)
        t, b = self.pipe.chunk_len or 0, self.pipe.microbatch_rows
        k, row = unit % self.plan.num_chunks, self.microbatch(unit) * b
        K = self.plan.max_chunks * self.pipe.num_segments

        def time():
            in_segments = self.pipe.num_segments > 1
            return (self.segment * self.plan.max_chunks + k) * t if in_segments else k * t

        def cut(a):
            if not jnp.ndim(a):
                return a
            if self.pipe.chunk_len is None or a.ndim == 1:
                return lax.dynamic_slice_in_dim(a, row, b, 0)
            # What has one step is the same for all chunks, and one chunk has all steps, however many.
            is_cut = K > 1 and a.shape[0] > 1 and not is_whole
            steps = t if is_cut else a.shape[0]
            start = time() if steps != a.shape[0] else 0
            return lax.dynamic_slice(a, _corner(a, start, row), (steps, b, *a.shape[2:]))

        return At(
            layer=0,
            time=time(),
            row=self.first_row + row,
            key=self.key,
            batch=jax.tree.map(cut, self.batch),
            layout=self.pipe.layout,
            time_major=self.pipe.chunk_len is not None,
            platform=self.pipe.platform,
        )

    def first(self, unit) -> Any:
        x = self.pipe.first(self.params.first, self.frozen.first, self.at(unit))
        return vary_like(x, self.here)

    def first_gradient(self, grads, unit, dx):
        params, at = self.params.first, self.at(unit)
        if self.pipe.first_gradient is not None:
            return self.pipe.first_gradient(grads, params, self.frozen.first, at, dx)
        _, vjp = jax.vjp(
            lambda params: vary_like(self.pipe.first(params, self.frozen.first, at), dx), params
        )
        return add(grads, vjp(dx)[0])

    def last(self, params, y, unit):
        return self.pipe.last(params, self.frozen.last, vary_like(y, self.here), self.at(unit))

    def layers_forward(self, with_gradients: bool, unit, group, carry, x):
        """The layers over a unit, and what is kept for its backward."""
        params, frozen, slots = self.own(group)
        if with_gradients and not self.pipe.remat:
            return self.layers.forward(params, frozen, carry, x, self.at(unit), slots)
        after, y = run_layers(
            self.pipe.layers,
            *(params, frozen, carry, x, self.at(unit), slots),
            has_empty_slots=self.pipe.slots.has_empty_slots,
        )
        return after, y, (carry, x) if with_gradients else ()

    def own(self, group):
        """Parameters, frozen ones and slots of a group."""
        return self.of_group((self.params.layers, self.frozen.layers, self.slots), group)

    def read_carry(self, carry, group, m):
        b = self.pipe.microbatch_rows
        rows = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, m * b, b, 1), carry)
        return self.of_group(rows, group)

    def write_carry(self, carry, part, group, m):
        row = m * self.pipe.microbatch_rows

        def write(a, p):
            start = group * (a.shape[0] // self.plan.num_groups)
            return lax.dynamic_update_slice(a, p, _corner(a, start, row))

        return jax.tree.map(write, carry, part)

    # ---- groups of layers (interleaved schedules) ----

    def of_group(self, tree, group):
        """A group's rows of every stacked array."""
        V = self.plan.num_groups
        if V == 1:
            return tree
        return jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, group * (a.shape[0] // V), a.shape[0] // V), tree
        )

    def into_group(self, tree, part, group):
        if self.plan.num_groups == 1:
            return part
        return jax.tree.map(
            lambda a, p: lax.dynamic_update_slice_in_dim(a, p, group * p.shape[0], 0), tree, part
        )


def _head_again(backward: Lane) -> jax.Array:
    """What leaves the last layer when its forward is run again: unit, and a slot that is not needed."""
    unit = jnp.where(backward.source[..., -1] < 0, backward.unit[..., -1], -1)
    return jnp.stack([unit, jnp.zeros_like(unit)], axis=-1)


def _ticks_of(lane: Lane) -> jax.Array:
    """Up to the last tick in which a stage has a unit."""
    has_unit_T = jnp.any(jnp.asarray(lane.unit) >= 0, axis=(0, 2))
    return jnp.max(jnp.where(has_unit_T, jnp.arange(len(has_unit_T)) + 1, 0))


def _if(condition: ArrayLike, run: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """`lax.cond`; without a branch where the condition is known to be true."""
    return run() if condition is True else lax.cond(condition, run, skip)


def _corner(a: jax.Array, *starts: ArrayLike) -> list[jax.Array]:
    """Where a part of an array begins: so in its first dims, at 0 in others; of one type, as XLA asks."""
    return [jnp.asarray(start, jnp.int32) for start in (*starts, *[0] * (a.ndim - len(starts)))]


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


def write_saved(buffers: Sequence[Any], saved: Sequence[Any], slot: ArrayLike) -> list[Any]:
    """Puts what a forward saved into a slot of buffers; the room behind it, for W, stays as it is."""
    count = len(saved)
    return [*write(list(buffers[:count]), list(saved), slot), *buffers[count:]]


def write_later(
    buffers: Sequence[Any], later: Sequence[Any], places: Sequence[int], slot: ArrayLike
) -> list[Any]:
    """Puts what W needs of a backward into its places in a slot of buffers; see `SplitLayer.places`."""
    buffers = list(buffers)
    for place, leaf in zip(places, later, strict=True):
        buffers[place] = write(buffers[place], leaf, slot)
    return buffers
