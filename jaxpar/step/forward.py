"""The pass through a model, as a whole or unit by unit on a schedule.

The one place where a model and the pipeline meet.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.at import LayerContext, Processor
from jaxpar.base.axes import DATA, STAGE, TENSOR
from jaxpar.base.parts import starts_of
from jaxpar.base.trees import has_time, same_along, vary_like
from jaxpar.base.types import Activations, Arrays, Batch, Carry, Function, Index, Outputs
from jaxpar.config import Parallel
from jaxpar.model.model import Sums, mean_loss, overrides
from jaxpar.model.stack import values, wrap_like
from jaxpar.partition.gather import gathering
from jaxpar.partition.partition import Partition
from jaxpar.pipeline.engine import Pipeline
from jaxpar.pipeline.lanes import Schedule
from jaxpar.pipeline.schedules import make_schedule
from jaxpar.pipeline.spec import Layer, PipelineParams
from jaxpar.pipeline.store import unstack
from jaxpar.pipeline.tables import TickTable, largest, make_table
from jaxpar.pipeline.walk import SlotArrays, make_walk, run_layers, with_sums
from jaxpar.sharding import axes_of_spec, by_hand, constrain
from jaxpar.step.parts import Outer, Parts

_make_schedule = functools.lru_cache(maxsize=1024)(make_schedule)  # few, asked for very often


def make_forward(
    parts: Parts, mesh: Mesh, *, predicts: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """(params, frozen, carry, batch, dropout key, table) -> (carry, sums), over one window.

    Args:
      predicts: instead of the sums, what the model's `predict` gives: arrays by name, [time, rows, ...] or
        [rows, ...], rows in the order of the batch.
    """
    partition = parts.partition
    layers = parts.layer_functions(in_units=partition.runs_in_units)
    if partition.runs_in_units:
        # The engine does not differentiate the carry that it is given.
        layers = tuple(
            layer if start is None else _from_learned_start(layer, start)
            for layer, start in zip(layers, parts.learned_starts, strict=True)
        )
    if predicts:
        _ = parts.facts.outputs  # what is wrong with them is said now
        layers = tuple(map(_without_sums, layers))
    if partition.gathers_layers:
        specs = [jax.tree.map(lambda spec: P(*spec[1:]), own) for own in parts.layer_specs(TENSOR)]
        pairs = zip(layers, zip(*specs, strict=True), strict=True)
        layers = tuple(gathering(partition, *pair) for pair in pairs)
    run = _run_in_units if partition.runs_in_units else _run_at_once
    run = functools.partial(run, parts, mesh, layers, predicts)

    def forward(params, frozen, carry, batch, key, table):
        # Parameters stored split over `data` are gathered here, and their gradients scattered; or where they
        # are used.
        params, frozen = (constrain(tree, mesh, partition.step_rules) for tree in (params, frozen))
        if key is not None:
            params = parts.drawn(params, frozen, key)
        starts, initial = starts_of(batch), parts.initial_carry(params, frozen)
        before = jax.tree.map(lambda a, b: jnp.where(starts, b, a), carry, initial)
        flat = tuple(values(before[kind]) for kind in parts.facts.kinds)
        after, sums = run(params, frozen, flat, batch, key, table)
        by_kind = zip(parts.facts.kinds, after, strict=True)
        return {kind: wrap_like(own, carry[kind]) for kind, own in by_kind}, sums

    return forward


def _from_learned_start(layer: Function, start: Function):
    """A layer that begins the first window by itself, so that its gradient reaches the parameters."""

    def run(params, frozen, carry, x, at):
        is_first = (at.time == 0) & jnp.asarray(starts_of(at.batch)).astype(bool)
        initial = start(params, frozen, jax.tree.leaves(carry)[0].shape[0])
        carry = jax.tree.map(lambda a, b: jnp.where(is_first, b, a), carry, initial)
        return layer(params, frozen, carry, x, at)

    return run


def _without_sums(layer: Function) -> Function:
    """A layer whose sums are not wanted."""
    return lambda *args: layer(*args)[:2]


def _run_at_once(parts: Parts, mesh, layers, predicts, params, frozen, carry, batch, key, table):
    """The whole batch and window as one block on every data-parallel group."""

    def run(params, frozen, carry, batch, key, at_layout, time: Index = 0, row: Index = 0):
        at = parts.facts.at(parts.facts.to_block(batch), draws=False)
        where = {"time": jnp.int32(time), "row": jnp.int32(row), "processor": Processor.of(mesh)}
        at = at._replace(**where, key=key, layout=at_layout)
        return run_block(parts, layers, params, frozen, carry, at, predicts=predicts)

    own = parts.facts.task.axes
    if not own and (mesh.shape[DATA] == 1 or not parts.facts.divides_by_hand):
        return run(params, frozen, carry, batch, key, parts.partition.constraint(mesh))

    # Left to itself, the compiler would sum gradients over `data` in the loop over the layers. Here they
    # are summed where the parameters came in, all at once.
    axes, facts = (DATA, *own), parts.facts

    def run_shard(params, frozen, carry, batch, key):
        group = sum(lax.axis_index(axis) for axis in axes)
        with jax.named_scope("gradients"):
            # What is frozen, too: backward passes give all that they are given one type.
            params, frozen = vary_like((params, frozen), group)
        shape = mesh.shape
        num_rows = facts.batch_size // math.prod(shape[axis] for axis in (DATA, *facts.row_axes))
        first_row, time = lax.axis_index((DATA, *facts.row_axes)) * num_rows, 0
        if facts.time_axes:
            time = lax.axis_index(facts.time_axes) * (parts.partition.chunk_len or 0)
        at_layout = parts.partition.constraint(mesh, DATA)
        carry, sums = run(params, frozen, carry, batch, key, at_layout, time, first_row)
        carry = same_along(own, carry, of_carry)
        if predicts:
            return carry, same_along(own, vary_like(sums, group), of_block)
        with jax.named_scope("loss"):
            return carry, lax.psum(vary_like(sums, group), axes)

    rows, times = (DATA, *facts.row_axes) if facts.row_axes else DATA, facts.time_axes or None

    def spec_of(a, timed):
        splits_time = facts.time_major and timed and jnp.shape(a)[1] > 1
        return P(*(rows, times if splits_time else None)[: jnp.ndim(a)])

    of_carry = _carry_specs(parts, carry, DATA)
    of_batch = jax.tree.map(spec_of, batch, has_time(batch))
    of_block = P(times, rows) if facts.time_major else P(rows)
    return jax.shard_map(
        run_shard,
        mesh=mesh,
        # At most `tensor` is left to XLA: `jax.debug.print` takes one axis.
        axis_names=by_hand(mesh, axes),
        in_specs=(
            parts.partition.specs(params),
            parts.partition.specs(frozen),
            of_carry,
            of_batch,
            P(),
        ),
        out_specs=(of_carry, of_block if predicts else P()),
    )(params, frozen, carry, batch, key)


def _carry_specs(parts: Parts, carry: Carry, *axes: str) -> Arrays:
    """Partition specs of a carry as the engine takes it."""
    known = parts.carry_specs(*axes)
    pairs = zip(carry, known, strict=True)
    return tuple(jax.tree.unflatten(jax.tree.structure(own), specs) for own, specs in pairs)


def run_block(
    parts: Parts, layers, params, frozen, carry, at: LayerContext, *, predicts: bool = False
):
    """All of a model on a block of rows and time steps: the carry, and the sums or what `predict` gives."""
    graphdef, state = nnx.split(parts.storage.merge(params, frozen))

    def first(state: nnx.State, at: LayerContext) -> Activations:
        return nnx.merge(graphdef, state).first(at.batch, at)

    def after(state: nnx.State, y: Activations, at: LayerContext, of_layers: Outputs) -> Outputs:
        model = nnx.merge(graphdef, state)
        return parts.after_layers(model, y, at, of_layers, predicts=predicts)

    with jax.named_scope("first"):
        own = at._replace(layer=len(parts.facts.kind_of) + 1)
        x = parts.on_mesh("`first`", first)(state, own)
    own = parts.of_layers(params), parts.of_layers(frozen)
    no_sums = () if predicts else parts.no_sums
    start = x, vary_like(no_sums, (carry, x))  # in a loop over layers all is of one type
    carry, (y, of_layers) = _run_stack(parts, layers, *own, carry, start, at)
    with jax.named_scope("head"):
        what = "`predict`" if predicts else "`last`"
        return carry, parts.on_mesh(what, after)(state, y, at, of_layers)


def _run_stack(parts: Parts, layers, params, frozen, carry, x, at: LayerContext):
    """All layers on one stage: neighbours of one kind in a loop, or written out if they are few."""
    carry, first = list(carry), 0
    for kind, run in itertools.groupby(parts.facts.kind_of):
        numbers = range(first, first + len(list(run)))
        first, row = numbers.stop, parts.partition.slots.places[numbers.start]
        rows = slice(row, row + len(numbers))
        *weights, before = (
            jax.tree.map(lambda a, rows=rows: a[rows], tree[kind])
            for tree in (params, frozen, carry)
        )
        unroll = len(numbers) <= max(parts.facts.unroll, 1)
        if unroll:
            weights = [unstack(own, len(numbers)) for own in weights]
        walk = make_walk(1, has_empty_slots=False, unroll=unroll)
        slots = SlotArrays(*(jnp.asarray(part, jnp.int32) for part in (numbers, numbers, numbers)))
        layer = (with_sums(layers[kind]),)
        (after,), x = run_layers(walk, layer, *((own,) for own in (*weights, before)), x, at, slots)
        carry[kind] = jax.tree.map(
            lambda a, part, rows=rows: part if len(part) == len(a) else a.at[rows].set(part),
            carry[kind],
            after,
        )
    return tuple(carry), x


def _run_in_units(
    parts: Parts,
    mesh: Mesh,
    layers: Sequence[Layer],
    predicts: bool,
    params: nnx.State,
    frozen: nnx.State,
    carry: Sequence[Carry],
    batch: Batch,
    key: jax.Array | None,
    table: TickTable,
) -> tuple[Sequence[Carry], Outputs]:
    """The model's three parts on the pipeline engine."""
    model, facts = parts.storage.merge(params, frozen), parts.facts
    if overrides(model, "prepare"):
        facts.check_prepare(mesh.shape)
        model = model.prepare(mesh.shape)
    outer = Outer(parts, model, predicts=predicts, tied=parts.storage.tied)
    pipeline = _pipeline(parts, mesh, layers, outer, carry, predicts=predicts)

    def stored(number: int) -> PipelineParams:
        """Trained variables (0) or others (1), as the pipeline takes them."""
        leaves, tree = outer.leaves[number], (params, frozen)[number]
        apart = {name for kind in parts.storage.packed_names(number) for name in kind}
        first, last = (
            tuple(
                None if name in apart else leaves[n]
                for n, name in zip(numbers[number], outer.names(numbers)[number], strict=True)
            )
            for numbers in (outer.first, outer.last)
        )
        planes = parts.storage.planes(number, tree)
        if not pipeline.stores[0].is_stacked:
            return PipelineParams(first, planes, last)
        return PipelineParams(first, parts.of_layers(outer.states[number]), last, planes)

    def d_mean_loss(sums: Sums) -> jax.Array:
        return mean_loss(sums._replace(loss=jnp.float32(1)))

    deal, gather = _deal(parts, mesh)
    block = facts.to_block(jax.tree.map(lambda a: deal(a, 0) if jnp.ndim(a) else a, batch))
    carry = jax.tree.map(lambda a: deal(a, 1), carry)
    run = pipeline.forward
    if not predicts:
        run = functools.partial(pipeline.sums, d_loss=d_mean_loss if facts.knows_weight else None)
    sums, carry, _ = run(stored(0), carry, block, table, frozen=stored(1), key=key)
    if predicts:
        sums = jax.tree.map(lambda a: gather(a, pipeline.rows_dim), sums)
    return jax.tree.map(lambda a: gather(a, 1), carry), sums


def _pipeline(
    parts: Parts,
    mesh: Mesh,
    layers: Sequence[Layer],
    outer: Outer,
    carry: Sequence[Carry],
    *,
    predicts: bool,
) -> Pipeline:
    """The pipeline of a model: its functions, and where their arrays are."""
    partition, facts = parts.partition, parts.facts
    parallel = partition.parallel
    sharded = partition.head == "sharded" and mesh.shape[STAGE] > 1
    is_part = sharded and facts.has_last_part
    # A model that cannot predict by parts has what it uses for that on every stage meanwhile.
    sharded = sharded and (not predicts or (is_part and overrides(facts.model, "predict_part")))
    in_parts = [
        names.intersection(uses.called)
        for names, uses in zip(partition.split_modules, outer.uses, strict=True)
    ]
    first_specs = outer.specs(outer.first, in_parts[0])
    axes = [axes for own in first_specs for spec in own for axes in axes_of_spec(spec)]
    last_names = (None if is_part else in_parts[1]) if sharded else frozenset[str]()
    stores = parts.storage.stores(outer.names(outer.first), outer.names(outer.last))
    first, last = outer.run_first, functools.partial(outer.run_last, is_part=sharded and is_part)
    if partition.gathers_layers:
        first = gathering(partition, first, outer.specs(outer.first, None, TENSOR))
        last = gathering(partition, last, outer.specs(outer.last, None, TENSOR))
    constraint = partition.constraint(mesh, DATA, STAGE)
    return Pipeline(
        layers=tuple(layers),
        first=first,
        last=last,
        mesh=mesh,
        slots=partition.slots,
        chunk_len=partition.chunk_len,
        microbatch_rows=partition.microbatch_rows,
        collects="rows" if predicts else "sums",
        adds_sums=facts.traces.adds_sums and not predicts,
        head="sharded" if sharded else "last",
        shares_first=bool(parts.storage.tied) or any(STAGE in each for each in axes),
        first_specs=first_specs,
        last_specs=outer.specs(outer.last, last_names),
        layer_specs=parts.layer_specs(STAGE) if stores[0].is_stacked else (P(STAGE), P(STAGE)),
        carry_specs=_carry_specs(parts, carry, STAGE, DATA),
        row_axes=facts.row_axes,
        time_axes=facts.time_axes,
        config=parallel.pipeline,
        num_segments=parallel.num_segments,
        first_gradient=None if partition.gathers_layers else outer.add_first_gradient,
        first_rows=tuple(
            np.cumsum((0, *parallel.group_shares[:-1]))
            * parallel.microbatch_rows(facts.batch_size)
            * parallel.pipeline.num_microbatches
        ),
        layout=constraint,
        stores=stores,
        lay_out_gradients=constraint.of_variables,
    )


def _deal(parts: Parts, mesh: Mesh):
    """Two functions of (array, its dim of the batch): to the groups' own rows, and back to the user's order.

    Every group has room for the largest share; what a smaller one leaves empty is not computed.
    """
    parallel = parts.partition.parallel
    if parallel.has_equal_shares:
        return (lambda a, dim: a), (lambda a, dim: a)
    shares = np.asarray(parallel.group_shares)
    size_G1 = shares[:, None] * (parts.facts.batch_size // shares.sum())
    row_R = np.arange(size_G1.max())
    is_there_GR = row_R < size_G1
    dealt_GR = np.where(is_there_GR, np.cumsum(size_G1)[:, None] - size_G1 + row_R, 0)
    places = np.flatnonzero(is_there_GR)

    def deal(a, dim: int):
        spec = P(*[None] * dim, DATA) if dim == 0 else P(STAGE, DATA)
        return lax.with_sharding_constraint(
            jnp.take(a, dealt_GR.ravel(), axis=dim), NamedSharding(mesh, spec)
        )

    return deal, lambda a, dim: jnp.take(a, places, axis=dim)


def step_schedule(
    parallel: Parallel, share: int = 1, num_chunks: int | None = None, *, backward: bool = True
) -> Schedule:
    """The schedule that a step follows.

    Args:
      share: of the data-parallel group; it has so many times `num_microbatches`.
      num_chunks: of the batch, or of one of its segments; None if it has the full length.
      backward: False in an evaluation.
    """
    return _make_schedule(
        parallel.pipeline.schedule if parallel.mesh.stage > 1 else "1f1b",
        parallel.mesh.stage,
        share * parallel.pipeline.num_microbatches,
        parallel.num_chunks // parallel.num_segments if num_chunks is None else num_chunks,
        parallel.num_groups,
        backward=backward,
        zero_bubble=parallel.zero_bubble,
    )


def full_table(partition: Partition, *, backward: bool) -> TickTable | None:
    """The schedules of a batch of the full length; None if a step is one whole."""
    if not partition.runs_in_units:
        return None
    parallel = partition.parallel
    return table_of(parallel, parallel.num_chunks // parallel.num_segments, backward)


@functools.lru_cache
def table_of(parallel: Parallel, num_chunks: int, backward: bool) -> TickTable:
    """The schedules of a batch of so many chunks, in a program that holds `parallel.num_chunks`."""

    def schedule(share: int, K: int) -> Schedule:
        return step_schedule(parallel, share, K, backward=backward)

    full_length = parallel.num_chunks // parallel.num_segments
    any_length = range(1, full_length + 1) if parallel.num_segments == 1 else [full_length]
    shares = parallel.group_shares
    capacity = largest([schedule(share, K) for share in {*shares} for K in any_length])
    return make_table([schedule(share, num_chunks) for share in shares], capacity)
