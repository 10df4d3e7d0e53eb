"""Training and evaluation steps: compiled programs of a model's losses, gradients and updates."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import BATCH, TENSOR
from jaxpar.base.checks import require, require_instance
from jaxpar.base.compiler import compiler_options
from jaxpar.base.jax_private import compile_once, num_programs
from jaxpar.base.keys import key_data, key_of, new_key
from jaxpar.base.parts import RATE, check_keys, part_of
from jaxpar.base.trees import has_time
from jaxpar.base.types import Arrays, Batch, Carry, Function, Tree
from jaxpar.data.batches import check_numbers, check_types, owned
from jaxpar.mesh import release_freed_memory
from jaxpar.model.facts import ModelFacts
from jaxpar.model.model import Sums, describe_value, mean_loss
from jaxpar.nn.lstm import has_kernels
from jaxpar.pipeline.tables import TickTable
from jaxpar.sharding import constrain, shardings
from jaxpar.step.custom_backward import check_custom_backward
from jaxpar.step.forward import full_table, make_forward, table_of
from jaxpar.step.independence import check_rows_alone
from jaxpar.step.optimizer import HostOptimizer, clip_scale, global_norm, update
from jaxpar.step.parts import Parts
from jaxpar.step.per_layer import without_empty_rows
from jaxpar.step.resolved import Resolved
from jaxpar.step.state import TrainState, abstract_state, state_shardings
from jaxpar.trace.numbers import with_numbers
from jaxpar.trace.source_lines import source_line_of_instruction
from jaxpar.trace.surprises import tell_of_optimizer
from jaxpar.trace.varying import is_mismatch

# A collective-permute in a unit's work (a branch of the loop over ticks, or a loop of one turn or none), and
# where in the model it comes from.
_PERMUTE_OF_A_UNIT = re.compile(
    r' collective-permute(?:-start)?\(.*op_name="[^"]*/while/body/[^"]*?'
    r'(?:cond/branch_\d+_fun|(?:forward|backward|weights\d)/while/body)/([^"]*)"'
    r"(?:.* stack_frame_id=(\d+))?"
)
Numbers = dict[str, Any]  # see `CompiledStep`
_STRUCTURE = re.compile(r"(while|body|closed_call|eval_jaxpr|(transpose\()?jvp\(\)\)?)/")


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


class StuckError(ValueError):
    """A compiled step would never end."""


class CompiledStep:
    """A step as one compiled program for batches of every length up to that of the task's example.

    In a pipeline the length is data: shorter batches run fewer ticks of the same program. Without stages
    each length is compiled once.
    """

    def __init__(
        self, step: Function, parts: Parts, numbers: Tree = (), *, backward: bool, **jit_options
    ):
        """Compiles nothing yet.

        Args:
          step: (state, batch, table, numbers) -> what a step returns.
          numbers: what else it computes with. Steps that differ in them alone are one program.
        """
        self._parts, self._backward, self._numbers = parts, backward, numbers
        [mesh] = {place.mesh for place in jax.tree.leaves(jit_options["out_shardings"])}
        options = compiler_options(mesh, has_kernels=has_kernels(parts.facts.model, mesh))
        self._jitted = jax.jit(step, compiler_options=options, **jit_options)

    def __call__(self, state: TrainState, batch: Batch) -> Arrays:
        """Runs the step. NumPy arrays of the batch are copied: they may be filled again at once.

        Raises:
          ValueError: the state is of another mesh. The model mixes rows of a batch that is divided. The batch
            is not as the task's example: other arrays, other sizes, more time steps, or fewer where the task
            has batches of one length; or it has values that the task refuses, or devices cannot hold.
        """
        self._check_state(state)
        check_batch_shape(self._parts.facts, batch)
        check_numbers(batch)
        leaves = jax.tree.leaves(batch)
        if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
            self._parts.facts.task.check_batch(jax.device_get(batch))
        return self.run(state, batch)

    def run(self, state: TrainState, batch: Batch) -> Arrays:
        """The same, without checking the values of the batch."""
        if is_first := not self.num_programs:
            self._place_numbers(state)
        arguments = state, *self._with_table(owned(batch)), self._numbers
        if is_first:
            parallel = self._parts.partition.parallel
            if self._backward:
                self._parts.facts.warn_of_resets()
            mesh = parallel.mesh
            splits = any(size > 1 for size in (mesh.data, *dict(mesh.axes).values()))
            if self._backward and (splits or parallel.runs_in_units):
                check_rows_alone(self._parts)
                check_custom_backward(self._parts)
            program = compile_once(self._jitted, *arguments)
            if parallel.splits_units:
                check_program(program)
            release_freed_memory()
        return self._jitted(*arguments)

    def _check_state(self, state: TrainState) -> None:
        require_instance("state", state, TrainState, "what init_state or a step returns")
        sizes = self._parts.partition.parallel.mesh.sizes
        if not isinstance(state.step, jax.Array):
            raise ValueError("the state is abstract.\nFix: make one with values by init_state.")
        lies_on = getattr(state.step.sharding, "mesh", None)
        if lies_on is not None and dict(lies_on.shape) != sizes:
            raise ValueError(
                f"the state lies on a mesh of {dict(lies_on.shape)}, the step is for {sizes}.\n"
                f"Fix: make both with the same parallel."
            )

    def lower(self, state: Tree, batch: Batch) -> Arrays:
        """`jax.jit(...).lower` of the program, for arrays or their shapes."""
        self._place_numbers(state)
        return self._jitted.lower(state, *self._with_table(batch), self._numbers)

    def _place_numbers(self, state: Tree) -> None:
        """Puts the numbers where the state lies: from the host they would be sent at each step."""
        where = getattr(state.step, "sharding", None)
        if isinstance(state.step, jax.Array) and isinstance(where, NamedSharding):
            self._numbers = jax.tree.map(lambda a: _on_all(a, where), self._numbers)

    @property
    def full_table(self) -> TickTable | None:
        """The schedules of a batch of the full length; None if a step is one whole."""
        return full_table(self._parts.partition, backward=self._backward)

    @property
    def num_programs(self) -> int:
        """How many programs have been compiled."""
        return num_programs(self._jitted)

    def _with_table(self, batch: Batch) -> tuple[Any, TickTable | None]:
        parts, parallel = self._parts, self._parts.partition.parallel
        length = check_batch_shape(parts.facts, batch)
        if parallel.num_chunks == 1 or parallel.num_segments > 1:
            return batch, self.full_table  # one chunk has all steps, however many
        whole, K = parts.facts.num_steps or 1, parallel.num_chunks
        chunk_len = whole // K
        if length % chunk_len:
            raise ValueError(
                f"a batch has {length} time steps, expected {whole} or less that divide by {chunk_len} "
                f"(num_chunks={K}).\nFix: pad it with steps that do not count, or change num_chunks."
            )
        if length < whole:

            def pad(leaf, timed):
                if not timed or leaf.shape[1] != length:
                    return leaf
                # No unit looks at what is added.
                return jnp.pad(leaf, ((0, 0), (0, whole - length), *[(0, 0)] * (leaf.ndim - 2)))

            batch = jax.tree.map(pad, batch, has_time(batch))
        return batch, table_of(parallel, length // chunk_len, self._backward)


def _on_all(a: Any, where: NamedSharding) -> jax.Array:
    """A small array on all devices; what lies on some stays there."""
    if isinstance(a, jax.Array):
        return a
    return jax.make_array_from_callback(np.shape(a), where, lambda index: np.asarray(a)[index])


def check_batch_shape(facts: ModelFacts, batch: Batch) -> int:
    """The time steps of a batch (1 if the model has no time), if it is as the task's example.

    Raises:
      ValueError: it is not.
    """
    example, whole, name = facts.batch, facts.num_steps, facts.task.name
    check_arrays(facts, batch)
    lengths = set()
    of_example = jax.tree.leaves(example), jax.tree.leaves(has_time(example))
    for (path, leaf), wanted, timed in zip(
        jax.tree.leaves_with_path(batch), *of_example, strict=True
    ):
        shape, expected = list(np.shape(leaf)), list(wanted.shape)
        may_differ = facts.time_major and timed and expected[1] == whole
        if may_differ and len(shape) == len(expected):
            lengths.add(shape[1])
            shape[1] = whole
        dtype = getattr(leaf, "dtype", None) or jax.dtypes.result_type(leaf)
        kinds = tuple(jnp.dtype(d).kind for d in (dtype, wanted.dtype))
        if shape != expected or kinds[0] != kinds[1]:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is {jnp.dtype(dtype)}{list(np.shape(leaf))}, in batches "
                f"of task {name} it is {wanted.dtype}{list(wanted.shape)}.\n"
                f"Fix: change the sizes of the batch, or those of the task."
            )
    length, *others = lengths or {whole or 1}
    may_be_shorter = facts.task.variable_length
    if others or (whole and (length > whole or (length < whole and not may_be_shorter))):
        raise ValueError(
            f"a batch of {' and '.join(map(str, sorted(lengths)))} time steps, those of task {name} have "
            f"{whole}{' at most' * may_be_shorter}.\n"
            f"Fix: change the length of the batch, or that of the task."
        )
    return length


def check_arrays(facts: ModelFacts, batch: Batch) -> None:
    """Raises a ValueError if a batch, or some of its rows, has not the arrays that the task's example has."""

    def describe(tree: Tree) -> str:
        paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
        return describe_value(tree) + f" of {', '.join(names)}" * any(names)

    example = facts.batch
    check_keys(batch, f"the batch for task {facts.task.name}")
    if jax.tree.structure(batch) != jax.tree.structure(example):
        raise ValueError(
            f"the batch is {describe(batch)}, those of task {facts.task.name} are {describe(example)}.\n"
            f"Fix: give all of these arrays. For `predict`, unknown targets can be zeros."
        )
    check_types(batch, f"for task {facts.task.name}")


class _GradientStep(CompiledStep):
    """A compiled program up to the gradients, which does not see the optimizer's state."""

    def run(self, state: TrainState, batch: Batch) -> Arrays:
        return super().run(_without_optimizer(state), batch)

    def lower(self, state: TrainState, batch: Batch) -> Arrays:
        return super().lower(_without_optimizer(state), batch)


class _ValueAndGrad(_GradientStep):
    """Gradients for an optimizer of the user's: parameters stay as they are, outside of the program."""

    def run(self, state: TrainState, batch: Batch) -> Arrays:
        (loss, (step, carry, sums)), grads = super().run(state, batch)
        return (loss, (dataclasses.replace(state, step=step, carry=carry), sums)), grads


class _HostStep(_GradientStep):
    """Gradients; after them the optimizer, on the host."""

    def __init__(
        self, gradients, setup: Resolved, numbers, states: TrainState, out_shardings: Tree
    ):
        parts = setup.parts
        super().__init__(gradients, parts, numbers, backward=True, out_shardings=out_shardings)
        self._setup, self._host = setup, HostOptimizer(setup.optimizer)
        has_own, rows_of = parts.facts.task.has_own_optimizer, parts.partition.rows_of
        self._gather = jax.jit(  # into the memory of the old parameters
            lambda old, new: without_empty_rows(new, rows_of) if has_own else new,
            out_shardings=states.params,
            donate_argnums=0,
            keep_unused=True,
        )

    def run(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        split, grads, *how, metrics = super().run(state, batch)
        params, opt_state = self._host.update(
            split.params, grads, state.opt_state, *how, metrics.loss
        )
        params = self._gather(state.params, params)
        return dataclasses.replace(split, params=params, opt_state=opt_state), metrics


def _without_optimizer(state: TrainState) -> TrainState:
    return dataclasses.replace(state, opt_state=())


def train_step(setup: Resolved, *_: Any) -> CompiledStep:
    """One optimizer step; see `functions.make_train_step`."""
    train, parts, mesh, optimizer = setup.train, setup.parts, setup.mesh, setup.optimizer
    loss_and_grad = make_loss_and_grad(setup)
    numbers = {"key": key_data(train.seed), "allowed_skips": np.int32(train.allowed_skips)}
    limit = setup.settings.clip_norm
    if limit is not None:
        numbers["clip_norm"] = np.float32(limit)

    def gradients(state: TrainState, batch: Batch, table: TickTable | None, numbers: Numbers):
        (loss, (carry, sums)), grads = loss_and_grad(state, batch, table, numbers["key"])
        initial = parts.initial_carry(state.params, state.frozen)
        # The update runs where the optimizer state lies: what is split is updated in parts.
        with jax.named_scope("update"):
            grads = constrain(grads, mesh, state.opt_rules)
            params = constrain(state.params, mesh, state.opt_rules)
            norm = global_norm(grads)
            is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            scale, rate = clip_scale(norm, numbers.get("clip_norm")), part_of(batch, RATE)
            state, applies = _count(state, carry, initial, is_finite, numbers["allowed_skips"])
            state = dataclasses.replace(state, params=params)
            metrics = Metrics(loss, norm, state.skipped, sums)
            return state, grads, applies, scale, rate, metrics

    target = abstract_state(setup)
    make = setup.task.make_optimizer
    tell_of_optimizer(make, optimizer.update, target.params, target.opt_state)
    states, replicated = state_shardings(target, mesh), NamedSharding(mesh, P())
    if setup.parallel.update == "host":
        split = shardings(target.params, mesh, target.opt_rules)
        state = dataclasses.replace(states, params=split, opt_state=())
        out = (state, split, replicated, replicated, replicated, replicated)
        return _HostStep(gradients, setup, numbers, states, out)
    args = target.params, target.opt_state, target.params, jax.ShapeDtypeStruct((), jnp.float32)
    numbers["optimizer"], run = with_numbers(optimizer.update, *args)

    def step(
        state: TrainState, batch: Batch, table: TickTable | None, numbers: Numbers
    ) -> tuple[TrainState, Metrics]:
        state, grads, applies, scale, rate, metrics = gradients(state, batch, table, numbers)
        with jax.named_scope("update"):
            apply = functools.partial(run, numbers["optimizer"])
            how = applies, scale, rate, metrics.loss
            params, opt_state = update(apply, state.params, grads, state.opt_state, *how)
            params = constrain(params, mesh, state.param_rules)
        return dataclasses.replace(state, params=params, opt_state=opt_state), metrics

    out = states, replicated
    return CompiledStep(step, parts, numbers, backward=True, donate_argnums=0, out_shardings=out)


def _count(
    state: TrainState, carry: Carry, initial: Any, is_finite: jax.Array, max_skipped: jax.Array
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
    """Checks that a compiled step would terminate; one that might not does so itself before its first run.

    Raises:
      StuckError: a unit's work contains an exchange that all devices must take part in: it would never end.
    """
    text = program.as_text() or ""
    places = {}  # those of lines of the user's first
    for found in _PERMUTE_OF_A_UNIT.finditer(text):
        operation = _STRUCTURE.sub("", found[1])
        place = source_line_of_instruction(text, int(found[2] or 0))
        places.setdefault(not place, f"{operation} ({place})" if place else operation)
    if places:
        raise StuckError(
            f"{places[min(places)]} cuts, joins or reshapes a dim that {TENSOR!r} splits: stages would wait "
            f"for each other forever.\nFix: give gates or heads a dim of their own, or call "
            f'at.layout(x, None, "batch", None) before, or use tensor=1.'
        )


def value_and_grad(setup: Resolved, seed: int) -> CompiledStep:
    """Loss and gradients; see `functions.value_and_grad`."""
    loss_and_grad = make_loss_and_grad(setup)

    def step(state: TrainState, batch: Batch, table: TickTable | None, root: jax.Array):
        (loss, (carry, sums)), grads = loss_and_grad(state, batch, table, root)
        return (loss, (state.step + 1, carry, sums)), grads

    states = state_shardings(abstract_state(setup), setup.mesh)
    replicated = NamedSharding(setup.mesh, P())
    out = (replicated, (replicated, states.carry, replicated)), states.params
    return _ValueAndGrad(step, setup.parts, key_data(seed), backward=True, out_shardings=out)


def make_loss_and_grad(setup: Resolved, *, seed: int | None = 0) -> Function:
    """(state, batch, table=None, root=None) -> ((mean loss, (carry, sums)), gradients); not compiled.

    The state's step numbers the dropout masks. `root` has the numbers of the key of another seed. Without a
    table the batch has the full length. On a mesh with stages and tensor parallelism, use `check_program` on
    the program of your own layers: would it terminate?

    Args:
      seed: of the dropout masks; None for no dropout, as in evaluation.
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    setup.facts.check_gradient()
    differentiate = _differentiated(setup.parts, setup.mesh, seed)

    def run(state, batch, table=None, root=None):
        args = state.params, state, batch, table, root
        try:
            return differentiate(*args)
        except (TypeError, ValueError) as error:
            if not is_mismatch(error):
                raise
        # JAX differentiates a part of the model after it has traced it, and cannot do so on a mesh.
        return _differentiated(setup.parts.with_cast_derivatives(), setup.mesh, seed)(*args)

    return run


def _differentiated(parts: Parts, mesh: Mesh, seed: int | None) -> Function:
    """(params, state, batch, table, root) -> what `make_loss_and_grad` returns."""
    forward = make_forward(parts, mesh)

    def loss(params, state, batch, table, root):
        table = full_table(parts.partition, backward=True) if table is None else table
        key = dropout_key(seed if root is None else root, state)
        carry, sums = forward(params, state.frozen, state.carry, batch, key, table)
        return mean_loss(sums), (carry, sums)

    return jax.value_and_grad(loss, has_aux=True)


def dropout_key(seed: int | jax.Array | None, state: TrainState) -> jax.Array | None:
    """Of a step's dropout masks, by a seed or the numbers of its key; None for none."""
    if seed is None:
        return None
    root = new_key(seed) if isinstance(seed, int) else key_of(seed)
    return jax.random.fold_in(root, state.step)


def eval_step(setup: Resolved) -> CompiledStep:
    """The sums of a batch; see `functions.make_eval_step`."""
    forward = make_forward(setup.parts, setup.mesh)

    def step(state: TrainState, batch: Batch, table: TickTable | None, _: Tree):
        return forward(state.params, state.frozen, state.carry, batch, None, table)

    replicated = NamedSharding(setup.mesh, P())
    return CompiledStep(
        step, setup.parts, backward=False, out_shardings=(_of_carry(setup), replicated)
    )


def _of_carry(setup: Resolved) -> Arrays:
    """Where the carry lies: that of one window is given to the next."""
    return state_shardings(abstract_state(setup), setup.mesh).carry


def predict_step(setup: Resolved) -> CompiledStep:
    """What the model predicts; see `functions.make_predict_step`."""
    forward = make_forward(setup.parts, setup.mesh, predicts=True)
    facts, parallel = setup.facts, setup.parallel
    cuts = parallel.num_chunks > 1 or any(parallel.mesh.sizes[a] > 1 for a in facts.time_axes)
    for name, output in facts.outputs.items() if cuts else ():
        require(
            output.shape[0] == facts.num_steps,
            f"`predict` gives {output.shape[0]} time steps as {name!r} for a window of {facts.num_steps}, "
            f"which is cut into parts.\nFix: predict with num_chunks=1, on a mesh that leaves time whole.",
        )
    check_rows_alone(setup.parts, predicts=True)

    def step(state: TrainState, batch: Batch, table: TickTable | None, _: Tree):
        carry, outputs = forward(state.params, state.frozen, state.carry, batch, None, table)
        if setup.facts.time_major:
            outputs = jax.tree.map(lambda a: a.swapaxes(0, 1), outputs)
        return carry, outputs

    out = _of_carry(setup), batch_sharding(setup)
    return CompiledStep(step, setup.parts, backward=False, out_shardings=out)


def batch_sharding(setup: Resolved) -> NamedSharding:
    """How the arrays of a batch lie on the mesh between steps: rows as the rules say, in the user's order.

    Unequal shares do not split evenly: then every data-parallel group has all rows and takes its own.
    """
    return NamedSharding(setup.mesh, setup.partition.carry_rules.spec((BATCH,)))


def abstract_batch(setup: Resolved) -> Arrays:
    """A batch without its values, as a step takes it: shapes, dtypes and shardings."""
    where = batch_sharding(setup)

    def place(leaf):
        sharding = where if leaf.shape else NamedSharding(setup.mesh, P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, setup.facts.batch)
