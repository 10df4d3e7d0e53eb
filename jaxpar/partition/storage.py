"""Where a state holds the arrays of a model: layers of a kind in a stack, or all of a stage's in pools.

A state has two trees of variables: those that are trained (number 0) and all others (number 1). In a stack
[rows, ...] of each kind every stage has as many rows as the fullest of them needs. Where that takes much more
than the layers do, a stage has its own layers alone, in a pool (`partition.pool`). This module alone knows
which of the two it is. All others read variables by their names, or one layer at a time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import DATA, STAGE, TENSOR
from jaxpar.base.display import format_bytes
from jaxpar.base.keys import key_of
from jaxpar.base.trees import shape_of, zeros
from jaxpar.base.types import Arrays, Module, Shapes, Tree
from jaxpar.model.model import says
from jaxpar.model.outer import LAYERS_OF_MODEL, name_dims
from jaxpar.model.stack import Stack
from jaxpar.model.task import Task
from jaxpar.partition import partition
from jaxpar.partition.partition import Partition
from jaxpar.partition.pool import (
    OTHER,
    LayerPool,
    OuterPool,
    Pool,
    dim_over_tensor,
    stack_of,
    with_stack,
)
from jaxpar.pipeline.store import Stacks, Store
from jaxpar.sharding import (
    PARAM_SHAPE,
    array_of,
    axes_of_spec,
    is_variable,
    named_leaves,
    shardings,
    split_over_data,
)

Variables = TypeVar("Variables", bound=Tree)
Names = Sequence[str]

# The names of the pools in both trees of a state, in place of the variables that are in them.
POOLS = ("@pool", "@pool of frozen")


class Storage:
    """Where the variables of a partition's model are stored.

    Attributes:
      partition: of the model.
    """

    def __init__(self, partition: Partition):
        """Makes nothing; shapes are found when they are asked for."""
        self.partition, self.facts = partition, partition.facts

    # ---- the model, its layers in the slots of stacks ----

    def make(self, seed: int | jax.Array) -> Module:
        """The model with its values, of a seed or a key, its layers in their slots. Call under `jit`."""
        model = self.facts.make(seed)
        if self.partition.slots.layers:
            model.layers.place(self.partition.slots)
        for _, variable in nnx.iter_graph(model):
            if is_variable(variable):
                variable.set_metadata(PARAM_SHAPE, tuple(variable.shape))
        name_dims(model, self.facts.ends)
        return model

    @functools.cached_property
    def _shapes(self) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        return self.facts.split(nnx.eval_shape(lambda: self.make(0)))

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the model."""
        return self._shapes[0]

    @property
    def params(self) -> nnx.State:
        """Shapes of the variables that are trained, layers in stacks."""
        return self._shapes[1]

    @property
    def frozen(self) -> nnx.State:
        """Shapes of all other variables, layers in stacks."""
        return self._shapes[2]

    @functools.cached_property
    def stored(self) -> tuple[nnx.State, nnx.State]:
        """Shapes of both trees as a state has them."""
        if self.pools is None:
            return self.params, self.frozen
        planes = [
            [jax.ShapeDtypeStruct(pool.shape_of(plane), plane.dtype) for plane in pool.planes]
            for pool in self.pools
        ]
        return self._in_pools((self.params, self.frozen), planes)

    # ---- what is in pools ----

    @functools.cached_property
    def pools(self) -> tuple[Pool, Pool] | None:
        """One for each tree; None if nothing is in pools."""
        if self.pools_layers:
            return self.possible_pools
        return None if self._has_own_optimizer else self._pools_of_outer

    @functools.cached_property
    def pools_layers(self) -> bool:
        """Whether layers are in pools; otherwise they are in stacks.

        They are in stacks where a task's own axes may split them, where an optimizer that is not an
        `OptimizerConfig` may look at single parameters, where the model's `draw` or `prepare` looks at them,
        and where the carry that they begin with depends on parameters.
        """
        return (
            self.possible_pools is not None
            and not (self.facts.task.axes or self._has_own_optimizer)
            and not any(path.startswith(f"{LAYERS_OF_MODEL}/") for path in self._looked_at)
            and not self.facts.starts_with_variables
        )

    @property
    def _has_own_optimizer(self) -> bool:
        names = "make_optimizer", "after_validation", "evaluated_params"
        kind, task = type(self.facts.task), self.facts.task
        is_own = any(getattr(kind, name) is not getattr(Task, name) for name in names)
        return is_own or not task.has_optimizer

    @property
    def _looked_at(self) -> frozenset[str]:
        """The variables that the model's `draw` and `prepare` change or depend on."""
        sizes = tuple(self.partition.parallel.mesh.sizes.items())
        asked = {"draw": None, "prepare": sizes}
        found = (self.facts.looked_at(*a) for a in asked.items() if says(self.facts.model, a[0]))
        return frozenset().union(*found)

    @functools.cached_property
    def possible_pools(self) -> tuple[Pool, Pool] | None:
        """Pools, if layers can be in them and take so much less than in stacks that it matters.

        Layers of one kind take as much in a stack, which a scan reads without a copy.
        """
        if self.partition.parallel.mesh.stage == 1 or len(self.facts.kinds) < 2:
            return None
        if (pools := self._make_pools(self.facts.layer_stacks)) is None:
            return None
        in_stacks, in_pools = (
            sum(getattr(pool, name) for pool in pools) for name in ("stack_bytes", "num_bytes")
        )
        saves = in_stacks - in_pools > max(partition.LITTLE * in_stacks, partition.FEW * 4)
        return pools if saves else None

    @functools.cached_property
    def _pools_of_outer(self) -> tuple[Pool, Pool] | None:
        """Pools for the modules before and after the layers alone, if these are large.

        No stage but its own has them then, and their gradients are not summed over stages.
        """
        size = sum(array_of(leaf).size for own in self._outer[0] for leaf in own.values())
        of_stage = self.facts.layer_numbers / self.partition.parallel.mesh.stage
        if size <= max(partition.LITTLE * of_stage, partition.FEW):
            return None
        nothing = tuple({} for _ in self.facts.kinds)
        return self._make_pools((nothing, nothing))

    def _make_pools(self, layer_stacks: Sequence[Sequence[Shapes]]) -> tuple[Pool, Pool] | None:
        """Pools for layers by kind, and for both outer parts; None if their arrays do not fit."""
        sizes, rules = self.partition.parallel.mesh.sizes, self.partition.rules
        stages = sizes[STAGE]
        outer = [
            [0 if s == own else -1 for s in range(stages)] for own in self.partition.outer_stages
        ]
        pools = []
        for stacks, of_outer in zip(layer_stacks, self._outer, strict=True):
            shapes: list[Shapes] = [
                jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack)
                for stack in stacks
            ]
            leaves = [jax.tree.leaves(own, is_leaf=is_variable) for own in stacks]
            dims = [[dim_over_tensor(leaf, 1, rules, sizes) for leaf in own] for own in leaves]
            if any(dim == OTHER for own in dims for dim in own):
                return None  # or a mistake, which `check_sizes` reports
            for own in of_outer:
                shapes.append({name: shape_of(array_of(leaf)) for name, leaf in own.items()})
                dims += [[dim_over_tensor(leaf, 0, rules, sizes) for leaf in own.values()]]
            rows = (*self.partition.slots.rows, *outer)
            pools.append(Pool.of(shapes, dims, rows, stages, sizes[TENSOR]))
        return pools[0], pools[1]

    @functools.cached_property
    def _outer(self) -> list[list[dict[str, nnx.Variable]]]:
        """Variables outside of the layers that one stage alone uses, and that no rule splits over stages.

        For both trees: those that `first` uses and those that `last` uses, by name.
        """
        partition, task = self.partition, self.facts.task
        if partition.parallel.mesh.stage == 1 or task.axes:  # all stays where it is
            return [[{}, {}], [{}, {}]]
        first, last = self.facts.reads
        looked_at, sizes = self._looked_at, partition.parallel.mesh.sizes
        uses = (
            frozenset() if partition.shares_first else first - last - looked_at,
            last - first - looked_at if partition.head == "last" else frozenset(),
        )
        fits = [
            {n: v for n, v in own.items() if dim_over_tensor(v, 0, partition.rules, sizes) != OTHER}
            for own in self.facts.outer_variables
        ]
        return [[{n: own[n] for n in own if n in names} for names in uses] for own in fits]

    def packed_names(self, number: int) -> list[list[str]]:
        """The variables in the pool of a tree: for each kind of layer, of `first`, and of `last`."""
        if self.pools is None:
            return []
        stacks = zip(self.facts.kinds, self.facts.layer_stacks[number], strict=True)
        names = [
            [f"{LAYERS_OF_MODEL}/{kind}/{name}" for name, _ in named_leaves(stack, "/")]
            if self.pools_layers
            else []
            for kind, stack in stacks
        ]
        return [*names, *map(list, self._outer[number])]

    def describe(self) -> list[tuple[str, str]]:
        """A row of the table before a run: how much layers of unequal kinds take."""
        if self.possible_pools is None:
            return []
        size = format_bytes(sum(pool.num_bytes for pool in self.possible_pools))
        pools = f"pools: {size} a device"
        return [
            ("layers in", pools if self.pools_layers else "stacks of their kinds, which take more")
        ]

    # ---- from stacks to pools and back, in a traced program ----

    def _in_pools(self, trees: Sequence[nnx.State], planes: Sequence[Sequence[Arrays]]):
        """Both trees as a state has them, of trees with layers in stacks and the planes of both pools."""
        assert self.pools is not None
        made, classes = [], (nnx.Param, nnx.Variable)
        for n, (tree, pool, arrays, of) in enumerate(
            zip(trees, self.pools, planes, classes, strict=True)
        ):
            own = {}
            for plane, array in zip(pool.planes, arrays, strict=True):
                own[plane.name] = of(array, out_sharding=plane.dims, eager_sharding=False)
            rest = self._not_pooled(tree, n)
            made.append(nnx.State({**rest, POOLS[n]: nnx.State(own)} if own else rest))
        return made[0], made[1]

    def _not_pooled(self, tree: nnx.State, number: int) -> nnx.State:
        """The variables of a tree that are in no pool."""
        names = {name for kind in self.packed_names(number) for name in kind}
        flat = nnx.to_flat_state(tree)
        return nnx.from_flat_state([(p, v) for p, v in flat if "/".join(map(str, p)) not in names])

    def merge(self, params: nnx.State, frozen: nnx.State) -> Module:
        """The model with these values; of variables that are in pools it has zeros, which nobody reads."""
        made = []
        for state, key, shapes in zip(
            (params, frozen), POOLS, (self.params, self.frozen), strict=True
        ):
            if key in state:
                rest = {name: part for name, part in state.items() if name != key}
                own = dict(nnx.to_flat_state(nnx.State(rest)))
                flat = nnx.to_flat_state(shapes)
                state = nnx.from_flat_state(
                    [(p, own[p] if p in own else zeros(v)) for p, v in flat]
                )
            made.append(state)
        return nnx.merge(self.graphdef, *made)

    def replaced(self, params: nnx.State, new: nnx.State) -> nnx.State:
        """The parameters of a state, with those that are in no pool replaced by those of `new`."""
        if POOLS[0] not in params:
            return new
        return nnx.State({**self._not_pooled(new, 0), POOLS[0]: params[POOLS[0]]})

    def planes(self, number: int, state: nnx.State) -> nnx.State:
        """The planes of the pool in a tree of a state; empty if it has none."""
        return nnx.State(state.get(POOLS[number], {}))

    def stores(self, first: Sequence[Names], last: Sequence[Names]) -> tuple[Store, Store]:
        """How the pipeline reads layers of both trees, and adds to their gradients.

        Args:
          first, last: the names of the variables that `first` and `last` use, of both trees.
        """
        if self.pools is None:
            return Stacks(), Stacks()
        of, each = LayerPool if self.pools_layers else OuterPool, zip(first, last, strict=True)
        made = map(of, self.pools, each, (self.facts.platform,) * 2)
        return next(made), next(made)

    # ---- the first values ----

    def draw(self, key_data: jax.Array, mesh: Mesh) -> tuple[nnx.State, nnx.State]:
        """Both trees as a state has them, of the data of a key. Call under `jit`."""
        _, *trees = self.facts.split(self.make(key_of(key_data)))
        if self.pools is None:
            return trees[0], trees[1]
        return self._in_pools(trees, _draw_planes(self, key_data, mesh))

    # ---- variables by their names ----

    def each_by_name(
        self,
        tree: Variables,
        change: Callable[[str, nnx.Variable], jax.Array | None],
        separator: str = "/",
    ) -> Variables:
        """A tree with other values of its variables; layers are shown in the slots of stacks, one by one.

        Args:
          tree: a state or a part of it; arrays of pools are donated, where one is changed.
          change: name and variable -> the new array, None for no change. A tree of shapes becomes one of
            arrays, if all are changed.
        """

        def of(path: tuple[object, ...], node: Tree) -> Tree:
            name = jax.tree_util.keystr(path, simple=True, separator=separator)
            if not (key := _has_pool(node)):
                value = change(name, node)
                if value is None:
                    return node
                return node.replace(value) if is_variable(node) else value
            begin = name + separator if name else ""

            def within(name: str, leaf: nnx.Variable) -> jax.Array | None:
                return change(begin + name, leaf)

            rest = nnx.State({name: part for name, part in node.items() if name != key})
            rest = self.each_by_name(rest, within, separator)
            planes = self._each_in_pool(node[key], POOLS.index(key), within, separator)
            return nnx.State({**rest, key: planes})

        return jax.tree_util.tree_map_with_path(of, tree, is_leaf=_is_whole)

    def _each_in_pool(
        self,
        planes: nnx.State,
        number: int,
        change: Callable[..., jax.Array | None],
        separator: str,
    ) -> nnx.State:
        """As `each_by_name`, for the planes of one pool."""
        assert self.pools is not None
        variables, structure = jax.tree.flatten(planes, is_leaf=is_variable)
        pool, arrays = self.pools[number], [*map(array_of, variables)]
        shapes = dict(named_leaves((self.params, self.frozen)[number], "/"))
        for kind, names in enumerate(self.packed_names(number)):
            for name, leaf in zip(names, pool.leaves[kind], strict=True):
                variable, plane = shapes[name], arrays[leaf.plane]
                split, rules = axes_of_spec(plane.sharding.spec, plane.ndim), self.partition.rules
                rules = split_over_data(rules) if DATA in sum(split, ()) else rules
                place = array_of(shardings(variable, plane.sharding.mesh, rules))
                shown = jax.ShapeDtypeStruct(variable.shape, plane.dtype, sharding=place)
                if isinstance(array_of(variables[leaf.plane]), jax.Array):
                    shown = stack_of(on_device(plane), pool, kind, leaf, place)
                value = change(name.replace("/", separator), variable.replace(shown))
                if value is not None:
                    plane = on_device(plane)
                    arrays[leaf.plane] = with_stack(plane, value, pool, kind, leaf, plane.sharding)
        made = [
            variable.replace(jax.device_put(array, array_of(variable).sharding))
            if isinstance(array, jax.Array)
            else variable
            for variable, array in zip(variables, arrays, strict=True)
        ]
        return jax.tree.unflatten(structure, made)

    def in_stacks(self, tree: Variables) -> Variables:
        """A tree with all layers in the slots of stacks."""

        def of(node: Tree) -> Tree:
            if not (key := _has_pool(node)):
                return node
            found: dict[str, nnx.Variable] = {}
            self.each_by_name(node, lambda name, leaf: found.update({name: leaf}))
            shapes = (self.params, self.frozen)[POOLS.index(key)]
            leaves = [found[name] for name, _ in named_leaves(shapes, "/")]
            return jax.tree.unflatten(jax.tree.structure(shapes, is_leaf=is_variable), leaves)

        return jax.tree.map(of, tree, is_leaf=_is_whole)


def _draw_planes(storage: Storage, key_data: jax.Array, mesh: Mesh) -> list[list[jax.Array]]:
    """The planes of both pools; every stage draws its own layers."""
    assert storage.pools is not None
    pools, names = storage.pools, [storage.packed_names(number) for number in range(2)]
    num_layers, num_stages = len(storage.facts.kinds), mesh.shape[STAGE]

    def on_stage(model: Module, whole: dict[str, jax.Array], stage: int):
        kinds: list[list[list[jax.Array]]] = [[] for _ in pools]
        for kind in range(len(pools[0].leaves)):
            drawn = jax.tree.map(lambda a: a[None], whole)
            if kind < num_layers:
                rows = np.split(np.asarray(storage.partition.slots.rows[kind]), num_stages)[stage]
                drawn = _named_layers(model.layers, kind, [int(n) for n in rows if n >= 0])
            here = np.split(pools[0].is_full[kind], num_stages)[stage].any()
            for pool, own, named in zip(pools, kinds, names, strict=True):
                pairs = zip(pool.leaves[kind], named[kind], strict=True)
                own.append([leaf.part(drawn[name]) for leaf, name in pairs if here])
        return [pool.packed(own) for pool, own in zip(pools, kinds, strict=True)]

    def draw(key_data: jax.Array) -> list[list[jax.Array]]:
        model = storage.facts.make(key_of(key_data))
        states = storage.facts.split(model)[1:]
        whole = {n: array_of(leaf) for own in states for n, leaf in named_leaves(own, "/")}
        whole = {n: whole[n] for own in names for kind in own[num_layers:] for n in kind}
        branches = [functools.partial(on_stage, model, whole, s) for s in range(num_stages)]
        return jax.lax.switch(jax.lax.axis_index(STAGE), branches)

    specs = [[plane.spec for plane in pool.planes] for pool in pools]
    # No axis is summed over, which is what the check is for.
    run = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)
    return run(key_data)


def _has_pool(node: Tree) -> str:
    """The name of the pool in a tree, if there is one."""
    return next((key for key in POOLS if isinstance(node, nnx.State) and key in node), "")


def _is_whole(node: Tree) -> bool:
    return is_variable(node) or bool(_has_pool(node))


def on_device(array: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """An array in the devices' own memory; zeros for a shape."""
    assert array.sharding is not None
    place = array.sharding.with_memory_kind("device")
    if isinstance(array, jax.Array):
        return jax.device_put(array, place)
    return jax.jit(functools.partial(jnp.zeros, array.shape, array.dtype), out_shardings=place)()


def _named_layers(stack: Stack, kind: int, layers: list[int]) -> dict[str, jax.Array]:
    """The variables of these layers of a kind, stacked, by their names in the model."""
    if not layers:
        return {}
    begin = f"{LAYERS_OF_MODEL}/{stack.kinds[kind]}/"
    state = nnx.state(stack.draw_kind(kind, layers))
    return {begin + name: array_of(leaf) for name, leaf in named_leaves(state, "/")}
