"""Flax modules with random streams and plain arrays, in the layer form: each row has keys of its own.

`nnx.Dropout` and others have a random stream, whose key and count are variables that a call changes. Here
such streams have no variables. A layer or a model that has one is traced with keys as inputs. What it draws,
such as a mask, is then drawn for each row, and for each time step where blocks are [time, rows, ...]. Its key
is of the seed, the step, the layer, the time step, the row and the number of the stream. In evaluation,
modules are as after `eval()`.

Plain arrays of a module are no variables for Flax. Here they are, so that they are stored, stacked and laid
out as others that are not trained.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from jaxpar.base.at import LayerContext, anywhere
from jaxpar.base.keys import new_key
from jaxpar.base.trees import has_time, timed_leaves
from jaxpar.base.types import Arrays, Index, Leaves, Module, Tree
from jaxpar.model.model import overrides
from jaxpar.trace import varying
from jaxpar.trace.counts import used_inputs
from jaxpar.trace.draws import draws_apart
from jaxpar.trace.jaxprs import pruned

_KEYS: contextvars.ContextVar[Leaves | None] = contextvars.ContextVar("_KEYS", default=None)
_TRACED = "layer", "time", "row", "key", "batch"  # what a context has of arrays
STREAMS = 2**29  # added to the number of a stream, so that no other draw has the same key


class RowStream(nnx.RngStream):
    """A stream without variables: its keys are those of the rows that are computed.

    Attributes:
      number: of the stream in its layer.
    """

    def __init__(self, number: int, tag: str):
        self.number, self.tag = number, tag

    def __call__(self) -> jax.Array:
        """The next key."""
        keys = _KEYS.get()
        assert keys is not None
        keys[self.number], key = jax.random.split(keys[self.number])
        return key


class Constant(nnx.Variable[jax.Array]):
    """An array that a module has as it is: a variable for jaxpar, and in the module's methods the array."""


def as_run(module: Module, methods: Iterable[str]) -> Module:
    """A module as jaxpar runs it: its random streams are those of rows, its plain arrays are variables.

    Args:
      methods: in which it has arrays; those but `initial_carry` take a `LayerContext` as their last argument.
    """
    streams, has_constants = dict[int, RowStream](), False
    for _, node in [*nnx.iter_graph(module)]:
        for name, value in [*vars(node).items()] if isinstance(node, nnx.Pytree) else ():
            if isinstance(value, nnx.RngStream) and not isinstance(value, RowStream):
                stream = streams.setdefault(id(value), RowStream(len(streams), value.tag))
                setattr(node, name, stream)
            elif isinstance(value, jax.Array | np.ndarray):
                setattr(node, name, nnx.data(Constant(jnp.asarray(value))))
                has_constants = True
    if streams:
        module.num_streams = len(streams)
    if streams or has_constants:
        own = tuple(name for name in methods if overrides(module, name))
        module.__class__ = _as_run(type(module), own)
    return module


@contextlib.contextmanager
def _with_arrays(module: Module) -> Iterator[None]:
    """The module has arrays in the place of its constants."""
    nodes = [vars(node) for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    own = [(node, [*node.items()]) for node in nodes]
    found = [
        (node, *item) for node, items in own for item in items if isinstance(item[1], Constant)
    ]
    for node, name, variable in found:
        node[name] = variable.get_value()
    try:
        yield
    finally:
        for node, name, variable in found:
            node[name] = variable


@functools.cache
def _as_run(of: type, methods: tuple[str, ...]) -> type:
    def method(name: str):
        @functools.wraps(getattr(of, name))
        def run(self: Module, *args: Tree) -> Tree:
            with _with_arrays(self):
                if name == "initial_carry" or not hasattr(self, "num_streams"):
                    return getattr(of, name)(self, *args)
                *given, at = args
                if at.key is None:
                    self.eval()
                return _with_draws(self, name, given, at)

        return run

    return type(of.__name__, (of,), {name: method(name) for name in methods})


def _with_draws(module: Module, name: str, given: list[Tree], at: LayerContext) -> Tree:
    """Calls a method of a module with keys for each row.

    Raises:
      ValueError: it draws in evaluation; or in a loop.
    """
    graphdef, state = nnx.split(module)
    of = type(module).__mro__[1]  # without these keys
    context = [getattr(at, field) for field in _TRACED]
    leaves, tree = jax.tree.flatten((state, given, context))
    # Variables that a part of a model does not read are there as shapes.
    is_shape = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    arrays = [jnp.asarray(a) for a, fixed in zip(leaves, is_shape, strict=True) if not fixed]

    def run(keys: Leaves, arrays: Leaves, at: LayerContext = at) -> Tree:
        rest = iter(arrays)
        values = [a if fixed else next(rest) for a, fixed in zip(leaves, is_shape, strict=True)]
        state, given, context = jax.tree.unflatten(tree, values)
        token = _KEYS.set([*keys])
        try:
            at = at._replace(**dict(zip(_TRACED, context, strict=True)))
            return getattr(of, name)(nnx.merge(graphdef, state), *given, at)
        finally:
            _KEYS.reset(token)

    time_and_row = (at.time, at.row) if at.time_major else (at.row,)
    dims = len(time_and_row)

    def keys_of(*places: Index) -> Leaves:
        key = new_key(0) if at.key is None else at.key  # which is not used in evaluation
        key = functools.reduce(jax.random.fold_in, (at.layer, *places), key)
        return [jax.random.fold_in(key, STREAMS + n) for n in range(module.num_streams)]

    keys = keys_of(*time_and_row)
    whole, out = jax.make_jaxpr(run, return_shape=True)(keys, arrays)
    needed = pruned(jaxpr_as_fun(whole), *keys, *arrays)
    uses_keys = any(used_inputs(needed, *keys, *arrays)[: len(keys)])
    if not uses_keys:  # as of `nnx.RNN`: its state is zeros
        return run(keys, arrays)
    if at.key is None:
        raise ValueError(
            f"{of.__name__}.{name} draws random numbers in evaluation.\n"
            f"Fix: draw only in training, as nnx.Dropout does by its attribute deterministic."
        )
    carries = [1 if (name, n) == ("__call__", 0) else dims for n in range(len(given))]
    one = state, [_one(a, count) for a, count in zip(given, carries, strict=True)]
    one = jax.tree.leaves((*one, [_one(each, dims) for each in context]))
    one = [a for a, fixed in zip(one, is_shape, strict=True) if not fixed]
    of_one = functools.partial(run, at=at._replace(layout=anywhere))
    block = given[-1] if name == "__call__" else at.batch  # x of a layer, or the batch
    shapes = [jnp.shape(a) for a, timed in timed_leaves(block) if timed or not at.time_major]
    sizes = max(shapes, key=len, default=())[:dims]
    single = jax.make_jaxpr(of_one)(keys, one)
    drawn = draws_apart(whole, single, range(len(keys)), sizes, lambda eqn: False)
    if drawn is None:
        first = "time steps and rows" if at.time_major else "rows"
        raise ValueError(
            f"{of.__name__}.{name} draws random numbers in a loop, or in a shape without {first} first.\n"
            f"Fix: draw by at.draw(jax.random.normal, x.shape), or use nnx.Dropout outside of loops."
        )
    values = varying.run(drawn.rest, [*keys, *arrays, *drawn.values(keys_of, time_and_row)])
    return jax.tree.unflatten(jax.tree.structure(out), values)


def _one(tree: Arrays, dims: int) -> Arrays:
    """Shapes of arrays for one row, or one time step of one row."""

    def of(a: jax.Array, timed: bool) -> jax.ShapeDtypeStruct:
        shape = jnp.shape(a)
        count = dims if timed else min(len(shape), 1)
        return jax.ShapeDtypeStruct((*[1] * count, *shape[count:]), jnp.result_type(a))

    return jax.tree.map(of, tree, has_time(tree))
