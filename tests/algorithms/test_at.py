"""Which devices run kernels that fill them."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lib.gpus import mesh_of

from jaxpar.base.at import Processor

pytestmark = [
    pytest.mark.law,
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the kernels need JAX 0.12"),
]


@pytest.mark.parametrize(
    ("mesh", "version", "cores"),
    [
        (mesh_of(1), (0, 12, 0), 132),
        (mesh_of(1), (0, 10, 1), 0),
        (mesh_of(1, "8.0"), (0, 12, 0), 0),
        (mesh_of(2), (0, 12, 0), 0),
    ],
    ids=["an H100", "an older JAX", "an A100", "the compiler divides arrays"],
)
def test_which_devices_run_kernels(mesh, version, cores, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert Processor.of(mesh) == ("gpu", cores)


def test_kernels_run_where_every_axis_is_divided_by_hand():
    mesh, found = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2), []
    of = types.SimpleNamespace(devices=mesh_of(4).devices, shape=dict(mesh.shape))

    def note(x):
        found.append(Processor.of(of).cores)
        return x

    for axes in ({"data"}, {"data", "tensor"}):
        run = jax.shard_map(note, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=axes)
        jax.jit(run).trace(jnp.zeros(4))
    assert found == [0, 132]
