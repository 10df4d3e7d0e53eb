"""Who computes which rows of a batch, and in how many pieces, changes no loss and no gradient."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from lib.laws import MODEL, RELATIVE_ERROR, by_layer, make_batch, more
from lib.laws import make_settings as make_any_settings

from jaxpar import OptimizerConfig, TrainConfig, init_state, make_train_step
from jaxpar.model.task import find_task
from jaxpar.planning import propose_shares, time_steps
from jaxpar.step.setup import Setup
from jaxpar.step.state import audit

Digits = find_task(f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits")
MODEL_4 = dataclasses.replace(MODEL, num_layers=4)
NO_MASKS = dataclasses.replace(MODEL_4, dropout=0.0)  # half of a program to compile


def make_settings(mesh, units=(1, 1), task=MODEL, *, shares=None, update="replicated", **options):
    layout = {"shares": shares, "update": update}
    return make_any_settings(mesh, units, task, layout=layout, **options)


TRAINED = [
    ((2, 2, 2), (1, 2), (3, 1), "replicated"),
    more((3, 1, 1), (1, 1), (5, 2, 1), "replicated"),
    more((1, 1, 1), (4, 1), None, "replicated"),
    ((4, 1, 2), (2, 1), None, "sharded"),
    more((2, 2, 2), (1, 2), None, "host"),
]


@functools.cache
def train_20_steps(mesh, units, shares, update):
    """Losses and parameters of 20 steps with a clipped optimizer, the state carried along."""
    adam = OptimizerConfig("adam", learning_rate=0.01, warmup_steps=0)
    task = dataclasses.replace(NO_MASKS, optimizer=adam)
    train = TrainConfig(clip_norm=0.05)
    settings = make_settings(mesh, units, task, train=train, shares=shares, update=update)
    task, parallel, _ = settings
    mesh = parallel.mesh.build()
    state, losses = init_state(task, parallel, mesh=mesh), []
    step = make_train_step(*settings, mesh)
    for number in range(20):
        starts = number % 7 == 0
        state, metrics = step(state, make_batch(settings, mesh, number, starts=starts))
        losses.append(float(metrics.loss))
        assert metrics.grad_norm > train.clip_norm
    audit(state)
    return losses, by_layer(state.carry, settings)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "units", "shares", "update"), TRAINED)
def test_20_clipped_steps_give_the_losses_of_one_device(mesh, units, shares, update):
    expected_losses, expected_carry = train_20_steps((1, 1, 1), (1, 1), None, "replicated")
    losses, carry = train_20_steps(mesh, units, shares, update)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    # Twenty steps of Adam divide by small second moments: the state drifts more than the loss.
    for name, value in expected_carry.items():
        np.testing.assert_allclose(carry[name], value, atol=1e-3)


def test_a_smaller_share_runs_fewer_units():
    settings = make_settings((2, 2, 1), (2, 2), shares=(3, 1))
    table = make_train_step(*settings).full_table
    units = [(np.asarray(table.forward.unit[group]) >= 0).sum(0).tolist() for group in (0, 1)]
    assert units == [[12, 12], [4, 4]]  # share x microbatches x chunks, on both stages


@pytest.mark.parametrize(
    ("shares", "mesh", "message"),
    [
        ((1, 0), (2, 1, 1), r"shares=\(1, 0\): must be positive"),
        ((2, -1), (2, 1, 1), r"shares=\(2, -1\): must be positive"),
        ((), (2, 1, 1), r"shares=\(\): must be positive"),
        ((3, 1), (4, 1, 1), r"shares=\(3, 1\): expected 4 \(data\), got 2"),
        (
            (2, 1),
            (2, 1, 1),
            r"batch_size=16 does not divide by sum of shares=3\nFix: use batch_size=15 or 18",
        ),
    ],
)
def test_bad_shares_are_refused(shares, mesh, message):
    with pytest.raises(ValueError, match=message):
        make_settings(mesh, shares=shares).parallel.check(MODEL.batch_size, MODEL.seq_len)


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


@pytest.mark.parametrize(
    "seconds",
    [
        (),
        (1.0, 0.0),
        (1.0, -2.0),
        (1, float("nan")),
        (float("nan"), 1),
        (1, float("inf")),
        (float("-inf"), 1),
    ],
)
def test_times_that_are_none_are_refused(seconds):
    with pytest.raises(ValueError, match=r"seconds=\(.*every group needs a time above 0"):
        propose_shares(seconds)


@pytest.mark.parametrize("seconds", [(1e-310, 1e-310), (1e308, 1.5e308), (1e-300, 1e300)])
def test_shares_of_extreme_times_are_shares(seconds):
    first, second = propose_shares(seconds)
    assert 8 >= first >= second >= 1


@pytest.mark.full
def test_any_task_can_be_timed():
    task = Digits(channels=(4,), widths=(8,), batch_size=16)
    [[seconds]] = time_steps([Setup.of(task, "dp2tp4")], 1, num_steps=1)
    assert seconds > 0


def test_batch_and_carry_keep_the_order_of_the_user():
    settings = make_settings((2, 1, 1), shares=(3, 1))
    state = init_state(settings.task, settings.parallel)
    for leaf in jax.tree.leaves(state.carry):
        assert leaf.shape == (8, 16, 16)
        assert leaf.sharding.is_fully_replicated
    batch = make_batch(settings, settings.parallel.mesh.build())
    assert batch.inputs_BT.shape == (16, 8)
    assert batch.inputs_BT.sharding.is_fully_replicated
