"""A layout that leaves its mesh open: which devices share the batch, for whoever resolves it."""

import dataclasses

import jax
import numpy as np
import pytest
from lib import api
from lib.models import Regress

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.planning import estimate_step

RELATIVE_TOLERANCE = 1e-5  # sums in another order, in float32
SMALL = Regress(kinds=("gru",), batch_size=12, seq_len=4)


def mesh_of(state):
    """That its arrays lie on."""
    [mesh] = {leaf.sharding.mesh for leaf in jax.tree.leaves(state)}
    return mesh


def with_rows(batch_size, num_microbatches=1, mesh=None):
    pipeline = PipelineConfig(num_microbatches=num_microbatches)
    layout = Parallel(pipeline=pipeline) if mesh is None else Parallel(mesh, pipeline)
    kinds = ("gru",) * layout.mesh.stage
    return dataclasses.replace(SMALL, kinds=kinds, batch_size=batch_size), layout


@pytest.mark.rows(8)
@pytest.mark.parametrize(
    ("batch_size", "num_microbatches", "mesh", "sizes"),
    [
        (16, 1, None, (8, 1, 1)), (12, 1, None, (6, 1, 1)), (6, 1, None, (6, 1, 1)),
        (7, 1, None, (7, 1, 1)), (11, 1, None, (1, 1, 1)), (4, 1, None, (4, 1, 1)),
        (16, 4, None, (4, 1, 1)), (12, 2, None, (6, 1, 1)), (12, 1, "dp-1tp2", (4, 1, 2)),
        (6, 1, "dp-1pp2", (3, 2, 1)), (16, 1, "dp-1pp8", (1, 8, 1)),
    ],
)  # fmt: skip
def test_as_many_devices_share_the_batch_as_its_rows_divide_by(
    batch_size, num_microbatches, mesh, sizes
):
    task, layout = with_rows(batch_size, num_microbatches, mesh)
    mesh = mesh_of(api.abstract_state(task, layout))
    assert mesh.devices.shape == sizes
    assert [device.id for device in mesh.devices.flat] == [*range(mesh.size)]
    parallel = estimate_step(task, layout).parallel
    assert (tuple(parallel.mesh.sizes.values()), parallel.pipeline) == (sizes, layout.pipeline)


def test_what_others_have_a_part_in_is_not_made_smaller(monkeypatch):
    """The devices of several processes, and those that are named."""
    task, _ = with_rows(6)
    named = MeshConfig(data=-1, devices=(0, 2, 4, 6))
    with pytest.raises(ValueError, match="batch_size=6 does not divide by data=4"):
        jaxpar.init_state(task, named)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="batch_size=6 does not divide by data=8"):
        jaxpar.fit(task)


def test_a_mesh_that_is_built_decides():
    mesh = MeshConfig(data=2, devices=(6, 7)).build()
    assert mesh_of(jaxpar.init_state(SMALL, mesh=mesh)) == mesh


def test_rows_that_do_not_divide_into_microbatches_are_told_of():
    with pytest.raises(ValueError, match="batch_size=10 does not divide by data=8 x num_microbat"):
        jaxpar.init_state(*with_rows(10, 4))


@pytest.mark.full
def test_whoever_is_given_no_mesh_takes_the_same_devices():
    state = jaxpar.init_state(SMALL)
    devices = set(jax.devices()[:6])
    assert all(leaf.sharding.device_set == devices for leaf in jax.tree.leaves(state))
    assert {leaf.sharding.shard_shape(leaf.shape)[1] for leaf in jax.tree.leaves(state.carry)} == {
        2
    }
    batch = SMALL.example_batch()
    sums, _ = api.evaluation(SMALL, None, state, batch)
    _, metrics = jaxpar.make_train_step(SMALL)(state, batch)
    assert sums["weight"] == metrics.sums.weight > 0
    assert {total.axes for total in jaxpar.inspect_step(SMALL).totals} == {("data",)}
    assert estimate_step(SMALL).parallel.mesh.sizes["data"] == 6


@pytest.mark.full
@pytest.mark.law
@pytest.mark.usefixtures("compile_once")
def test_losses_without_a_mesh_are_those_of_one_device(tmp_path):
    """Of as many devices as fit, and of meshes smaller than the machine."""

    def losses(mesh, batch_size):
        train = jaxpar.TrainConfig(num_steps=5, out_dir=str(tmp_path / f"{mesh}-{batch_size}"))
        result = jaxpar.fit(dataclasses.replace(SMALL, batch_size=batch_size), mesh, train)
        return result.losses, mesh_of(result.state).devices.shape

    for batch_size, shape in ((8, (8, 1, 1)), (6, (6, 1, 1))):
        expected, one = losses("dp1", batch_size)
        found, of_all = losses(None, batch_size)
        assert (one, of_all) == ((1, 1, 1), shape)
        np.testing.assert_allclose(found, expected, rtol=RELATIVE_TOLERANCE)
        found, of_two = losses("dp2", batch_size)
        assert of_two == (2, 1, 1)
        np.testing.assert_allclose(found, expected, rtol=RELATIVE_TOLERANCE)
