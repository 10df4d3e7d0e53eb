"""The state of a training run, initialized in shards on its devices."""

import dataclasses
import functools
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpar.base.checks import require_instance
from jaxpar.base.compiler import options_to_draw
from jaxpar.base.display import Shown, format_bytes, format_count
from jaxpar.base.jax_private import call_once
from jaxpar.base.keys import key_data
from jaxpar.base.memory import device_memory
from jaxpar.base.trees import device_bytes, placed, zeros
from jaxpar.base.types import Arrays, Function, Tree
from jaxpar.model.task import Task
from jaxpar.sharding import (
    Rules,
    annotated,
    array_of,
    check_sizes,
    is_variable,
    named_leaves,
    shardings,
    user_name,
)
from jaxpar.step.host_check import updates_numbers_alone
from jaxpar.step.optimizer import HOST_MEMORY, HostOptimizer
from jaxpar.step.resolved import Resolved
from jaxpar.trace.counts import draws, reductions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TrainState(Shown):
    """Everything that a training step reads and writes.

    Attributes:
      step: int32 scalar, steps taken.
      skipped: int32 scalar, how many of them were skipped because their loss or gradient was not finite.
        One more than the settings allow halts the state: it stays as it was before that step.
      params: `nnx.State` of what is trained; variables carry the names of their dims. Those
        of layers may be packed (`partition.storage`): `partition.by_layer` has them by their names.
      frozen: `nnx.State` of all other variables of the model, likewise.
      opt_state: of optax; what mirrors a parameter carries its named dims too. Empty if the task has no
        optimizer.
      carry: the state of layers between windows: by kind of layer, variables annotated likewise.
      param_rules, opt_rules, carry_rules: what parameters, optimizer state and carry are laid out by.
      opt_memory: kind of memory that holds the optimizer state; None for the devices' own.
      model_size: how many numbers the model has in `params` and `frozen`, and their bytes. Each layer counts
        once, on every mesh; empty rows and padding do not count.
    """

    step: jax.Array
    skipped: jax.Array
    params: nnx.State
    frozen: nnx.State
    opt_state: optax.OptState
    carry: dict[str, Arrays]
    param_rules: Rules = dataclasses.field(metadata={"static": True})
    opt_rules: Rules = dataclasses.field(metadata={"static": True})
    carry_rules: Rules = dataclasses.field(metadata={"static": True})
    opt_memory: str | None = dataclasses.field(metadata={"static": True})
    model_size: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        numbers, num_bytes = self.model_size
        return f"<TrainState: {numbers:,} parameters, {format_bytes(num_bytes)}; see jaxpar.show>"


def abstract_state(setup: Resolved) -> TrainState:
    """The state without its values: shapes, dtypes and the shardings that it will have.

    Raises:
      ValueError: a size does not split over its axes (see `sharding.check_sizes`), or the optimizer's state
        cannot be laid out.
    """
    return setup.cached(_abstract_state, setup.train.num_steps)


def zero_carry(setup: Resolved) -> dict[str, Arrays]:
    """Zeros for what layers carry on, laid out as in the state."""
    carry = abstract_state(setup).carry
    where = jax.tree.map(lambda leaf: leaf.sharding, carry)
    return call_once(jax.jit(lambda: zeros(carry), out_shardings=where))


def _abstract_state(setup: Resolved, _: int) -> TrainState:
    storage, mesh = setup.storage, setup.mesh
    for variables in (storage.params, storage.frozen):
        check_sizes(variables, mesh, setup.partition.param_rules)
    make = functools.partial(_initial_state, setup)
    state = jax.eval_shape(make, *storage.stored)
    for variables in (state.params, state.frozen):
        check_sizes(variables, mesh, state.param_rules)
    check_sizes(state.carry, mesh, state.carry_rules)
    _check_optimizer(setup, state)
    check_sizes(state.opt_state, mesh, state.opt_rules)
    return placed(state, state_shardings(state, mesh))


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """The declared sharding of every array of the state."""
    return dataclasses.replace(
        shardings(state, mesh, state.carry_rules),
        params=shardings(state.params, mesh, state.param_rules),
        frozen=shardings(state.frozen, mesh, state.param_rules),
        opt_state=shardings(state.opt_state, mesh, state.opt_rules, state.opt_memory),
    )


def init_state(setup: Resolved, seed: int) -> TrainState:
    """The state before the first step; see `functions.init_state`."""
    check_room(abstract_state(setup), setup.mesh)
    make = setup.cached(_initializer, setup.train.num_steps)
    return _with_host_state(setup, call_once(make, key_data(seed)))


def draw_variables(setup: Resolved, without: Container[str] = ()) -> tuple[nnx.State, nnx.State]:
    """Parameters and other variables of the model, as `init_state` draws them; the rest is not made.

    Args:
      without: names of those that are not drawn either, and are zeros.
    """
    target = abstract_state(setup)
    check_room(target, setup.mesh)

    def make(key_data: jax.Array) -> tuple[nnx.State, nnx.State]:
        trees = setup.storage.draw(key_data, setup.mesh)
        leaves = [
            jax.tree.map(jnp.zeros_like, leaf) if name in without else leaf
            for tree in trees
            for name, leaf in named_leaves(tree)
        ]
        return jax.tree.unflatten(jax.tree.structure(trees, is_leaf=is_variable), leaves)

    options = options_to_draw(setup.facts.platform)
    where = _places((target.params, target.frozen))
    draw = jax.jit(make, out_shardings=where, compiler_options=options)
    return call_once(draw, key_data(setup.train.seed))


def state_of(setup: Resolved, params: nnx.State, frozen: nnx.State) -> TrainState:
    """The state before the first step with these parameters and other variables, which are donated."""
    make = _begin(setup, lambda *trees: trees, donate_argnums=(0, 1))
    return _with_host_state(setup, call_once(make, params, frozen))


def _initializer(setup: Resolved, _: int) -> Callable[[Any], TrainState]:
    """What makes a state of a key's data: one program for all seeds."""
    return _begin(setup, lambda key_data: setup.storage.draw(key_data, setup.mesh))


def _begin(setup: Resolved, make_variables: Function, **options: Any) -> Callable[..., TrainState]:
    """What makes a state of variables, without the optimizer's where that is kept on the host."""
    target, on_host = abstract_state(setup), setup.parallel.update == "host"
    made = dataclasses.replace(target, opt_state=()) if on_host else target

    def make(*args: Any) -> TrainState:
        state = _initial_state(setup, *make_variables(*args))
        return dataclasses.replace(state, opt_state=()) if on_host else state

    how = options_to_draw(setup.facts.platform)
    return jax.jit(make, out_shardings=_places(made), compiler_options=how, **options)


def _places(tree: Tree) -> Arrays:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _with_host_state(setup: Resolved, state: TrainState) -> TrainState:
    """With the optimizer's state, where that is kept on the host."""
    if setup.parallel.update != "host":
        return state
    host, target = HostOptimizer(setup.optimizer), abstract_state(setup)
    split = jax.device_put(state.params, shardings(state.params, setup.mesh, state.opt_rules))
    return dataclasses.replace(state, opt_state=host.init(split, target.opt_state))


def check_room(state: TrainState, mesh: Mesh) -> None:
    """Checks that the devices of this process have the memory for an abstract state, leaving out the step's.

    A step needs more; `train --memory` and the planner know how much.

    Raises:
      ValueError: they do not.
    """
    devices = mesh.local_devices
    here = device_bytes(state)
    on_cpu, room = devices[0].platform == "cpu", device_memory(devices)
    if room and here > room and (on_cpu or state.opt_memory is None):
        count = len(devices) if on_cpu else 1
        arrays = f"parameters{' and optimizer state' * bool(jax.tree.leaves(state.opt_state))}"
        raise ValueError(
            f"{arrays} alone need {format_bytes(count * here)} on {format_count(count, 'device')}, "
            f"but {'this machine' if on_cpu else 'it'} has {format_bytes(count * room)}\n"
            f"Fix: use a smaller model, or split it over more devices or machines."
        )


def release(state: TrainState, allowed_skips: int) -> TrainState:
    """The state, no longer halted: the step that the settings do not allow to be skipped is not counted."""
    skipped = min(int(state.skipped), allowed_skips)
    skipped = jax.device_put(np.int32(skipped), state.skipped.sharding)
    return dataclasses.replace(state, skipped=skipped)


def evaluated(setup: Resolved, state: TrainState) -> TrainState:
    """The state with the parameters that are evaluated instead of those trained; see the task's method."""
    if not setup.task.evaluates_others:
        return state
    # Into the devices' memory, if it lies on the host.
    opt_state = jax.device_put(
        state.opt_state, shardings(state.opt_state, setup.mesh, state.opt_rules)
    )
    return dataclasses.replace(
        state, params=call_once(setup.cached(_evaluated_params), state.params, opt_state)
    )


def _evaluated_params(setup: Resolved) -> Callable[..., nnx.State]:
    where, task = _places(abstract_state(setup).params), setup.task
    # The method itself may be one that JAX has traced before.
    return jax.jit(lambda *args: task.evaluated_params(*args), out_shardings=where)


def audit(state: TrainState) -> None:
    """Compares the declared and the actual sharding of parameters, optimizer state and carry.

    All must lie on one mesh, that of `state.step`.

    Raises:
      ValueError: names each annotated array that is sharded otherwise.
    """
    require_instance("state", state, TrainState, "what init_state or a step returns")
    mesh, lines = getattr(getattr(state.step, "sharding", None), "mesh", None), []
    if not isinstance(mesh, Mesh):
        raise ValueError("state is not placed on a mesh\nFix: make it with init_state.")
    declared = state_shardings(state, mesh)
    for (name, leaf), (_, wanted) in zip(*map(annotated, (state, declared)), strict=True):
        array, where = leaf.get_value(), wanted.get_value()
        actual = array.sharding
        is_there = isinstance(actual, NamedSharding) and actual.mesh == mesh
        if not (is_there and actual.is_equivalent_to(where, array.ndim)):
            lines.append(f"{name} {array.shape}: declared {where}, but placed on {actual}")
    if lines:
        raise ValueError(
            f"state: {len(lines)} arrays are not sharded as annotated:\n  "
            + "\n  ".join(lines)
            + "\nFix: place them with init_state, or with jax.device_put and state_shardings."
        )


def _check_optimizer(setup: Resolved, state: TrainState) -> None:
    """Checks that an optimizer runs, keeps arrays, and updates parts of a parameter alone where it must.

    Raises:
      ValueError: it does not.
    """
    task = setup.task
    for name, variable in named_leaves(state.opt_state):
        kept, shown = array_of(variable), user_name(name, variable)
        if not hasattr(kept, "shape"):
            raise ValueError(
                f"the optimizer of task {task.name} keeps {shown}, a {type(kept).__name__}\n"
                f"Fix: use one that keeps arrays, such as optax.adafactor."
            )
    if not task.has_own_optimizer:
        return
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    args = state.params, state.opt_state, state.params, loss
    if setup.parallel.update != "host":
        with jax.numpy_dtype_promotion("standard"):
            jax.eval_shape(setup.optimizer.update, *args)  # mistakes in it are reported now
        return
    if updates_numbers_alone(setup, state.params, state.opt_rules):
        return
    with jax.numpy_dtype_promotion("standard"):
        program = jax.make_jaxpr(setup.optimizer.update)(*args).jaxpr
    places = jax.tree.leaves(shardings(state.params, setup.mesh, state.opt_rules))
    found = reductions(program)
    if found:
        why = f"looks at more than one number at once ({', '.join(sorted(found))})"
    elif draws(program):
        why = "draws random numbers"
    elif all(place.is_fully_replicated for place in places):
        return  # there are no parts
    else:
        why = "may update a part in another way than the whole array"
    raise ValueError(_on_host(task, why))


def _on_host(task: Task, why: str) -> str:
    return (
        f"update='host' updates parts of parameters separately, but the optimizer of task {task.name} {why}\n"
        f"Fix: use update='sharded', or an optimizer such as optax.adam."
    )


def _initial_state(setup: Resolved, params: nnx.State, frozen: nnx.State) -> TrainState:
    parts = setup.parts
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        params=params,
        frozen=frozen,
        opt_state=setup.optimizer.init(params) if setup.task.has_optimizer else (),
        carry=parts.initial_carry(params, frozen),
        param_rules=parts.partition.param_rules,
        opt_rules=parts.partition.opt_rules,
        carry_rules=parts.partition.carry_rules,
        opt_memory=HOST_MEMORY if parts.partition.parallel.update == "host" else None,
        model_size=parts.facts.model_size,
    )
