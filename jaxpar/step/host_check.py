"""Whether an optimizer updates pieces of arrays as it updates whole arrays.

With `update="host"` each device's piece of a parameter is updated separately. The result must not depend on
the shape of an array, on the place of a number in it, or on other numbers of it.

Most optimizers do the same to each number. Their traced programs show it: all operations are elementwise, and
those for pieces have the same numbers in them. What depends on no parameter or gradient, such as a schedule,
may be anything that is the same for pieces. A trial would prove less: after its first steps, an optimizer may
do something else.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from jaxpar.base.types import Atom, Shapes, Tree
from jaxpar.partition.by_layer import kind_of
from jaxpar.sharding import is_variable, shardings
from jaxpar.step.resolved import Resolved
from jaxpar.trace.jaxprs import aval_of, inlined, programs_in

_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "complex", "conj",
    "convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "not", "or", "pow", "real", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "xor",
}  # fmt: skip

Indices = tuple[slice, ...]


def updates_numbers_alone(setup: Resolved, params: Tree, opt_rules: Any) -> bool:
    """Whether its program shows that an update of whole parameters is that of their pieces.

    The pieces are those of the first and of the last device.

    Args:
      params: shapes of the parameters, as a state has them.
      opt_rules: what the optimizer state is laid out by.
    """
    leaves, structure = jax.tree.flatten(params)
    is_stack = [kind_of(v) is not None for v in jax.tree.leaves(params, is_leaf=is_variable)]
    places = jax.tree.leaves(shardings(params, setup.mesh, opt_rules))
    cuts = []
    for place, leaf in zip(places, leaves, strict=True):
        cuts.append(place.devices_indices_map(leaf.shape))
    ways = _numbers_of_ways(leaves, [[*cut.values()] for cut in cuts])
    shapes_seen = list[list[tuple[int, ...]]]()
    for device in (setup.mesh.devices.flat[0], setup.mesh.devices.flat[-1]):
        pieces = _pieces(leaves, [cut[device] for cut in cuts], ways)
        shapes = [piece.shape for piece in pieces]
        if shapes in shapes_seen:
            continue
        shapes_seen.append(shapes)
        whole = []
        for leaf, piece, stack in zip(leaves, pieces, is_stack, strict=True):
            # An optimizer sees each layer alone, and parts of a stack have no empty rows: as many as a piece.
            shape = (piece.shape[0], *leaf.shape[1:]) if stack else leaf.shape
            whole.append(jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type))
        try:
            with jax.numpy_dtype_promotion("standard"):
                steps, steps_of_pieces = (
                    _steps_of_update(setup, jax.tree.unflatten(structure, arrays))
                    for arrays in (whole, pieces)
                )
        except (TypeError, ValueError):  # shapes that do not fit each other
            return False
        if steps is None or steps != steps_of_pieces:
            return False
    return True


def _numbers_of_ways(
    leaves: Sequence[jax.ShapeDtypeStruct], cuts: Sequence[list[Indices]]
) -> list[int]:
    """For each array, which of the ways it is that arrays of its shape are cut in.

    Args:
      cuts: what each device has of an array: one device may have the same of arrays cut in other ways.
    """
    ways: dict[tuple[int, ...], list[list[Indices]]] = {}
    numbers = []
    for leaf, way in zip(leaves, cuts, strict=True):
        ways_of_shape = ways.setdefault(leaf.shape, [])
        if way not in ways_of_shape:
            ways_of_shape.append(way)
        numbers.append(ways_of_shape.index(way))
    return numbers


def _pieces(
    leaves: Sequence[jax.ShapeDtypeStruct], indices: Sequence[Indices], ways: Sequence[int]
) -> list[jax.ShapeDtypeStruct]:
    """Shapes of pieces of parameters.

    Where arrays of one shape are cut in other ways, numbers of two of them would meet at other places. So the
    pieces of the second way are longer by one, those of the third by two, and do not fit each other.
    """
    pieces = []
    for leaf, at, way in zip(leaves, indices, ways, strict=True):
        shape = [len(range(*cut.indices(size))) for cut, size in zip(at, leaf.shape, strict=True)]
        if shape:
            shape[-1] += way  # the first one may be that of layers
        pieces.append(jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type))
    return pieces


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
    jaxpr, numbers = program.jaxpr, dict[Var, int]()
    is_uniform = dict[Var, bool]()  # whether all numbers of an array are equal
    is_fixed = dict[Var, bool]()  # whether it depends on no array that is cut

    def add(variables: Sequence[Var], *, uniform: bool, fixed: bool) -> None:
        for v in variables:
            numbers[v] = len(numbers)
            is_scalar = not aval_of(v).shape
            is_uniform[v], is_fixed[v] = uniform or is_scalar, fixed or is_scalar

    def read(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return str(aval_of(atom).dtype), np.asarray(atom.val).tobytes()
        return numbers[atom]

    add(jaxpr.constvars, uniform=False, fixed=True)
    add(jaxpr.invars, uniform=False, fixed=False)
    steps: list[Hashable] = []
    for const in program.consts:
        steps.append((np.shape(const), np.asarray(const).tobytes()))
    for eqn in jaxpr.eqns:
        name, reads = eqn.primitive.name, [*map(read, eqn.invars)]
        variables = [v for v in eqn.invars if isinstance(v, Var)]
        uniform = all(is_uniform[v] for v in variables)
        fixed = all(is_fixed[v] for v in variables)
        shapes = {aval_of(v).shape for v in (*eqn.invars, *eqn.outvars)} - {()}
        if name == "broadcast_in_dim" and uniform:
            steps.append((name, *reads))
            fixed = False  # it has the shape of an array
        elif name == "cond":  # its index is one number, the same for all
            steps.append((name, *reads))
            for branch in eqn.params["branches"]:
                steps_of_branch = _steps(branch)
                if steps_of_branch is None:
                    return None
                steps.append(tuple(steps_of_branch))
            uniform = fixed = False
        elif fixed and not programs_in(eqn):  # with its shapes, which must be those of pieces
            steps.append((name, *reads, *sorted(shapes), str(sorted(eqn.params.items()))))
        elif name in _ELEMENTWISE and len(shapes) <= 1:
            steps.append((name, *reads, *sorted(eqn.params.items())))
        else:
            return None
        add(eqn.outvars, uniform=uniform, fixed=fixed)
    return [*steps, *map(read, jaxpr.outvars)]
