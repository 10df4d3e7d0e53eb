"""Columns of the numbers of a run."""

import math

import numpy as np

from jaxpar.training.progress import columns_of


def test_columns_are_equally_long_and_in_the_order_of_steps():
    lines = [
        {"split": "train", "step": 2, "loss": 3.0, "learning_rate": None},
        {"split": "train", "step": 4, "loss": 2.0, "learning_rate": 0.1},
        {"split": "skipped", "step": 5, "nonfinite": "loss"},
        {"split": "valid", "step": 3, "loss": 2.5},
    ]
    nan = math.nan
    expected = {
        "step": [2, 3, 4],
        "train/loss": [3.0, nan, 2.0],
        "train/learning_rate": [nan, nan, 0.1],
        "valid/loss": [nan, 2.5, nan],
    }
    found = columns_of(lines)
    assert [*found] == [*expected]
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column)
    assert columns_of([]) == {"step": []}
