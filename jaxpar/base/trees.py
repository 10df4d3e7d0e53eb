"""Trees of arrays: sums, zeros, shapes, comparisons, and casts over the axes of a `shard_map`."""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.base.parts import STATIC, part_of, with_part
from jaxpar.base.types import Arrays, Batch, DType, Shapes, Specs, Value


def add(totals: Arrays, parts: Arrays) -> Arrays:
    """Adds two trees, in the dtypes of the first."""
    return jax.tree.map(lambda total, part: total + part.astype(total.dtype), totals, parts)


def has_time(batch: Batch) -> Arrays:
    """Of each array of a batch, whether it has time: those [rows], and all under `static`, have none."""
    found = jax.tree.map(lambda a: np.ndim(a) > 1, batch)
    if (static := part_of(batch, STATIC)) is None:
        return found
    return with_part(found, STATIC, jax.tree.map(lambda _: False, static))


def timed_leaves(batch: Batch) -> Iterator[tuple[Value, bool]]:
    """Each array of a batch, and whether it has time."""
    return zip(jax.tree.leaves(batch), jax.tree.leaves(has_time(batch)), strict=True)


def time_steps(batch: Batch, dim: int) -> dict[str, int]:
    """By name, the sizes of this dim of arrays with time; without those of one step, which all steps share.

    Args:
      dim: of time, 1 of a batch as users have it, 0 as a model sees it.
    """
    paths = (path for path, _ in jax.tree.leaves_with_path(batch))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): a.shape[dim]
        for path, (a, timed) in zip(paths, timed_leaves(batch), strict=True)
        if timed and a.shape[dim] > 1
    }


def uneven(batch: Batch) -> str:
    """That arrays of a batch have other numbers of time steps, in words; "" if all have as many."""
    steps = time_steps(batch, 1)
    if len({*steps.values()}) < 2:
        return ""
    each = " and ".join(f"{size} time steps ({name})" for name, size in steps.items())
    return f"arrays of a batch have {each}; put arrays without time under {STATIC!r}"


def wide(dtype: DType) -> jnp.dtype:
    """What real or complex numbers of a dtype are added up in: float32 at least."""
    return max(jnp.dtype(dtype), jnp.dtype(jnp.float32), key=lambda dtype: dtype.itemsize)


def in_float32(tree: Arrays) -> Arrays:
    """A tree with its floating-point arrays of fewer digits as float32; others as they are."""

    def of(a: jax.Array) -> jax.Array:
        dtype = jax.typeof(a).dtype
        is_short = jnp.issubdtype(dtype, jnp.inexact) and wide(dtype) != dtype
        return a.astype(wide(dtype)) if is_short else a

    return jax.tree.map(of, tree)


def zeros(shapes: Shapes) -> Arrays:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def shape_of(leaf: Value) -> jax.ShapeDtypeStruct:
    """The shape of an array, a number or what stands for one, in the dtype that JAX gives it; unsharded."""
    dtype = getattr(leaf, "dtype", None) or jax.dtypes.result_type(leaf)
    dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def check_floats(what: str, tree: Shapes, why: str = "") -> None:
    """Raises a ValueError if an array of a tree is not of real or complex numbers; `why` it must."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"{what}{_name_of(path)} is {leaf.dtype}{list(leaf.shape)}\n"
                f"Fix: make it floating-point numbers{why}."
            )


def check_same(what: str, found: Shapes, as_what: str, wanted: Shapes, why: str = "") -> None:
    """Raises a ValueError if two trees have not the same structure, shapes and dtypes; `why` they must."""
    structures = tuple(map(jax.tree.structure, (found, wanted)))
    if structures[0] != structures[1]:
        raise ValueError(
            f"{what} has the structure {structures[0]}, {as_what} {structures[1]}\n"
            f"Fix: make them the same{why}."
        )
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"{what}{_name_of(path)} is {a.dtype}{list(a.shape)}, {as_what} {b.dtype}{list(b.shape)}\n"
                f"Fix: make them the same{why}."
            )


def _name_of(path: jax.tree_util.KeyPath) -> str:
    """Where a leaf is, in brackets; nothing if it is the whole tree."""
    text = jax.tree_util.keystr(path)
    return f" ({text})" if text else ""


def whole_bytes(tree: Shapes) -> int:
    """What the arrays of a tree, which may be abstract, take where each lies whole."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def placed(tree: Shapes, shardings: Specs) -> Shapes:
    """The shapes of a tree with the shardings of another one."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def device_bytes(tree: Shapes) -> int:
    """What the sharded arrays of a tree, which may be abstract, take on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def vary_like(tree: Arrays, reference: Arrays) -> Arrays:
    """`tree`, typed inside a `shard_map` as differing over every axis that the reference differs over.

    Args:
      reference: an array, or a tree of arrays.
    """
    types = map(jax.typeof, jax.tree.leaves(reference))
    axes = frozenset().union(*(own.manual_axis_type.varying for own in types))
    return jax.tree.map(lambda leaf: vary_over(leaf, axes), tree)


def summed(tree: Arrays, axes: str | Sequence[str]) -> Arrays:
    """The sum of arrays over axes of a `shard_map`.

    In 32 bits and more: XLA's CPU compiler aborts on a sum of bfloat16.
    """

    def sum_of(leaf: jax.Array) -> jax.Array:
        own = leaf.dtype
        narrow = own.itemsize < 4
        wide = jnp.float32 if jnp.issubdtype(own, jnp.floating) else jnp.int32
        return lax.psum(leaf.astype(wide) if narrow else leaf, axes).astype(own)

    return jax.tree.map(sum_of, tree)


def axes_in(spec: P) -> frozenset[str]:
    """All axes of a partition spec."""
    return frozenset().union(*((a,) if isinstance(a, str) else a or () for a in spec))


def same_along(axes: Sequence[str], tree: Arrays, specs: Specs) -> Arrays:
    """Arrays that are the same along those of these axes of a `shard_map` that do not split them, typed so.

    Args:
      specs: says what splits them; partition specs of whole trees will do.
    """

    def same(spec: P, tree: Arrays) -> Arrays:
        along = tuple(axis for axis in axes if axis not in axes_in(spec))
        if not along:
            return tree
        is_first = sum(lax.axis_index(axis) for axis in along) == 0
        tree = jax.tree.map(lambda a: jnp.where(is_first, a, jnp.zeros_like(a)), tree)
        return summed(tree, along)

    return jax.tree.map(same, specs, tree, is_leaf=lambda node: isinstance(node, P))


def vary_over(leaf: jax.Array, axes: frozenset[str]) -> jax.Array:
    """An array, typed inside a `shard_map` as differing over these axes as well.

    Its gradient is summed over them, in float32 at least; XLA's CPU compiler aborts on a sum of bfloat16.
    """
    missing = tuple(axes - jax.typeof(leaf).manual_axis_type.varying)
    if not missing:
        return leaf
    own, cast = jax.typeof(leaf).dtype, lax.pcast(in_float32(leaf), missing, to="varying")
    return cast if cast.dtype == own else cast.astype(own)
