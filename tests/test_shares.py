"""Who computes which rows of a batch, and in how many pieces, changes no loss and no gradient."""

import dataclasses
import time

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from test_equivalence import (
    DATA,
    MODEL,
    RELATIVE_ERROR,
    assert_same_as_plain,
    by_layer,
    make_batch,
    make_config,
)

import jaxpar.planning.shares
from jaxpar.config import TrainConfig
from jaxpar.planning.shares import measure_groups, propose_shares
from jaxpar.state import audit, init_state
from jaxpar.step import make_train_step

MODEL_4 = dataclasses.replace(MODEL, num_layers=4)


def shared(shares, batch_size=16):
    return dataclasses.replace(DATA, batch_size=batch_size, shares=shares)


@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "shares", "options"),
    [
        ((2, 1, 1), (1, 1), (3, 1), {}),
        ((2, 1, 2), (2, 1), (1, 3), {}),
        ((2, 2, 2), (1, 2), (3, 1), {}),
        ((2, 4, 1), (2, 2), (1, 3), {"head": "last", "remat": True}),
        ((2, 2, 1), (1, 4), (3, 1), {"schedule": "interleaved", "num_groups": 2}),
        ((3, 1, 1), (1, 1), (5, 2, 1), {}),
        ((3, 2, 1), (2, 2), (5, 2, 1), {"schedule": "gpipe"}),
        ((2, 2, 1), (1, 2), (2, 2), {}),
    ],
)
def test_any_shares_give_the_gradients_of_one_device(mesh, units, shares, options):
    assert_same_as_plain(make_config(mesh, units, data=shared(shares), **options))


@pytest.mark.law
@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (4, 1, 1), (2, 1, 2), (1, 1, 8)])
def test_accumulation_equals_the_big_batch(mesh, num_microbatches):
    assert_same_as_plain(make_config(mesh, (num_microbatches, 1)))


@pytest.mark.law
@hypothesis.settings(phases=[hypothesis.Phase.generate], max_examples=3)
@hypothesis.given(
    shares=st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple),
    stages=st.sampled_from([1, 2]),
    num_microbatches=st.integers(1, 2),
)
def test_random_shares_equal_plain(shares, stages, num_microbatches):
    data = shared(shares, batch_size=2 * num_microbatches * sum(shares))
    mesh = (len(shares), stages, 1)
    assert_same_as_plain(make_config(mesh, (num_microbatches, 2), MODEL_4, data))


TRAINED = [
    ((2, 2, 2), (1, 2), (3, 1), "replicated"),
    ((3, 1, 1), (1, 1), (5, 2, 1), "replicated"),
    ((1, 1, 1), (4, 1), None, "replicated"),
    ((4, 1, 2), (2, 1), None, "sharded"),
    ((2, 2, 2), (1, 2), None, "host"),
]


def train(mesh, units, shares, update):
    """Losses and parameters of 20 steps with a clipped optimizer, the state carried along."""
    settings = TrainConfig(
        optimizer="adam", learning_rate=0.01, warmup_steps=0, clip_norm=0.05, update=update
    )
    config = make_config(mesh, units, MODEL_4, shared(shares), settings)
    mesh = config.mesh.build()
    state, step, losses = init_state(config, mesh), make_train_step(config, mesh), []
    for number in range(20):
        state, metrics = step(state, make_batch(config, mesh, number, starts=number % 7 == 0))
        losses.append(float(metrics.loss))
        assert metrics.grad_norm > settings.clip_norm
    audit(state)
    return losses, by_layer(state.carry, config)


@pytest.mark.law
def test_20_clipped_steps_give_the_losses_of_one_device():
    expected_losses, expected_carry = train((1, 1, 1), (1, 1), None, "replicated")
    for case in TRAINED:
        losses, carry = train(*case)
        np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
        # Twenty steps of Adam divide by small second moments: the state drifts more than the loss.
        for name, value in expected_carry.items():
            np.testing.assert_allclose(carry[name], value, atol=1e-3)


def test_a_smaller_share_runs_fewer_units():
    from jaxpar.step import _full_plan

    plan = _full_plan(make_config((2, 2, 1), (2, 2), data=shared((3, 1))), backward=True)
    units = [(np.asarray(plan.forward.unit[group]) >= 0).sum(0).tolist() for group in (0, 1)]
    assert units == [[12, 12], [4, 4]]  # share x microbatches x chunks, on both stages


@pytest.mark.parametrize(
    ("shares", "mesh", "message"),
    [
        ((1, 0), (2, 1, 1), r"shares=\(1, 0\): every data-parallel group needs at least one part"),
        ((2, -1), (2, 1, 1), r"shares=\(2, -1\): every"),
        ((), (2, 1, 1), r"shares=\(\): every"),
        ((3, 1), (4, 1, 1), r"shares=\(3, 1\) are 2 parts for data=4; give one to every"),
        (
            (2, 1),
            (2, 1, 1),
            r"batch_size=16 does not divide by sum of shares=3; use batch_size 15 or 18",
        ),
    ],
)
def test_bad_shares_are_refused(shares, mesh, message):
    with pytest.raises(ValueError, match=message):
        make_config(mesh, data=shared(shares)).check()


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ((1, 3), (3, 1)),
        ((2.0, 2.05), (1, 1)),
        ((0.2, 0.5, 1.0), (5, 2, 1)),
        ((1, 100), (8, 1)),
        ((7,), (1,)),
    ],
)
def test_proposed_shares_are_as_the_speeds(seconds, shares):
    assert propose_shares(seconds) == shares


@pytest.mark.parametrize("seconds", [(), (1.0, 0.0), (1.0, -2.0)])
def test_times_that_are_none_are_refused(seconds):
    with pytest.raises(ValueError, match=r"seconds=\(.*give a time above 0 for every group"):
        propose_shares(seconds)


def test_groups_are_measured_on_their_own_devices(monkeypatch):
    """The second group sleeps: the first gets the larger share."""
    seen = []

    def slow(config, mesh):
        step, devices = make_train_step(config, mesh), config.mesh.devices
        seen.append((devices, [device.id for device in mesh.devices.flat], config.data.batch_size))

        def run(state, batch):
            time.sleep(0.0 if devices == (0, 1) else 1.0)
            return step(state, batch)

        return run

    monkeypatch.setattr(jaxpar.planning.shares, "make_train_step", slow)
    config = make_config((2, 2, 1), (2, 2), MODEL_4)
    seconds = measure_groups(config, config.mesh.build(), num_steps=1)
    assert seen == [((0, 1), [0, 1], 8), ((2, 3), [2, 3], 8)]
    assert seconds[1] >= 1.0 > seconds[0]
    assert propose_shares(seconds)[0] > propose_shares(seconds)[1]


def test_batch_and_carry_keep_the_order_of_the_user():
    config = make_config((2, 1, 1), (1, 1), data=shared((3, 1)))
    state = init_state(config)
    assert state.carry["h"].get_value().shape == (8, 16, 16)
    assert state.carry["h"].get_value().sharding.is_fully_replicated
    assert jax.tree.leaves(make_batch(config, config.mesh.build()))[0].shape == (16, 8)
