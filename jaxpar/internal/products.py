"""Matrix products of layers, and those of their gradients."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.base.trees import wide
from jaxpar.base.types import DType, Precision


def contract(
    x: jax.Array,
    kernel: jax.Array,
    num_summed: int = 1,
    precision: Precision = None,
    *,
    out: DType,
    num_blocks: int = 0,
) -> jax.Array:
    """x [..., *blocks, *in] and kernel [*blocks, *in, *out] -> [..., *blocks, *out].

    Args:
      num_summed, num_blocks: how many dims `in` and `blocks` are; each block has a product of its own.
      out: the dtype of the result; None is that of x.
    """
    first = x.ndim - num_summed
    over = (range(first, x.ndim), range(num_blocks, num_blocks + num_summed))
    blocks = (range(first - num_blocks, first), range(num_blocks))
    y = dot(x, kernel, over, precision, out, blocks)
    return jnp.moveaxis(y, blocks[1], blocks[0]) if num_blocks else y


def sum_of_outer_products(
    x_TBI: jax.Array,
    dy_TBO: jax.Array,
    num_in: int = 1,
    precision: Precision = None,
    num_blocks: int = 0,
) -> jax.Array:
    """The gradient of a kernel, [*blocks, *in, *out]: over all dims of x but its last ones, in their order.

    `einsum` would sum over B and T, and autodiff of `x @ kernel` gives the product the other way round: XLA's
    CPU transposes dy for it, and multiplies at half the speed.

    Returns:
      in `wide` of x's dtype.
    """
    first = x_TBI.ndim - num_in
    over, blocks = range(first - num_blocks), range(first - num_blocks, first)
    both = (over, over), precision, wide(x_TBI.dtype), (blocks, blocks)
    return dot(transposable(x_TBI), dy_TBO, *both)


def dot(
    a: jax.Array,
    b: jax.Array,
    over: tuple[range, range],
    precision: Precision,
    out: DType,
    blocks: tuple[range, range] = (range(0), range(0)),
) -> jax.Array:
    """`lax.dot_general` that sums over the dims `over` of a and b; the result has the dtype `out`."""
    return lax.dot_general(a, b, (over, blocks), precision, preferred_element_type=out)


def transposable(x: jax.Array) -> jax.Array:
    """x, for a product that takes it transposed, as an array of its own.

    XLA's CPU transposes whole arrays ten times as fast as what it transposes while it computes it, such as a
    layer's slice of a stack.
    """
    return lax.optimization_barrier(x)
