"""Which arrays of a batch have time, and sums over devices."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import MeshConfig
from jaxpar.base.trees import has_time, vary_over


class Pair(NamedTuple):
    x: Any
    static: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fields:
    x: Any
    static: Any


@pytest.mark.parametrize("kind", [dict, Pair, Fields])
def test_batches_of_any_kind_have_arrays_without_time(kind):
    batch = kind(x=np.zeros((3, 5, 2)), static={"first": np.zeros((3, 2))})
    assert has_time(batch) == kind(x=True, static={"first": False})


def test_gradients_are_summed_over_devices_in_float32():
    mesh = MeshConfig(data=8).build()
    x = jnp.ones(8, jnp.bfloat16).at[0].set(256)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def products(w, x):
        return vary_over(w, frozenset(["data"])) * x

    gradient = jax.jit(jax.grad(lambda w: jnp.sum(products(w, x).astype(jnp.float32))))
    found = gradient(jnp.bfloat16(1))
    assert (found, found.dtype) == (264, jnp.bfloat16)  # 263, rounded once; one by one it stays 256
