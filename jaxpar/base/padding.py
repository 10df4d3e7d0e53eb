"""Activations whose shape changes from layer to layer, as blocks of one shape that stages can exchange.

All devices of a mesh run one program, in which what goes from stage to stage has one shape. So where layers
pass on arrays of unequal shapes, all features of a row lie one after the other, followed by zeros up to the
widest: x [t, b, 16, 16, 8] and y [t, b, 4, 4, 64] both go as [t, b, 2048]. A block has real numbers: complex
ones lie in it as their real parts, followed by their imaginary parts.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.base.types import Activations, Function, Shapes


class Padding:
    """To blocks of one shape and back; where all shapes are the same nothing is done.

    Attributes:
      width: numbers of a row in a block, at one time step; 0 if all shapes are the same.
    """

    def __init__(self, shapes: Sequence[Shapes], dims: Mapping[str, int]):
        """Looks at the shapes.

        Args:
          shapes: of what stands before each layer and after the last, trees.
          dims: those that stay, by name; their sizes, of whole batches.
        Raises:
          ValueError: shapes are unequal, and one of them begins with other dims.
        """
        self.width, self.num_dims, lead = 0, len(dims), tuple(dims.values())
        if all(_same(shape, shapes[0]) for shape in shapes):
            return
        for number, tree in enumerate(shapes):
            for leaf in jax.tree.leaves(tree):
                if leaf.shape[: len(lead)] != lead:
                    place = f"layer {number - 1} returns" if number else "`first` returns"
                    raise ValueError(
                        f"{place} {leaf.dtype}{list(leaf.shape)}, but layers have unequal shapes\n"
                        f"Fix: let the first dims of each array be [{', '.join(dims)}], here {list(lead)}."
                    )
        self.width = max(map(self._width_of, shapes))
        with jax.numpy_dtype_promotion("standard"):
            self.dtype = jnp.result_type(*map(_dtype_of_parts, jax.tree.leaves(list(shapes))))

    def pad(self, x: Activations, layout: Function) -> Activations:
        """x as a block.

        Args:
          layout: lays an array out by the names of its dims, as `at.layout`: a block is whole on the devices
            that share a layer, or they would have to exchange its parts within a unit.
        """
        if not self.width:
            return x
        flat, n = list[jax.Array](), self.num_dims
        for leaf in jax.tree.leaves(x):
            rows = _whole(leaf, layout).reshape(*leaf.shape[:n], -1)
            flat += [rows.real, rows.imag] if _is_complex(rows) else [rows]
        block = jnp.concatenate([rows.astype(self.dtype) for rows in flat], axis=-1)
        rest = self.width - block.shape[-1]
        return _whole(jnp.pad(block, [(0, 0)] * n + [(0, rest)]), layout)

    def unpad(self, block: Activations, like: Shapes, layout: Function) -> Activations:
        """What `pad` made a block of, in the block's dtype, or of complex numbers of that.

        Args:
          like: shapes of what it is, of batches of any size.
        """
        if not self.width:
            return block
        leaves, structure = jax.tree.flatten(like)
        lead = block.shape[: self.num_dims]
        block = _whole(block, layout)
        start = 0

        def take(dims: Sequence[int]) -> jax.Array:
            """The next numbers of the block."""
            nonlocal start
            numbers = block[..., start : start + math.prod(dims)]
            start += math.prod(dims)
            return _whole(numbers.reshape(*lead, *dims), layout)

        arrays = []
        for leaf in leaves:
            dims = leaf.shape[self.num_dims :]
            array = take(dims)
            if _is_complex(leaf):
                array = lax.complex(array, take(dims))
            arrays.append(array)
        return jax.tree.unflatten(structure, arrays)

    def _width_of(self, tree: Shapes) -> int:
        width = 0
        for leaf in jax.tree.leaves(tree):
            num_parts = 2 if _is_complex(leaf) else 1
            width += num_parts * math.prod(leaf.shape[self.num_dims :])
        return width


def _is_complex(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.complexfloating)


def _dtype_of_parts(leaf: jax.ShapeDtypeStruct) -> np.dtype:
    """The dtype of the real and the imaginary parts of complex numbers; that of real ones is their own."""
    return jnp.finfo(leaf.dtype).dtype if _is_complex(leaf) else leaf.dtype


def _same(a: Shapes, b: Shapes) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        (x.shape, x.dtype) == (y.shape, y.dtype)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _whole(a: jax.Array, layout: Function) -> jax.Array:
    return layout(a, *[None] * a.ndim)
