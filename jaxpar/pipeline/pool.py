"""Layers of unequal shapes in pools: a device has room for the layers of its own stage, not for all kinds.

In a stack of each kind every stage has as many rows as the fullest of them needs. In a pool a layer is a
*block* of rows, whatever its shapes; a stage's blocks lie one after the other, and what is left is zero:

    stacks of kinds a, b, c        a pool
    stage 0   a a  -  -            a a .
    stage 1   -  b-  -             b b .
    stage 2   -    -  c            c c c

A pool has a *plane* [stage, rows, COLUMNS] for each dtype, and for what `tensor` splits one of its own, in
which each of its devices has rows for its part. A leaf is whole rows of a plane. Where a layer's block begins
is data, where its leaves lie within is not: one branch serves all layers of a kind. It takes its views inside
of a `shard_map` over `tensor`, so that they send nothing: by constraints, one that was forgotten would mean a
permute in a branch, for which other stages wait forever.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import TENSOR

COLUMNS = 128  # of a row, as many as of a TPU's tile


class Leaf(NamedTuple):
    """Where an array of a layer lies.

    Attributes:
      plane: its number.
      start: its first row within the layer's block.
      shape: on one device.
      dim: that `tensor` splits; None for none.
    """

    plane: int
    start: int
    shape: tuple[int, ...]
    dim: int | None

    @property
    def num_rows(self) -> int:
        """Of the plane."""
        return -(-math.prod(self.shape) // COLUMNS)

    @property
    def spec(self) -> P:
        """Over `tensor`, of one layer's."""
        return P(*(TENSOR if dim == self.dim else None for dim in range(len(self.shape))))

    def read(self, plane: jax.Array, block: Any) -> jax.Array:
        """The array, of a device's plane [1, rows, COLUMNS] in which its layer's block begins there."""
        at = jnp.int32(0), block + jnp.int32(self.start), jnp.int32(0)
        rows = lax.dynamic_slice(plane, at, (1, self.num_rows, COLUMNS))
        return rows.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def write(self, plane: jax.Array, block: Any, value: jax.Array) -> jax.Array:
        """That plane with another value of the array."""
        at = jnp.int32(0), block + jnp.int32(self.start), jnp.int32(0)
        return lax.dynamic_update_slice(plane, self.rows_of(value.astype(plane.dtype))[None], at)

    def rows_of(self, value: jax.Array) -> jax.Array:
        """The array as rows; what it does not fill is zero."""
        room = self.num_rows * COLUMNS
        return jnp.pad(value.reshape(-1), (0, room - value.size)).reshape(-1, COLUMNS)


class Plane(NamedTuple):
    """A plane of a pool.

    Attributes:
      dtype: its name.
      is_split: whether `tensor` splits what lies in it.
      rows: on one device.
    """

    dtype: str
    is_split: bool
    rows: int

    @property
    def name(self) -> str:
        """By which a state has it."""
        return self.dtype + "_over_tensor" * self.is_split

    @property
    def num_bytes(self) -> int:
        """On one device."""
        return self.rows * COLUMNS * np.dtype(self.dtype).itemsize


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
        layers: Sequence[Any],
        dims: Sequence[Sequence[int | None]],
        rows: Sequence[Sequence[int]],
        num_stages: int,
        num_tensor: int,
    ) -> "Pool":
        """A pool for layers that are placed.

        Args:
          layers: a tree of shapes for each kind.
          dims: for each kind, of each of its leaves the dim that `tensor` splits, or None.
          rows: for each kind the layer in each row of its stack (`Slots.rows`).
        """
        kinds = [
            [*zip(jax.tree.leaves(t), d, strict=True)] for t, d in zip(layers, dims, strict=True)
        ]
        keys = sorted(
            {(np.dtype(a.dtype).name, dim is not None) for kind in kinds for a, dim in kind},
            key=lambda key: Plane(*key, 0).name,
        )
        leaves, blocks = [], np.zeros((len(kinds), len(keys)), np.int32)
        for number, kind in enumerate(kinds):
            own = list[Leaf]()
            for a, dim in kind:
                plane = keys.index((np.dtype(a.dtype).name, dim is not None))
                shape = tuple(n // num_tensor if d == dim else n for d, n in enumerate(a.shape))
                own.append(Leaf(plane, int(blocks[number, plane]), shape, dim))
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
        planes = tuple(Plane(*key, int(n)) for key, n in zip(keys, ends.max(0), strict=True))
        structures = tuple(map(jax.tree.structure, layers))
        return cls(
            planes, tuple(leaves), structures, tuple(starts), is_full, num_stages, num_tensor
        )

    @property
    def num_bytes(self) -> int:
        """On one device."""
        return sum(plane.num_bytes for plane in self.planes)

    @property
    def stack_bytes(self) -> int:
        """On one device, if each kind were a stack."""
        return sum(
            len(full) // self.num_stages * math.prod(leaf.shape) * self._itemsize(leaf)
            for full, own in zip(self.is_full, self.leaves, strict=True)
            for leaf in own
        )

    def _itemsize(self, leaf: Leaf) -> int:
        return np.dtype(self.planes[leaf.plane].dtype).itemsize

    def over_tensor(self, plane: int) -> P:
        """How a device of `stage` and `data` has a plane."""
        return P(None, TENSOR) if self.planes[plane].is_split else P()

    def packed(self, kinds: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """A stage's planes, [1, rows, COLUMNS], on one device.

        Args:
          kinds: for each kind the arrays of its layers there, stacked, [layers, ...]; nothing if it has none.
        """
        parts: list[list[jax.Array]] = [[] for _ in self.planes]
        for own, stacks in zip(self.leaves, kinds, strict=True):
            for number, part in enumerate(parts):
                pairs = [
                    (leaf, a) for leaf, a in zip(own, stacks, strict=False) if leaf.plane == number
                ]
                rows = [jax.vmap(leaf.rows_of)(a) for leaf, a in pairs]
                part += [jnp.concatenate(rows, axis=1).reshape(-1, COLUMNS)] * bool(rows)
        full = []
        for plane, part in zip(self.planes, parts, strict=True):
            empty = plane.rows - sum(map(len, part))
            part += [jnp.zeros((empty, COLUMNS), plane.dtype)]
            full.append(jnp.concatenate(part)[None])
        return full


@dataclasses.dataclass(frozen=True)
class Pooled:
    """The layers of a stage in a pool: how the walk through them (`walk`) reads and changes one.

    Attributes:
      starts: as of the pool, of the rows of this stage, or of a group of it.
    """

    pool: Pool
    starts: tuple[jax.Array, ...]
    platform: str

    def pick(self, planes: Any, kind: int, place: Any) -> Any:
        """A layer; () if there are no planes for it."""
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

    def put(self, planes: Any, kind: int, place: Any, layer: Any) -> Any:
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

    def _block(self, kind: int, place: Any) -> jax.Array:
        return lax.dynamic_index_in_dim(self.starts[kind], place, 0, keepdims=False)

    @property
    def _planes(self) -> list[P]:
        return [*map(self.pool.over_tensor, range(len(self.pool.planes)))]

    def _over_tensor(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        if self.pool.num_tensor == 1:
            return run
        return jax.shard_map(run, axis_names={TENSOR}, in_specs=in_specs, out_specs=out_specs)

    def _row_major(self, plane: jax.Array) -> jax.Array:
        """The plane where it lay: left to choose, XLA lays it out anew in every tick."""
        if self.platform == "cpu":
            return plane
        return with_layout_constraint(plane, Layout(tuple(range(plane.ndim))))
