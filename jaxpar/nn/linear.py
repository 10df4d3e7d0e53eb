"""Linear layers."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.nn.param import lecun_uniform, named_param
from jaxpar.trees import vary_like


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
    # A gradient has the type of what it is of: over which axes parts are added is told before.
    x, kernel_IO = vary_like((x, kernel_IO), (x, kernel_IO))
    return _matmul(x.dtype if dtype is None else dtype, x, kernel_IO)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(dtype: jnp.dtype, x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    rounded = x.astype(dtype), kernel_IO.astype(dtype)
    return jnp.matmul(*rounded, preferred_element_type=jnp.float32)


def _matmul_fwd(dtype: jnp.dtype, x: jax.Array, kernel_IO: jax.Array):
    return _matmul(dtype, x, kernel_IO), (x, kernel_IO)


def _matmul_bwd(dtype: jnp.dtype, saved, dy: jax.Array):
    """Of rounded values, but the rounding itself counts as the identity."""
    x, kernel_IO = saved
    dims = (((dy.ndim - 1,), (1,)), ((), ()))
    dx = lax.dot_general(dy, kernel_IO.astype(dtype), dims, preferred_element_type=jnp.float32)
    d_kernel = sum_of_outer_products(x.astype(dtype), dy)
    return dx.astype(x.dtype), d_kernel.astype(kernel_IO.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def sum_of_outer_products(x_TBI: jax.Array, dy_TBO: jax.Array) -> jax.Array:
    """The gradient of a kernel, [I, ...O]: over all dims of x but its last, in their order, in float32.

    `einsum` would sum over B and T, and autodiff of `x @ kernel` gives the product the other way round: XLA's
    CPU transposes dy for it, and multiplies at half the speed.
    """
    over = tuple(range(x_TBI.ndim - 1))
    dims = ((over, over), ((), ()))
    return lax.dot_general(x_TBI, dy_TBO, dims, preferred_element_type=jnp.float32)


def transposable(x: jax.Array) -> jax.Array:
    """x, for a product that takes it transposed, as an array of its own.

    XLA's CPU transposes whole arrays ten times as fast as what it transposes while it computes it, such as a
    layer's slice of a stack.
    """
    return lax.optimization_barrier(x)
