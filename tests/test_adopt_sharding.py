"""Blocks and heads of Flax models are split over devices."""

import dataclasses

import jax
import pytest
from lib import api
from lib import flax_models as models
from lib.adopted import Adopted, assert_as_plain

from jaxpar import Parallel, PipelineConfig, suggest_rules

TASK = Adopted(models.GPT)
pytestmark = pytest.mark.usefixtures("as_people_write")
UNITS = PipelineConfig(num_microbatches=2)


@pytest.fixture
def as_people_write():
    """Flax and its users add a bias to arrays of more dims."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_the_head_is_split_over_stages():
    parallel = Parallel("pp2", dataclasses.replace(UNITS, head="sharded"))
    assert "stores 1/2 of head" in api.summary(TASK, parallel)["each stage"]
    assert_as_plain(TASK, parallel)


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize("mesh", ["tp2", "dp2pp2tp2"])
@pytest.mark.parametrize(
    ("model", "head"), [(models.GPT, "last"), (models.GPT, "sharded"), (models.Padded, "last")]
)
def test_blocks_and_head_are_split_as_proposed(model, head, mesh):
    rules = suggest_rules(Adopted(model), mesh)
    assert rules["embed.embedding" if model.tied else "head.kernel"].count("tensor") == 1
    task = Adopted(model, by_path=tuple(rules.items()))
    assert_as_plain(task, Parallel(mesh, dataclasses.replace(UNITS, head=head)))
