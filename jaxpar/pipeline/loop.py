"""The loop over ticks: it looks up the work of a stage, its order, and what stages exchange.

    tick            one turn of the loop, the same program on every stage
      forward       x from another stage (at first: from the batch) -> layers -> y, what is kept
      head          y of the last layer -> sums, dy
      backward      dy from another stage (at last: from the head), what was kept -> layers -> dx
      weights       W, what is left of backward units where the schedule splits it off; also before the head
      exchange      y and dx go to the stage above, to the one below, or stay

With `remat` the head waits for the forward pass that runs again before its backward pass.

A long window can be cut into segments, each a loop over ticks of its own. They run forward, for the carries
between them alone, and once more, the last first, forward and backward: residuals are those of one segment.

A worked example: two stages, one microbatch in two chunks of time, units 0 and 1, zero-bubble 1F1B, a head on
the last stage. c0 is the carry before the window, c1 after unit 0, c2 after unit 1; d1 and d0 are the
cotangents of c1 and c0. `x[0]` is a buffer of `State.arrived_x`, `dy[0]` one of `arrived_dy`, `slot 0` a
residual slot.

    tick  stage 0                                       stage 1
    0     enter 0, F0: first(unit 0) -> y               idle: nothing is computed, its y goes nowhere
          carry c0 -> c1, slot 0 <- residuals
          y goes up                                     x[0] <- y of unit 0
    1     enter 1, F1: first(unit 1) -> y               F0: x[0] -> y, carry c0 -> c1, slot 0 <- residuals
          carry c1 -> c2, slot 1 <- residuals           head 0: sums += last(y), head_dy[slot 0] <- dy
          y goes up                                     x[0] <- y of unit 1
    2     idle                                          F1: x[0] -> y, carry c1 -> c2, slot 1 <- residuals
                                                        head 1: sums += last(y), head_dy[slot 1] <- dy
                                                        B1: head_dy[slot 1], d_carry 0 -> d1, slot 1 <- for W
          dy[0] <- dx of unit 1                         dx goes down
    3     B1: dy[0], d_carry 0 -> d1, slot 1 <- for W   B0: head_dy[slot 0], d_carry d1 -> d0, slot 0 <- for W
          leave 1: gradient of first += of dx
          W1: gradients += of slot 1, which is free     W1: gradients += of slot 1, which is free
          dy[0] <- dx of unit 0                         dx goes down
    4     B0: dy[0], d_carry d1 -> d0, slot 0 <- for W  W0: gradients += of slot 0, which is free
          leave 0: gradient of first += of dx
          W0: gradients += of slot 0, which is free
    then  gradients of layers are summed over `data`; those of first and last, and sums, over both axes

Between the chunks of a sequence a carry lies in `State.carry`, on the stage of its layers: one array for all
rows of the device, which each unit reads and writes in the rows of its microbatch. Its cotangent lies in
`State.d_carry`, which needs room for one microbatch, since a sequence goes back without a pause.

Collectives of a tick, outside of any branch: a permute over `stage` for each direction in which activations
and cotangents move, two in all, four of "v" (`_exchange`); with a sharded head the sum of y over `stage`, and
what `last` combines (`_head`). Where all stages have parts of `first`, a branch that they take together adds
up what these give (`_enter`), and one puts the dx of the unit that leaves on all stages (`_leave`). Over
`data` there is none: what is summed over it is summed after the loop (`engine`). Only FSDP without stages
gathers a layer's parameters where it runs, and scatters their gradients (`partition.gather`). What layers
exchange over `tensor` the compiler puts in.

Branches count their turns, 0 or 1, and what follows needs that count: so all devices come to the collectives
in one order (`order`).

Legend: t time steps of a chunk, b rows of a microbatch, B rows of the device; G segments.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.axes import STAGE
from jaxpar.base.trees import add, vary_like, wide
from jaxpar.base.types import Activations, Arrays, Carry, Cotangents, Function, Index, Outputs, Tree
from jaxpar.pipeline.buffers import write
from jaxpar.pipeline.kept import Inputs, Residuals
from jaxpar.pipeline.lanes import Lane
from jaxpar.pipeline.order import after_collectives
from jaxpar.pipeline.spec import PipelineParams, Spec
from jaxpar.pipeline.stage import Stage, Unit
from jaxpar.pipeline.store import pick
from jaxpar.pipeline.tables import SharedLane, TickTable
from jaxpar.trace.loops import after

# The parts of a tick, as named scopes of the program.
FORWARD, HEAD, BACKWARD = "forward", "head", "backward"
# What comes before the layers, within forward and backward.
ENTER, LEAVE = "enter", "leave"


def scope_of_weights(number: int) -> str:
    """Of the W in a lane: number 0 is beside forwards, others are after backwards."""
    return f"weights{number}"


class State(NamedTuple):
    """What the loop carries from tick to tick; the backward half is None in evaluation.

    Activations and cotangents are written in every tick: where a buffer is numbered -1 to the last one, which
    nobody reads. There is one more than needed.
    """

    carry: Carry  # for every kind, [rows, B, ...]
    arrived_x: Activations  # activations that wait for their tick, [buffers + 1, t, b, ...]
    ran_T4: jax.Array  # units that this stage did in each part of a tick
    sums: Outputs  # of `last`, or its rows
    layer_sums: Outputs  # of the layers; () if they add none
    kept: Arrays = None  # for the backward of a unit, leaves [residual slots, ...]
    head_dy: Cotangents = (
        None  # cotangents of the head, [slots + 1, t, b, ...]; with remat just one
    )
    arrived_dy: Cotangents = None  # cotangents that wait for their tick, [buffers + 1, t, b, W]
    d_carry: Cotangents = (
        None  # of the sequence on its way back, [rows, b, ...]; of all between segments
    )
    grads: Cotangents = None  # PipelineParams


@dataclasses.dataclass(frozen=True)
class Loop:
    """Ticks of one stage.

    Attributes:
      kept: of units between forward and backward; None in evaluation.
      d_loss: cotangent of the loss of each unit; None in evaluation.
    """

    stage: Stage
    kept: Residuals | None
    table: TickTable
    d_loss: jax.Array | None = None

    @property
    def spec(self) -> Spec:
        """What is run."""
        return self.stage.spec

    def start(self, carry: Carry) -> State:
        """The state before the first tick, with nothing kept and all sums 0."""
        stage, table, spec = self.stage, self.table, self.spec
        here, x, buffers = stage.here, stage.x_shape, stage.buffers
        state = State(
            carry=carry,
            arrived_x=buffers(table.num_forward_buffers + 1, x),
            ran_T4=jnp.zeros((table.forward.unit.shape[1], 4), jnp.int32),
            sums=(),
            layer_sums=(),
        )
        if self.kept is not None:
            rows = spec.microbatch_rows if spec.num_segments == 1 else None
            kept = buffers(table.num_slots, self.kept.shapes, on_host=spec.keeps_on_host)
            state = state._replace(
                kept=self.kept.placed(kept),
                head_dy=buffers(1 if spec.remat else table.num_slots + 1, x),
                arrived_dy=buffers(table.num_backward_buffers + 1, x),
                d_carry=jax.tree.map(
                    lambda a: jnp.full_like(a[:, :rows], spec.buffer_fill or 0), carry
                ),
            )
        state = vary_like(state, here)
        # A sharded head's sums are the same on all stages, and so differ over `data` alone.
        head_like = stage.group if self.spec.head == "sharded" else here
        sums = vary_like(stage.nothing_collected, head_like)
        state = state._replace(sums=sums, layer_sums=stage.no_sums)
        if self.kept is not None:
            grads = jax.tree.map(_no_gradient, stage.params)
            layers, outer = map(self.spec.lay_out_gradients, (grads.layers, grads.outer))
            state = state._replace(grads=grads._replace(layers=layers, outer=outer))
        return state

    def run(
        self, state: State, num_ticks: Index, segment: Index = 0, *, has_head: bool = True
    ) -> State:
        """So many ticks.

        Args:
          has_head: False where the carry alone is wanted.
        """
        tick = functools.partial(self._tick, segment=segment, has_head=has_head)
        return lax.fori_loop(0, num_ticks, tick, state)

    def _tick(self, number: Index, state: State, *, segment: Index, has_head: bool) -> State:
        table, here = self.table, self.stage.here
        forward, backward, *weights = (
            vary_like(jax.tree.map(lambda a: a[0, number, 0], lane), here)
            for lane in (table.forward, table.backward, *table.weights)
        )
        enter, head, leave = (
            jax.tree.map(lambda a: a[0, number], lane)
            for lane in (table.enter, table.head, table.leave)
        )
        state, y = self._forward(forward, enter, segment, state)
        if self.kept and weights:
            # B writes over what is read here. XLA does not know the order, and would copy all that is kept.
            state, turns = self._weights(weights[0], state, 0, jnp.int32(0))
            backward = after(turns, backward)
            y = after_collectives(self.spec, turns, y)
        y_of_head, recalled = y, None
        if isinstance(self.kept, Inputs):
            with jax.named_scope(BACKWARD):
                at = Unit(backward.unit, segment), backward.group, backward.slot
                y_of_head, recalled = self.kept.recall(state.kept, *at)
        turns, dx = jnp.int32(0), None
        if has_head:
            state, turns = self._head(Unit(head.unit, segment), head.slot, y_of_head, state)
        if self.kept:
            state, dx, turns = self._backward(backward, leave, segment, recalled, y, state)
            if weights:
                lane = after_collectives(self.spec, turns, weights[1])
                state, turns = self._weights(lane, state, 1, turns)
        y, dx = after_collectives(self.spec, turns, (y, dx))
        arrived_x = _exchange(self, FORWARD, y, state.arrived_x, forward.arrival)
        if self.kept:
            arrived_dy = _exchange(self, BACKWARD, dx, state.arrived_dy, backward.arrival)
            state = state._replace(arrived_dy=arrived_dy)
        beside, last = (jnp.sum(lane.unit >= 0) for lane in weights) if weights else (0, 0)
        ran = (forward.unit >= 0, beside, backward.unit >= 0, last)
        ran_4 = jnp.stack([jnp.asarray(n, jnp.int32) for n in vary_like(ran, here)])
        ran_T4 = lax.dynamic_update_slice_in_dim(state.ran_T4, ran_4[None], number, 0)
        return state._replace(arrived_x=arrived_x, ran_T4=ran_T4)

    @jax.named_scope(FORWARD)
    def _forward(
        self, at: Lane, enter: SharedLane, segment: Index, state: State
    ) -> tuple[State, Any]:
        stage, kept_of = self.stage, self.kept
        unit, m = Unit(jnp.maximum(at.unit, 0), segment), stage.microbatch(at.unit)
        arrived = pick(state.arrived_x, jnp.asarray(at.source))
        x = self._enter(Unit(enter.unit, segment), unit, arrived)
        before = stage.read_carry(state.carry, at.group, m)

        def run(inputs, state):
            at, unit, before, x = inputs
            carry, total, _, kept = state
            arguments = unit, at.group, before, (x, stage.no_sums)
            if kept_of:
                after, (y, sums), kept = kept_of.forward(kept, at.slot, *arguments)
            else:
                after, (y, sums) = stage.forward(*arguments)
            carry = stage.write_carry(carry, after, at.group, stage.microbatch(unit.number))
            return carry, add(total, sums), y, kept

        changes = state.carry, state.layer_sums, x, state.kept
        changes = vary_like(changes, stage.here)
        carry, total, y, kept = _if_runs(self, at.unit >= 0, run, (at, unit, before, x), changes)
        return state._replace(carry=carry, layer_sums=total, kept=kept), y

    @jax.named_scope(ENTER)
    def _enter(self, entering: Unit, own: Unit, arrived: Activations) -> Arrays:
        """What goes into the layers: of the batch where a unit enters, else what has arrived.

        Args:
          entering: the unit that comes to the first layer, if there is one; `own` that of this stage.
        """
        stage, is_there = self.stage, entering.number >= 0
        on_stage = stage.number == self.table.route.stages[0]
        if not self.spec.shares_first:
            return lax.cond(is_there & on_stage, lambda: stage.first(own), lambda: arrived)

        def enter():
            x = stage.first(entering)
            return jax.tree.map(lambda a, b: jnp.where(on_stage, a, b), x, arrived)

        return lax.cond(is_there, enter, lambda: arrived)

    @jax.named_scope(LEAVE)
    def _leave(
        self, leaving: Unit, own: Unit, dx: Cotangents, grads: PipelineParams
    ) -> tuple[PipelineParams, jax.Array]:
        """What `first` adds to the gradients for the unit that leaves the first layer.

        Args:
          leaving: that unit, if there is one; `own` that of this stage.
        Returns:
          the gradients; and how many turns the branch had.
        """
        stage, runs, shares = self.stage, leaving.number >= 0, self.spec.shares_first
        on_stage = stage.number == self.table.route.stages[0]

        def leave(inputs: Tree, now: Tree) -> Arrays:
            (unit, dx), (_, grads) = inputs, now
            if shares:
                dtypes = jax.tree.map(lambda a: a.dtype, dx)
                dx = jax.tree.map(lambda a: jnp.where(on_stage, a, jnp.zeros_like(a)), dx)
                dx = jax.tree.map(jnp.astype, stage.over_stages(dx), dtypes)
            return (), stage.add_to_end(0, grads, lambda now: stage.first_gradient(now, unit, dx))

        runs, unit = (runs, leaving) if shares else (runs & on_stage, own)
        _, grads, turns = self._add_to_end(0, runs, leave, (unit, dx), (), grads)
        return grads, turns

    def _add_to_end(
        self, end: int, runs: Index, run: Function, inputs: Tree, others: Tree, grads: Cotangents
    ) -> tuple[Any, PipelineParams, jax.Array]:
        """Runs a function that adds to the gradients of `first` or `last` alone, in a branch.

        Args:
          run: (inputs, (others, gradients)) -> (others, gradients).
        Returns:
          the others; the gradients; and how many turns the branch had.
        """
        alone = {name: getattr(grads, name) for name in self.stage.untouched(end)}
        turns = vary_like(jnp.int32(0), runs)
        now = (others, grads._replace(**dict.fromkeys(alone, ()))), turns

        def turn(inputs, now):
            now, turns = now
            return run(inputs, now), turns + 1

        if self.stage.is_stored(end):
            (others, grads), turns = _if_runs(self, runs, turn, inputs, now, adds=True)
        else:
            (others, grads), turns = lax.cond(
                runs, lambda: _typed_like(now, turn(inputs, now)), lambda: now
            )
        return others, grads._replace(**alone), turns

    @jax.named_scope(HEAD)
    def _head(
        self, unit: Unit, slot: Index, y: Activations, state: State
    ) -> tuple[State, jax.Array]:
        """Sums (or rows) and cotangent of the unit that has just left the last layer, if there is one.

        Returns:
          the state; and how many turns the branch had.
        """
        stage = self.stage
        on_stage = stage.number == self.table.route.stages[-1]
        dtypes = jax.tree.map(lambda a: a.dtype, y)
        if self.spec.head == "sharded":
            active = unit.number >= 0
            # The y of the stage that has it, on all of them.
            is_there = on_stage & active
            y = jax.tree.map(lambda a: jnp.where(is_there, a, jnp.zeros_like(a)), y)
            y = stage.over_stages(y)
        else:
            number, slot = vary_like((unit.number, slot), stage.here)
            unit = unit._replace(number=number)
            active = (unit.number >= 0) & on_stage

        if not self.kept:

            def collect():
                of_unit = stage.last(stage.of_end(1, stage.params), y, unit)
                return vary_like(stage.collect(state.sums, of_unit, unit), y), jnp.int32(1)

            sums, turns = lax.cond(active, collect, lambda: (state.sums, jnp.int32(0)))
            return state._replace(sums=sums), turns

        def loss(params, y):
            sums = stage.last(params, y, unit)
            return jax.tree.leaves(sums)[0] * self.d_loss, sums

        differentiate = jax.value_and_grad(loss, (0, 1), has_aux=True)

        def run(y: Activations, now: Tree) -> Arrays:
            (sums, _), grads = now
            (_, own), (d_last, dy) = differentiate(stage.of_end(1, stage.params), y)
            others = add(sums, own), dy
            return others, stage.add_to_end(1, grads, lambda before: add(before, d_last))

        others = state.sums, jax.tree.map(jnp.zeros_like, y)
        (sums, dy), grads, turns = self._add_to_end(1, active, run, y, others, state.grads)
        slot = 0 if self.spec.remat else jnp.where(on_stage & active, slot, -1)
        dy = jax.tree.map(lambda a, dtype: a.astype(dtype), vary_like(dy, stage.here), dtypes)
        state = state._replace(sums=sums, grads=grads, head_dy=write(state.head_dy, dy, slot))
        return state, turns

    @property
    def _d_sums(self) -> Arrays:
        """The cotangent of what layers have added: of the first, the loss; 0 of others."""
        leaves, structure = jax.tree.flatten(self.stage.no_sums)
        of_each = [a + self.d_loss if n == 0 else a for n, a in enumerate(leaves)]
        return jax.tree.unflatten(structure, of_each)

    @jax.named_scope(BACKWARD)
    def _backward(
        self,
        at: Lane,
        leave: SharedLane,
        segment: Index,
        recalled: Arrays,
        idle_dx: Cotangents,
        state: State,
    ) -> tuple[State, Any, jax.Array]:
        """Cotangents of a unit's input and carry, and the gradients of its weights or what W needs.

        Args:
          recalled: the unit's residuals, if they were made again.
          idle_dx: what is sent as dx where no unit runs.
        Returns:
          the state; dx; and how many turns the branch of `_leave` had.
        """
        stage, kept = self.stage, self.kept
        assert kept is not None
        number, in_segments = jnp.maximum(at.unit, 0), self.spec.num_segments > 1

        def run(inputs, changes):
            at, number, slot = inputs
            grads, d_carry, _, buffers = changes
            m = stage.microbatch(number)
            dy = jax.tree.map(
                lambda head, arrived: jnp.where(at.source < 0, head, arrived),
                pick(state.head_dy, 0 if self.spec.remat else at.slot),
                pick(state.arrived_dy, at.source),
            )
            if in_segments:
                after = stage.read_carry(d_carry, at.group, m)
            else:
                is_last = number % self.table.num_chunks == self.table.num_chunks - 1
                after = jax.tree.map(
                    lambda a: jnp.where(is_last, jnp.zeros_like(a), a),
                    stage.of_group(d_carry, at.group),
                )
            own, before, (dx, _), buffers = kept.backward(
                buffers, slot, at.group, after, (dy, self._d_sums), grads
            )
            if in_segments:
                d_carry = stage.write_carry(d_carry, before, at.group, m)
            else:
                d_carry = stage.into_group(d_carry, before, at.group)
            return own, d_carry, dx, buffers

        grads = kept.added_to(state.grads.layers)
        buffers, slot = (state.kept, at.slot) if recalled is None else (recalled, jnp.int32(0))
        changes = vary_like((grads, state.d_carry, idle_dx, buffers), stage.here)
        grads, d_carry, dx, buffers = _if_runs(self, at.unit >= 0, run, (at, number, slot), changes)
        layer_grads = kept.after_backward(state.grads.layers, grads)
        leaving = Unit(leave.unit, segment), Unit(number, segment)
        grads, turns = self._leave(*leaving, dx, state.grads._replace(layers=layer_grads))
        if recalled is None:
            state = state._replace(kept=buffers)
        return state._replace(d_carry=d_carry, grads=grads), dx, turns

    def _weights(
        self, at: Lane, state: State, first: int, turns: jax.Array
    ) -> tuple[State, jax.Array]:
        """W of the units of this part of a tick; gradients are changed in place.

        Args:
          first: number of the first lane.
          turns: of the branches before.
        Returns:
          the state; and the turns, with those of W.
        """
        kept = self.kept
        assert kept is not None
        layers, turns = state.grads.layers, vary_like(turns, self.stage.here)
        if not (kept.has_weights and jax.tree.leaves(layers)):  # all layers may be frozen
            return state, turns
        for place in range(at.unit.shape[0]):
            here = jax.tree.map(lambda a, place=place: a[place], at)

            def run(here, now):
                layers, turns = now
                return kept.weights(state.kept, here.slot, here.group, layers), turns + 1

            # Not a loop over places: what is kept would be copied into it.
            with jax.named_scope(scope_of_weights(first + place)):
                layers, turns = _if_runs(
                    self, here.unit >= 0, run, here, (layers, turns), adds=True
                )
        return state._replace(grads=state.grads._replace(layers=layers)), turns


def run_segments(loop: Loop, carry: Carry) -> State:
    """All segments of a window: forward, and then once more with their gradients, the last first."""
    numbers = jnp.arange(loop.spec.num_segments)
    evaluation = dataclasses.replace(loop, kept=None)

    def forward(carried, number, has_head):
        carry, totals = carried
        state = evaluation.start(carry)._replace(**totals)
        ticks = loop.table.num_forward_ticks
        state = evaluation.run(state, ticks, number, has_head=has_head)
        return (state.carry, _totals(state)), (carry, state.ran_T4)

    start = evaluation.start(carry)
    carried = carry, _totals(start)
    if loop.kept is None:
        run: Function = functools.partial(forward, has_head=True)
        (carry, totals), (_, ran) = lax.scan(run, carried, numbers)
        return start._replace(carry=carry, ran_T4=ran.reshape(-1, 4), **totals)

    run = functools.partial(forward, has_head=False)
    (last_carry, _), (carry_G, _) = lax.scan(run, carried, numbers[:-1])
    carry_G = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), carry_G, last_carry)

    def backward(carried, inputs):
        (after, totals), (segment, carry) = carried, inputs
        state = loop.start(carry)._replace(**totals)
        state = loop.run(state, loop.table.num_ticks, segment)
        is_last = segment == numbers[-1]
        after = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), state.carry, after)
        return (after, _totals(state)), state.ran_T4

    start = loop.start(carry)
    d_carry = vary_like(jax.tree.map(jnp.zeros_like, start.d_carry), loop.stage.here)
    carried = carry, _totals(start) | {"d_carry": d_carry}
    (carry, totals), ran = lax.scan(backward, carried, (numbers, carry_G), reverse=True)
    return start._replace(carry=carry, ran_T4=ran.reshape(-1, 4), **totals)


def _no_gradient(param: jax.Array) -> jax.Array:
    """Zeros of the parameter's type, or float32 if that is wider: units add their gradients to them."""
    return vary_like(jnp.zeros(param.shape, wide(param.dtype)), param)


def _totals(state: State) -> dict[str, Arrays]:
    """What goes on from segment to segment, but for the carry."""
    return {name: getattr(state, name) for name in ("sums", "layer_sums", "grads", "d_carry")}


def _if_runs(
    loop: Loop, runs: Index, run: Function, inputs: Tree, state: Tree, *, adds: bool = False
) -> Arrays:
    """`run(inputs, state)` where a unit runs, and the state as it is where none does, in no time.

    A branch, or a loop of one turn or none: whichever XLA changes the state in without a copy. On CPU
    that of JAX 0.10 copies all that a branch changes. On GPUs a branch that adds to arrays copies them
    where it is skipped. On TPUs a loop takes more memory than a branch.

    Args:
      inputs: what the loop depends on, or its work would be done before it, whether it has a turn or not.
      adds: whether `run` adds to the state.
    """
    platform = loop.spec.platform
    loops = platform == "cpu" or (platform == "gpu" and adds)
    # Autodiff takes evaluation apart, which keeps nothing.
    if loop.kept is None or not loops:
        return lax.cond(runs, lambda: _typed_like(state, run(inputs, state)), lambda: state)

    def turn(number, state):
        # Each by itself: JAX 0.10 types all values of one barrier by the axes of all.
        own = jax.tree.map(lambda a: lax.optimization_barrier((a, number))[0], inputs)
        return _typed_like(state, run(own, state))

    return lax.fori_loop(0, jnp.asarray(runs, jnp.int32), turn, state)


def _typed_like(state: Tree, changed: Tree) -> Arrays:
    """The changed state, each array over the axes that it differed over before."""
    return jax.tree.map(vary_like, changed, state)


def _exchange(
    loop: Loop, part: str, blocks: Activations, arrived: Activations, arrival: dict[int, Any]
) -> Arrays:
    """Sends to other stages; puts what comes from them into buffers.

    Args:
      arrival: for every direction in which the schedule sends (`placement.UP`, ...) the buffer.
    """
    n, ring = loop.spec.mesh.shape[STAGE], loop.table.route.is_ring
    with jax.named_scope(part), jax.named_scope("exchange"):
        for step, buffer in arrival.items():
            came = blocks
            if step:
                pairs = [(s, (s + step) % n) for s in range(n) if ring or 0 <= s + step < n]
                came = lax.ppermute(blocks, STAGE, pairs)
            arrived = write(arrived, came, buffer)
    return arrived
