"""Which models may run kernels that fill a GPU."""

import jax
import pytest
from flax import nnx
from lib.gpus import mesh_of

from jaxpar.nn import LSTM
from jaxpar.nn.lstm import has_kernels


@pytest.mark.law
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernels need JAX 0.12")
def test_models_with_a_fused_layer_that_is_not_split_have_kernels():
    fused, plain = (
        nnx.Sequential(LSTM(8, rngs=nnx.Rngs(0), fused=fused)) for fused in (True, False)
    )
    assert has_kernels(fused, mesh_of(1))
    assert has_kernels(fused, mesh_of(2))
    assert not has_kernels(plain, mesh_of(2))
    assert not has_kernels(fused, mesh_of(2, tensor=2))
    assert not has_kernels(fused, mesh_of(2, "8.0"))
