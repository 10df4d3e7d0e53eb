"""Optimizers that see each layer's own arrays, where a state has the layers of a kind in one stack.

An optimizer may look at a whole array: at its norm, its rows or its number of dims. So it must not see a
stack as one array. It must not see the empty rows of unequal stages either:

    state       gru.w_x  [layer 0, empty, layer 1]         outer.kernel
    optimizer   gru.w_x  layer 0     gru.w_x  layer 1      outer.kernel

The optimizer is traced on the arrays of all layers. Most programs do the same to each layer. Then the part
for the first layer runs on the whole stack by `jax.vmap`, and the parts for other layers are left out. An
elementwise optimizer costs as much as on stacks. A sum of one number of each layer, such as the square of a
global norm, becomes a sum over rows. Any other program runs as it is, on one row of the stacks per layer.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from jaxpar.base.axes import LAYERS
from jaxpar.base.types import Arrays, OptState, Params, Shapes, Tree
from jaxpar.model.outer import ENDS
from jaxpar.model.stack import KIND
from jaxpar.partition.by_layer import Rows, kind_of, places_in_order
from jaxpar.sharding import PARAM_SHAPE, USER_NAMES, array_of, is_variable, user_names
from jaxpar.trace.jaxprs import function_of

RowsOf = Mapping[str, Rows]
Place = tuple[str, int]  # a layer: its kind, and its number among the layers of the kind
Places = Sequence[tuple[Place | None, int]]  # see `_places`

_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def per_layer(
    optimizer: optax.GradientTransformation, rows_of: RowsOf
) -> optax.GradientTransformation:
    """An optimizer of trees with stacks, which updates each layer as the given one updates its own arrays.

    State of single layers is in stacks too. Updates and state of empty rows are zeros. Stacks may be parts
    with fewer rows, as with `update="host"`. Then no row counts as empty; see `without_empty_rows`.

    Args:
      optimizer: any of optax, as of `given_loss`.
      rows_of: by kind, the layer in each row of its stack; -1 in empty rows.
    """
    rows_of = {kind: places_in_order(rows) for kind, rows in rows_of.items()}

    def init(params: Params) -> OptState:
        return _apply(optimizer.init, rows_of, (_own(params, rows_of), params))

    def update(
        updates: Params, state: OptState, params: Params = None, loss: Any = None
    ) -> tuple[Params, OptState]:
        own = _own(updates, rows_of)
        kept = jax.eval_shape(optimizer.init, own)
        trees = (own, updates), (kept, state), (_own(params, rows_of), params), (loss, loss)
        return _apply(optimizer.update, rows_of, *trees)

    return optax.GradientTransformation(init, update)


def without_empty_rows(params: Params, rows_of: RowsOf) -> Params:
    """Parameters with zeros in the empty rows of stacks, after an update of parts of them."""

    def clear(leaf: Any) -> Arrays:
        if (kind := kind_of(leaf)) is None:
            return leaf
        return leaf.replace(_cleared(leaf.get_value(), np.array(rows_of[kind]) >= 0))

    return jax.tree.map(clear, params, is_leaf=is_variable)


def _cleared(stack: jax.Array, is_full: np.ndarray) -> jax.Array:
    if is_full.all():
        return stack
    is_full = np.expand_dims(is_full, tuple(range(1, stack.ndim)))
    return jnp.where(is_full, stack, jnp.zeros_like(stack))


# ---- trees ----


@dataclasses.dataclass(frozen=True)
class _Key:
    """A step of a path that is not printed, with the key of the step before it."""

    key: str

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
class Own(tuple[Any, ...]):
    """The variables of single layers, in the place of their stack. It has the attributes of the first one.

    Where an optimizer masks some of them (`optax.MaskedNode`), its state has zeros in their rows.

    Attributes:
      names: of the kind of layer, and of the variable.
    """

    names: tuple[str, str]

    @classmethod
    def of(cls, names: tuple[str, str], variables: Any) -> "Own":
        """The variables of a kind under the name of one."""
        own = cls(variables)
        own.names = names
        return own

    def __getattr__(self, name: str) -> Arrays:
        return getattr(self[0], name)

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[str, str]]:
        """The variables, all with the same path: masks and labels look at it."""
        return [(_Key(self.names[1]), variable) for variable in self], self.names

    tree_unflatten = of


def _own(tree: Params, rows_of: RowsOf) -> Shapes:
    """The shapes of a tree, with each layer's own variables in the place of a stack."""

    def of(path: Any, leaf: Any) -> Arrays:
        kind = kind_of(leaf)
        if kind is None:
            return leaf
        stack = jax.typeof(leaf.get_value())
        shape = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, weak_type=stack.weak_type)
        if kind in ENDS:  # one layer, without a name of its own
            return leaf.replace(shape)
        return Own.of((kind, path[-1].key), [leaf.replace(shape)] * (1 + max(rows_of[kind])))

    return jax.tree.map_with_path(of, tree, is_leaf=is_variable)


def _is_node(node: Tree) -> bool:
    return isinstance(node, Own) or is_variable(node)


def _kind(node: Tree) -> str | None:
    """Of a node whose arrays are in a stack."""
    if isinstance(node, Own):
        return node.names[0]
    return kind if (kind := kind_of(node)) in ENDS else None


def _places(tree: Tree) -> Places:
    """For each array of a tree its layer, None for none, and its number in the tree with stacks."""
    found, start = list[tuple[Place | None, int]](), 0
    for node in jax.tree.leaves(tree, is_leaf=_is_node):
        parts = [*map(jax.tree.leaves, node)] if isinstance(node, Own) else [jax.tree.leaves(node)]
        for number, part in enumerate(parts):
            kind = _kind(node)
            layer = (kind, number) if kind else None
            found += [(layer, start + place) for place in range(len(part))]
        start += max(map(len, parts))
    return found


def _with_stacks(tree: Tree, arrays: Sequence[jax.Array], params: Params) -> Arrays:
    """A tree with these arrays in order, and in the place of `Own` stacks: variables of their kind.

    Args:
      params: with stacks, or parts of them; what has the shape of one is a variable of the same type.
    """
    left, variables = iter(arrays), jax.tree.leaves(params, is_leaf=is_variable)
    shapes = {(v.get_metadata(PARAM_SHAPE, v.shape), v.shape) for v in variables}

    def of(node: Tree) -> Arrays:
        own = (
            max(node, key=lambda own: len(jax.tree.leaves(own))) if isinstance(node, Own) else node
        )
        made, kind = jax.tree.map(lambda _: next(left), own), _kind(node)
        if kind is None:
            return made
        return jax.tree.map(functools.partial(named, kind), made, is_leaf=is_variable)

    def named(kind: str, stack: Any) -> nnx.Variable:
        array = array_of(stack)
        if not hasattr(array, "shape"):
            return stack  # such as a list, which is refused
        shape = array.shape
        if is_variable(stack) and (stack.get_metadata(PARAM_SHAPE, shape), shape) in shapes:
            return stack
        dims = (LAYERS, *[None] * (stack.ndim - 1))
        metadata: dict[str, Arrays] = {"out_sharding": dims, KIND: kind, "eager_sharding": False}
        if known := user_names(stack):
            metadata[USER_NAMES] = known
        return nnx.Variable(array, **metadata)

    return jax.tree.map(of, tree, is_leaf=_is_node)


# ---- programs ----


def _apply(function: Callable[..., Tree], rows_of: RowsOf, *trees: tuple[Shapes, Arrays]) -> Arrays:
    """The result of a function of each layer's own arrays, for trees with stacks.

    Args:
      trees: the arguments, as shapes of each layer's own arrays and as arrays with stacks.
    """
    shapes = [own for own, _ in trees]
    program, made = jax.make_jaxpr(function, return_shape=True)(*shapes)
    arrays, inputs, outputs = jax.tree.leaves([a for _, a in trees]), _places(shapes), _places(made)
    try:
        run = functools.partial(_on_stacks, program, rows_of, inputs, outputs)
        results = jaxpr_as_fun(jax.make_jaxpr(run)(*arrays))(*arrays)
    except _Mixed:
        results = _one_by_one(program, rows_of, inputs, outputs, *arrays)
    return _with_stacks(made, results, trees[0][1])


def _one_by_one(
    program: ClosedJaxpr, rows_of: RowsOf, inputs: Places, outputs: Places, *arrays: jax.Array
) -> list[jax.Array]:
    """The results of a program, in stacks, by running it on each layer's own arrays."""
    rows = {kind: list(places) for kind, places in rows_of.items()}
    given = [arrays[n] if at is None else arrays[n][rows[at[0]].index(at[1])] for at, n in inputs]
    made = collections.defaultdict[Any, dict[int, jax.Array]](dict)
    for (at, number), array in zip(outputs, jaxpr_as_fun(program)(*given), strict=True):
        made[at and at[0], number][at[1] if at else 0] = array

    def stack(kind: str | None, parts: dict[int, jax.Array]) -> jax.Array:
        first = next(iter(parts.values()))
        rows = rows_of[kind] if kind else ()
        return jnp.stack([parts.get(n, jnp.zeros_like(first)) for n in rows]) if kind else first

    return [stack(kind, parts) for (kind, _), parts in made.items()]


def _on_stacks(
    program: ClosedJaxpr, rows_of: RowsOf, inputs: Places, outputs: Places, *arrays: jax.Array
) -> list[jax.Array]:
    """The same, by running the part for the first layer of each kind on stacks.

    Raises:
      _Mixed: the results would differ.
    """
    for places in (inputs, outputs):
        count = collections.Counter((at[0], number) for at, number in places if at is not None)
        if any(found != 1 + max(rows_of[kind]) for (kind, _), found in count.items()):
            raise _Mixed  # some layers are masked
    sizes = {at[0]: len(arrays[number]) for at, number in inputs if at is not None}
    run = _Interpreter(rows_of, sizes)
    given = [
        _Value(run.key("input", number), at, None if at is not None and at[1] else arrays[number])
        for at, number in inputs
    ]
    results = dict[int, _Value]()
    for (at, number), value in zip(outputs, run.program(program, given), strict=True):
        if value.is_part or value.layer not in (None, at):
            raise _Mixed
        stack = run.rows(value, at, clear=True)
        if value.key != results.setdefault(number, value._replace(data=stack)).key:
            raise _Mixed
    return [value.data for value in results.values()]


class _Mixed(Exception):  # noqa: N818 - it stays in this module
    """A program treats layers differently, or combines their arrays in another way than by a sum."""


class _Value(NamedTuple):
    """The value of a variable in a program.

    Attributes:
      key: equal for values that are computed in the same way, also from different layers.
      layer: the only layer that it is computed from, or None.
      data: an array. For the first layer of a kind it is the stack of all layers; for others it is None.
      terms: the values that a sum of scalars adds.
    """

    key: int
    layer: Place | None
    data: Any
    terms: "tuple[_Value, ...]" = ()

    @property
    def is_part(self) -> bool:
        """Whether it is a sum over some layers of a kind, but not over all."""
        return self.layer is None and self.data is None


class _Interpreter:
    """Runs programs on values of layers.

    Args:
      rows_of: as of `per_layer`.
      sizes: by kind, the number of rows that its stacks have.
    """

    def __init__(self, rows_of: RowsOf, sizes: Mapping[str, int]):
        self._keys = dict[Any, int]()
        self._counts = {kind: 1 + max(rows) for kind, rows in rows_of.items()}
        self._full = {
            kind: np.array(rows_of[kind] if size == len(rows_of[kind]) else range(size)) >= 0
            for kind, size in sizes.items()
        }

    def key(self, *parts: Params) -> int:
        """A number that is equal for equal parts."""
        return self._keys.setdefault(parts, len(self._keys))

    def rows(self, value: _Value, layer: Place | None, *, clear: bool = False) -> Arrays:
        """The data of a value as data of a layer; with `clear`, empty rows are zeros."""
        stack = value.data
        if layer is None:
            return stack
        if layer[1]:
            return None
        full = self._full[layer[0]]
        if value.layer is None:
            stack = jnp.broadcast_to(stack, (len(full), *stack.shape))
        return _cleared(stack, full) if clear else stack

    def program(self, program: ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """The results of a program."""
        jaxpr = program.jaxpr
        constants = [_Value(self.key("constant", id(c)), None, c) for c in program.consts]
        known = zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True)
        values = dict[Any, _Value](known)

        def read(atom: Any) -> _Value:
            if not isinstance(atom, Literal):
                return values[atom]
            number = np.asarray(atom.val)
            return _Value(self.key("number", number.dtype, number.tobytes()), None, atom.val)

        for eqn in jaxpr.eqns:
            made = self._run(jaxpr, eqn, [*map(read, eqn.invars)])
            values.update(zip(eqn.outvars, made, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _run(self, jaxpr: Jaxpr, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        """The results of an equation."""
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self.program(params.get("jaxpr", params.get("call_jaxpr")), inputs)
        layer, *others = _layers(inputs) or [None]
        is_sum, has_part = (
            name == "add" and not eqn.outvars[0].aval.shape,
            any(v.is_part for v in inputs),
        )
        terms = tuple(term for v in inputs for term in v.terms or [v]) if is_sum else ()
        if is_sum and (others or has_part or (layer and self._counts.get(layer[0]) == 1)):
            return [self._sum(terms)]
        if has_part:
            raise _Mixed
        if name == "cond" and inputs[0].layer is None:
            return self._cond(eqn, inputs)
        if others or (layer and eqn.effects):
            raise _Mixed
        key = self.key(
            eqn.primitive, self._described(list(params.values())), *(v.key for v in inputs)
        )
        is_left_out = layer is not None and layer[1] > 0
        made = [None] * len(eqn.outvars) if is_left_out else _computed(jaxpr, eqn, inputs)
        return [_Value(self.key(key, n), layer, data, terms) for n, data in enumerate(made)]

    def _described(self, part: Any) -> Arrays:
        """Parameters of an equation as something hashable, equal for equal programs."""
        if isinstance(part, ClosedJaxpr):
            inputs = range(len(part.jaxpr.invars))
            given = [_Value(self.key("argument", n), ("", 1), None) for n in inputs]
            return tuple(v.key for v in self.program(part, given))
        if isinstance(part, tuple | list):
            return tuple(map(self._described, part))
        return part if isinstance(part, Hashable) else id(part)

    def _sum(self, terms: tuple[_Value, ...]) -> _Value:
        """A sum of scalars of layers. It is of no layer if each part has all layers of its kind."""
        key = self.key("sum", *((v.key, v.layer) for v in terms))
        count = collections.Counter((v.key, v.layer) for v in terms if v.layer is not None)
        for (part, (kind, _)), times in count.items():
            if any(count[part, (kind, n)] != times for n in range(self._counts[kind])):
                return _Value(key, None, None, terms)
        given = [(v.layer, self.rows(v, v.layer, clear=True)) for v in terms]
        data = [a if at is None else jnp.sum(a, dtype=a.dtype) for at, a in given if a is not None]
        return _Value(key, None, functools.reduce(operator.add, data))

    def _cond(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        """The results of a choice that is the same for all layers."""
        index, *operands = inputs
        results, layers = list[list[_Value]](), list[Place | None]()

        def branch(program: ClosedJaxpr, data: list[Any]) -> list[Arrays]:
            given = [v._replace(data=a) for v, a in zip(operands, data, strict=True)]
            results.append(self.program(program, given))
            return [*map(self.rows, results[-1], layers)]

        data = [v.data for v in operands]
        branches = [functools.partial(branch, program) for program in eqn.params["branches"]]
        for each in branches:  # to see which layers the results are of
            jax.eval_shape(each, data)
        alike = [*zip(*results, strict=True)]
        for values in alike:
            layer, *others = _layers(values) or [None]
            if others or any(v.is_part for v in values):
                raise _Mixed
            layers.append(layer)
        made = jax.lax.switch(index.data, branches, data)
        keys = [self.key("cond", index.key, *(v.key for v in values)) for values in alike]
        return [*map(_Value, keys, layers, made)]


def _layers(values: Iterable[_Value]) -> set[Place]:
    return {v.layer for v in values if v.layer is not None}


def _computed(jaxpr: Jaxpr, eqn: Any, inputs: Sequence[_Value]) -> list[Arrays]:
    """The data of the results of an equation."""
    given = {v: x for v, x in zip(eqn.invars, inputs, strict=True) if isinstance(v, Var)}
    run = function_of(jaxpr, [*given], [eqn], eqn.outvars)
    if _layers(inputs):
        run = jax.vmap(run, [None if x.layer is None else 0 for x in given.values()])
    return run(*(x.data for x in given.values()))
