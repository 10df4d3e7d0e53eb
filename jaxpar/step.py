"""Training and evaluation steps: the one place where a model and the pipeline meet.

There is one way through a model: `first`, then the layers, then `last`. A step takes it at once, or, on
stages or in microbatches, unit by unit on a schedule.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.at import At, anywhere
from jaxpar.axes import BATCH, DATA, STAGE, TENSOR
from jaxpar.config import Parallel, TrainConfig
from jaxpar.fields import require_instance
from jaxpar.layout import Layout, Outer
from jaxpar.mesh import MeshConfig, release_freed_memory
from jaxpar.model import Sums, checked_sums, values, wrap_like
from jaxpar.optimizer import HostOptimizer, Safe, clip_scale, gives_finite, update
from jaxpar.parts import RATE, part_of, starts_of
from jaxpar.pipeline.engine import Pipeline, PipelineParams
from jaxpar.pipeline.layers import SlotArrays, run_layers
from jaxpar.pipeline.schedule import Schedule, make_schedule
from jaxpar.pipeline.ticks import Plan, largest, make_plan
from jaxpar.rows import check_rows_alone
from jaxpar.setup import Setup
from jaxpar.sharding import constrain, dims_of, is_variable, shardings
from jaxpar.state import TrainState, abstract_state, state_shardings
from jaxpar.task import Task
from jaxpar.trees import vary_like

# A collective-permute in a branch of the loop over ticks, and where in the model it comes from.
_PERMUTE_OF_A_UNIT = re.compile(
    r' collective-permute(?:-start)?\(.*op_name="[^"]*/while/body/[^"]*?cond/branch_\d+_fun/([^"]*)"'
)
_STRUCTURE = re.compile(r"(while|body|closed_call|(transpose\()?jvp\(\)\)?)/")

NEVER = 2**22  # a time step that no batch has; float32 tells all before it apart

_make_schedule = functools.lru_cache(maxsize=1024)(make_schedule)  # few, asked for very often


class Metrics(NamedTuple):
    """What a training step reports; scalars.

    Attributes:
      loss: of the batch, `sums.loss / sums.weight`; float32. Where that weight is 0 it is `sums.loss`.
      grad_norm: global norm of the gradients, before clipping; float32.
      skipped: of the state after the step.
      sums: over the batch, as the model's `last` gives them.
    """

    loss: jax.Array
    grad_norm: jax.Array
    skipped: jax.Array
    sums: Sums


class CompiledStep:
    """A step as one compiled program for batches of every length up to that of the task's example.

    In a pipeline the length is data: shorter batches run fewer ticks of the same program. Without stages
    each length is compiled once.
    """

    def __init__(self, step: Callable[..., Any], layout: Layout, *, backward: bool, **jit_options):
        self._jitted, self._layout, self._backward = jax.jit(step, **jit_options), layout, backward

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """Runs the step.

        Raises:
          ValueError: the state is of another mesh. The model mixes rows of a batch that is divided. The batch
            is not as the task's example: other arrays, other sizes, more time steps, or fewer where the task
            has batches of one length; or it has values that the task refuses.
        """
        self._check_state(state)
        check_batch_shape(self._layout, batch)
        leaves = jax.tree.leaves(batch)
        if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
            self._layout.task.check_batch(jax.device_get(batch))
        return self.run(state, batch)

    def run(self, state: TrainState, batch: Any) -> Any:
        """The same, without checking the values of the batch."""
        arguments = (state, *self._planned(batch))
        if not self.num_programs:
            parallel = self._layout.parallel
            if self._backward and (parallel.mesh.data > 1 or parallel.runs_in_units):
                check_rows_alone(self._layout)
            if parallel.mesh.stage > 1 and parallel.mesh.tensor > 1:
                # The call finds it compiled.
                check_program(self._jitted.lower(*arguments).compile())
            release_freed_memory()
        return self._jitted(*arguments)

    def _check_state(self, state: TrainState) -> None:
        require_instance("state", state, TrainState, "what init_state or a step returns")
        sizes = self._layout.parallel.mesh.sizes
        if not isinstance(state.step, jax.Array):
            raise ValueError("the state is abstract; make one with values by init_state")
        lies_on = getattr(state.step.sharding, "mesh", None)
        if lies_on is not None and dict(lies_on.shape) != sizes:
            raise ValueError(
                f"the state lies on a mesh of {dict(lies_on.shape)}, the step is for {sizes}; make both with "
                f"the same parallel"
            )

    def lower(self, state: Any, batch: Any) -> Any:
        """`jax.jit(...).lower` of the program, for arrays or their shapes."""
        return self._jitted.lower(state, *self._planned(batch))

    @property
    def full_plan(self) -> Plan | None:
        """The schedules of a batch of the full length; None if a step is one whole."""
        return _full_plan(self._layout.parallel, backward=self._backward)

    @property
    def num_programs(self) -> int:
        """How many programs have been compiled."""
        return self._jitted._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def _planned(self, batch: Any) -> tuple[Any, Plan | None]:
        layout, parallel = self._layout, self._layout.parallel
        length = check_batch_shape(layout, batch)
        is_whole = parallel.mesh.stage == 1 and parallel.num_chunks == 1
        if is_whole or layout.facts.num_steps is None or parallel.num_segments > 1:
            return batch, self.full_plan
        whole, K = layout.facts.num_steps, parallel.num_chunks
        chunk_len = whole // K
        if length % chunk_len:
            raise ValueError(
                f"a batch of {length} time steps is not made of 1 to {K} chunks of {chunk_len}; pad it with "
                f"steps that do not count, or change the {whole} steps of a batch or num_chunks={K}"
            )
        if length < whole:

            def pad(leaf):
                if jnp.ndim(leaf) < 2 or leaf.shape[1] != length:
                    return leaf
                # No unit looks at what is added.
                return jnp.pad(leaf, ((0, 0), (0, whole - length), *[(0, 0)] * (leaf.ndim - 2)))

            batch = jax.tree.map(pad, batch)
        return batch, _plan(parallel, length // chunk_len, self._backward)


def check_batch_shape(layout: Layout, batch: Any) -> int:
    """The time steps of a batch (1 if the model has no time), if it is as the task's example.

    Raises:
      ValueError: it is not.
    """
    example, whole, name = layout.facts.batch, layout.facts.num_steps, layout.task.name
    if jax.tree.structure(batch) != jax.tree.structure(example):
        raise ValueError(
            f"the batch has the structure {jax.tree.structure(batch)}, those of task {name} have "
            f"{jax.tree.structure(example)}"
        )
    lengths = set()
    for (path, leaf), wanted in zip(
        jax.tree.leaves_with_path(batch), jax.tree.leaves(example), strict=True
    ):
        shape, expected = list(np.shape(leaf)), list(wanted.shape)
        has_time = layout.facts.time_major and len(expected) > 1 and expected[1] == whole
        if has_time and len(shape) == len(expected):
            lengths.add(shape[1])
            shape[1] = whole
        dtype = getattr(leaf, "dtype", None) or jax.dtypes.result_type(leaf)
        kinds = tuple(jnp.dtype(d).kind for d in (dtype, wanted.dtype))
        if shape != expected or kinds[0] != kinds[1]:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is {jnp.dtype(dtype)}{list(np.shape(leaf))}, in batches "
                f"of task {name} it is {wanted.dtype}{list(wanted.shape)}; give a batch of these sizes, or "
                f"change those of the task"
            )
    if len(lengths) > 1:
        raise ValueError(f"arrays of one batch have {sorted(lengths)} time steps; give all as many")
    length = lengths.pop() if lengths else whole or 1
    if whole is not None and (
        length > whole or (length < whole and not layout.task.variable_length)
    ):
        raise ValueError(
            f"a batch of {length} time steps, those of task {name} have {whole}"
            + (" at most" if layout.task.variable_length else "")
            + "; give a batch of that length, or change that of the task"
        )
    return length


class _HostStep(CompiledStep):
    """A compiled program up to the gradients; after it the optimizer, on the host.

    Args:
      refuse: state -> the state after a step whose update does not apply; None if every update does.
    """

    def __init__(
        self, gradients, layout: Layout, optimizer, refuse, states: TrainState, out_shardings
    ):
        super().__init__(gradients, layout, backward=True, out_shardings=out_shardings)
        self._host = HostOptimizer(optimizer)
        self._refuse = None if refuse is None else jax.jit(refuse, out_shardings=out_shardings[0])
        self._gather = jax.jit(  # into the memory of the old parameters
            lambda old, new: new, out_shardings=states.params, donate_argnums=0, keep_unused=True
        )

    def run(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        before = _without_optimizer(state)
        split, grads, scale, rate, applies, metrics = super().run(before, batch)
        if (
            self._refuse is not None
            and applies
            and not self._host.gives_finite(split.params, grads, state.opt_state, scale, rate)
        ):
            split, applies = self._refuse(before), jnp.zeros_like(applies)
            metrics = metrics._replace(skipped=split.skipped)
        params, opt_state = self._host.update(
            split.params, grads, state.opt_state, applies, scale, rate
        )
        params = self._gather(state.params, params)
        return dataclasses.replace(split, params=params, opt_state=opt_state), metrics

    def lower(self, state: TrainState, batch: Any) -> Any:
        return super().lower(_without_optimizer(state), batch)


def _without_optimizer(state: TrainState) -> TrainState:
    return dataclasses.replace(state, opt_state=())


def make_train_step(
    task: Task | Setup,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> CompiledStep:
    """One optimizer step on a global batch, compiled for the mesh; the state passed in is consumed.

    Any mesh, schedule and microbatching give the loss and the gradients of one device, to float32 rounding. A
    model that mixes rows of the batch cannot: where a step does not take the batch as a whole, its first call
    refuses it.

    A loss, gradient or update that is not finite changes no parameter: the step is skipped, or, where the
    settings do not allow that, the state is halted. No later step changes it then, so it is enough to look at
    the metrics from time to time; `state.release` lets it continue.

    Args:
      task, parallel: as given to `init_state`.
      train: None takes the task's own settings.
      mesh: None builds `parallel.mesh`.
    Returns:
      (state, batch) -> (state, metrics); the batch lies on `batch_sharding` of their setup.
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    setup = Setup.of(task, parallel, train, mesh)
    train = setup.train
    return setup.keep(
        _make_train_step, train.num_steps, train.clip_norm, train.allowed_skips, train.seed
    )


def _make_train_step(setup: Setup, *_: Any) -> CompiledStep:
    train, layout, mesh, optimizer = setup.train, setup.layout, setup.mesh, setup.optimizer
    value_and_grad = make_loss_and_grad(setup, seed=train.seed)
    is_safe, on_host = isinstance(optimizer, Safe), setup.parallel.update == "host"

    def gradients(state: TrainState, batch: Any, plan: Plan | None):
        (loss, (carry, sums)), grads = value_and_grad(state, batch, plan)
        initial = layout.initial_carry(state.params, state.frozen)
        # The update runs where the optimizer state lies: what is split is updated in parts.
        with jax.named_scope("update"):
            grads = constrain(grads, mesh, state.opt_rules)
            params = constrain(state.params, mesh, state.opt_rules)
            norm = optax.tree.norm(grads)
            is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            scale, rate = clip_scale(norm, train.clip_norm), part_of(batch, RATE)
            if not (is_safe or on_host):
                is_finite &= gives_finite(optimizer, params, grads, state.opt_state, scale, rate)
            state, applies = _count(state, carry, initial, is_finite, train.allowed_skips)
            state = dataclasses.replace(state, params=params)
            metrics = Metrics(loss, norm, state.skipped, sums)
            return state, grads, scale, rate, applies, metrics

    def refuse(state: TrainState) -> TrainState:
        initial = layout.initial_carry(state.params, state.frozen)
        state, _ = _count(state, state.carry, initial, jnp.bool_(False), train.allowed_skips)
        return dataclasses.replace(state, params=constrain(state.params, mesh, state.opt_rules))

    def step(state: TrainState, batch: Any, plan: Plan | None) -> tuple[TrainState, Metrics]:
        state, grads, scale, rate, applies, metrics = gradients(state, batch, plan)
        with jax.named_scope("update"):
            params, opt_state = update(
                optimizer, state.params, grads, state.opt_state, applies, scale, rate
            )
            params = constrain(params, mesh, state.param_rules)
        return dataclasses.replace(state, params=params, opt_state=opt_state), metrics

    target = abstract_state(setup)
    states, replicated = state_shardings(target, mesh), NamedSharding(mesh, P())
    if on_host:
        split = shardings(target.params, mesh, target.opt_rules)
        state = dataclasses.replace(states, params=split, opt_state=())
        out = (state, split, replicated, replicated, replicated, replicated)
        return _HostStep(gradients, layout, optimizer, None if is_safe else refuse, states, out)
    return CompiledStep(
        step, layout, backward=True, donate_argnums=0, out_shardings=(states, replicated)
    )


def _count(
    state: TrainState, carry: Any, initial: Any, is_finite: jax.Array, max_skipped: int
) -> tuple[TrainState, jax.Array]:
    """Step, skipped and carry after a step, and whether its update applies.

    skipped before       finite    step   skipped   carry     applies
    up to max_skipped    yes       + 1              new       yes
    below max_skipped    no        + 1    + 1       initial   no        skips
    max_skipped          no               + 1                 no        halts
    above max_skipped    any                                  no        is halted
    """
    runs = state.skipped <= max_skipped
    applies = runs & is_finite
    skipped = jnp.where(runs & ~is_finite, state.skipped + 1, state.skipped)
    goes_on = skipped <= max_skipped

    def select(new, initial, old):
        return jnp.where(applies, new, jnp.where(goes_on, initial, old))

    step = jnp.where(goes_on, state.step + 1, state.step)
    carry = jax.tree.map(select, carry, initial, state.carry)
    return dataclasses.replace(state, step=step, skipped=skipped, carry=carry), applies


def check_program(program: jax.stages.Compiled) -> None:
    """Checks that a compiled step of stages would terminate; steps do so themselves before their first run.

    Raises:
      ValueError: a unit's work contains an exchange that all stages must take part in: it would wait forever.
    """
    if found := _PERMUTE_OF_A_UNIT.search(program.as_text() or ""):
        where = _STRUCTURE.sub("", found[1])
        raise ValueError(
            f"the compiler moves parts of an array between the devices of {TENSOR!r} within a unit's "
            f"work, at {where}; all stages would have to take part in that, and wait forever. An array "
            f"is cut, joined or reshaped across a dim that {TENSOR!r} splits: give what is cut (such as "
            f"gates or heads) a dim of its own, as in [input, gates, hidden], or use tensor=1 or stage=1"
        )


def make_loss_and_grad(
    setup: Setup, *, seed: int | None = 0, watch: bool = False
) -> Callable[..., Any]:
    """(state, batch, plan=None) -> ((mean loss, (carry, sums)), gradients); not compiled.

    The state's step numbers the dropout masks; without a plan the batch has the full length. On a mesh with
    stages and tensor parallelism, use `check_program` on the program of your own layers: would it terminate?

    Args:
      seed: of the dropout masks; None for no dropout, as in evaluation.
      watch: instead of the carry, by kind, float32 [rows of the stack, B, 2], in which time step t inputs and
        outputs of layers were not finite for the first time: `NEVER` - t, or 0. The gradients are then
        (gradients, marks). Marks, [rows of the stack, 2, T, B], are not 0 where the
        gradients of these inputs and outputs are not finite.
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    layout = setup.layout
    unroll = _make_unroll(layout, setup.mesh, watch)

    def loss(params, state, batch, plan):
        params, probes = params if watch else (params, ())
        key = None if seed is None else jax.random.fold_in(jax.random.key(seed), state.step)
        plan = _full_plan(layout.parallel, backward=True) if plan is None else plan
        carry, sums = unroll(params, state.frozen, state.carry, batch, key, plan, probes)
        mean = sums.loss / jnp.where(sums.weight == 0, 1.0, sums.weight)
        return mean, (carry, sums)

    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def run(state, batch, plan=None):
        params = state.params
        if watch:
            T, B = layout.facts.num_steps or 1, layout.facts.batch_size
            params = params, tuple(jnp.zeros((len(rows), 2, T, B)) for rows in layout.slots.rows)
        return value_and_grad(params, state, batch, plan)

    return run


def make_eval_step(
    task: Task | Setup,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> CompiledStep:
    """The sums of a batch without dropout, compiled for the mesh.

    Args:
      task, parallel, train, mesh: as for `make_train_step`.
    Returns:
      (state, batch) -> (carry, sums); of the state parameters and carry are read.
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    return Setup.of(task, parallel, train, mesh).keep(_make_eval_step)


def _make_eval_step(setup: Setup) -> CompiledStep:
    unroll = _make_unroll(setup.layout, setup.mesh)

    def step(state: TrainState, batch: Any, plan: Plan | None):
        return unroll(state.params, state.frozen, state.carry, batch, None, plan)

    return CompiledStep(step, setup.layout, backward=False)


def batch_sharding(setup: Setup) -> NamedSharding:
    """How the arrays of a batch lie on the mesh between steps: rows as the rules say, in the user's order.

    Unequal shares do not split evenly: then every data-parallel group has all rows and takes its own.
    """
    return NamedSharding(setup.mesh, setup.layout.carry_rules.spec((BATCH,)))


def abstract_batch(setup: Setup) -> Any:
    """A batch without its values, as a step takes it: shapes, dtypes and shardings."""
    where = batch_sharding(setup)

    def place(leaf):
        sharding = where if leaf.shape else NamedSharding(setup.mesh, P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, setup.layout.facts.batch)


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


# ---- one way through a model ----


def _make_unroll(
    layout: Layout, mesh: Mesh, watch: bool = False
) -> Callable[..., tuple[Any, Sums]]:
    """(params, frozen, carry, batch, dropout key, plan, probes) -> (carry, sums) over one window."""
    layers = layout.layer_functions()
    if layout.parallel.runs_in_units:
        # The engine does not differentiate the carry that it is given.
        layers = tuple(
            layer if start is None else _from_learned_start(layer, start)
            for layer, start in zip(layers, layout.learned_starts, strict=True)
        )
    if watch:
        layers = tuple(_watched(layer, layout) for layer in layers)
    run = _run_in_units if layout.parallel.runs_in_units else _run_at_once

    def unroll(params, frozen, carry, batch, key, plan, probes=()):
        # Parameters stored split over `data` are gathered here, and their gradients scattered.
        params, frozen = (constrain(tree, mesh, layout.rules) for tree in (params, frozen))
        if key is not None:
            params = layout.drawn(params, frozen, key)
        starts, initial = starts_of(batch), layout.initial_carry(params, frozen)
        before = jax.tree.map(lambda a, b: jnp.where(starts, b, a), carry, initial)
        flat = tuple(values(before[kind]) for kind in layout.facts.kinds)
        if watch:
            B = layout.facts.batch_size
            flags = (jnp.zeros((len(rows), B, 2)) for rows in layout.slots.rows)
            flat = tuple(zip(flat, flags, strict=True))
        after, sums = run(layout, mesh, layers, params, probes, frozen, flat, batch, key, plan)
        by_kind = zip(layout.facts.kinds, after, strict=True)
        if watch:
            return {kind: flags for kind, (_, flags) in by_kind}, sums
        return {kind: wrap_like(own, carry[kind]) for kind, own in by_kind}, sums

    return unroll


def _from_learned_start(layer: Callable[..., Any], start: Callable[..., Any]):
    """A layer that begins the first window by itself, so that its gradient reaches the parameters."""

    def run(params, frozen, carry, x, at):
        is_first = (at.time == 0) & jnp.asarray(starts_of(at.batch)).astype(bool)
        initial = start(params, frozen, jax.tree.leaves(carry)[0].shape[0])
        carry = jax.tree.map(lambda a, b: jnp.where(is_first, b, a), carry, initial)
        return layer(params, frozen, carry, x, at)

    return run


def _with_probes(params: tuple[Any, ...], probes: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Parameters of the layers by kind, as layers that are watched take them."""
    return tuple(zip(params, probes, strict=True)) if probes else params


def _watched(layer: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """A layer that tells where its inputs and outputs, and the gradients of both, are not finite.

    Its parameters are (parameters, probe), its carry (carry, marks); see `make_loss_and_grad`.
    """

    def bad(tree):
        parts = []
        for leaf in jax.tree.leaves(tree):
            leaf_TB = leaf if layout.facts.time_major else leaf[None]
            parts.append(~jnp.isfinite(leaf_TB).all(tuple(range(2, leaf_TB.ndim))))
        return functools.reduce(jnp.logical_or, parts)

    def first_bad(tree, at):
        bad_TB = bad(lax.stop_gradient(tree))
        step_B = at.time + bad_TB.argmax(0)
        return jnp.where(bad_TB.any(0), (NEVER - step_B).astype(jnp.float32), 0.0)

    @jax.custom_vjp
    def tap(tree, probe_TB, place):
        return tree

    def pull_back(place, d_tree):
        marks_TB = bad(d_tree).astype(jnp.float32)
        room_TB = vary_like(
            jnp.zeros((layout.facts.num_steps or 1, layout.facts.batch_size)), marks_TB
        )
        return d_tree, lax.dynamic_update_slice(room_TB, marks_TB, place), None

    tap.defvjp(lambda tree, probe_TB, place: (tree, place), pull_back)

    def run(params, frozen, carry, x, at):
        (params, probe_2TB), (carry, marks_B2) = params, carry
        x = tap(x, probe_2TB[0], (at.time, at.row))
        after, y = layer(params, frozen, carry, x, at)
        y = tap(y, probe_2TB[1], (at.time, at.row))
        now_B2 = jnp.stack([first_bad(x, at), first_bad(y, at)], axis=1)
        return (after, jnp.maximum(lax.stop_gradient(marks_B2), now_B2)), y

    return run


def _run_at_once(layout: Layout, mesh, layers, params, probes, frozen, carry, batch, key, plan):
    """The whole batch and window as one block on every data-parallel group."""

    def run(params, probes, frozen, carry, batch, key, first_row=0, at_layout=anywhere):
        at = At(
            layer=jnp.int32(0),
            time=jnp.int32(0),
            row=jnp.int32(first_row),
            key=key,
            batch=layout.facts.to_block(batch),
            layout=at_layout,
            time_major=layout.facts.time_major,
            platform=layout.facts.platform,
        )
        return run_block(layout, layers, params, probes, frozen, carry, at)

    if mesh.shape[DATA] == 1 or not layout.facts.divides_by_hand:
        return run(params, probes, frozen, carry, batch, key, at_layout=layout.constraint(mesh))

    # Left to itself, the compiler would sum gradients over `data` in the loop over the layers. Here they
    # are summed where the parameters came in, all at once.
    def run_shard(params, probes, frozen, carry, batch, key):
        group = lax.axis_index(DATA)
        with jax.named_scope("gradients"):
            params, probes = vary_like((params, probes), group)
        first_row = group * (layout.facts.batch_size // mesh.shape[DATA])
        at_layout = layout.constraint(mesh, DATA)
        carry, sums = run(params, probes, frozen, carry, batch, key, first_row, at_layout)
        with jax.named_scope("loss"):
            return carry, lax.psum(vary_like(sums, group), DATA)

    rows = jax.tree.map(lambda a: P(DATA) if jnp.ndim(a) else P(), batch)
    return jax.shard_map(
        run_shard,
        mesh=mesh,
        axis_names={DATA},
        in_specs=(P(), P(), P(), P(None, DATA), rows, P()),
        out_specs=(P(None, DATA), P()),
    )(params, probes, frozen, carry, batch, key)


def run_block(layout: Layout, layers, params, probes, frozen, carry, at: At):
    """All of a model on a block of rows and time steps: the carry, and the sums."""
    model = layout.merge(params, frozen)
    with jax.named_scope("first"):
        x = model.first(at.batch, at._replace(layer=len(layout.facts.kind_of) + 1))
    own = _with_probes(layout.of_layers(params), probes), layout.of_layers(frozen)
    carry, y = _run_stack(layout, layers, *own, carry, x, at)
    with jax.named_scope("head"):
        sums = model.last(y, at.batch, at._replace(layer=len(layout.facts.kind_of)))
        return carry, checked_sums(sums, model)


def _run_stack(layout: Layout, layers, params, frozen, carry, x, at: At):
    """All layers on one stage: neighbours of one kind in a loop, or written out if they are few."""
    carry, first = list(carry), 0
    for kind, run in itertools.groupby(layout.facts.kind_of):
        numbers = range(first, first + len(list(run)))
        first, row = numbers.stop, layout.slots.places[numbers.start]
        rows = slice(row, row + len(numbers))
        own = tuple(
            jax.tree.map(lambda a, rows=rows: a[rows], tree[kind])
            for tree in (params, frozen, carry)
        )
        after, x = run_kind(layout.facts.unroll, layers[kind], own, x, at, numbers)
        carry[kind] = jax.tree.map(
            lambda a, part, rows=rows: part if len(part) == len(a) else a.at[rows].set(part),
            carry[kind],
            after,
        )
    return tuple(carry), x


def run_kind(unroll: int, layer, stacked: tuple[Any, Any, Any], x, at: At, numbers: range):
    """Neighbours of one kind; `stacked` are parameters, frozen ones and carry."""
    if len(numbers) <= unroll:
        afters = []
        for row, number in enumerate(numbers):
            own = jax.tree.map(lambda a, row=row: a[row], stacked)
            after, x = layer(*own, x, at._replace(layer=jnp.int32(number)))
            afters.append(after)
        return jax.tree.map(lambda *parts: jnp.stack(parts), *afters), x
    slots = SlotArrays(*(jnp.asarray(part, jnp.int32) for part in (numbers, numbers, numbers)))
    (after,), y = run_layers(
        (layer,), *((tree,) for tree in stacked), x=x, at=at, slots=slots, has_empty_slots=False
    )
    return after, y


def _run_in_units(layout: Layout, mesh, layers, params, probes, frozen, carry, batch, key, plan):
    """The model's three parts, handed to the pipeline engine."""
    parallel, model = layout.parallel, layout.merge(params, frozen)
    if hasattr(model, "prepare"):
        model = model.prepare(mesh.shape)
    outer = Outer(layout, model)
    sharded = layout.head == "sharded" and mesh.shape[STAGE] > 1
    # If all of `first` is frozen there is no gradient to add to.
    adds_gradient = hasattr(model, "add_first_gradient") and outer.first[0]
    deal, gather = _deal(layout, mesh)
    b = parallel.microbatch_rows(layout.facts.batch_size)
    pipeline = Pipeline(
        layers=layers,
        first=outer.run_first,
        last=functools.partial(outer.run_last, is_part=sharded),
        mesh=mesh,
        slots=layout.slots,
        chunk_len=layout.facts.num_steps // parallel.num_chunks if layout.facts.num_steps else None,
        microbatch_rows=b,
        head="sharded" if sharded else "last",
        last_specs=_last_specs(layout, outer),
        remat=parallel.pipeline.remat and parallel.num_segments == 1,
        keeps_on_host=parallel.pipeline.remat_keeps == "host" and _have_own_memory(mesh),
        num_segments=parallel.num_segments,
        unroll=parallel.pipeline.unroll and parallel.mesh.stage > 1,
        first_gradient=outer.add_first_gradient if adds_gradient else None,
        first_rows=tuple(
            np.cumsum((0, *parallel.group_shares[:-1])) * b * parallel.pipeline.num_microbatches
        ),
        layout=layout.constraint(mesh, DATA, STAGE),
    )

    def parts(number, probes=()):
        leaves, first, last = (each[number] for each in (outer.leaves, outer.first, outer.last))
        return PipelineParams(
            tuple(leaves[n] for n in first),
            _with_probes(layout.of_layers(outer.states[number]), probes),
            tuple(leaves[n] for n in last),
        )

    block = layout.facts.to_block(jax.tree.map(lambda a: deal(a, 0) if jnp.ndim(a) else a, batch))
    carry = jax.tree.map(lambda a: deal(a, 1), carry)
    sums, carry, _ = pipeline.sums(parts(0, probes), carry, block, plan, frozen=parts(1), key=key)
    return jax.tree.map(lambda a: gather(a, 1), carry), sums


def _have_own_memory(mesh: Mesh) -> bool:
    """Whether devices have another memory than the host; that of CPUs is the host's."""
    return mesh.devices.flat[0].platform != "cpu"


def _last_specs(layout: Layout, outer: Outer) -> tuple[Any, ...]:
    """Over `stage`, of what `last_part` uses: trained, and frozen."""

    def specs(state, numbers):
        variables = jax.tree.leaves(state, is_leaf=is_variable)
        dims = [dims_of(variables[n]) for n in numbers]
        split = [[STAGE in layout.rules.axes_of(d) if d else False for d in each] for each in dims]
        return tuple(P(*(STAGE if is_split else None for is_split in each)) for each in split)

    return tuple(map(specs, outer.states, outer.last))


def _deal(layout: Layout, mesh: Mesh):
    """Two functions of (array, its dim of the batch): to the groups' own rows, and back to the user's order.

    Every group has room for the largest share; what a smaller one leaves empty is not computed.
    """
    parallel = layout.parallel
    if parallel.has_equal_shares:
        return (lambda a, dim: a), (lambda a, dim: a)
    shares = np.asarray(parallel.group_shares)
    size_G1 = shares[:, None] * (layout.facts.batch_size // shares.sum())
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


def _full_plan(parallel: Parallel, *, backward: bool) -> Plan | None:
    if not parallel.runs_in_units:
        return None
    return _plan(parallel, parallel.num_chunks // parallel.num_segments, backward)


@functools.lru_cache
def _plan(parallel: Parallel, num_chunks: int, backward: bool) -> Plan:
    """The schedules of a batch of so many chunks, in a program that holds `parallel.num_chunks`."""

    def schedule(share: int, K: int) -> Schedule:
        return step_schedule(parallel, share, K, backward=backward)

    full_length = parallel.num_chunks // parallel.num_segments
    any_length = range(1, full_length + 1) if parallel.num_segments == 1 else [full_length]
    shares = parallel.group_shares
    capacity = largest([schedule(share, K) for share in {*shares} for K in any_length])
    schedules = [schedule(share, num_chunks) for share in shares]
    return make_plan(schedules, capacity)
