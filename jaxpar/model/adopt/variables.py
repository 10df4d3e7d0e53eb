"""The variables of a user's model by name: the block of each, its initial value and its storage."""

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.axes import LAYERS
from jaxpar.base.checks import require
from jaxpar.base.display import format_names
from jaxpar.base.keys import new_key
from jaxpar.base.trees import shape_of
from jaxpar.base.types import Arrays, Leaves, Module, Shapes, Tree
from jaxpar.model.adopt.drawing import Drawing
from jaxpar.model.adopt.finding import Path
from jaxpar.model.outer import SPLITS, STACK
from jaxpar.model.stack import KIND
from jaxpar.model.task import Task
from jaxpar.sharding import USER_NAMES, UserNames, array_of, is_variable, named_leaves

FROZEN = "frozen"  # metadata of a parameter that is not trained
_ALL = -2  # instead of the number of a block: all, as they are stacked


class _Leaf(NamedTuple):
    """A leaf of the user's model: its name, the variable of shapes, and what it is.

    Attributes:
      owner: the number of its block; -1 of none, `_ALL` of stacked blocks.
      role: "param", "key" of random numbers, "count" of them, or "constant".
    """

    name: str
    variable: Tree
    owner: int
    role: str


class Variables:
    """The variables of a user's model.

    Attributes:
      places: the path of each block.
      names: of the parameters; of stacked blocks "blocks.kernel@3".
      owners: the block of each parameter; -1 of none. `key_owners` those of keys of random numbers.
      variables: shapes and metadata of the parameters.
    """

    def __init__(self, task: Task, drawing: Drawing, places: Sequence[Path], *, is_stacked: bool):
        """Looks at them.

        Args:
          drawing: of the model, and its shapes.
          is_stacked: whether the blocks are one module with stacked parameters.
        """
        self.task, self.places, self.is_stacked = task, places, is_stacked
        self.drawing, model = drawing, drawing.model
        self.plain = nnx.split(model)
        self._outer_modules = self.find_outer(model)
        self._leaves = self._look_at(model)
        self._expand_rows(len(places))
        constants = [leaf.name for leaf in self._leaves if leaf.role == "constant"]
        self.constants = drawing.constants(constants)

    def find_outer(self, model: Module) -> dict[str, Module]:
        """The embeddings and linear layers of a model outside of its blocks."""
        return {
            _dotted(path): module
            for path, module in nnx.iter_graph(model)
            if type(module) in SPLITS and self._owner(path) == -1
        }

    def _owner(self, path: Sequence[object]) -> int:
        """The block that something at a path is of."""
        for number, place in enumerate(self.places):
            if tuple(path[: len(place)]) == place:
                return _ALL if self.is_stacked else number
        return -1

    def _look_at(self, model: Module) -> list[_Leaf]:
        """The leaves of a model; parameters say what their dims are called, and whether they are frozen."""
        is_frozen = nnx.filterlib.to_predicate(self.task.frozen)
        leaves, unused = list[_Leaf](), {*self.task.dims}
        for path, leaf in _flat(nnx.state(model)):
            name, role = _dotted(path), _role(leaf)
            if role == "param":
                leaf = leaf.replace(shape_of(leaf.get_value()))
                for pattern, dims in self.task.dims.items():
                    if fnmatch.fnmatchcase(name, pattern):
                        unused.discard(pattern)
                        shape = [*leaf.get_value().shape]
                        require(
                            len(dims) == len(shape),
                            f"dims of {pattern} are {dims}, but {name} has shape {shape}.\n"
                            f"Fix: give a name, an axis or None for each dim.",
                        )
                        leaf.set_metadata("out_sharding", dims)
                leaf.set_metadata(FROZEN, bool(is_frozen(path, leaf)))
            leaves.append(_Leaf(name, leaf, self._owner(path), role))
        require(
            not unused,
            f"dims of {format_names(sorted(unused))} match no parameter of the model; it has "
            f"{format_names([leaf.name for leaf in leaves if leaf.role == 'param'])}.\n"
            f"Fix: use names of its parameters.",
        )
        return leaves

    def _expand_rows(self, num_blocks: int) -> None:
        """The names of all parameters; each block has its own."""
        self.names, self.owners, self.key_owners = list[str](), list[int](), list[int]()
        self.variables = list[Tree]()
        for leaf in self._leaves:
            owners = range(num_blocks) if leaf.owner == _ALL else [leaf.owner]
            if leaf.role == "param":
                self.owners += owners
                self.names += [leaf.name + f"@{n}" * (leaf.owner == _ALL) for n in owners]
                self.variables += [self._row(leaf)] * len(owners)
            elif leaf.role == "key":
                self.key_owners += owners

    def _row(self, leaf: _Leaf) -> Tree:
        """A parameter as one block has it."""
        shape, metadata = leaf.variable.get_value(), leaf.variable.get_metadata()
        dims = metadata.get("out_sharding") or ()
        if leaf.owner == _ALL:
            shape, dims = jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype), dims[1:]
        metadata |= {"out_sharding": tuple(dims) or None, "eager_sharding": False}
        return type(leaf.variable)(shape, **metadata)

    def own(self, number: int) -> dict[str, Tree]:
        """The parameters of a block by their names within it, or those of no block, -1; of shapes."""
        pairs = zip(self.names, self.owners, self.variables, strict=True)
        return {self.inner(name, number): v for name, own, v in pairs if own == number}

    def names_of(self, number: int) -> list[str]:
        """Their names in the model."""
        return [n for n, owner in zip(self.names, self.owners, strict=True) if owner == number]

    def inner(self, name: str, number: int) -> str:
        """The name of a parameter within its block."""
        place = f"{_dotted(self.places[number])}." if number >= 0 else ""
        return name.removeprefix(place).partition("@")[0]

    def outer_name(self, number: int, inner: str) -> str:
        """The reverse."""
        return f"{_dotted(self.places[number])}.{inner}" + f"@{number}" * self.is_stacked

    @property
    def block_names(self) -> list[str]:
        """The names of the blocks: "blocks.3", or "blocks[3]" of stacked ones."""
        names = [*map(_dotted, self.places)]
        return [f"{name}[{n}]" for n, name in enumerate(names)] if self.is_stacked else names

    @property
    def other_names(self) -> list[str]:
        """The names of what is no parameter: random streams and constants."""
        return [leaf.name for leaf in self._leaves if leaf.role != "param"]

    # ---- all of them in the user's model ----

    @property
    def shapes(self) -> tuple[Shapes, Shapes]:
        """Of parameters and of keys, as the user's model has them."""
        first, second = (
            [shape_of(array_of(leaf.variable)) for leaf in self._leaves if leaf.role == role]
            for role in ("param", "key")
        )
        return first, second

    def merge(self, graphdef: nnx.GraphDef, params: Leaves, keys: Leaves) -> Module:
        """The user's model, maybe with marks, of values of these shapes; counts are zeros."""
        given = {"param": iter(params), "key": iter(keys)}
        leaves = []
        for leaf in self._leaves:
            if leaf.role in given:
                value = next(given[leaf.role])
            elif leaf.role == "constant":
                value = jnp.asarray(self.constants[leaf.name])
            else:
                shape = shape_of(array_of(leaf.variable))
                value = jnp.asarray(np.zeros(shape.shape, shape.dtype))  # known, and no equation
            leaves.append(leaf.variable.replace(value) if is_variable(leaf.variable) else value)
        structure = jax.tree.structure(self.plain[1], is_leaf=is_variable)
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

    def user_model(self, arrays: Mapping[str, Arrays]) -> Module:
        """The user's own model with these values of its parameters; its random streams begin with seed 0."""
        params = [arrays[leaf.name] for leaf in self._leaves if leaf.role == "param"]
        keys = [jnp.broadcast_to(new_key(0), key.shape) for key in self.shapes[1]]
        graphdef, state = self.plain
        values = jax.tree.leaves(nnx.state(self.merge(graphdef, params, keys)))
        model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), values))
        for _, leaf in nnx.iter_graph(model):
            if is_variable(leaf) and not leaf.get_metadata("out_sharding", None):
                leaf.set_metadata("eager_sharding", nnx.using_eager_sharding())
        return model

    # ---- modules that hold parameters ----

    @functools.cached_property
    def _held(self) -> dict[str, Tree]:
        """What holds the parameters outside of blocks: embeddings and linear layers, and variables."""
        held = self.own(-1)
        for name, module in self._outer_modules.items():
            own = [f"{name}.{key}" for key, value in vars(module).items() if is_variable(value)]
            if own and all(name in held for name in own):
                held = {key: leaf for key, leaf in held.items() if key not in own} | {name: module}
        return held

    @property
    def held_modules(self) -> list[str]:
        """The modules outside of blocks that are called as they are."""
        return [name for name, own in self._held.items() if not is_variable(own)]

    def outer(self, key: jax.Array) -> "Holder":
        """The parameters outside of blocks, drawn."""
        names, own = self.names_of(-1), self.own(-1)
        values = dict(zip(names, self.drawing.block(names, key), strict=True))
        graphdef, state = nnx.split(Holder(self._held))
        leaves = []
        for name, _ in named_leaves(state):
            leaves.append(own[name].replace(values[name]))
            leaves[-1].set_metadata(USER_NAMES, UserNames(f"outer.{name}", (name,)))
        structure = jax.tree.structure(state, is_leaf=is_variable)
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

    def block(self, number: int, key: jax.Array) -> "Holder":
        """The parameters of a block, drawn."""
        pairs = zip(self.own(number).items(), self._rows([number], key), strict=True)
        return Holder({name: variable.replace(rows[0]) for (name, variable), rows in pairs})

    def stacked(self, kind: str, first: int, numbers: Sequence[int], key: jax.Array) -> "Holder":
        """The parameters of blocks of a kind in the rows of a stack, drawn; -1 is a row of zeros.

        Args:
          first: the first block of the kind.
        """
        drawn = self._rows([number if number >= 0 else first for number in numbers], key)
        is_there, held = jnp.asarray(numbers) >= 0, {}
        in_order = sorted(number for number in numbers if number >= 0)
        for (inner, variable), value in zip(self.own(first).items(), drawn, strict=True):
            value = jnp.where(is_there.reshape(-1, *[1] * (value.ndim - 1)), value, 0)
            metadata = variable.get_metadata()
            dims = metadata["out_sharding"] or (None,) * (value.ndim - 1)
            names = tuple(self.outer_name(number, inner) for number in in_order)
            known = UserNames(f"{STACK}.{kind}.own.{inner}", names)
            metadata |= {"out_sharding": (LAYERS, *dims), KIND: kind, USER_NAMES: known}
            held[inner] = type(variable)(value, **metadata)
        return Holder(held)

    def _rows(self, numbers: Sequence[int], key: jax.Array) -> Leaves:
        """The parameters of blocks of one kind, stacked."""
        if not self.is_stacked:
            return self.drawing.stacked([*map(self.names_of, numbers)], key)
        names = [name.partition("@")[0] for name in self.names_of(numbers[0])]
        whole = self.drawing.block(names, key)
        is_whole = [*numbers] == [*range(len(self.places))]
        return whole if is_whole else [a[np.asarray(numbers)] for a in whole]


def is_frozen(_: object, variable: Tree) -> bool:
    """A filter of the parameters that `Task.frozen` matches by their own paths."""
    return is_variable(variable) and bool(variable.get_metadata(FROZEN, False))


class Holder(nnx.Module):
    """Variables and modules under the names that they have in the user's model."""

    def __init__(self, held: Mapping[str, Tree]):
        inner = dict[str, dict[str, Tree]]()
        for name, node in held.items():
            first, dot, rest = name.partition(".")
            if dot:
                inner.setdefault(first, {})[rest] = node
            else:
                setattr(self, first, node)
        for first, own in inner.items():
            setattr(self, first, Holder(own))


def find_in(holder: Holder, name: str) -> Tree:
    """What a holder has under a name."""
    return functools.reduce(getattr, name.split("."), holder)


def _flat(state: nnx.State) -> list[tuple[tuple[Any, ...], Tree]]:
    """The leaves of a state with their paths, in the order of `jax.tree`."""
    pairs = jax.tree.leaves_with_path(state, is_leaf=is_variable)
    keys = "key", "name", "idx"
    return [
        (tuple(next(getattr(s, k) for k in keys if hasattr(s, k)) for s in path), leaf)
        for path, leaf in pairs
    ]


def _dotted(path: Sequence[object]) -> str:
    return ".".join(map(str, path))


def _role(leaf: Tree) -> str:
    kinds = ((nnx.Param, "param"), (nnx.RngKey, "key"), (nnx.RngCount, "count"))
    return next((name for kind, name in kinds if isinstance(leaf, kind)), "constant")
