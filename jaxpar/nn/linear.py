"""Linear layers."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.nn.param import lecun_uniform, named_param


class Linear(nnx.Module):
    """`y = x W + b`, W of shape [in, out], drawn with variance 1 / in_size.

    How it is split follows from the names of its dims and the rules. A rule for the second dim makes it
    column-parallel: it takes x whole, and every device computes columns of y. One for the first makes it
    row-parallel: it takes x split over its last dim, and the devices' results are added. A column-parallel
    layer and a row-parallel one after it need nothing between them. `sharding.Layout` says whether an
    output is gathered or stays split.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        dims: tuple[str | None, str | None],
        rngs: nnx.Rngs,
    ):
        init = lecun_uniform(in_size)
        kernel = init(rngs.params(), (in_size, out_size), jnp.dtype(jnp.float32))
        self.kernel = named_param(kernel, dims)
        self.bias = named_param(jnp.zeros(out_size), dims[1:])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> float32 [..., out]; the matmul runs in the dtype of x and accumulates in float32."""
        return matmul(x, self.kernel[...]) + jnp.expand_dims(self.bias[...], range(x.ndim - 1))


def matmul(x: jax.Array, kernel_IO: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """`x @ kernel` in `dtype` (None: that of x), accumulated and returned in float32.

    The gradient of x has x's dtype. Where devices hold parts of the kernel and add what each of them finds
    for x, a float32 x and a narrower `dtype` round the sum alone, not every part of it.
    """
    if dtype is None or dtype == x.dtype:
        return jnp.matmul(x, kernel_IO.astype(x.dtype), preferred_element_type=jnp.float32)
    return _matmul_in(dtype, x, kernel_IO)


def sum_of_outer_products(x_TBI: jax.Array, dy_TBO: jax.Array) -> jax.Array:
    """The gradient of a kernel, [I, ...O]: over T and B, in that order, in float32.

    `einsum` would sum over B and T, and transpose both arrays for it.
    """
    dims = (((0, 1), (0, 1)), ((), ()))
    return lax.dot_general(transposable(x_TBI), dy_TBO, dims, preferred_element_type=jnp.float32)


def transposable(x: jax.Array) -> jax.Array:
    """x, for a product that takes it transposed, as an array of its own.

    XLA's CPU transposes whole arrays ten times as fast as what it transposes while it computes it, such as a
    layer's slice of a stack.
    """
    return lax.optimization_barrier(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matmul_in(dtype: jnp.dtype, x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    return matmul(x.astype(dtype), kernel_IO)


@_matmul_in.defjvp
def _matmul_in_jvp(dtype: jnp.dtype, primals, tangents):
    """Of rounded values, but the rounding itself counts as the identity."""
    (x, kernel_IO), (dx, dkernel_IO) = primals, tangents
    rounded = x.astype(dtype), kernel_IO.astype(dtype)
    dy = matmul(dx, rounded[1]) + matmul(rounded[0].astype(x.dtype), dkernel_IO)
    return matmul(*rounded), dy
