"""Layers of unequal shapes in pools: a device has room for the layers of its own stage, not for all kinds.

In a stack of each kind every stage has as many rows as the fullest of them needs. In a pool a layer is a
*block* of rows, whatever its shapes; a stage's blocks lie one after the other, and what is left is zero:

    stacks of kinds a, b, c        a pool
    stage 0   a a  -  -            a a .
    stage 1   -  b-  -             b b .
    stage 2   -    -  c            c c c

What comes before the layers and after them may lie there too, as two more kinds; or alone, with the layers in
stacks. No other stage has it then.

A pool has a *plane* [stage, rows, columns] for each dtype, and for what `tensor` splits one of its own, in
which each of its devices has rows for its part. A leaf is whole rows of a plane. Rows are as long as those of
the largest leaf, which a TPU reads as it lies there; in shorter rows it would be copied in every unit. Where
a layer's block begins is data, where its leaves lie within is not: one branch serves all layers of a kind. It
takes its views inside of a `shard_map` over `tensor`, so that they send nothing: by constraints, one that was
forgotten would mean a permute in a branch, for which other stages wait forever.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import LAYERS, POOL_ROWS, STAGE, TENSOR
from jaxpar.base.types import Activations, Arrays, Index, Params, Specs
from jaxpar.pipeline.store import Store, rows_of_group
from jaxpar.sharding import Rules, dims_of

# Of a TPU's tile. Planes have at least so many columns, and a multiple of these rows: a TPU copies others.
ROWS, COLUMNS = 8, 128
MOST_FILLED = 1.02  # times what the arrays of a plane take
OTHER = -1  # of an array that cannot be in a pool: the dim that `tensor` splits


class Leaf(NamedTuple):
    """Where an array of a layer lies.

    Attributes:
      plane: its number.
      start: its first row within the layer's block.
      shape: on one device.
      dim: that `tensor` splits; None for none.
      columns: of the plane.
    """

    plane: int
    start: int
    shape: tuple[int, ...]
    dim: int | None
    columns: int

    @property
    def num_rows(self) -> int:
        """Of the plane."""
        return -(-math.prod(self.shape) // self.columns)

    @property
    def spec(self) -> P:
        """Over `tensor`, of one layer's."""
        return P(*(TENSOR if dim == self.dim else None for dim in range(len(self.shape))))

    def part(self, layers: jax.Array) -> jax.Array:
        """Of whole arrays of several layers, [layers, ...], the part of this device of `tensor`."""
        if self.dim is None:
            return layers
        size = self.shape[self.dim]
        return lax.dynamic_slice_in_dim(
            layers, lax.axis_index(TENSOR) * size, size, axis=self.dim + 1
        )

    def read(self, plane: jax.Array, block: Activations) -> jax.Array:
        """The array, of a device's plane [1, rows, columns] in which its layer's block begins there."""
        return self._rows(plane, block)[: math.prod(self.shape)].reshape(self.shape)

    def write(self, plane: jax.Array, block: Activations, value: jax.Array) -> jax.Array:
        """That plane with another value of the array, and nothing else changed."""
        rest = self._rows(plane, block)[value.size :]
        rows = jnp.concatenate([value.reshape(-1).astype(plane.dtype), rest])
        rows = rows.reshape(1, self.num_rows, self.columns)
        return lax.dynamic_update_slice(plane, rows, self._place(block))

    def rows_of(self, value: jax.Array) -> jax.Array:
        """The array as rows; what it does not fill is zero."""
        room = self.num_rows * self.columns
        return jnp.pad(value.reshape(-1), (0, room - value.size)).reshape(-1, self.columns)

    def _rows(self, plane: jax.Array, block: Activations) -> jax.Array:
        sizes = 1, self.num_rows, self.columns
        return lax.dynamic_slice(plane, self._place(block), sizes).reshape(-1)

    def _place(self, block: Activations) -> tuple[jax.Array, ...]:
        return jnp.int32(0), block + jnp.int32(self.start), jnp.int32(0)


def _on_device(shape: Sequence[int], dim: int | None, num_tensor: int) -> tuple[int, ...]:
    """The part of an array that a device of `tensor` has, split in this dim."""
    return tuple(n // num_tensor if d == dim else n for d, n in enumerate(shape))


def _columns_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Of a plane with such arrays: the last dim of the largest, unless much would be empty with that."""
    wide = max([COLUMNS, *max(shapes, key=math.prod)[-1:]])
    sizes = [*map(math.prod, shapes)]
    filled = sum(-(-size // wide) * wide for size in sizes)
    return wide if filled <= MOST_FILLED * sum(sizes) else COLUMNS


class Plane(NamedTuple):
    """A plane of a pool.

    Attributes:
      dtype: its name.
      is_split: whether `tensor` splits what lies in it.
      rows, columns: on one device.
    """

    dtype: str
    is_split: bool
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """By which a state has it."""
        return self.dtype + "_over_tensor" * self.is_split

    @property
    def dims(self) -> tuple[str | None, ...]:
        """Their names."""
        return LAYERS, POOL_ROWS if self.is_split else None, None

    @property
    def spec(self) -> P:
        """Over `stage` and `tensor`."""
        return P(STAGE, TENSOR) if self.is_split else P(STAGE)

    @property
    def num_bytes(self) -> int:
        """On one device."""
        return self.rows * self.columns * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """Where the arrays of all layers lie.

    Attributes:
      planes: in the order of their names.
      leaves: of a layer of each kind, in the order in which a tree has them.
      structures: of these trees.
      starts: of each kind, for each row of what would be its stack, the first row of the block in each plane:
        int32 [rows, planes].
      is_full: of each kind, for each of these rows, whether there is a layer.
      num_stages, num_tensor: sizes of the mesh.
    """

    planes: tuple[Plane, ...]
    leaves: tuple[tuple[Leaf, ...], ...]
    structures: tuple[Any, ...]
    starts: tuple[np.ndarray, ...]
    is_full: tuple[np.ndarray, ...]
    num_stages: int
    num_tensor: int

    @classmethod
    def of(
        cls,
        layers: Sequence[Arrays],
        dims: Sequence[Sequence[int | None]],
        rows: Sequence[Sequence[int]],
        num_stages: int,
        num_tensor: int,
    ) -> "Pool":
        """A pool for layers that are placed.

        Args:
          layers: a tree of shapes for each kind; the last two are what is used before and after the layers.
          dims: for each kind, of each of its leaves the dim that `tensor` splits, or None.
          rows: for each kind the layer in each row of its stack (`Slots.rows`).
        """
        kinds = list[list[tuple[str, tuple[int, ...], int | None]]]()
        for tree, splits in zip(layers, dims, strict=True):
            pairs = zip(jax.tree.leaves(tree), splits, strict=True)
            kinds.append(
                [
                    (np.dtype(a.dtype).name, _on_device(a.shape, dim, num_tensor), dim)
                    for a, dim in pairs
                ]
            )
        shapes = collections.defaultdict[tuple[str, bool], list[tuple[int, ...]]](list)
        for dtype, shape, dim in itertools.chain(*kinds):
            shapes[dtype, dim is not None].append(shape)
        keys = sorted(shapes, key=lambda key: Plane(*key, 0, 0).name)
        columns = [_columns_of(shapes[key]) for key in keys]
        leaves, blocks = [], np.zeros((len(kinds), len(keys)), np.int32)
        for number, kind in enumerate(kinds):
            own = list[Leaf]()
            for dtype, shape, dim in kind:
                plane = keys.index((dtype, dim is not None))
                own.append(Leaf(plane, int(blocks[number, plane]), shape, dim, columns[plane]))
                blocks[number, plane] += own[-1].num_rows
            leaves.append(tuple(own))
        is_full = tuple(np.asarray(own) >= 0 for own in rows)
        starts, ends = [], np.zeros((num_stages, len(keys)), np.int32)
        for number, full in enumerate(is_full):
            full_SR = full.reshape(num_stages, -1)
            before_SR = np.cumsum(full_SR, axis=1) - full_SR
            starts_SRP = ends[:, None] + before_SR[..., None] * blocks[number]
            starts.append(starts_SRP.reshape(len(full), -1).astype(np.int32))
            ends = ends + full_SR.sum(1, keepdims=True) * blocks[number]
        sizes = zip(keys, ends.max(0), columns, strict=True)
        planes = tuple(Plane(*key, -(-int(end) // ROWS) * ROWS, width) for key, end, width in sizes)
        structures = tuple(map(jax.tree.structure, layers))
        return cls(
            planes, tuple(leaves), structures, tuple(starts), is_full, num_stages, num_tensor
        )

    def number_of_end(self, end: int) -> int:
        """The number of the kind that holds variables of `first` (0) or `last` (1), on one stage."""
        return len(self.leaves) - 2 + end

    def shape_of(self, plane: Plane) -> tuple[int, int, int]:
        """Of a whole plane."""
        devices = self.num_tensor if plane.is_split else 1
        return self.num_stages, devices * plane.rows, plane.columns

    @property
    def num_bytes(self) -> int:
        """On one device."""
        return sum(plane.num_bytes for plane in self.planes)

    @property
    def stack_bytes(self) -> int:
        """On one device, if each kind were a stack."""
        size = [np.dtype(plane.dtype).itemsize for plane in self.planes]
        return sum(
            len(full) // self.num_stages * math.prod(leaf.shape) * size[leaf.plane]
            for full, own in zip(self.is_full, self.leaves, strict=True)
            for leaf in own
        )

    def packed(self, kinds: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """A stage's planes, [1, rows, columns], on one device.

        Args:
          kinds: for each kind the arrays of its layers there, stacked, [layers, ...]; nothing if it has none.
        """
        parts: list[list[jax.Array]] = [[] for _ in self.planes]
        for own, stacks in zip(self.leaves, kinds, strict=True):
            blocks: list[list[jax.Array]] = [[] for _ in self.planes]
            for leaf, stack in zip(own, stacks, strict=False):
                blocks[leaf.plane].append(jax.vmap(leaf.rows_of)(stack))
            for plane, part, block in zip(self.planes, parts, blocks, strict=True):
                if block:
                    part.append(jnp.concatenate(block, axis=1).reshape(-1, plane.columns))
        full = []
        for plane, part in zip(self.planes, parts, strict=True):
            rest = plane.rows - sum(map(len, part))
            room = jnp.zeros((rest, plane.columns), plane.dtype)
            full.append(jnp.concatenate([*part, room])[None])
        return full


@dataclasses.dataclass(frozen=True)
class OuterPool(Store):
    """Layers in stacks, and variables of `first` and `last` in a pool; a `pipeline.store.Store`.

    Attributes:
      names: of the variables of `first` and of `last`, those that are not in the pool too. One of both is
        with `last`, on its stage: other stages read no value of it, and add nothing to its gradient.
      starts: as of the pool, of the rows of this stage, or of a group of it.
    """

    pool: Pool
    names: tuple[Sequence[str], Sequence[str]]
    platform: str
    starts: tuple[jax.Array, ...] = ()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The first rows of all layers."""
        return tuple(map(jnp.asarray, self.pool.starts))

    def bind(self, arrays: tuple[jax.Array, ...]) -> "OuterPool":
        """The store of one stage."""
        return dataclasses.replace(self, starts=arrays)

    def has_outer(self, end: int) -> bool:
        """Whether variables of `first` (0) or `last` (1) are in the pool."""
        return any(self._outer_kinds(end))

    def _outer_kinds(self, end: int) -> Iterator[int]:
        """The kinds that hold variables of `first` or `last`."""
        for kind in map(self.pool.number_of_end, (0, 1)):
            own = jax.tree.unflatten(self.pool.structures[kind], self.pool.leaves[kind])
            if not own.keys().isdisjoint(self.names[end]):
                yield kind

    def pick_outer(self, stored: Params, end: int, own: Params) -> Params:
        """All variables of `first` or `last`, those that are None in `own` of the pool."""
        found = {}
        for kind in self._outer_kinds(end):
            found |= dict(self._read(stored, kind, 0))
        pairs = zip(self.names[end], own, strict=True)
        return tuple(found[name] if leaf is None else leaf for name, leaf in pairs)

    def put_outer(
        self, stored: Params, end: int, own: Params, values: Params
    ) -> tuple[Params, Params]:
        """`own` and the planes with other values."""
        each = [*zip(self.names[end], own, values, strict=True)]
        found = {name: new for name, old, new in each if old is None}
        for kind in self._outer_kinds(end) if found else ():
            before = self._read(stored, kind, 0)
            stored = self._write(stored, kind, 0, {n: found.get(n, a) for n, a in before.items()})
        return tuple(None if old is None else new for _, old, new in each), stored

    def _read(self, planes: Params, kind: int, place: Index) -> Params:
        """The variables of a layer; () if there are no planes for it."""
        arrays, own = jax.tree.leaves(planes), self.pool.leaves[kind]
        if len(arrays) != len(self.pool.planes):
            return ()

        def read(arrays: list[jax.Array], block: jax.Array) -> list[jax.Array]:
            return [leaf.read(arrays[leaf.plane], block[leaf.plane]) for leaf in own]

        specs = [leaf.spec for leaf in own]
        found = self._over_tensor(read, (self._planes, P()), specs)(
            arrays, self._block(kind, place)
        )
        return jax.tree.unflatten(self.pool.structures[kind], found)

    def _write(self, planes: Params, kind: int, place: Index, layer: Params) -> Params:
        """The planes with a layer changed; as they are for ()."""
        (arrays, structure), values = jax.tree.flatten(planes), jax.tree.leaves(layer)
        if not values:
            return planes
        own = self.pool.leaves[kind]

        def write(arrays: list[jax.Array], block: jax.Array, values: list[jax.Array]):
            arrays = [*arrays]
            for leaf, value in zip(own, values, strict=True):
                changed = leaf.write(arrays[leaf.plane], block[leaf.plane], value)
                arrays[leaf.plane] = self._row_major(changed)
            return arrays

        specs = self._planes, P(), [leaf.spec for leaf in own]
        run = self._over_tensor(write, specs, self._planes)
        return jax.tree.unflatten(structure, run(arrays, self._block(kind, place), values))

    def _block(self, kind: int, place: Index) -> jax.Array:
        return lax.dynamic_index_in_dim(self.starts[kind], place, 0, keepdims=False)

    @property
    def _planes(self) -> list[P]:
        return [P(None, *plane.spec[1:]) for plane in self.pool.planes]

    def _over_tensor(
        self, run: Callable[..., Arrays], in_specs: Specs, out_specs: Specs
    ) -> Callable[..., Arrays]:
        if self.pool.num_tensor == 1:
            return run
        return jax.shard_map(run, axis_names={TENSOR}, in_specs=in_specs, out_specs=out_specs)

    def _row_major(self, plane: jax.Array) -> jax.Array:
        """The plane in its layout: left to choose, XLA copies it to another one in every tick."""
        if self.platform == "cpu":
            return plane
        return with_layout_constraint(plane, Layout(tuple(range(plane.ndim))))


@dataclasses.dataclass(frozen=True)
class LayerPool(OuterPool):
    """Layers in a pool, and variables of `first` and `last` with them."""

    is_stacked, outer_field = False, "layers"

    def of_group(self, number: Index, count: int) -> "LayerPool":
        """With the first rows of a group's layers."""
        starts = self.starts[: self.pool.number_of_end(0)]
        return dataclasses.replace(self, starts=rows_of_group(starts, number, count))

    def pick(self, stored: Params, kind: int, place: Index) -> Params:
        """A layer; () if nothing is stored."""
        return self._read(stored, kind, place)

    def put(self, stored: Params, kind: int, place: Index, layer: Params) -> Params:
        """The planes with a layer changed; as they are for ()."""
        return self._write(stored, kind, place, layer)

    def take_group(self, stored: Params, number: Index, count: int) -> Params:
        """All planes: layers of a group have their places in them."""
        return stored

    def put_group(self, stored: Params, part: Params, number: Index, count: int) -> Params:
        """The changed planes."""
        return part

    def keep(self, stored: Params, kinds: Sequence[bool]) -> Params:
        """The planes, if any kind is True."""
        return stored if any(kinds) else ()

    def restore(self, stored: Params, kept: Params, kinds: Sequence[bool]) -> Params:
        """The changed planes, if any kind is True."""
        return kept if any(kinds) else stored


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def stack_of(
    plane: jax.Array, pool: Pool, kind: int, leaf: Leaf, place: NamedSharding
) -> jax.Array:
    """A leaf of all layers of a kind as a stack with slots for it on every stage, [rows, ...].

    Nothing is sent from stage to stage. Empty slots are zeros.

    Args:
      place: where it shall lie. Of an end it may be that of the only layer, which all stages have then.
    """

    def run(plane: jax.Array, starts_RP: jax.Array, is_full_R: jax.Array) -> jax.Array:
        def read(start: jax.Array, is_full: jax.Array) -> jax.Array:
            found = leaf.read(plane, start)
            return jnp.where(is_full, found, jnp.zeros_like(found))

        return jax.vmap(read)(starts_RP[:, leaf.plane], is_full_R)

    specs, starts, is_full = _slots(pool, kind, leaf)
    out = P(STAGE, *leaf.spec)
    found = jax.shard_map(run, mesh=place.mesh, in_specs=specs, out_specs=out)(
        plane, starts, is_full
    )
    if len(place.spec) == len(leaf.shape):
        found = found[int(pool.is_full[kind].argmax())]
    return lax.with_sharding_constraint(found, place)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), donate_argnums=0)
def with_stack(
    plane: jax.Array, stack: jax.Array, pool: Pool, kind: int, leaf: Leaf, place: NamedSharding
) -> jax.Array:
    """The plane, which is donated, with the values of such a stack, or of an end.

    Args:
      place: where the plane lies.
    """

    def run(plane: Any, starts_RP: jax.Array, is_full_R: jax.Array, stack: jax.Array) -> Arrays:
        def put(row: Index, plane: jax.Array) -> jax.Array:
            start = starts_RP[row, leaf.plane]
            before, value = leaf.read(plane, start), stack[row].astype(plane.dtype)
            return leaf.write(plane, start, jnp.where(is_full_R[row], value, before))

        return lax.fori_loop(0, len(stack), put, plane)

    specs, starts, is_full = _slots(pool, kind, leaf)
    specs = *specs, P(STAGE, *leaf.spec)
    if stack.ndim == len(leaf.shape):
        stack = jnp.broadcast_to(stack[None], (pool.num_stages, *stack.shape))
    change: Any = jax.shard_map(run, mesh=place.mesh, in_specs=specs, out_specs=specs[0])
    changed = change(plane, starts, is_full, stack)
    return lax.with_sharding_constraint(changed, place)


def _slots(pool: Pool, kind: int, leaf: Leaf) -> tuple[tuple[P, ...], jax.Array, jax.Array]:
    """Specs of a plane and of what says where the slots lie, and that."""
    starts, is_full = (jnp.asarray(each[kind]) for each in (pool.starts, pool.is_full))
    return (pool.planes[leaf.plane].spec, P(STAGE), P(STAGE)), starts, is_full


def dim_over_tensor(leaf: Any, first: int, rules: Rules, sizes: Mapping[str, int]) -> int | None:
    """The dim of a variable, from its first, that `tensor` splits; `OTHER` if it cannot lie in a pool."""
    split = rules.split(dims_of(leaf))[first:]
    found = [dim for dim, axes in enumerate(split) if math.prod(sizes[axis] for axis in axes) > 1]
    if not found and isinstance(leaf.dtype, np.dtype):
        return None
    axes = {axis for dim in found for axis in split[dim] if sizes[axis] > 1}
    fits = axes == {TENSOR} and leaf.shape[first:][found[0]] % sizes[TENSOR] == 0
    return found[0] if fits else OTHER
