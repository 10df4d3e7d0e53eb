"""Layers that add to the loss: exact on every mesh and schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib.laws import RELATIVE_ERROR, assert_close, by_layer, make_settings, more
from lib.layers import PENALTY, Penalized
from lib.models import Regress, Regression

import jaxpar
from jaxpar import LayerContext, Stack, Sums, init_state, make_train_step
from jaxpar.data.batches import put_batch
from jaxpar.step.functions import make_eval_step
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding, make_loss_and_grad


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


def results(settings):
    """Sums, gradients and the carry of a step, whose state is not zero."""
    task, parallel, _ = settings
    setup = Setup.of(task, parallel, mesh=parallel.mesh.build())
    batch = put_batch(task.example_batch(), batch_sharding(setup))
    run = jax.jit(make_loss_and_grad(setup))
    (loss, (carry, sums)), grads = run(init_state(setup), batch)
    numbers = {"loss of a step": loss, **sums.by_name}
    return numbers, by_layer(grads, settings), by_layer(carry, settings)


def in_plain_python(task):
    """The same by the model's own methods and autodiff alone."""
    setup = Setup.of(task, make_settings(task=task).parallel)
    state, batch = init_state(setup), task.example_batch()
    block = setup.facts.to_block(batch)
    at = LayerContext(0, 0, 0, key=None, batch=block)

    def loss(params):
        model = setup.storage.merge(params, state.frozen)
        carry = model.layers.initial_carry(task.batch_size)
        _, y, of_layers = model.layers(carry, model.first(block, at), at)
        sums = model.last(y, block, at)
        return (sums.loss + of_layers.loss) / sums.weight, of_layers

    (value, of_layers), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return value, of_layers, grads


@pytest.mark.more
@pytest.mark.parametrize("task", [Task(), MIXED])
def test_the_plain_model_adds_what_its_layers_add(task):
    value, of_layers, expected = in_plain_python(task)
    settings = make_settings(task=task)
    numbers, grads, _ = results(settings)
    np.testing.assert_allclose(numbers["loss of a step"], value, rtol=RELATIVE_ERROR)
    np.testing.assert_allclose(numbers["penalty"], of_layers.loss, rtol=RELATIVE_ERROR)
    assert numbers["above"] == of_layers.metrics["above"]
    assert of_layers.loss > 0.1 * value  # else what follows would show little
    assert_close(grads, by_layer(expected, settings))


@dataclasses.dataclass(frozen=True)
class Text(jaxpar.lm.LM):
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
    wanted, grads, _ = results(make_settings(task=task))
    settings = make_settings((2, 2, 1), (2, 2), task, head="sharded", **options)
    numbers, found, _ = results(settings)
    for name, value in wanted.items():
        np.testing.assert_allclose(numbers[name], value, rtol=RELATIVE_ERROR, err_msg=name)
    assert_close(found, grads)


@pytest.mark.full
def test_evaluation_reports_them():
    settings = make_settings((1, 2, 1), (2, 2), MIXED)
    setup = Setup.of(*settings)
    batch = put_batch(MIXED.example_batch(), batch_sharding(setup))
    _, sums = make_eval_step(setup)(init_state(setup), batch)
    plain = Setup.of(*make_settings(task=MIXED))
    state = init_state(plain)
    _, expected = make_eval_step(plain)(
        state, put_batch(MIXED.example_batch(), batch_sharding(plain))
    )
    for name, value in expected.by_name.items():
        np.testing.assert_allclose(sums.by_name[name], value, rtol=RELATIVE_ERROR, err_msg=name)


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

    def train():
        setup = Setup.of(*make_settings((2, 1, 1), task=task))
        batch = put_batch(task.example_batch(), batch_sharding(setup))
        return make_train_step(setup)(init_state(setup), batch)

    with pytest.raises(ValueError, match=message):
        train()


def test_sums_for_some_calls_only_are_refused():
    task = Task(("sometimes", "silent"))
    setup = Setup.of(*make_settings(task=task))
    state, batch = init_state(setup), put_batch(task.example_batch(), batch_sharding(setup))
    evaluate = make_eval_step(setup)
    with pytest.raises(ValueError, match="returns sums for some of its calls only"):
        evaluate(state, batch)
