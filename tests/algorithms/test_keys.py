"""Random keys as numbers."""

import jax
import numpy as np
import pytest

from jaxpar.base.keys import key_data, new_key


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, -1, 2**40 + 5])
@pytest.mark.parametrize("x64", [False, True])
def test_the_numbers_of_a_key_are_jax_s(seed, x64):
    with jax.enable_x64(x64):
        expected = jax.random.key_data(new_key(seed))
        np.testing.assert_array_equal(key_data(seed), expected)
        assert key_data(seed).dtype == expected.dtype
