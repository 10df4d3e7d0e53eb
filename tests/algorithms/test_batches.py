"""Batches on devices: each process reads the rows of its devices, once, and they are those of the host."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lib import api

from jaxpar.data.batches import place_batch
from jaxpar.lm import TokenStreams


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    ("axes", "spec", "shard_shape"),
    [
        ({"data": 8}, PartitionSpec("data"), (1, 6)),
        ({"data": 8}, PartitionSpec(), (8, 6)),
        ({"data": 2, "stage": 4}, PartitionSpec("data"), (4, 6)),
        ({"data": 2, "stage": 2, "tensor": 2}, PartitionSpec(("data", "tensor")), (2, 6)),
    ],
)
def test_a_placed_batch_equals_the_host_batch(axes, spec, shard_shape, seed):
    text = TokenStreams(np.arange(205), batch_size=8, seq_len=6, seed=seed)
    sharding = NamedSharding(mesh_of(**axes), spec)
    for step in (0, 1, text.num_windows - 1, text.num_windows):
        placed, host = place_batch(text, step, sharding), text.batch(step)
        for on_mesh, on_host in zip(placed[:2], host[:2], strict=True):
            assert on_mesh.sharding == sharding
            assert on_mesh.dtype == np.int32
            assert {shard.data.shape for shard in on_mesh.addressable_shards} == {shard_shape}
            np.testing.assert_array_equal(on_mesh, on_host)
        assert placed.starts == host.starts


def test_each_part_of_the_rows_is_read_once(monkeypatch):
    text = TokenStreams(np.arange(200), batch_size=8, seq_len=6, seed=0)
    read, batch = [], text.batch
    monkeypatch.setattr(text, "batch", lambda step, rows: read.append(rows) or batch(step, rows))
    place_batch(text, 3, NamedSharding(mesh_of(data=2, stage=4), PartitionSpec("data")))
    assert read == [slice(0, 4), slice(4, 8)]


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "stage": 4}])
def test_batches_of_any_length_are_placed(mesh, seed):
    lengths, sharding = np.arange(60), NamedSharding(mesh_of(**mesh), PartitionSpec("data"))
    bucketed = api.BucketedBatches({"x": np.arange(lengths.sum())}, lengths, 8, (4, 12, 40), seed)
    for step in range(bucketed.num_windows + 2):
        placed, host = place_batch(bucketed, step, sharding), bucketed.batch(step)
        assert placed["x"].sharding == sharding
        shard_shape = (8 // mesh["data"], host["x"].shape[1])
        assert {shard.data.shape for shard in placed["x"].addressable_shards} == {shard_shape}
        np.testing.assert_array_equal(placed["x"], host["x"])
        assert placed["starts"] is True


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            PartitionSpec("data"),
            "batch_size=6 does not divide by data=4\nFix: use batch_size=4 or 8, or",
        ),
        (
            PartitionSpec(("data", "stage")),
            "by data=4 x stage=2 = 8\nFix: use batch_size=8, or other",
        ),
    ],
)
def test_sharding_that_does_not_divide(spec, message):
    text = TokenStreams(np.arange(100), batch_size=6, seq_len=5)
    with pytest.raises(ValueError, match=message):
        place_batch(text, 0, NamedSharding(mesh_of(data=4, stage=2), spec))


def test_masked_values_of_a_users_batches_are_refused():
    x = np.ma.masked_greater(np.arange(20, dtype=np.float32), 17)
    sharding = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))

    class Own:
        num_windows, batch_size = 1, 20

        def batch(self, step, rows=slice(None)):
            return {"x": x[rows]}

    with pytest.raises(ValueError, match=r"batch\['x'\] has 2 masked values"):
        place_batch(Own(), 0, sharding)
