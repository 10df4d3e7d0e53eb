"""The input and output modules of a model, split so that no stage has to store them whole.

An embedding is split by its rows: each stage looks up the words that it has, others count as zeros. A linear
layer is split by its columns: each stage computes its part of the outputs. Either way the whole is a sum over
`stage`, of which one part is not zero. That holds for the layers of `jaxpar.nn` and of Flax, whatever model
they are in, as long as nobody but their own call reads their parameters: where something else does (a table
that is read as an array), it would see a part. `nnx.Embed.attend` is a call too, with a column for each row.

So a module at such an end is *called* in another way than its class says: `with_calls`.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import core

from jaxpar.base.axes import STAGE
from jaxpar.base.trees import shape_of, summed, vary_like, vary_over
from jaxpar.base.types import Arrays, Function, Leaves, Module, Tree, Value
from jaxpar.nn.embedding import Embedding
from jaxpar.nn.linear import Linear
from jaxpar.sharding import OF, dims_of, is_variable
from jaxpar.trace.counts import amount, used_inputs
from jaxpar.trace.jaxprs import repeated_in

# Of each class the parameters that are split, and the dim of each.
SPLITS = {
    Embedding: {"table": 0},
    nnx.Embed: {"embedding": 0},
    Linear: {"kernel": 1, "bias": 0},
    nnx.Linear: {"kernel": 1, "bias": 0},
}
_TABLES = (Embedding, nnx.Embed)

ATTEND = "attend"  # the method of a table that is a head
STACK = "layers"  # the attribute of a model that is its stack
ENDS = "@first", "@last"  # the kinds of what comes before the layers and after them

# How a module is called: (its own call, what it is called with) -> what it gives.
Call = Function


class OuterModule(NamedTuple):
    """A module before or after the layers that can be in parts.

    Attributes:
      name: "embedding", or "embeddings/0".
      dim: the name of the dim that is split.
      what: rows or columns.
      size: of that dim.
      num_params: its numbers.
      num_outputs: what its calls give of a whole batch, before and after the layers, numbers.
    """

    name: str
    dim: str
    what: str
    size: int
    num_params: int
    num_outputs: tuple[int, int]


class Uses(NamedTuple):
    """How a function uses a model.

    Attributes:
      read: the paths of the variables that it reads.
      called: the modules that it calls and uses in no other way: the numbers that they give.
      looked_up: of the embeddings among them those whose words are known outside of any loop.
      looped: the called modules that a loop or a branch calls.
      flops: of all that it does but these calls.
    """

    read: frozenset[str]
    called: Mapping[str, int]
    looked_up: frozenset[str]
    looped: frozenset[str]
    flops: float

    @property
    def modules(self) -> frozenset[str]:
        """The names of all whose variables it reads."""
        return frozenset(map(owner, self.read))


def with_calls(model: Module, calls: Mapping[str, Call]) -> Module:
    """The model, changed: the modules of these names are called so."""
    for name, module in modules(model):
        if name in calls:
            object.__setattr__(module, "called", calls[name])
            module.__class__ = _called(type(module))
    return model


def call_as_it_is(call: Call, *args: Arrays, **options: Value) -> Tree:
    """The call of a module that has all of its parameters."""
    return call(*args, **options)


@functools.cache
def _called(of: type) -> type:
    def method(name: str) -> Function:
        def call(self: Module, *args: Arrays, **options: Value) -> Tree:
            return self.called(functools.partial(getattr(of, name), self), *args, **options)

        return call

    names = [name for name in ("__call__", ATTEND) if hasattr(of, name)]
    return type(of.__name__, (of,), {name: method(name) for name in names})


def _attends(call: Any) -> bool:
    """Whether a call is that of a table as a head."""
    return call.func.__name__ == ATTEND


def modules(model: Module) -> Iterator[tuple[str, Module]]:
    """Those of a model outside of its stack that can be in parts, by name."""
    for path, module in nnx.iter_graph(model):
        if type(module) in SPLITS and path[0] != STACK:
            yield "/".join(map(str, path)), module


def split_params(module: Module) -> dict[str, int]:
    """The parameters of a module that are split, and the dim of each."""
    named = SPLITS[type(module)]
    return {name: dim for name, dim in named.items() if is_variable(getattr(module, name, None))}


def size_of(module: Module) -> int:
    """Of the dim that is split."""
    key, dim = next(iter(SPLITS[type(module)].items()))
    return getattr(module, key).shape[dim]


def part_call(module: Module, size: int) -> Call:
    """How a module with a part of its parameters is called, inside of a `shard_map` over `stage`.

    Args:
      size: of the dim that is split, of all parts.
    """
    is_table = type(module) in _TABLES

    def run(call: Call, *args: Arrays, **options: Value) -> jax.Array:
        part = _rows if is_table and not _attends(call) else _columns
        return part(size, call, *args, **options)

    return run


def held_call(stage: int) -> Call:
    """How a module whose parameters one stage alone has is called on all of them: its result there."""

    def run(call: Call, *args: Arrays, **options: Value) -> jax.Array:
        y = call(*args, **options)
        is_here = lax.axis_index(STAGE) == stage
        return summed(jnp.where(is_here, y, jnp.zeros_like(y)), STAGE)

    return run


def _rows(size: int, call: Call, ids: jax.Array, **options: Value) -> jax.Array:
    """Of the words that this stage has; the sum of all."""
    local, is_here = _local(ids, size)
    rows = call(local, **options)
    return summed(jnp.where(is_here[..., None], rows, jnp.zeros_like(rows)), STAGE)


def _columns(size: int, call: Call, x: jax.Array, **options: Value) -> jax.Array:
    """The outputs that this stage computes, in their place; the sum of all."""
    y = call(vary_over(x, frozenset([STAGE])), **options)
    start = (*[0] * (y.ndim - 1), lax.axis_index(STAGE) * y.shape[-1])
    whole = vary_like(jnp.zeros((*y.shape[:-1], size), y.dtype), y)
    return summed(lax.dynamic_update_slice(whole, y, start), STAGE)


def _local(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The places of words in this stage's rows, and whether they are there.

    Ids that no word has are out of bounds on the first or last stage, and so are what they are to a table
    that is whole.
    """
    count = size // lax.axis_size(STAGE)
    first = lax.axis_index(STAGE) * count
    ids = ids.astype(jnp.int32)
    ids = jnp.where(ids < 0, jnp.maximum(ids + size, -size), ids)
    local = jnp.where(ids < 0, -size, ids - first)
    is_first, is_last = first == 0, first == size - count
    return local, ((local >= 0) | is_first) & ((local < count) | is_last)


def add_rows(table: jax.Array, ids: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    """A table, or this stage's part of one of `size` rows, with these added where the words are."""
    if len(table) < size:
        local, is_here = _local(ids, size)
        ids = jnp.where(is_here & (local >= 0), local, len(table))
    return table.at[ids].add(vary_like(rows.astype(table.dtype), table), mode="drop")


def uses(model: Module, run: Callable[[Module], Tree]) -> Uses:
    """How a function of a model uses its modules.

    Args:
      model: of shapes.
      run: what is traced.
    """
    graphdef, state = nnx.split(model)
    pairs, structure = jax.tree.flatten_with_path(state)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    shapes = [shape_of(leaf) for _, leaf in pairs]
    names = [name for name, _ in modules(model)]
    made: dict[str, list[int]] = {name: [] for name in names}
    outermost, nested = None, set[str]()
    inside = {name for name, own in modules(model) if type(own) not in _TABLES or size_of(own) == 1}

    def merged(leaves: Leaves) -> Module:
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

    def reads(run: Callable[[Module], Tree]) -> frozenset[str]:
        used = used_inputs(lambda leaves: run(merged(leaves)), shapes)
        return frozenset(path for path, is_used in zip(paths, used, strict=True) if is_used)

    def stand_in(name: str, call: Call, *args: Arrays, **options: Value) -> Tree:
        out = jax.eval_shape(functools.partial(call, **options), *args)
        made[name].append(math.prod(out.shape))
        if _trace() != outermost:
            nested.add(name)
        if _attends(call):
            inside.add(name)
        with jax.named_scope(_scope(name)):
            return jnp.zeros(out.shape, out.dtype)

    calls = {name: functools.partial(stand_in, name) for name in names}

    def rest(model: Module) -> Tree:
        nonlocal outermost
        outermost = _trace()
        return run(with_calls(model, calls))

    otherwise = frozenset(map(owner, reads(rest)))
    called = {name: sum(own) for name, own in made.items() if own and name not in otherwise}
    flops = amount(lambda leaves: rest(merged(leaves)), shapes).flops
    looped = frozenset[str]()
    if nested:
        program = jax.make_jaxpr(lambda leaves: rest(merged(leaves)))(shapes).jaxpr
        scopes = {str(eqn.source_info.name_stack) for eqn in repeated_in(program)}
        looped = frozenset(name for name in nested if any(_scope(name) in own for own in scopes))
    return Uses(reads(run), called, frozenset(called) - inside - nested, looped, flops)


def _scope(name: str) -> str:
    """What equations of a call are marked with in a traced program."""
    return f"<{name.replace('/', '.')}>"


def _trace() -> Any:
    """What tells loops and calls of a program apart."""
    return core.get_opaque_trace_state(convention="nnx")


def owner(path: str) -> str:
    """The name of the module that a variable is of."""
    return path.removesuffix("/value").rpartition("/")[0]


def outer_modules(model: Module, of: tuple[Uses, Uses]) -> dict[str, OuterModule]:
    """The modules of a model that can be in parts, if their dims have names or none that are split so.

    A module that a loop calls stays whole: its stages would exchange in each turn, and nothing would keep the
    order of that and of what follows the loop.

    Args:
      of: how what comes before the layers uses them, and what comes after.
    """
    found, owners = {}, collections.Counter()
    for _, module in modules(model):
        owners.update(id(getattr(module, key)) for key in split_params(module))
    for name, module in modules(model):
        where = [uses for uses in of if name in uses.modules]
        if not where or any(name not in uses.called or name in uses.looped for uses in where):
            continue
        params = {key: getattr(module, key) for key in split_params(module)}
        if any(owners[id(param)] > 1 for param in params.values()):
            continue
        dims = {dims_of(params[key])[dim] for key, dim in split_params(module).items()} - {None}
        if len(dims) > 1:
            continue
        base = str(*dims)
        key, dim = next(iter(split_params(module).items()))
        found[name] = OuterModule(
            name=name,
            dim=f"{base}{OF}{name}",
            what="rows" if type(module) in _TABLES else "columns",
            size=params[key].shape[dim],
            num_params=sum(math.prod(param.shape) for param in params.values()),
            num_outputs=(of[0].called.get(name, 0), of[1].called.get(name, 0)),
        )
    return found


def name_dims(model: Module, of: Mapping[str, OuterModule]) -> None:
    """Gives the dims of modules that can be split names of their own."""
    for name, module in modules(model):
        for key, dim in split_params(module).items() if name in of else ():
            variable = getattr(module, key)
            dims = list(dims_of(variable))
            dims[dim] = of[name].dim
            variable.set_metadata("out_sharding", tuple(dims))
            variable.set_metadata("eager_sharding", False)
