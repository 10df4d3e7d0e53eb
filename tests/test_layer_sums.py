"""Layers that add to the loss: in the plain model, in evaluation, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.law.check import assert_near
from lib.laws import RELATIVE_ERROR, more, on_devices
from lib.layers import PENALTY, Penalized
from lib.models import Regress, Regression

from jaxpar import (
    LayerContext,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    init_state,
    lm,
    make_train_step,
)


class Silent(nnx.Module):
    """A layer that adds nothing."""

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 16)) / 4)

    def __call__(self, carry, x, at: LayerContext):
        return carry, jnp.tanh(x @ self.kernel[...])


class Mean(Penalized):
    def __call__(self, carry, x, at: LayerContext):
        return carry, x, Sums(jnp.mean(jnp.square(x)), 0)


class OfSeveral(Penalized):
    def __call__(self, carry, x, at: LayerContext):
        return carry, x, Sums(jnp.sum(x, -1), 0)


class NoSums(Penalized):
    def __call__(self, carry, x, at: LayerContext):
        return carry, x, jnp.sum(x)


class InTraining(Penalized):
    def __call__(self, carry, x, at: LayerContext):
        return (carry, x) if at.key is not None else (carry, x, Sums(jnp.sum(x), 0))


KINDS = {
    "penalized": Penalized,
    "silent": Silent,
    "mean": Mean,
    "several": OfSeveral,
    "none": NoSums,
    "sometimes": InTraining,
}


class Model(Regression):
    """That of `Regress`, with these layers."""

    def __init__(self, kinds, *, rngs):
        super().__init__(("dense",) * len(kinds), rngs=rngs)
        makers = {kind: (lambda rngs, kind=kind: KINDS[kind](rngs=rngs)) for kind in KINDS}
        self.layers = Stack([makers[kind] for kind in kinds], rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Task(Regress):
    kinds: tuple[str, ...] = ("penalized",) * 4

    def make_model(self, rngs):
        return Model(self.kinds, rngs=rngs)


MIXED = Task(("penalized", "silent", "silent", "penalized"))


@pytest.mark.more
@pytest.mark.parametrize("task", [Task(), MIXED])
def test_the_plain_model_adds_what_its_layers_add(task):
    """By the model's own methods alone."""
    model, batch = task.make_model(nnx.Rngs(0)), task.example_batch()
    block = {name: a.swapaxes(0, 1) if np.ndim(a) > 1 else a for name, a in batch.items()}
    at, carry = LayerContext(0, 0, 0, batch=block), model.layers.initial_carry(task.batch_size)
    _, y, of_layers = model.layers(carry, model.first(block, at), at)
    sums = model.last(y, block, at)
    value = (sums.loss + of_layers.loss) / sums.weight
    assert of_layers.loss > 0.05 * value * sums.weight  # else this would show little
    found = api.gradients(task, Parallel("dp1"), batch)
    np.testing.assert_allclose(found.loss, value, rtol=RELATIVE_ERROR)
    for name, own in of_layers.metrics.items():
        np.testing.assert_allclose(found.metrics[name], own / sums.weight, rtol=RELATIVE_ERROR)


@dataclasses.dataclass(frozen=True)
class Text(lm.LM):
    """A language model, whose head stages share, with penalties."""

    def make_model(self, rngs):
        model = super().make_model(rngs)
        model.layers = Stack([lambda rngs: Penalized2(rngs=rngs)] * self.num_layers, rngs=rngs)
        return model


class Penalized2(Penalized):
    def __call__(self, carry, x_TBW, at: LayerContext):
        with jax.numpy_rank_promotion("allow"):
            carry, y_TBW = jax.lax.scan(self.cell, carry, x_TBW)
        return carry, y_TBW, Sums(PENALTY * jnp.sum(jnp.square(y_TBW)), 0)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("options", [{}, more({"remat": True}), more({"schedule": "v"})])
def test_sums_of_layers_beside_a_head_that_stages_share_equal_plain(options):
    task = Text(4, 16, 16, vocab_size=96, batch_size=8, seq_len=8, dropout=0.0)
    units = PipelineConfig(num_microbatches=2, num_chunks=2, head="sharded", **options)
    batch = task.example_batch()
    found = api.gradients(task, Parallel(on_devices((2, 2, 1)), units), batch)
    expected = api.gradients(task, Parallel("dp1"), batch)
    assert_near({"loss": found.loss}, {"loss": expected.loss}, RELATIVE_ERROR)
    assert_near(found.grads, expected.grads, RELATIVE_ERROR)


@pytest.mark.full
def test_evaluation_reports_them():
    units, batch = PipelineConfig(num_microbatches=2, num_chunks=2), MIXED.example_batch()
    layouts = Parallel(on_devices((1, 2, 1)), units), Parallel("dp1")
    found, expected = (
        api.evaluation(MIXED, parallel, init_state(MIXED, parallel), batch)[0]
        for parallel in layouts
    )
    assert {"penalty", "above"} < expected.keys()
    assert found == pytest.approx(expected, rel=RELATIVE_ERROR)


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", "the sums of layer mean do not add up: its loss is"),
        ("several", r"layer ofseveral returns an array of shape \[8, 16\] as 'loss' of its Sums"),
        ("none", r"layer nosums returns an array of shape \[\]\.\nFix: return jaxpar\.Sums"),
    ],
)
def test_what_would_be_another_loss_is_refused(kind, message):
    task = Task((kind, "silent"))
    with pytest.raises(ValueError, match=message):
        make_train_step(task, "dp2")(init_state(task, "dp2"), task.example_batch())


def test_sums_for_some_calls_only_are_refused():
    task = Task(("sometimes", "silent"))
    state = init_state(task, "dp1")
    with pytest.raises(ValueError, match="returns sums for some of its calls only"):
        api.evaluation(task, "dp1", state, task.example_batch())
