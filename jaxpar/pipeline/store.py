"""The storage of a stage's layer variables: in stacks, or in the form that a caller brings.

The pipeline reads one layer at a time, and adds to the gradients of one layer at a time, by `pick` and `put`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.types import Arrays, Index, Params


class Store:
    """Layers of each kind in a stack; `first` and `last` hold their variables themselves.

    What stores variables in another way overrides this.

    Attributes:
      is_stacked: whether layers are a tuple of trees, one for each kind, with leaves [rows, ...].
      outer_field: the field of `PipelineParams` that has what `first` and `last` do not hold themselves.
      arrays: data that it needs on a stage; leaves [rows, ...], sharded over `stage`.
    """

    is_stacked, outer_field, arrays = True, "outer", ()

    def bind(self, arrays: Arrays) -> "Store":
        """The store of one stage, with its data; inside of the engine's `shard_map`."""
        return self

    def of_group(self, number: Index, count: int) -> "Store":
        """The store of one of a stage's `count` groups of layers; places count from its first row."""
        return self

    def pick(self, stored: Params, kind: int, place: Index) -> Params:
        """A layer of a kind, by its row."""
        return pick(stored[kind], place)

    def put(self, stored: Params, kind: int, place: Index, layer: Params) -> Params:
        """What is stored, with one layer changed."""
        return replaced(stored, kind, put(stored[kind], place, layer))

    def take_group(self, stored: Params, number: Index, count: int) -> Params:
        """What is stored of one of a stage's groups of layers."""
        return rows_of_group(stored, number, count)

    def put_group(self, stored: Params, part: Params, number: Index, count: int) -> Params:
        """What is stored, with one group changed."""
        return with_rows_of_group(stored, part, number, count)

    def keep(self, stored: Params, kinds: Sequence[bool]) -> Params:
        """What is stored, without what is only of kinds that are False."""
        return tuple(own if keeps else () for keeps, own in zip(kinds, stored, strict=True))

    def restore(self, stored: Params, kept: Params, kinds: Sequence[bool]) -> Params:
        """What is stored, with what `keep` gave changed."""
        each = zip(kinds, stored, kept, strict=True)
        return tuple(new if keeps else old for keeps, old, new in each)

    def has_outer(self, end: int) -> bool:
        """Whether it holds variables of `first` (0) or `last` (1)."""
        return False

    def pick_outer(self, stored: Params, end: int, own: Params) -> Params:
        """All variables of `first` or `last`; `own` are those that it holds itself, None for others."""
        return own

    def put_outer(
        self, stored: Params, end: int, own: Params, values: Params
    ) -> tuple[Params, Params]:
        """`own` and what is stored, with other values of all of these variables."""
        return values, stored


def pick(tree: Arrays, place: Index) -> Arrays:
    """One row of stacked leaves."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, place, 0, False), tree)


def put(tree: Arrays, place: Index, part: Arrays) -> Arrays:
    """Stacked leaves with one row changed."""
    return jax.tree.map(
        lambda a, p: lax.dynamic_update_index_in_dim(a, p.astype(a.dtype), place, 0), tree, part
    )


def replaced(parts: tuple[Arrays, ...], number: int, part: Arrays) -> tuple[Arrays, ...]:
    """A tuple with one of its parts changed."""
    return (*parts[:number], part, *parts[number + 1 :])


def rows_of_group(tree: Arrays, number: Index, count: int) -> Arrays:
    """The rows of one of `count` groups of layers, of every stacked array."""
    if count == 1:
        return tree

    def rows(a: jax.Array) -> jax.Array:
        size = a.shape[0] // count
        return lax.dynamic_slice_in_dim(a, number * size, size)

    return jax.tree.map(rows, tree)


def with_rows_of_group(tree: Arrays, part: Arrays, number: Index, count: int) -> Arrays:
    """Stacked arrays with the rows of a group changed."""
    if count == 1:
        return part
    return jax.tree.map(
        lambda a, p: lax.dynamic_update_slice_in_dim(a, p, number * p.shape[0], 0), tree, part
    )


def stack(rows: Sequence[Arrays]) -> Arrays:
    """Trees of equal structure as one, their leaves stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def unstack(tree: Arrays, num_rows: int) -> list[Arrays]:
    """Stacked leaves as a tree for each row."""
    return [jax.tree.map(lambda a, row=row: a[row], tree) for row in range(num_rows)]
