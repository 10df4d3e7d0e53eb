"""Marks in a traced model: the call of a block is one equation, as is that of an embedding or a linear layer.

A module is marked by a class of the same name, derived from its own. So paths, attributes and `isinstance`
are as before. When a method is called from outside of any block, it is traced apart, and becomes an equation
that has its program in it. Outside of `tracing`, a marked module does what it always did.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.tracers import TraceState
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpar.base.checks import require
from jaxpar.base.display import format_names
from jaxpar.base.trees import shape_of, zeros
from jaxpar.base.types import Leaves, Module, Shapes, Tree, Value
from jaxpar.model.tracing import types_in
from jaxpar.sharding import array_of, named_leaves
from jaxpar.trace.described import exact
from jaxpar.trace.jaxprs import equations_in, inlined, is_call, programs_in
from jaxpar.trace.mistakes import check_no_refs
from jaxpar.trace.source_lines import source_line_here
from jaxpar.trace.surprises import tell_of_model

Changes = dict[str, jax.Array]

_log = logging.getLogger(__name__)

block_p, outer_p = Primitive("block"), Primitive("outer_module")
for _primitive in (block_p, outer_p):
    _primitive.multiple_results = True


@block_p.def_abstract_eval
def _block_types(*avals, number, jaxpr, num_carries):
    return [v.aval for v in jaxpr.outvars]


@outer_p.def_abstract_eval
def _outer_types(*avals, name, call, jaxpr):
    return [v.aval for v in jaxpr.outvars]


def _batch_block(operands, dims, *, jaxpr, **params):
    """A block under `jax.vmap` is one block."""
    run = jax.vmap(jaxpr_as_fun(ClosedJaxpr(jaxpr, ())), dims)
    closed = jax.make_jaxpr(run)(*operands)
    outs = block_p.bind(*closed.consts, *operands, jaxpr=as_equation(closed), **params)
    return outs, [0] * len(outs)


def _batch_outer(operands, dims, *, jaxpr, **_):
    outs = jax.vmap(jaxpr_as_fun(ClosedJaxpr(jaxpr, ())), dims)(*operands)
    return outs, [0] * len(outs)


def _refuse_derivative(*_, **__):
    raise ValueError(
        f"the loss takes a derivative of the model ({source_line_here()}), whose blocks may be on several "
        f"devices.\nFix: leave jax.grad, jax.vjp and jax.jvp of blocks out of the loss."
    )


batching.primitive_batchers[block_p] = _batch_block
batching.primitive_batchers[outer_p] = _batch_outer
ad.primitive_jvps[block_p] = ad.primitive_jvps[outer_p] = _refuse_derivative


@dataclasses.dataclass
class BlockTrace:
    """A block while it is traced.

    Attributes:
      given: the carries that it is given; `starts` those that it begins with, `after` those after it.
      level: JAX's trace of it; within another, such as that of `nnx.remat`, carries would not come out.
    """

    given: Iterator[jax.Array]
    starts: Leaves
    after: Leaves
    level: TraceState


@dataclasses.dataclass
class Tracing:
    """What is collected while a model is traced.

    Attributes:
      programs: of the calls of blocks so far, by what they depend on. (A graphdef may have no hash.)
      block: the block that is traced now.
      output: what the model's own call returned last.
    """

    programs: list[tuple[tuple[Value, ...], tuple[Value, ...]]]
    block: BlockTrace | None = None
    output: Tree = None


TRACING: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("TRACING", default=None)


@contextlib.contextmanager
def tracing() -> Iterator[Tracing]:
    """While it lasts, calls of marked modules become equations."""
    found = Tracing([])
    token = TRACING.set(found)
    try:
        yield found
    finally:
        TRACING.reset(token)


def has_marks(eqn: JaxprEqn, of: Sequence[Primitive]) -> bool:
    """Whether one of these primitives is in the program of an equation."""
    return any(e.primitive in of for part in programs_in(eqn) for e in equations_in(part))


def is_block(eqn: JaxprEqn) -> bool:
    """Whether an equation is the call of a block."""
    return eqn.primitive is block_p


# ---- modules are marked ----


def mark_block(block: Module, number: int) -> None:
    """Marks a block: each of its public methods is the call of a block."""
    block.block_number = number
    names = {
        name
        for of in type(block).__mro__[: type(block).__mro__.index(nnx.Module)]
        for name, value in vars(of).items()
        if callable(value) and not isinstance(value, type) and name[0] != "_"
    }
    block.__class__ = _marked(type(block), _call_block, (*sorted(names), "__call__"))


def mark_outer(module: Module, name: str) -> None:
    """Marks a module outside of the blocks, of which each device may have a part."""
    module.outer_name = name
    module.__class__ = _marked(type(module), _call_outer, ("__call__",))


def mark_model(model: Module) -> None:
    """Marks the model itself: what its call returns is noted."""
    model.__class__ = _marked(type(model), _call_model, ("__call__",) if callable(model) else ())


@functools.cache
def _marked(of: type, run: Callable[..., Tree], names: tuple[str, ...]) -> type:
    def marked(name: str) -> Callable[..., Tree]:
        method = getattr(of, name)

        @functools.wraps(method)
        def call(self: Module, *args: Tree, **options: Tree) -> Tree:
            state = TRACING.get()
            if state is None or state.block is not None:
                return method(self, *args, **options)
            return run(state, self, method, args, options)

        return call

    is_pytree = getattr(of, "_pytree__is_pytree", True)  # `class Own(nnx.Module, pytree=False)`
    methods = {name: marked(name) for name in names}
    return type(of.__name__, (of,), methods, pytree=is_pytree)


def _call_model(
    state: Tracing, model: Module, method: Callable[..., Tree], args: Tree, options: Tree
) -> Tree:
    state.output = method(model, *args, **options)
    return state.output


def _call_outer(
    state: Tracing, module: Module, method: Callable[..., Tree], args: Tree, options: Tree
) -> Tree:
    call, arrays = Call.of(args, options)
    graphdef, own = nnx.split(module)
    leaves, structure = jax.tree.flatten(own)

    def run(leaves: Leaves, arrays: Leaves) -> Tree:
        merged = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
        return call(functools.partial(method, merged), arrays)

    closed = jax.make_jaxpr(run)(leaves, arrays)
    operands = *closed.consts, *leaves, *arrays
    given = {"name": module.outer_name, "call": call, "jaxpr": as_equation(closed)}
    [out] = outer_p.bind(*operands, **given)
    return out


def _call_block(
    state: Tracing, block: Module, method: Callable[..., Tree], args: Tree, options: Tree
) -> Tree:
    number, (call, arrays) = block.block_number, Call.of(args, options)
    _check_arguments(number, (args, options))
    vars(block)["block_number"] = -1  # blocks that are otherwise equal have one program
    graphdef, own_state = nnx.split(block)
    vars(block)["block_number"] = number
    own, structure = jax.tree.flatten(own_state)
    starts: list[Shapes] = []

    def run(own: Leaves, arrays: Leaves, carries: Leaves) -> tuple[tuple[Tree, Leaves], Changes]:
        merged = nnx.merge(graphdef, jax.tree.unflatten(structure, own))
        state.block = found = BlockTrace(iter(carries), [], [], TraceState())
        try:
            out = call(functools.partial(method, merged), arrays)
        finally:
            state.block = None
        starts[:] = [shape_of(a) for a in found.starts]
        return (out, found.after), changes(own, nnx.state(merged))

    shapes = [[shape_of(a) for a in each] for each in (own, arrays)]
    types = exact(call.leaves), types_in(graphdef)
    key = method, call, structure, graphdef, types, str(shapes)
    known = next((found for other, found in state.programs if other == key), None)
    if known is None:
        jax.eval_shape(functools.partial(run, carries=[]), *shapes)
        carries = [*starts]
        closed, ((out, _), changed) = jax.make_jaxpr(run, return_shape=True)(*shapes, carries)
        closed = without_changes(f"block {number}", closed, changed)
        closed = inlined(closed)
        num_fixed = len(closed.consts) + len(own) + len(arrays)
        keep = [False] * num_fixed + [True] * len(carries)
        jaxpr = as_equation(closed)
        jaxpr, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), keep)
        known = jaxpr, used, closed.consts, out, carries
        state.programs.append((key, known))
    jaxpr, used, consts, out, carries = known
    operands = [*consts, *own, *arrays, *zeros(carries)]
    operands = [a for a, is_used in zip(operands, used, strict=True) if is_used]
    found = block_p.bind(*operands, number=number, jaxpr=jaxpr, num_carries=len(carries))
    leaves, tree = jax.tree.flatten(out)
    return jax.tree.unflatten(tree, found[: len(leaves)])


def _check_arguments(number: int, given: Tree) -> None:
    kinds = nnx.Rngs | nnx.RngStream
    for node in jax.tree.leaves(given, is_leaf=lambda a: isinstance(a, kinds)):
        if isinstance(node, kinds):
            raise ValueError(
                f"block {number} receives an {type(node).__name__} ({source_line_here()}).\n"
                f"Fix: give each block its own, such as nnx.Dropout(rate, rngs=rngs) where the block is made."
            )


@dataclasses.dataclass(frozen=True)
class Call:
    """What a function is called with but for its arrays.

    Attributes:
      leaves: of the arguments and the options; None in the places of arrays.
    """

    leaves: tuple[Value, ...]
    places: tuple[int, ...]
    tree: Any

    @classmethod
    def of(cls, args: Tree, options: Tree) -> tuple["Call", Leaves]:
        """The call, and its arrays."""
        leaves, tree = jax.tree.flatten((args, options))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        places = tuple(n for n, is_one in enumerate(is_array) if is_one)
        rest = tuple(None if is_one else a for a, is_one in zip(leaves, is_array, strict=True))
        return cls(rest, places, tree), [jnp.asarray(leaves[n]) for n in places]

    def __call__(self, function: Callable[..., Tree], arrays: Leaves) -> Tree:
        """Calls the function with these arrays."""
        leaves = list(self.leaves)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        args, options = jax.tree.unflatten(self.tree, leaves)
        return function(*args, **options)


def as_equation(closed: ClosedJaxpr) -> Jaxpr:
    """A program as that of an equation, which is given its constants first."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def changes(before: Leaves, after: nnx.State) -> Changes:
    """The variables that may have other values after a call, by name."""
    old = {id(leaf) for leaf in before}
    found = {}
    for name, leaf in named_leaves(after):
        if not isinstance(leaf, nnx.RngState) and id(array_of(leaf)) not in old:
            found[f"{name} (sown)" if isinstance(leaf, nnx.Intermediate) else name] = array_of(leaf)
    return found


def without_changes(what: str, closed: ClosedJaxpr, changed: Changes) -> ClosedJaxpr:
    """A program without the outputs of variables that may be changed.

    Raises:
      ValueError: one is changed, and that would be lost; or it has a Ref.
    """
    check_no_refs(what, closed.jaxpr)
    tell_of_model(what, closed.jaxpr)
    count = len(jax.tree.leaves(changed))
    jaxpr = inlined(closed, is_call).jaxpr
    pairs = zip(changed, jaxpr.outvars[len(jaxpr.outvars) - count :], strict=True)
    new = [name for name, v in pairs if v not in jaxpr.invars]
    if sown := tuple(name.partition(" ")[0] for name in new if name.endswith(" (sown)")):
        _warn_of_sown(what, sown)
    for name in new:
        require(
            name.endswith(" (sown)"),
            f"{what} changes its variable {name} when it is called, but the change would be lost.\n"
            f"Fix: compute it in the loss, or leave it out.",
        )
    outvars = closed.jaxpr.outvars
    return ClosedJaxpr(closed.jaxpr.replace(outvars=outvars[: len(outvars) - count]), closed.consts)


@functools.cache
def _warn_of_sown(what: str, names: tuple[str, ...]) -> None:
    """Once: a model is traced several times."""
    text = "%s sows %s, which is lost. Fix: return it, or leave sow out"
    _log.warning(text, what, format_names(names))
