"""A user's model, cut: its blocks, its parameters by their names, and the parts of its programs."""

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
from jaxpar.base.types import Arrays, Batch, Leaves, Module, Shapes, Tree
from jaxpar.model.adopt.drawing import Drawing, with_data
from jaxpar.model.adopt.draws import Drawn, draws_apart
from jaxpar.model.adopt.finding import (
    check_sharing,
    check_state,
    find_blocks,
    possible_layers,
)
from jaxpar.model.adopt.marks import (
    TRACING,
    Changes,
    changes,
    mark_block,
    mark_model,
    mark_outer,
)
from jaxpar.model.adopt.program import Inputs, Program
from jaxpar.model.adopt.recurrent import chunk_time
from jaxpar.model.outer import SPLITS
from jaxpar.model.stack import KIND
from jaxpar.model.task import Task
from jaxpar.model.tracing import made
from jaxpar.sharding import array_of, is_variable, named_leaves
from jaxpar.trace.jaxprs import aval_of

FROZEN = "frozen"  # metadata of a parameter that is not trained


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


_ALL = -2


class CutModel:
    """All that is known of a user's model from shapes.

    Attributes:
      places: the path of each block.
      names: of the parameters; of stacked blocks "blocks.kernel@3".
      owners: the block of each parameter; -1 of none.
      variables: shapes and metadata of these.
      kinds: the number of each block's kind; `first_of` the first block of each; `kind_names` theirs.
      time_major: whether windows can be cut into chunks of time.
    """

    def __init__(self, task: Task, batch: Shapes):
        """Traces the model and the loss.

        Raises:
          ValueError: the model is none that can be cut.
        """
        self.task, self.batch = task, batch
        model = nnx.eval_shape(lambda: with_data(made(task.make_model, 0)))
        self.model_name = type(model).__name__
        self.layers = task.layers or self._only_layers(model)
        found = find_blocks(model, self.layers)
        self.places, blocks = [path for path, _ in found], [block for _, block in found]
        check_sharing(model, list({id(block): block for block in blocks}.values()))
        check_state(model)
        self.is_stacked = len(blocks) > 1 and blocks[0] is blocks[1]
        self.plain = nnx.split(model)
        self.outer_modules = dict[str, Module]()
        for path, module in [*nnx.iter_graph(model)]:
            if type(module) in SPLITS and self._owner(path) == -1:
                self.outer_modules[_dotted(path)] = module
        self._leaves = self._look_at(model)
        self._expand_rows(len(blocks))
        constants = [leaf.name for leaf in self._leaves if leaf.role == "constant"]
        self.drawing = Drawing(task.make_model, [*self.names, *constants])
        self.constants = self.drawing.constants(constants)
        class_names = [type(block).__name__.lower() for block in blocks]
        self._mark(model, blocks)
        self.graphdef, state = nnx.split(model)
        self._structure = jax.tree.structure(state, is_leaf=is_variable)
        self._programs = dict[tuple[object, ...], Program]()
        self._drawn = dict[tuple[object, ...], Drawn | None]()
        self._find_kinds(class_names)
        self._find_rows()

    def _only_layers(self, model: Module) -> str:
        found = [*possible_layers(model)]
        require(
            len(found) == 1,
            f"the model {self.model_name} has {len(found)} lists of modules ({format_names(found)}), and layers "
            f"is not given.\nFix: name the one that holds the blocks, such as layers='blocks'.",
        )
        return found[0]

    # ---- variables ----

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
                        leaf.set_metadata("out_sharding", dims)
                leaf.set_metadata(FROZEN, bool(is_frozen(path, leaf)))
            leaves.append(_Leaf(name, leaf, self._owner(path), role))
        require(
            not unused,
            f"dims of {format_names(sorted(unused))} match no parameter of the model {self.model_name}; it has "
            f"{format_names([leaf.name for leaf in leaves if leaf.role == 'param'])}.\nFix: use such names.",
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

    # ---- programs ----

    def _mark(self, model: Module, blocks: Sequence[Module]) -> None:
        for name, module in self.outer_modules.items():
            mark_outer(module, name)
        for number, block in enumerate(blocks if not self.is_stacked else ()):
            chunk_time(block)
            mark_block(block, number)
        mark_model(model)

    def merge(self, params: Leaves, keys: Leaves) -> Module:
        """The user's model with marks."""
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
        return nnx.merge(self.graphdef, jax.tree.unflatten(self._structure, leaves))

    def program(self, what: str, batch: Batch, *, trains: bool) -> Program:
        """The user's code for batches of such shapes.

        Args:
          what: "loss" or "predict".
        """
        batch = jax.tree.map(shape_of, batch)
        leaves, tree = jax.tree.flatten(batch)
        # A trace with a custom derivative in it depends on the mesh around it.
        key = what, trains, str(batch), jax.sharding.get_abstract_mesh()
        if key not in self._programs:

            def run(params: Leaves, keys: Leaves, leaves: Leaves) -> tuple[Tree, Changes]:
                model = self.merge(params, keys)
                if not trains:
                    model.eval()
                before = jax.tree.leaves(nnx.state(model))
                out = self._call(what, model, jax.tree.unflatten(tree, leaves))
                return out, changes(before, nnx.state(model))

            shapes = [
                [shape_of(array_of(leaf.variable)) for leaf in self._leaves if leaf.role == role]
                for role in ("param", "key")
            ]
            inputs = Inputs(self.names, self.owners, self.key_owners)
            given, num = (shapes[0], shapes[1], leaves), len(self.places)
            self._programs[key] = Program(
                self.model_name, run, given, inputs, num, is_stacked=self.is_stacked
            )
        return self._programs[key]

    def _call(self, what: str, model: Module, batch: Batch) -> Tree:
        """The loss; or predictions, which by default are what the model's own call returns in it."""
        tracing = TRACING.get()
        assert tracing is not None
        if what == "predict" and self.has_own_predict:
            return self.task.predict(model, batch)
        out = self.task.loss(model, batch)
        return tracing.output if what == "predict" else out

    @property
    def has_own_predict(self) -> bool:
        """Whether the task says what is predicted."""
        return type(self.task).predict is not Task.predict

    @functools.cached_property
    def predicts(self) -> bool:
        """Whether there is anything to predict."""
        if self.has_own_predict:
            return True
        return bool(jax.tree.leaves(self.program("predict", self.batch, trains=False).out))

    def _find_kinds(self, class_names: Sequence[str]) -> None:
        numbers = range(len(self.places))
        both = [self.program("loss", self.batch, trains=trains) for trains in (True, False)]
        texts = []
        for n in numbers:
            own = [
                (name, str(sorted(v.get_metadata().items(), key=str)))
                for name, v in self.own(n).items()
            ]
            texts.append((class_names[n], str(own), *(program.part(n).text() for program in both)))
        self.first_of = [n for n in numbers if texts[n] not in texts[:n]]
        self.kinds = tuple(self.first_of.index(texts.index(text)) for text in texts)
        names = [class_names[n] for n in self.first_of]
        taken = {"kinds", "kind_of", "slots", "unroll", "cut"}
        self.kind_names = tuple(
            f"{name}{names[:n].count(name)}" if names.count(name) > 1 or name in taken else name
            for n, name in enumerate(names)
        )

    def _find_rows(self) -> None:
        """Which arrays of each x have rows; and whether all of them have time, and layers a state."""
        program = self.program("loss", self.batch, trains=True)
        self.carries = [program.part(n).carries for n in range(len(self.places))]
        self.x_rows = self._dims_that_grow(program, 0)
        grows = self._dims_that_grow(program, 1) if all(self.carries) else [[False]]
        self.time_major = all(all(each) for each in (*grows, *self.x_rows))
        parts = ("first", *range(len(self.places)), "last")
        drawing = [part for part in parts if program.part(part).keys]
        if any(self.drawn("loss", part, self.batch) is None for part in drawing):
            self.time_major = False

    def drawn(self, what: str, part: int | str, batch: Batch) -> Drawn | None:
        """What a part draws for such a batch, apart from the rest; None if rows are not the first dim of it."""
        dims = 1 + self.time_major
        one = jax.tree.map(lambda a: _with_sizes(a, (1,) * dims), batch)
        whole, single = (self.program(what, own, trains=True) for own in (batch, one))
        key = what, part, dims, str(jax.tree.map(shape_of, batch)), jax.sharding.get_abstract_mesh()
        if key not in self._drawn:
            self._drawn[key] = draws_apart(whole, single, part, dims)
        return self._drawn[key]

    def _dims_that_grow(self, program: Program, dim: int) -> list[list[bool]]:
        """Of each array of each x, whether this dim is that of the batch's rows, or time steps."""

        def twice(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return _with_sizes(a, (*a.shape[:dim], *(2 * size for size in a.shape[dim : dim + 1])))

        try:
            more = self.program("loss", jax.tree.map(twice, self.batch), trains=True)
        except Exception:
            return [[False]]
        return [
            [
                aval_of(a).shape[dim : dim + 1] != aval_of(b).shape[dim : dim + 1]
                for a, b in zip(*pair, strict=True)
            ]
            for pair in zip(program.xs, more.xs, strict=True)
        ]

    # ---- modules that hold parameters ----

    @functools.cached_property
    def _held(self) -> dict[str, Tree]:
        """What holds the parameters outside of blocks: embeddings and linear layers, and variables."""
        held = self.own(-1)
        for name, module in self.outer_modules.items():
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
        leaves = [own[name].replace(values[name]) for name, _ in named_leaves(state)]
        structure = jax.tree.structure(state, is_leaf=is_variable)
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

    def block(self, number: int, key: jax.Array) -> "Holder":
        """The parameters of a block, drawn."""
        values = self.drawing.block(self.names_of(number), key)
        pairs = zip(self.own(number).items(), values, strict=True)
        return Holder({name: variable.replace(value) for (name, variable), value in pairs})

    def stacked(self, kind: int, numbers: Sequence[int], key: jax.Array) -> "Holder":
        """The parameters of blocks of a kind in the rows of a stack, drawn; -1 is a row of zeros."""
        first, name = self.first_of[kind], self.kind_names[kind]
        rows = [self.names_of(number if number >= 0 else first) for number in numbers]
        drawn = self.drawing.stacked(rows, key)
        is_there, held = jnp.asarray(numbers) >= 0, {}
        for (inner, variable), value in zip(self.own(first).items(), drawn, strict=True):
            value = jnp.where(is_there.reshape(-1, *[1] * (value.ndim - 1)), value, 0)
            metadata = variable.get_metadata()
            dims = metadata["out_sharding"] or (None,) * (value.ndim - 1)
            metadata |= {"out_sharding": (LAYERS, *dims), KIND: name}
            held[inner] = type(variable)(value, **metadata)
        return Holder(held)

    def user_model(self, arrays: Mapping[str, Arrays]) -> Module:
        """The user's own model with these values of its parameters; its random streams begin with seed 0."""
        graphdef, state = self.plain
        leaves = []
        for (_, variable), leaf in zip(_flat(state), self._leaves, strict=True):
            shape = shape_of(array_of(variable))
            if leaf.role == "key":
                value = jnp.broadcast_to(new_key(0), shape.shape)
            elif leaf.role == "count":
                value = jnp.zeros(shape.shape, shape.dtype)
            elif leaf.role == "constant":
                value = jnp.asarray(self.constants[leaf.name])
            elif leaf.owner == _ALL:
                value = jnp.stack([arrays[f"{leaf.name}@{n}"] for n in range(len(self.places))])
            else:
                value = arrays[leaf.name]
            leaves.append(variable.replace(value) if is_variable(variable) else value)
        structure = jax.tree.structure(state, is_leaf=is_variable)
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))


def _with_sizes(a: jax.Array | jax.ShapeDtypeStruct, sizes: Sequence[int]) -> jax.ShapeDtypeStruct:
    """The shape of an array with other sizes of its first dims."""
    sizes = sizes[: len(a.shape)]
    return jax.ShapeDtypeStruct((*sizes, *a.shape[len(sizes) :]), a.dtype)


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
