"""The numbers of a run as text, and where the time of a run goes."""

import math

import pytest

from jaxpar.training.progress import format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (92.23, "92.2"), (5.6284, "5.628"), (0.9344, "0.934"), (0.00921, "0.00921"), (0.0, "0.000"),
        (-3.5, "-3.500"), (1234.56, "1234.6"), (3.2e8, "3.2e+08"), (math.inf, "inf"), (9.2e-6, "9.2e-06"),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_that_say_something(value, text):
    assert format_number(value) == text
