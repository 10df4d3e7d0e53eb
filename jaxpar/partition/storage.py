"""The storage of a model's arrays in a state: layers of a kind in a stack, or a stage's in pools.

A state has two trees of variables: those that are trained (number 0) and all others (number 1). In a stack
[rows, ...] of each kind every stage has as many rows as the fullest of them needs. Where that takes much more
than the layers do, a stage has its own layers alone, in a pool (`partition.pool`). This module alone knows
which of the two it is. All others read variables by their names, or one layer at a time.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import DATA, LAYERS, STAGE
from jaxpar.base.keys import key_of
from jaxpar.base.trees import zeros
from jaxpar.base.types import Arrays, Module, Shapes, Tree
from jaxpar.model.outer import ENDS, STACK
from jaxpar.model.stack import KIND, Stack
from jaxpar.partition.packing import Packing
from jaxpar.partition.pool import LayerPool, Leaf, OuterPool, stack_of, with_stack
from jaxpar.pipeline.store import Store
from jaxpar.sharding import (
    HELD,
    PARAM_SHAPE,
    Held,
    array_of,
    axes_of_spec,
    dims_of,
    is_variable,
    named_leaves,
    shardings,
    split_over_data,
    user_name,
)

Variables = TypeVar("Variables", bound=Tree)
Names = Sequence[str]

# The names of the pools in both trees of a state, in place of the variables that are in them.
POOLS = ("@pool", "@pool of frozen")

# Metadata of planes: the names of the variables that lie there, if an optimizer has masked others.
_POOLED = "pooled"


class Storage(Packing):
    """Where the variables of a partition's model are stored; see `Packing`."""

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

    @property
    def is_packed(self) -> bool:
        """Whether a state has variables in other arrays than their own."""
        return self.pools is not None

    # ---- from stacks to pools and back, in a traced program ----

    def _in_pools(
        self, trees: Sequence[nnx.State], planes: Sequence[Sequence[Arrays]]
    ) -> tuple[nnx.State, nnx.State]:
        """Both trees as a state has them, of trees with layers in stacks and the planes of both pools."""
        first, second = map(self._in_pool, trees, range(2), planes)
        return first, second

    def _in_pool(
        self, tree: nnx.State, number: int, planes: Sequence[Arrays], **metadata: Any
    ) -> nnx.State:
        """One tree, with these planes of its pool."""
        assert self.pools is not None
        own, of = {}, (nnx.Param, nnx.Variable)[number]
        for place, (plane, array) in enumerate(zip(self.pools[number].planes, planes, strict=True)):
            known = {"out_sharding": plane.dims, "eager_sharding": False, **metadata}
            known[HELD] = self._held[number, place]
            own[plane.name] = of(array, **known)
        rest = self._not_pooled(tree, number)
        return nnx.State({**rest, POOLS[number]: nnx.State(own)} if own else rest)

    @functools.cached_property
    def _held(self) -> dict[tuple[int, int], tuple[Held, ...]]:
        """What is in each plane of each pool."""
        assert self.pools is not None
        found = collections.defaultdict[tuple[int, int], tuple[Held, ...]](tuple)
        for number, pool in enumerate(self.pools):
            for kind, stored, leaf, variable in self._packed_leaves(number):
                name, dims, shape = user_name(stored, variable), dims_of(variable), variable.shape
                if LAYERS in dims:
                    shape = (int(pool.is_full[kind].sum()), *shape[1:])
                split = tuple(self.partition.param_rules.split(dims))
                found[number, leaf.plane] += (Held(name.replace("/", "."), shape, dims, split),)
        return found

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

    @functools.cached_property
    def in_slots(self) -> nnx.State:
        """Shapes of the trained variables, those in a pool as stacks with rows of every stage."""
        stages, ends = self.partition.parallel.mesh.stage, dict[str, str]()
        for kind, names in zip(ENDS, self.packed_names(0)[-2:], strict=False):
            ends |= dict.fromkeys(names, kind)

        def of(path: tuple[object, ...], leaf: nnx.Variable) -> nnx.Variable:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name not in ends:
                return leaf
            shape, dims = (stages, *leaf.shape), (LAYERS, *dims_of(leaf))
            known = {PARAM_SHAPE: shape, KIND: ends[name], "out_sharding": dims}
            made = leaf.replace(jax.ShapeDtypeStruct(shape, leaf.dtype))
            made.set_metadata(eager_sharding=False, **known)
            return made

        return jax.tree.map_with_path(of, self.params, is_leaf=is_variable)

    def unpacked(self, tree: Variables, like: Shapes, mesh: Mesh) -> Variables:
        """A tree with parameters of a state in it, those in pools in stacks; in a traced program.

        Args:
          like: what it becomes.
        """

        def of(wanted: Tree, node: Tree) -> Tree:
            if not (self.pools and _has_pool(node)):
                return node
            planes, rules = jax.tree.leaves(node[POOLS[0]]), self.partition.opt_rules
            found = {name: leaf for name, leaf in named_leaves(node, "/") if POOLS[0] not in name}
            shapes = dict(named_leaves(wanted, "/"))
            for kind, name, leaf in self._pooled(shapes):
                place = array_of(shardings(shapes[name], mesh, rules))
                stack = stack_of(planes[leaf.plane], self.pools[0], kind, leaf, place)
                found[name] = shapes[name].replace(stack)
            return _tree_of(found, wanted)

        return jax.tree.map(of, like, tree, is_leaf=_is_state)

    def packed(self, tree: Variables, mesh: Mesh) -> Variables:
        """The reverse: arrays like the parameters, or some of them, are in pools if that saves memory."""

        def of(node: Tree) -> Tree:
            found = dict(named_leaves(node, "/")) if _is_state(node) else {}
            assert self.pools is not None
            pool, own, size = self.pools[0], [*self._pooled(found)], 0
            for kind, _, leaf in own:
                rows = len(pool.is_full[kind]) // pool.num_stages
                size += (
                    rows * math.prod(leaf.shape) * np.dtype(pool.planes[leaf.plane].dtype).itemsize
                )
            is_whole = len(own) == sum(map(len, pool.leaves))
            if not own or not (is_whole or size > pool.num_bytes):
                return node
            known = {} if is_whole else {_POOLED: tuple(name for _, name, _ in own)}
            planes = [jnp.zeros(pool.shape_of(plane), plane.dtype) for plane in pool.planes]
            for kind, name, leaf in own:
                n, place = leaf.plane, NamedSharding(mesh, pool.planes[leaf.plane].spec)
                planes[n] = with_stack(planes[n], array_of(found[name]), pool, kind, leaf, place)
            return self._in_pool(node, 0, planes, **known)

        return jax.tree.map(of, tree, is_leaf=_is_state)

    def _pooled(self, found: Mapping[str, Any]) -> list[tuple[int, str, Leaf]]:
        """Those of some variables that can be in the pool, if all are like parameters: kind, name, place."""
        wanted = dict(named_leaves(self.in_slots, "/"))
        if any(n not in wanted or not _is_like(a, wanted[n]) for n, a in found.items()):
            return []
        return [each[:3] for each in self._packed_leaves(0) if each[1] in found]

    def _packed_leaves(self, number: int) -> Iterator[tuple[int, str, Leaf, nnx.Variable]]:
        """The variables in the pool of a tree: number of the kind, name, place, and shapes in a stack."""
        assert self.pools is not None
        shapes = dict(named_leaves((self.params, self.frozen)[number], "/"))
        for kind, names in enumerate(self.packed_names(number)):
            for name, leaf in zip(names, self.pools[number].leaves[kind], strict=True):
                yield kind, name, leaf, shapes[name]

    def stores(self, first: Sequence[Names], last: Sequence[Names]) -> tuple[Store, Store]:
        """How the pipeline reads layers of both trees, and adds to their gradients.

        Args:
          first, last: the names of the variables that `first` and `last` use, of both trees.
        """
        if self.pools is None:
            return Store(), Store()
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
        pooled = variables[0].get_metadata(_POOLED, None)
        for kind, name, leaf, variable in self._packed_leaves(number):
            if pooled is not None and name not in pooled:
                continue
            plane = arrays[leaf.plane]
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
            flat = nnx.to_flat_state((self.params, self.frozen)[POOLS.index(key)])
            paths = ((path, "/".join(map(str, path))) for path, _ in flat)
            return nnx.from_flat_state([(p, found[name]) for p, name in paths if name in found])

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


def _tree_of(found: Mapping[str, nnx.Variable], like: nnx.State) -> nnx.State:
    """Variables by name as a tree like another."""
    leaves = [found[name] for name, _ in named_leaves(like, "/")]
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_variable), leaves)


def _is_like(leaf: Any, wanted: nnx.Variable) -> bool:
    """Whether a leaf is a variable as a parameter is."""
    return is_variable(leaf) and (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)


def _is_state(node: Tree) -> bool:
    return isinstance(node, nnx.State)


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
    begin = f"{STACK}/{stack.kinds[kind]}/"
    state = nnx.state(stack.draw_kind(kind, layers))
    return {begin + name: array_of(leaf) for name, leaf in named_leaves(state, "/")}
