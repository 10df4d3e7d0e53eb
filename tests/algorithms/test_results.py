"""Long curves are drawn with few points, and as bars of text."""

import itertools
import math

import pytest

from jaxpar.pictures.results import MOST_POINTS, sparkline, thinned


def points(number):
    return [(step, 1 + math.cos(step)) for step in range(1, number + 1)]


@pytest.mark.parametrize("number", [1, 199, 200, 201, 1_000, 12_345])
def test_curves_are_thinned_and_end_where_the_run_is(number):
    kept = thinned(points(number), MOST_POINTS)
    assert len(kept) <= MOST_POINTS
    assert len(kept) == number or len(kept) > MOST_POINTS // 2
    assert kept[-1] == points(number)[-1]
    assert len({b[0] - a[0] for a, b in itertools.pairwise(kept)}) <= 1


def test_bars_are_as_high_as_losses():
    assert sparkline([(1, 8.0), (2, 4.5), (3, 1.0)], 40) == "█▅▁"
    assert sparkline([(1, 2.0), (2, 2.0)], 40) == "▁▁"
    assert len(sparkline(points(1_000), 40)) <= 40
