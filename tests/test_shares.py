"""Which devices compute which rows of a batch: shares, and how they are chosen."""

from pathlib import Path

import jax
import numpy as np
import pytest
from lib import api
from lib.laws import MODEL, on_devices

from jaxpar import Parallel, PipelineConfig, TrainConfig, fit, init_state, make_train_step
from jaxpar.planning import propose_shares, time_steps

Digits = api.task_class(f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits")


def test_a_smaller_share_runs_fewer_units():
    pipeline = PipelineConfig(num_microbatches=2, num_chunks=2)
    parallel = Parallel(on_devices((2, 2, 1)), pipeline, shares=(3, 1))
    table = make_train_step(MODEL, parallel).full_table
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
        init_state(MODEL, Parallel(on_devices(mesh), shares=shares))


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
def test_any_task_can_be_timed(tmp_path):
    task = Digits(channels=(4,), widths=(8,), batch_size=16)
    train = TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    result = fit(task, "dp2tp4", train, quiet=True)
    [[seconds]] = time_steps([result.setup], 1, num_steps=1)
    assert seconds > 0


def test_the_carry_keeps_the_order_of_the_user():
    state = init_state(MODEL, Parallel(on_devices((2, 1, 1)), shares=(3, 1)))
    for leaf in jax.tree.leaves(state.carry):
        assert leaf.shape == (8, 16, 16)
        assert leaf.sharding.is_fully_replicated
