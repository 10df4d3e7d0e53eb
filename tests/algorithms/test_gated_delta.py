"""The gated delta rule: an inverse that is exact, and states that change their signs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.nn.gated_delta import gated_delta, inverse


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 3, 64])
def test_an_inverse_is_exact_where_powers_overflow(size):
    """Of equal keys, each written twice over: powers of A reach 1e26, the inverse has ones and twos."""
    a = 2 * jnp.tri(size, k=-1)[None]
    expected = np.linalg.inv(np.eye(size) + np.asarray(a, np.float64))
    error = np.linalg.norm(inverse(a) - expected)
    assert error <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.full
def test_negative_eigenvalues_count_parities():
    """Of a thousand bits: what is written first changes its sign at each one. Without them it never does."""
    bits = np.random.default_rng(0).integers(2, size=1000)
    ones = jnp.ones((1001, 1, 1, 1), jnp.float32)
    v, log_a = ones.at[1:].set(0.0), 0 * ones[..., 0]
    before = jnp.zeros((1, 1, 1, 1), jnp.float32)

    def signs(most):
        b = log_a.at[:, 0, 0].set(np.concatenate([[1.0], most * bits]))
        return gated_delta(ones, ones, v, log_a, b, before)[1][1:, 0, 0, 0]

    np.testing.assert_array_equal(signs(2.0), 1 - 2 * (np.cumsum(bits) % 2))
    assert signs(0.99).min() > -1e-6
