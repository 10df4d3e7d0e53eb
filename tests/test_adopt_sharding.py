"""What shards parameters and optimizer state works for adopted models as for others."""

import dataclasses

import jax
import numpy as np
import pytest
from lib import flax_models as models
from lib.adopted import Adopted, assert_as_plain, batch_of

from jaxpar import Parallel, PipelineConfig, suggest_rules
from jaxpar.sharding import named_leaves
from jaxpar.step.setup import Setup

TASK = Adopted(models.GPT)
pytestmark = pytest.mark.usefixtures("as_people_write")
UNITS = PipelineConfig(num_microbatches=2)


@pytest.fixture
def as_people_write():
    """Flax and its users add a bias to arrays of more dims."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("mesh", ["dp4", pytest.param("dp2pp2", marks=pytest.mark.more)])
def test_fsdp(mesh):
    assert_as_plain(TASK, Parallel(mesh, UNITS, fsdp=True))


def losses(parallel):
    setup = Setup.of(TASK, parallel)
    state, step, batch = setup.init_state(), setup.train_step(), batch_of(TASK)
    found = []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics.loss))
    return found


@pytest.mark.parametrize("update", ["sharded", pytest.param("host", marks=pytest.mark.more)])
def test_updates(update):
    wanted = losses(Parallel("dp1"))
    assert wanted[2] < wanted[0]
    np.testing.assert_allclose(losses(Parallel("dp2pp2", UNITS, update=update)), wanted, rtol=1e-5)


def test_the_head_is_split_over_stages():
    parallel = Parallel("pp2", dataclasses.replace(UNITS, head="sharded"))
    setup = Setup.of(TASK, parallel)
    assert "outer/head" in setup.partition.split_modules[1]
    kernel = dict(named_leaves(setup.init_state().params, "/"))["outer/head/kernel"].get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (kernel.shape[0], kernel.shape[1] // 2)
    assert_as_plain(TASK, parallel)


@pytest.mark.parametrize("mesh", ["tp2", "dp2pp2tp2"])
@pytest.mark.parametrize(
    ("model", "head"), [(models.GPT, "last"), (models.GPT, "sharded"), (models.Padded, "last")]
)
def test_blocks_and_head_are_split_as_proposed(model, head, mesh):
    rules = suggest_rules(Adopted(model), mesh)
    assert rules["embed.embedding" if model.tied else "head.kernel"].count("tensor") == 1
    task = Adopted(model, by_path=tuple(rules.items()))
    assert_as_plain(task, Parallel(mesh, dataclasses.replace(UNITS, head=head)))
