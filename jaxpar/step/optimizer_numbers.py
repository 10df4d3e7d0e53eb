"""Numbers that an optimizer's maker has put into its state, such as a learning rate.

`optax.inject_hyperparams` keeps its rates in the state, `contrib.schedule_free` keeps `b1`, and a user's own
optimizer may do so as well. A restored state has the numbers of the run that wrote it:

    optimizer of the run before     learning_rate=0.1     state  count=20  learning_rate=0.1
    optimizer of this run           learning_rate=0.01    state  count=20  learning_rate=0.1    the old one!

So a checkpoint also holds what the state began with. Where this optimizer begins with another number, that is
what its user wants now.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import Var
from jax.tree_util import DictKey, GetAttrKey, KeyPath, keystr

from jaxpar.base.jax_private import call_once
from jaxpar.base.keys import is_key
from jaxpar.base.types import OptState
from jaxpar.sharding import is_variable, named_leaves
from jaxpar.step.resolved import Resolved
from jaxpar.step.state import abstract_state
from jaxpar.trace.jaxprs import equations_for, function_of, inlined, made_with

_Injected = optax.InjectHyperparamsState | optax.InjectStatefulHyperparamsState

# Larger arrays that do not depend on parameters are zeros for what is summed up, such as Adafactor's factors.
_MOST_NUMBERS = 64


@dataclasses.dataclass(frozen=True)
class ChangedNumber:
    """A number in a restored state that a new state of this optimizer has another value of.

    Attributes:
      name: its path in the optimizer's state.
      before: what the state of the earlier run began with.
      now: what a new state begins with.
      kept: what training has made of it, if that stays; None if the number of now replaces it.
    """

    name: str
    before: str
    now: str
    kept: str | None

    def __str__(self) -> str:
        name = f"opt_state.{self.name.replace('/', '.')}"
        if self.kept is None:
            return f"{name} was {self.before}, is {self.now}"
        return (
            f"{name} began with {self.before}, now begins with {self.now}, and stays {self.kept} "
            f"as training has made it"
        )


def first_numbers(setup: Resolved) -> dict[str, np.ndarray]:
    """The numbers in a new state of the optimizer that do not depend on parameters, by their paths.

    There are none for an `OptimizerConfig`: its state has no number of the user's.
    """
    return setup.cached(_first_numbers, setup.train.num_steps)


def as_texts(numbers: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Numbers as a checkpoint describes them: equal texts for equal numbers of one type."""
    return {name: _as_text(number) for name, number in numbers.items()}


def with_given_numbers(
    opt_state: OptState, before: Mapping[str, str], given: Mapping[str, np.ndarray]
) -> tuple[OptState, list[ChangedNumber]]:
    """A restored state with the numbers that the optimizer of this run was given.

    A number that was given before is left as it is: training or a callback may have changed it. Another one
    replaces that in the state, unless training has changed it and it is none of `inject_hyperparams`.

    Args:
      before: what the state began with in the run that wrote it, as of `as_texts`.
      given: what it begins with now, as of `first_numbers`.
    Returns:
      the state, and what has changed.
    """
    injected = _injected_numbers(opt_state)
    changes = dict[str, ChangedNumber]()
    for name, leaf in named_leaves(opt_state, "/"):
        if name not in given or name not in before:
            continue
        stored, first, now = _as_text(np.asarray(leaf)), before[name], _as_text(given[name])
        if now == first:
            continue
        is_replaced = name in injected or stored == first
        changes[name] = ChangedNumber(name, first, now, None if is_replaced else stored)

    def replaced(path: KeyPath, leaf: Any) -> Any:
        change = changes.get(_name_of(path))
        if change is None or change.kept is not None:
            return leaf
        return jax.device_put(given[change.name], leaf.sharding)

    state = jax.tree.map_with_path(replaced, opt_state, is_leaf=is_variable)
    return state, [*changes.values()]


def learning_rate(opt_state: OptState) -> Any:
    """The number `learning_rate` of `optax.inject_hyperparams`; None if there is not exactly one."""
    rates = []
    for _, state in _injections(opt_state):
        if "learning_rate" in state.hyperparams:
            rates.append(state.hyperparams["learning_rate"])
    if len(rates) != 1 or np.shape(rates[0]):
        return None
    return rates[0]


def _first_numbers(setup: Resolved, _: int) -> dict[str, np.ndarray]:
    if not setup.task.has_own_optimizer:
        return {}
    target = abstract_state(setup)
    scheduled = _scheduled_numbers(target.opt_state)
    injected = _injected_numbers(target.opt_state)
    with jax.numpy_dtype_promotion("standard"):  # as the user's program has it
        program = inlined(jax.make_jaxpr(setup.optimizer.init)(target.params))
    from_params = made_with(program.jaxpr, program.jaxpr.invars)
    outputs = {}
    leaves = named_leaves(target.opt_state, "/")
    for (name, leaf), output in zip(leaves, program.jaxpr.outvars, strict=True):
        if is_variable(leaf) or is_key(leaf):
            continue  # it is like a parameter, or random
        if name in scheduled or (isinstance(output, Var) and output in from_params):
            continue
        if name in injected or math.prod(leaf.shape) <= _MOST_NUMBERS:
            outputs[name] = output
    outvars = [*outputs.values()]
    eqns = equations_for(program.jaxpr.eqns, outvars)
    compute = jax.jit(function_of(program.jaxpr, [], eqns, outvars, program.consts))
    arrays = [np.asarray(array) for array in call_once(compute)]
    return dict(zip(outputs, arrays, strict=True))


def _injected_numbers(opt_state: OptState) -> set[str]:
    """Paths of the numbers that `inject_hyperparams` was given."""
    return _hyperparams(opt_state, scheduled=False)


def _scheduled_numbers(opt_state: OptState) -> set[str]:
    """Paths of the numbers that `inject_hyperparams` computes in each step, by a schedule."""
    return _hyperparams(opt_state, scheduled=True)


def _hyperparams(opt_state: OptState, *, scheduled: bool) -> set[str]:
    names = set[str]()
    for path, state in _injections(opt_state):
        schedules = getattr(state, "hyperparams_states", {})
        for name in state.hyperparams:
            if (name in schedules) == scheduled:
                names.add(_name_of((*path, GetAttrKey("hyperparams"), DictKey(name))))
    return names


def _injections(tree: OptState, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The states of `inject_hyperparams` in a state, also within each other, with their paths."""

    def is_injected(node: Any) -> bool:
        return isinstance(node, _Injected)

    for end, node in jax.tree.leaves_with_path(tree, is_leaf=is_injected):
        if is_injected(node):
            yield (*path, *end), node
            yield from _injections(node.inner_state, (*path, *end, GetAttrKey("inner_state")))


def _name_of(path: KeyPath) -> str:
    return keystr(path, simple=True, separator="/")


def _as_text(array: np.ndarray) -> str:
    return ", ".join(str(number) for number in array.ravel())
