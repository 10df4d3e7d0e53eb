"""When a run has had enough of validations that bring nothing."""

import pytest

from jaxpar.training.loop import validations_since_best


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({}, 0),
        ({4: 1.0}, 0),
        ({2: 2.0, 4: 1.0, 6: 1.5, 8: 1.2}, 2),
        ({2: 1.0, 4: 1.0}, 1),  # no lower one
        ({2: float("nan"), 4: float("inf")}, 2),
        ({2: float("nan"), 4: 3.0, 6: float("nan")}, 1),
        ({8: 1.2, 2: 2.0, 4: 1.0}, 1),
    ],
)
def test_validations_are_counted_from_the_best(losses, expected):
    assert validations_since_best(losses) == expected
