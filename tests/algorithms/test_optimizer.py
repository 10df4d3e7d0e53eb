"""The norm of all gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.step.optimizer import global_norm


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_norm_of_gradients_has_more_digits_than_they(dtype):
    many = [jnp.ones(1, dtype)] * 1000
    np.testing.assert_allclose(global_norm(many), 1000**0.5, rtol=1e-6)
    large = jnp.full(4, 300, dtype)  # whose square is more than float16 has
    np.testing.assert_allclose(global_norm(large), 600, rtol=1e-6)
