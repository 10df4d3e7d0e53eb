"""Gradients are clipped for an `OptimizerConfig`; for a user's own optimizer only if a limit is given."""

import dataclasses
import tomllib

import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.regression import Net, Regression, X, fit, loss, make_task

import jaxpar
from jaxpar import OptimizerConfig, Parallel, TrainConfig, planning


@dataclasses.dataclass(frozen=True)
class Configured(jaxpar.Task):
    optimizer: OptimizerConfig = OptimizerConfig("sgd")
    layers = "blocks"

    def make_model(self, rngs):
        return Net(rngs)

    def loss(self, model, batch):
        return loss(model, batch)

    def make_batches(self, split, seed=None):
        return jaxpar.ArrayBatches({"x": X}, 16, seed)


LIMITS = [
    (Configured(), None, 1.0),
    (Configured(), 0.0, None),
    (Configured(), 0.25, 0.25),
    (Regression(), None, None),
    (Regression(), 0.0, None),
    (Regression(), 0.25, 0.25),
    (make_task(optax.sgd(0.1)), None, None),
    (make_task(OptimizerConfig()), None, 1.0),
]


@pytest.mark.parametrize(("task", "given", "limit"), LIMITS)
def test_only_a_config_is_clipped_unless_a_limit_is_given(task, given, limit):
    said = api.summary(task, Parallel("dp1"), TrainConfig(clip_norm=given))["clipping"]
    wanted = (
        "gradients are not clipped" if limit is None else f"gradients are clipped to norm {limit:g}"
    )
    assert said.removesuffix(" before your optimizer") == wanted


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="clip_norm"):
        TrainConfig(clip_norm=wrong)


def test_an_own_optimizer_trains_as_in_a_loop_of_its_user(tmp_path):
    model, expected = Net(nnx.Rngs(0)), []
    task = make_task(optax.sgd(0.002))
    optimizer = nnx.Optimizer(model, optax.sgd(0.002), wrt=nnx.Param)
    for step in range(3):
        batch = task.make_batches("train", 0).batch(step)
        value, grads = nnx.value_and_grad(lambda model, batch: loss(model, batch).loss / 16)(
            model, batch
        )
        optimizer.update(model, grads)
        expected.append(value)
    result = fit(task, tmp_path / "own", 3, "dp2pp2")
    np.testing.assert_allclose(result.losses, expected, rtol=1e-5)  # sums in another order
    clipped = fit(task, tmp_path / "clipped", 3, train={"clip_norm": 1.0})
    assert clipped.losses[1] > 1.1 * expected[1]


def test_an_estimate_counts_the_copies_of_clipped_gradients():
    own, config = make_task(optax.sgd(0.1)), make_task(OptimizerConfig("sgd", warmup_steps=0))
    for task, default, other in ((own, 0.0, 1.0), (config, 1.0, 0.0)):
        found = []
        for train in (TrainConfig(), TrainConfig(clip_norm=default), TrainConfig(clip_norm=other)):
            found.append(planning.estimate_step(task, "dp2", train).parts["update"])
        assert found[0] == found[1] != found[2]


class Published(Regression):
    """Its own settings have a limit, which those of a run may leave open."""

    train = TrainConfig(clip_norm=0.25)


def test_a_run_writes_the_limit_that_it_uses(tmp_path):
    fit(Published(), tmp_path, 1)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["train"]["clip_norm"] == 0.0
