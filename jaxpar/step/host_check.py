"""Whether an optimizer updates pieces of arrays as it updates whole arrays.

With `update="host"` each device's piece of a parameter is updated separately. The result must not depend on
the shape of an array, on the place of a number in it, or on other numbers of it.

Most optimizers do the same to each number. Their traced programs show it: all operations are elementwise, and
those for pieces have the same numbers in them. Others are tried on random numbers.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from jaxpar.base.types import Arrays, Atom, Function, Shapes, Tree
from jaxpar.sharding import shardings
from jaxpar.step.per_layer import without_empty_rows
from jaxpar.step.resolved import Resolved
from jaxpar.step.trial import normal
from jaxpar.trace.jaxprs import aval_of, inlined

NUM_STEPS = 2  # the second one reads what the first has put into the state
# Two programs may round in another way, in bfloat16 by a percent; relative to the largest number of an array.
TOLERANCE = 2e-2

_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "complex", "conj",
    "convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "not", "or", "pow", "real", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "xor",
}  # fmt: skip

Indices = tuple[slice, ...]


def updates_pieces_alike(setup: Resolved, params: Tree, opt_rules: Any) -> bool:
    """Whether the updates of whole parameters are those of the first and the last device's pieces.

    Args:
      params: shapes of the parameters, as a state has them.
      opt_rules: what the optimizer state is laid out by.
    """
    leaves, structure = jax.tree.flatten(params)
    places = jax.tree.leaves(shardings(params, setup.mesh, opt_rules))
    ends = list[list[Indices]]()
    for device in (setup.mesh.devices.flat[0], setup.mesh.devices.flat[-1]):
        pairs = zip(places, leaves, strict=True)
        ends.append([place.devices_indices_map(leaf.shape)[device] for place, leaf in pairs])
    with (
        jax.default_device(jax.local_devices(backend="cpu")[0]),
        jax.numpy_dtype_promotion("standard"),
    ):
        if _does_the_same_to_each_number(setup, params, ends):
            return True
        return _random_updates_are_alike(setup, leaves, structure, ends)


# ---- by its program ----


def _does_the_same_to_each_number(
    setup: Resolved, params: Tree, ends: Sequence[Sequence[Indices]]
) -> bool:
    """Whether the program of an update shows it; if not, it may do so all the same."""
    leaves, structure = jax.tree.flatten(params)
    for indices in ends:
        cut = dict[tuple[int, ...], Indices]()
        for leaf, at in zip(leaves, indices, strict=True):
            if cut.setdefault(leaf.shape, at) != at:
                return False  # numbers of two parameters may meet at other places
    expected = _steps_of_update(setup, params)
    if expected is None:
        return False
    shapes_seen = list[list[tuple[int, ...]]]()
    for indices in ends:
        pieces = [_piece(leaf, at) for leaf, at in zip(leaves, indices, strict=True)]
        shapes = [piece.shape for piece in pieces]
        if shapes in shapes_seen:
            continue
        shapes_seen.append(shapes)
        if _steps_of_update(setup, jax.tree.unflatten(structure, pieces)) != expected:
            return False
    return True


def _piece(leaf: jax.ShapeDtypeStruct, indices: Indices) -> jax.ShapeDtypeStruct:
    sizes = zip(indices, leaf.shape, strict=True)
    shape = tuple(len(range(*at.indices(size))) for at, size in sizes)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)


def _steps_of_update(setup: Resolved, params: Shapes) -> list[Hashable] | None:
    """Of the initial state and of an update, as of `_steps`."""
    optimizer, loss = setup.optimizer, jax.ShapeDtypeStruct((), np.float32)
    begin, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
    update = jax.make_jaxpr(optimizer.update)(params, state, params, loss)
    of_begin, of_update = _steps(begin), _steps(update)
    return None if of_begin is None or of_update is None else [*of_begin, *of_update]


def _steps(program: ClosedJaxpr) -> list[Hashable] | None:
    """What an elementwise program does, without the shapes of its arrays; None if it is not elementwise."""
    program = inlined(program)
    jaxpr, names = program.jaxpr, dict[Var, int]()
    is_uniform = dict[Var, bool]()  # whether all numbers of an array are equal

    def add(variables: Sequence[Var], uniform: bool) -> None:
        for v in variables:
            names[v] = len(names)
            is_uniform[v] = uniform or not aval_of(v).shape

    def read(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return str(aval_of(atom).dtype), np.asarray(atom.val).tobytes()
        return names[atom]

    if any(np.shape(const) for const in program.consts):
        return None
    add(jaxpr.constvars, True)
    add(jaxpr.invars, False)
    steps: list[Hashable] = [np.asarray(const).tobytes() for const in program.consts]
    for eqn in jaxpr.eqns:
        name, reads = eqn.primitive.name, [*map(read, eqn.invars)]
        uniform = all(isinstance(v, Literal) or is_uniform[v] for v in eqn.invars)
        if name == "broadcast_in_dim" and uniform:
            steps.append((name, *reads))
        elif name == "cond":  # its index is one number, the same for all
            steps.append((name, *reads))
            for branch in eqn.params["branches"]:
                steps_of_branch = _steps(branch)
                if steps_of_branch is None:
                    return None
                steps.append(tuple(steps_of_branch))
            uniform = False
        else:
            shapes = {aval_of(v).shape for v in (*eqn.invars, *eqn.outvars)} - {()}
            if name not in _ELEMENTWISE or len(shapes) > 1:
                return None
            steps.append((name, *reads, *sorted(eqn.params.items())))
        add(eqn.outvars, uniform)
    return [*steps, *map(read, jaxpr.outvars)]


# ---- by a trial ----


def _random_updates_are_alike(
    setup: Resolved, leaves: Sequence[Any], structure: Any, ends: Sequence[Sequence[Indices]]
) -> bool:
    """Whether updates of random parameters are those of their pieces."""
    rng = np.random.default_rng(0)
    optimize: Function = setup.optimizer.update  # with the loss, as of `given_loss`

    def draw() -> Arrays:
        whole = jax.tree.unflatten(structure, [normal(rng, leaf) for leaf in leaves])
        whole = without_empty_rows(whole, setup.partition.rows_of)
        return [*map(np.asarray, jax.tree.leaves(whole))]

    def run(params: list[jax.Array], grads: list[jax.Array], loss: jax.Array) -> Tree:
        given, gradients = (jax.tree.unflatten(structure, own) for own in (params, grads))
        state, updates = setup.optimizer.init(given), None
        for _ in range(NUM_STEPS):
            updates, state = optimize(gradients, state, given, loss)
        return jax.tree.leaves(updates)

    arrays, loss, update = (draw(), draw()), np.float32(1), jax.jit(run)
    whole = update(*arrays, loss)
    for indices in ends:
        pieces = ([a[at] for a, at in zip(own, indices, strict=True)] for own in arrays)
        updates_of_pieces = update(*pieces, loss)
        for updates, piece, at in zip(whole, updates_of_pieces, indices, strict=True):
            if not _near(np.asarray(updates)[at], np.asarray(piece)):
                return False
    return True


def _near(one: np.ndarray, other: np.ndarray) -> bool:
    scale = np.max(np.abs(one), initial=0)
    return bool(np.all(np.abs(one - other) <= TOLERANCE * scale))
