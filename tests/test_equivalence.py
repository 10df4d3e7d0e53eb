"""Examples of the law (`test_law.py`), on meshes and with an optimizer that it does not draw."""

import dataclasses

import numpy as np
import pytest
from lib import api
from lib.laws import (
    MODEL,
    RELATIVE_ERROR,
    assert_close,
    assert_same_as_plain,
    make_batch,
    make_settings,
    more,
    train_two_steps,
)

from jaxpar import OptimizerConfig, init_state

pytestmark = pytest.mark.law


@pytest.mark.parametrize(
    ("mesh", "units"),  # microbatches, chunks of time
    [
        ((2, 2, 2), (2, 4)),
        more((8, 1, 1), (1, 1)),
        more((1, 8, 1), (2, 4)),
        more((1, 1, 8), (1, 1)),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(mesh, units):
    assert_same_as_plain(make_settings(mesh, units))


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "storage"),
    [
        ((2, 2, 2), {}),
        ((8, 1, 1), {}),
        ((2, 2, 2), {"fsdp": True}),
        ((4, 2, 1), {"update": "sharded"}),
    ],
)
def test_parameters_agree_after_two_steps_of_adam(mesh, storage):
    # Adam moves every weight by about its rate, also where the gradient is nothing but rounding.
    config = OptimizerConfig(name="adam", learning_rate=1e-3, warmup_steps=0)
    task = dataclasses.replace(MODEL, optimizer=config)

    expected_losses, expected = train_two_steps(make_settings(task=task))
    losses, params = train_two_steps(make_settings(mesh, (2, 2), task, layout=storage))
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(params, expected)


def test_windows_of_an_evaluation_carry_their_state_on_every_mesh():
    def sums_of_windows(settings):
        task, parallel, _ = settings
        state, found = init_state(task, parallel), []
        for number in range(3):
            batch = make_batch(settings, seed=number, starts=number == 0)
            sums, state = api.evaluation(task, parallel, state, batch)
            found.append((sums["loss"], sums["weight"]))
        return found

    expected = sums_of_windows(make_settings())
    assert len(set(expected)) == 3
    for mesh, units in [((2, 2, 2), (2, 4)), ((8, 1, 1), (1, 1)), ((1, 4, 2), (1, 2))]:
        np.testing.assert_allclose(
            sums_of_windows(make_settings(mesh, units)), expected, rtol=RELATIVE_ERROR
        )
