"""A stack of layers: those of one kind share stacked parameters, in the slots that a placement gives them."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH, LAYERS
from jaxpar.base.checks import check_takes, require, require_instance
from jaxpar.base.keys import is_key, same_under_vmap
from jaxpar.base.types import Activations, Arrays, Carry, Function, Module, Shapes, Tree
from jaxpar.model.model import Sums, check_variables, run_layer
from jaxpar.model.row_streams import as_run
from jaxpar.model.tracing import Maker, made, module_of, types_in
from jaxpar.pipeline.placement import Slots, make_slots
from jaxpar.sharding import is_variable
from jaxpar.trace.counts import FACTORIZATIONS
from jaxpar.trace.jaxprs import equations_in

KIND = "kind"  # metadata of a stacked variable: the kind of layer that it is of
NO_SLOTS = Slots((), (), (), (), ())


class Stack(nnx.Module):
    """Layers in sequence. Layers of equal structure store their parameters in one stack.

    Each *kind* of layer is stored under the name of its class in lower case (or its attribute `kind_name`),
    as a module whose variables have a leading dim `layers`: `stack.gru.w_x` is [layers, ...].

    Attributes:
      kinds: their names, in the order in which they first occur.
      kind_of: the number of each layer's kind.
      slots: where each layer lies; see `place`.

    Example:
      stack = jaxpar.Stack([lambda rngs: jaxpar.nn.GRU(16, rngs=rngs)] * 8, rngs=rngs)
      print(stack.gru.w_x.shape)  # (8, 16, 3, 16)
    """

    def __init__(self, makers: Sequence[Maker], *, rngs: nnx.Rngs, unroll: int = 4):
        """Draws the layers, each from a key of its own.

        Args:
          makers: a function for every layer, such as `[lambda rngs: GRU(64, rngs=rngs)] * 8`. Layers of one
            function are drawn at once, however many they are.
          unroll: without stages, this many layers of a kind or fewer are unrolled, which is some percent
            faster and takes some memory; more are a loop over one.
        Raises:
          ValueError: the makers make no layers, or a layer has variables that its calls would change.
        """
        use = "a list of functions that make a layer, such as [lambda rngs: GRU(64, rngs=rngs)] * 8"
        require_instance("makers", makers, Sequence, use)
        for maker in makers:
            if isinstance(maker, nnx.Module):
                name = type(maker).__name__
                raise ValueError(
                    f"makers of a Stack: a {name} is a layer already.\n"
                    f"Fix: give functions, such as [lambda rngs: {name}(..., rngs=rngs)] * 8."
                )
            require_instance("a maker of a Stack", maker, Callable, use)
            check_takes(maker, ("rngs",), "a maker of a Stack", f"use {use}")
        require_instance("rngs", rngs, nnx.Rngs, "nnx.Rngs(seed)")
        makers = _makers_as_run(makers)
        self._source, self.unroll = _Source(makers, same_under_vmap(rngs.params())), unroll
        structures = [self._source.looks[id(maker)].structure for maker in makers]
        kinds = [kind for n, kind in enumerate(structures) if kind not in structures[:n]]
        self.kind_of = tuple(map(kinds.index, structures))
        self.kinds, self.slots = (), NO_SLOTS  # names that are taken
        names = [kind.name for kind in kinds]
        self.kinds = tuple(
            f"{name}{names[:number].count(name)}"
            if names.count(name) > 1 or hasattr(self, name)  # as for a class called Layer
            else name
            for number, name in enumerate(names)
        )
        self.slots = make_slots((len(makers),), kind_of=self.kind_of) if makers else NO_SLOTS
        self._draw()

    def __len__(self) -> int:
        return len(self.kind_of)

    def maker(self, number: int) -> Maker:
        """The function that makes a layer; until the stack is placed."""
        assert self._source is not None
        return self._source.makers[number]

    def place(self, slots: Slots) -> None:
        """Draws the layers again, now in these slots; each has the same values as before.

        Call it once, in the function that made the stack: under `jax.jit` the earlier values cost nothing.
        """
        numbers = range(len(self.kinds))
        own = [[layer for layer, kind in enumerate(self.kind_of) if kind == n] for n in numbers]
        assert own == [sorted(layer for layer in rows if layer >= 0) for rows in slots.rows]
        self.slots = slots
        self._draw()
        self._source = None

    def initial_carry(self, rows: int) -> dict[str, Carry]:
        """The initial state of all layers: by kind, variables [rows of the stack, rows, ...]."""
        return {
            name: _initial_carry(getattr(self, name), name, num_rows, rows)
            for name, num_rows in zip(self.kinds, map(len, self.slots.rows), strict=True)
        }

    def layer(self, number: int) -> Module:
        """One layer by its number, as an ordinary module with these values."""
        kind = self.kind_of[number]
        graphdef, state = nnx.split(getattr(self, self.kinds[kind]))
        row = self.slots.rows[kind].index(number)
        return nnx.merge(graphdef, jax.tree.map(lambda a: a[row], state))

    def __call__(
        self, carry: dict[str, Carry], x: Activations, at: LayerContext
    ) -> tuple[Any, ...]:
        """All layers, one after the other, in plain Python: what a step must be equal to.

        Args:
          carry: as `initial_carry` gives it.
        Returns:
          as a layer: the carry, y, and a `Sums` if any of the layers adds to the loss.
        """
        carry, total = dict(carry), []
        for number, kind in enumerate(self.kind_of):
            name, row = self.kinds[kind], self.slots.rows[kind].index(number)
            before = jax.tree.map(lambda a, row=row: a[row], values(carry[name]))
            at = at._replace(layer=number)
            after, x, *sums = run_layer(name, self.layer(number), before, x, at)
            total += sums
            carry[name] = jax.tree.map(
                lambda v, a, row=row: v.replace(v[...].at[row].set(a)),
                carry[name],
                after,
                is_leaf=is_variable,
            )
        return carry, x, *([functools.reduce(_both, total)] if total else [])

    def _draw(self) -> None:
        for kind, name in enumerate(self.kinds):
            setattr(self, name, self.draw_kind(kind, self.slots.rows[kind]))

    def draw_kind(self, kind: int, rows: Sequence[int]) -> Module:
        """The layers of a kind with these numbers in the rows of a stack, until the stack is placed.

        Args:
          rows: -1 is a row of zeros; one is another number.
        """
        source, name = self._source, self.kinds[kind]
        assert source is not None, "a stack is placed once"
        makers = {id(source.makers[layer]): source.makers[layer] for layer in rows if layer >= 0}
        graphdef: Any = None
        stacked: Arrays = None
        for maker in makers.values():
            mine = [layer >= 0 and source.makers[layer] is maker for layer in rows]

            def draw(layer, is_mine, maker=maker):
                nonlocal graphdef
                key = jax.random.fold_in(source.key, layer)
                graphdef, state = nnx.split(made(maker, key))
                return jax.tree.map(lambda a: jnp.where(is_mine, a, jnp.zeros_like(a)), state)

            ids = jnp.asarray([max(layer, 0) for layer in rows], jnp.int32)
            every = _one_by_one if source.looks[id(maker)].factorizes else jax.vmap
            drawn = every(draw)(ids, jnp.asarray(mine))
            stacked = drawn if stacked is None else jax.tree.map(jnp.add, stacked, drawn)

        def annotate(variable):
            dims = variable.get_metadata("out_sharding", None) or (None,) * (variable.ndim - 1)
            metadata = {"out_sharding": (LAYERS, *dims), KIND: name, "eager_sharding": False}
            return type(variable)(variable[...], **{**variable.get_metadata(), **metadata})

        state = jax.tree.map(annotate, stacked, is_leaf=is_variable)
        return nnx.merge(graphdef, state)


def _both(sums: Sums, others: Sums) -> Sums:
    """Sums that are added up, by name."""
    names = {**sums.metrics, **others.metrics}
    return jax.tree.map(jnp.add, sums.with_names(names), others.with_names(names))


def values(tree: Tree) -> Arrays:
    """A tree of variables as one of arrays."""
    return jax.tree.map(lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable)


def wrap_like(tree: Tree, like: Tree) -> Tree:
    """A tree of arrays as one of variables, with the metadata of another."""
    return jax.tree.map(lambda old, value: old.replace(value), like, tree, is_leaf=is_variable)


def _makers_as_run(makers: Sequence[Maker]) -> tuple[Maker, ...]:
    """The makers, of layers as `as_run` gives them."""

    def of(make: Maker) -> Maker:
        return lambda rngs: as_run(make(rngs), ("__call__", "initial_carry"))

    own = {id(make): of(make) for make in makers}
    return tuple(own[id(make)] for make in makers)


class NoPart:
    """An attribute of a stack that is no part of what the stack is: all of a class are equal."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return 0


class _Source(NoPart):
    """How to draw the layers again, in other slots."""

    def __init__(self, makers: Sequence[Maker], key: jax.Array):
        self.makers, self.key = makers, key
        self.looks = {id(maker): _look_at(maker) for maker in {id(m): m for m in makers}.values()}


class _Kind(NamedTuple):
    """What tells a kind of layer from the others.

    Attributes:
      types: of its numbers: in a graphdef 1 is equal to 1.0 and to True.
    """

    name: str
    graphdef: Any
    shapes: Shapes
    types: Hashable


class _Look(NamedTuple):
    """What a maker makes.

    Attributes:
      factorizes: whether LAPACK draws the layer: an orthogonal kernel is the Q of a QR decomposition.
    """

    structure: _Kind
    factorizes: bool


def _look_at(make: Maker) -> _Look:
    """Traces it, twice; nothing is drawn."""
    before = dict[str, Any]()

    def layer(key: jax.Array) -> Module:
        module, use = made(make, key), "an nnx.Module; return it from the function"
        require_instance("what a maker of a Stack returns", module, nnx.Module, use)
        own = {".".join(map(str, path)): v for path, v in nnx.iter_graph(module) if is_variable(v)}
        for name, variable in own.items():
            require(
                before.get(name) is not variable,
                f"a maker of a Stack gives {type(module).__name__}s that share {name}, but each layer may "
                f"run on another device.\nFix: make it in the function, or call it many times in one layer.",
            )
        before.update(own)
        return module

    module, program = module_of("layer", layer)
    names = {eqn.primitive.name for eqn in equations_in(program.jaxpr)}
    return _Look(_structure(module), any(n.startswith(FACTORIZATIONS) for n in names))


def _structure(module: Module) -> _Kind:
    graphdef, state = nnx.split(module)
    name = getattr(module, "kind_name", None) or type(module).__name__
    check_variables(f"layer {name}", state)
    for path, leaf in nnx.to_flat_state(state):
        require(
            not is_key(leaf),
            f"layer {name} has {'.'.join(map(str, path))}, a random key, the same in every step.\n"
            f"Fix: draw from at.key, or make the key in the call: jax.random.key(0).",
        )
    size = getattr(module, "rows_together", None)
    require(
        size is None or (isinstance(size, int) and size > 0),
        f"layer {name} has rows_together={size!r}.\nFix: use a positive number of rows, or None.",
    )
    use = "write __call__(self, carry, x, at), or wrap it: jaxpar.nn.Stateless(module), .Recurrent(cell)"
    check_takes(module, ("carry", "x", "at"), f"layer {name}", use)
    shapes = tuple((tuple(a.shape), np.dtype(a.dtype).name) for a in jax.tree.leaves(state))
    return _Kind(name.lower(), graphdef, shapes, types_in(graphdef))


def _one_by_one(function: Function) -> Function:
    """As `jax.vmap(function)`, without batches: on CPU, LAPACK's share the threads that wait for them.

    With as many devices as threads, all of them may wait forever (jaxlib 0.10.1).
    """
    return lambda *args: jax.lax.map(lambda rows: function(*rows), args)


def check_rows_of_carry(kind: str, carry: Carry, rows: int) -> None:
    """Raises a ValueError if an array of `initial_carry(rows)` of a kind of layers has not so many rows."""
    for path, leaf in jax.tree.leaves_with_path(carry):
        require(
            leaf.shape[:1] == (rows,),
            f"layer {kind}: its initial_carry({rows}){jax.tree_util.keystr(path)} has the shape "
            f"{list(leaf.shape)}.\nFix: give [rows, ...], with as many rows as it is asked for.",
        )


def _initial_carry(layer: Module, kind: str, num_rows: int, rows: int) -> Carry:
    """Of one kind: variables [num_rows, rows, ...]; an empty tuple if its layers have no state."""
    if not hasattr(layer, "initial_carry"):
        return ()
    graphdef, state = nnx.split(layer)

    def initial(state):  # of one layer: what it reads of itself has no dim of rows of the stack
        carry = nnx.merge(graphdef, state).initial_carry(rows)
        check_rows_of_carry(kind, carry, rows)
        return carry

    carry = jax.vmap(initial, axis_size=num_rows)(state)
    dims = getattr(layer, "carry_dims", None)
    if dims is None:
        dims = jax.tree.map(lambda a: (BATCH, *[None] * (a.ndim - 2)), carry)

    def annotate(stacked, dims):
        shape = stacked.shape[1:]
        require(
            len(dims) == len(shape),
            f"layer {kind}: initial_carry({rows}) has an array of shape {shape} and dims {dims}.\n"
            f"Fix: give each dim a name, or None.",
        )
        metadata = {"out_sharding": (LAYERS, *dims), KIND: kind, "eager_sharding": False}
        return nnx.Variable(stacked, **metadata)

    return jax.tree.map(annotate, carry, dims)
