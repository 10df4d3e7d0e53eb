"""The law: any mesh, schedule and microbatching gives the losses and gradients of one device."""

import dataclasses

import numpy as np
import pytest
from lib.laws import (
    MESHES,
    MODEL,
    RELATIVE_ERROR,
    assert_close,
    assert_same_as_plain,
    by_layer,
    make_batch,
    make_settings,
    more,
    train_two_steps,
)

from jaxpar import OptimizerConfig, init_state, value_and_grad
from jaxpar.step.functions import make_eval_step

pytestmark = pytest.mark.law


UNITS = [(1, 1), (2, 1), (1, 4), (2, 4)]  # microbatches, chunks of time


# Microbatches and chunks are what moves between stages; without stages they change nothing.
LAYOUTS = [(mesh, UNITS[-1]) for mesh in MESHES] + [((2, 2, 2), units) for units in UNITS[:-1]]
LAYOUTS += [
    more(mesh, units)
    for mesh in MESHES
    for number, units in enumerate(UNITS[:-1])
    if mesh[1] > 1 and (mesh, units) not in LAYOUTS
]


@pytest.mark.parametrize(("mesh", "units"), LAYOUTS)
def test_loss_and_gradients_equal_plain(mesh, units):
    assert_same_as_plain(make_settings(mesh, units))


@pytest.mark.rows(1)
@pytest.mark.parametrize("placement", [(2, 3, 2), (1, 5, 1), more("balanced")])
def test_uneven_placement_equals_plain(placement):
    task = dataclasses.replace(MODEL, num_layers=7)
    assert_same_as_plain(make_settings((2, 3, 1), (2, 2), task=task, placement=placement))


@pytest.mark.more
@pytest.mark.parametrize("sizes", [more({"embed_size": 8}), {"tie_embedding": True}])
def test_model_variants_equal_plain(sizes):
    assert_same_as_plain(make_settings((2, 2, 2), (2, 2), task=dataclasses.replace(MODEL, **sizes)))


@pytest.mark.rows(1)
@pytest.mark.parametrize("optimizer", ["adam", more("sgd")])
@pytest.mark.parametrize(
    ("mesh_sizes", "storage"),
    [
        ((2, 2, 2), {}),
        ((8, 1, 1), {}),
        ((2, 2, 2), {"fsdp": True}),
        ((4, 2, 1), {"update": "sharded"}),
    ],
)
def test_parameters_agree_after_two_steps(optimizer, mesh_sizes, storage):
    # Adam moves every weight by about its rate, also where the gradient is nothing but rounding.
    rate = {"sgd": 0.1, "adam": 1e-3}[optimizer]
    config = OptimizerConfig(name=optimizer, learning_rate=rate, warmup_steps=0)
    task = dataclasses.replace(MODEL, optimizer=config)

    expected_losses, expected = train_two_steps(make_settings(task=task))
    losses, params = train_two_steps(make_settings(mesh_sizes, (2, 2), task, layout=storage))
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(params, expected)


def test_windows_carry_their_state_on_every_mesh():
    def perplexity_sums(settings):
        mesh = settings.parallel.mesh.build()
        state, sums = init_state(settings.task, settings.parallel, mesh=mesh), []
        step = make_eval_step(settings.task, settings.parallel, mesh=mesh)
        for number in range(3):
            batch = make_batch(settings, mesh, seed=number, starts=number == 0)
            carry, result = step(state, batch)
            state = dataclasses.replace(state, carry=carry)
            sums.append((float(result.loss), float(result.weight)))
        return sums

    expected = perplexity_sums(make_settings())
    assert len(set(expected)) == 3
    for mesh, units in [((2, 2, 2), (2, 4)), ((8, 1, 1), (1, 1)), ((1, 4, 2), (1, 2))]:
        np.testing.assert_allclose(
            perplexity_sums(make_settings(mesh, units)), expected, rtol=RELATIVE_ERROR
        )


@pytest.mark.full
def test_dropout_masks_are_new_at_every_step_and_the_same_on_every_mesh():
    def gradients(settings):
        mesh = settings.parallel.mesh.build()
        state = init_state(settings.task, settings.parallel, mesh=mesh)
        run = value_and_grad(*settings, mesh)
        batch = make_batch(settings, mesh)
        states = [dataclasses.replace(state, step=state.step + step) for step in (0, 1)]
        return [by_layer(run(each, batch)[1], settings) for each in states]

    first, second = gradients(make_settings())
    for name in first:
        if "head" not in name and "bias" not in name:  # the head's hardly depend on its input yet
            assert np.linalg.norm(first[name] - second[name]) > 0.1 * np.linalg.norm(first[name])
    for actual, expected in zip(
        gradients(make_settings((2, 2, 2), (2, 2))), (first, second), strict=True
    ):
        assert_close(actual, expected)
