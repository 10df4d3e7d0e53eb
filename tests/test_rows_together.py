"""Layers that mix rows say how many, and mix as many on any mesh and schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.any_model import Calm
from lib.law.check import assert_near
from lib.laws import more, on_devices
from lib.layers import GROUP, Balanced, Norm
from lib.models import MAKERS, SGD, WIDTH, Regression

from jaxpar import (
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    TrainConfig,
    fit,
)
from jaxpar.planning import estimate_step


class Mixing(Regression):
    def __init__(self, kinds, *, rngs):
        super().__init__((), rngs=rngs)
        makers = MAKERS | {"norm": lambda rngs: Norm(rngs=rngs), "balanced": make_balanced}
        self.layers = Stack([makers[kind] for kind in kinds], rngs=rngs)


def make_balanced(rngs):
    return Balanced(rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Mixed(Calm):
    kinds: tuple[str, ...] = ("gru", "norm", "balanced", "dense")
    batch_size: int = 16

    def make_model(self, rngs):
        return Mixing(self.kinds, rngs=rngs)


class Flat(nnx.Module):
    """Without time."""

    time_major = False

    def __init__(self, *, rngs):
        self.inputs, self.outputs = (
            nnx.Linear(*n, use_bias=False, rngs=rngs) for n in ((3, WIDTH), (WIDTH, 3))
        )
        self.layers = Stack([lambda rngs: Centred(rngs=rngs)] * 4, rngs=rngs)

    def first(self, batch, at):
        return self.inputs(batch["x"])

    def last(self, y, batch, at):
        error = jnp.sum(jnp.square(self.outputs(y) - batch["y"]), -1)
        return Sums(jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]), {})


class Centred(nnx.Module):
    rows_together = 2 * GROUP

    def __init__(self, *, rngs):
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, carry, x_BW, at):
        weight_B1 = at.batch["weight"][:, None]
        return carry, jnp.tanh(self.mix(x_BW - jnp.mean(x_BW * weight_B1, 0, keepdims=True)))


@dataclasses.dataclass(frozen=True)
class Timeless(Task):
    batch_size: int = 32
    optimizer: OptimizerConfig = SGD

    def make_model(self, rngs):
        return Flat(rngs=rngs)

    def make_batches(self, split, seed=None):
        x_NF = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        weight_N = np.linspace(0.5, 1.5, 64, dtype=np.float32)
        return ArrayBatches(
            {"x": x_NF, "y": np.sin(x_NF), "weight": weight_N}, self.batch_size, seed
        )


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("mesh", [(2, 2, 1), more((1, 1, 1))])
def test_a_model_without_time_mixes_rows_too(mesh):
    parallel = Parallel(on_devices(mesh), PipelineConfig(num_microbatches=2))
    batch = Timeless().make_batches("train", 0).batch(0)
    found = api.gradients(Timeless(), parallel, batch)

    @jax.value_and_grad
    def plain(weights):
        weight_G81 = batch["weight"].reshape(-1, Centred.rows_together, 1)
        x_BW = batch["x"] @ weights["inputs.kernel"]
        for layer in range(4):
            x_G8W = x_BW.reshape(-1, Centred.rows_together, WIDTH)
            x_G8W = x_G8W - jnp.mean(x_G8W * weight_G81, 1, keepdims=True)
            mixed_BW = x_G8W.reshape(x_BW.shape) @ weights[f"layers.{layer}.mix.kernel"]
            x_BW = jnp.tanh(mixed_BW + weights[f"layers.{layer}.mix.bias"][None])
        error_B = jnp.sum(jnp.square(x_BW @ weights["outputs.kernel"] - batch["y"]), -1)
        return jnp.sum(error_B * batch["weight"]) / jnp.sum(batch["weight"])

    loss, grads = plain(found.weights)
    assert_near({"loss": found.loss}, {"loss": loss}, 1e-5)
    assert_near(found.grads, grads, 1e-5)


def test_groups_that_a_microbatch_would_cut_are_refused():
    parallel = Parallel(on_devices((2, 1, 1)), PipelineConfig(num_microbatches=2))
    message = (
        r"batch_size=16 does not divide by data=2 x num_microbatches=2 x rows_together of layer "
        r"balanced=8 = 32\nFix: use batch_size=32"
    )
    with pytest.raises(ValueError, match=message):
        fit(Mixed(), parallel, TrainConfig(num_steps=1))


def test_a_number_of_rows_is_a_number():
    class Wrong(Norm):
        rows_together = "all"

    with pytest.raises(ValueError, match=r"layer Wrong has rows_together='all'"):
        Stack([lambda rngs: Wrong(rngs=rngs)], rngs=nnx.Rngs(0))


@pytest.mark.full
def test_a_run_trains_and_evaluates():
    parallel = Parallel(on_devices((2, 2, 1)), PipelineConfig(num_chunks=2))
    result = fit(Mixed(), parallel, TrainConfig(num_steps=2), quiet=True)
    one = fit(Mixed(), Parallel("dp1"), TrainConfig(num_steps=2), quiet=True)
    np.testing.assert_allclose(result.losses, one.losses, rtol=1e-5)
    found, expected = (run.evaluations["valid"].loss for run in (result, one))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.full
def test_a_plan_counts_whole_groups():
    costs = [estimate_step(Mixed(batch_size=rows), "dp1") for rows in (24, 48)]
    one, two = (cost.parts["layers"] for cost in costs)
    np.testing.assert_allclose(two, 2 * one, rtol=0.1)


@pytest.mark.parametrize("loses", ["rows", "carry"])
def test_as_many_rows_come_back(loses):
    class Wrong(Balanced):
        def __call__(self, carry_BW, x_TBW, at):
            carry_BW, y_TBW, sums = super().__call__(carry_BW, x_TBW, at)
            return (
                (carry_BW, y_TBW[:, 1:], sums) if loses == "rows" else (carry_BW[1:], y_TBW, sums)
            )

    @dataclasses.dataclass(frozen=True)
    class Losing(Mixed):
        def make_model(self, rngs):
            model = super().make_model(rngs)
            model.layers = Stack([lambda rngs: Wrong(rngs=rngs)], rngs=rngs)
            return model

    what, dim = {"rows": ("its output", 1), "carry": ("the carry that it returns", 0)}[loses]
    message = rf"for 8 rows \(rows_together\), but {what} has the shape .*\nFix: let dim {dim} be these rows"
    with pytest.raises(ValueError, match=message):
        fit(Losing(), Parallel(on_devices((1, 1, 1))), TrainConfig(num_steps=1))
