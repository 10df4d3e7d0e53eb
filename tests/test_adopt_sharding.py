"""What shards parameters and optimizer state works for adopted models as for others."""

import jax
import numpy as np
import pytest
from lib import flax_models as models
from lib.adopted import Adopted, assert_as_plain, batch_of

from jaxpar import Parallel, PipelineConfig
from jaxpar.base.axes import STAGE
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


@pytest.mark.parametrize("mesh", ["dp4", pytest.param("dp2pp2", marks=pytest.mark.slow)])
def test_fsdp(mesh):
    assert_as_plain(TASK, Parallel(mesh, UNITS, fsdp=True))


def losses(parallel):
    setup = Setup.of(TASK, parallel)
    state, step, batch = setup.init_state(), setup.train_step(), batch_of(TASK)
    found = []
    for _ in range(3):
        state, numbers = step(state, batch)
        found.append(float(numbers["loss"]))
    return found


@pytest.mark.parametrize("update", ["sharded", pytest.param("host", marks=pytest.mark.slow)])
def test_updates(update):
    wanted = losses(Parallel("dp1"))
    assert wanted[2] < wanted[0]
    np.testing.assert_allclose(losses(Parallel("dp2pp2", UNITS, update=update)), wanted, rtol=1e-5)


def test_embedding_and_head_are_split_over_stages():
    setup = Setup.of(TASK, Parallel("pp2", UNITS))
    first, last = setup.partition.split_modules
    assert {*first, *last} == {"outer/embed", "outer/head"}
    state = setup.init_state()
    named = dict(named_leaves(state.params, "/"))
    split = {
        name
        for name, leaf in named.items()
        if "outer/" in name and STAGE in str(leaf.get_value().sharding.spec)
    }
    assert {"outer/embed/embedding", "outer/head/kernel"} <= split
    assert_as_plain(TASK, Parallel("pp2", UNITS))
