"""The matrix memory of an mLSTM, by its queries, keys, values and gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar import nn
from jaxpar.nn.mlstm import mlstm


@pytest.mark.more
@pytest.mark.parametrize("log_i", [-1000.0, 0.0, 100.0, 1000.0])
def test_an_mlstm_reads_zeros_where_it_asks_nothing(log_i):
    """q = 0 at every step, and input gates that float32 has no number for."""
    k = jnp.ones((3, 1, 1, 2))
    gates = jnp.full((3, 1, 1), log_i), jnp.zeros((3, 1, 1))
    carry = nn.MLSTM(2, num_heads=1, rngs=nnx.Rngs(0)).initial_carry(1)
    y, d_q = jax.vjp(lambda q: mlstm(q, k, k, *gates, carry)[1], 0 * k)
    assert not y.any()
    assert np.isfinite(d_q(jnp.ones_like(y))[0]).all()
