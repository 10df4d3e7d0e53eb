"""Products of matrices with few digits, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.nn.linear import matmul


def assert_close(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(actual - expected) <= 1e-6 * np.linalg.norm(expected)


def test_a_float32_gradient_of_a_narrower_matmul_is_rounded_nowhere():
    keys = jax.random.split(jax.random.key(3), 3)
    x, kernel, dy = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, ((5, 16), (16, 24), (5, 24)), strict=True)
    )
    y, vjp = jax.vjp(lambda x, kernel: matmul(x, kernel, jnp.dtype("bfloat16")), x, kernel)
    dx, dkernel = vjp(dy)
    rounded_x, rounded_kernel = (
        np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, kernel)
    )
    assert {a.dtype for a in (y, dx, dkernel)} == {jnp.dtype("float32")}
    assert_close(y, rounded_x @ rounded_kernel)
    assert_close(dx, dy @ rounded_kernel.T)
    assert_close(dkernel, rounded_x.T @ dy)
