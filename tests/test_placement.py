"""Placements: every layer on one stage, as evenly as can be, in slots that split evenly."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxpar.placement import resolve_placement, slots


@st.composite
def places(draw):
    """(number of layers, stages, groups on each stage), at least a layer for each group."""
    num_stages, num_groups = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return draw(st.integers(num_stages * num_groups, 64)), num_stages, num_groups


@st.composite
def placements(draw):
    """(layers of each group, groups on each stage)."""
    num_stages, num_groups = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    size = num_stages * num_groups
    return tuple(draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))), num_groups


@hypothesis.given(sizes=places())
def test_balanced_shares_differ_by_at_most_one_and_the_last_is_no_larger_one(sizes):
    num_layers, num_stages, num_groups = sizes
    placement = resolve_placement("balanced", num_layers, num_stages, num_groups)
    assert len(placement) == num_stages * num_groups
    assert sum(placement) == num_layers
    assert max(placement) - min(placement) <= 1
    assert placement[-1] == min(placement)


@hypothesis.given(sizes=places())
def test_even_shares_are_the_balanced_ones_where_the_layers_divide(sizes):
    num_layers, num_stages, num_groups = sizes
    num_places = num_stages * num_groups
    if num_layers % num_places == 0:
        even = resolve_placement("even", num_layers, num_stages, num_groups)
        assert even == (num_layers // num_places,) * num_places
    else:
        message = f"num_layers={num_layers} does not split evenly over stage={num_stages}"
        with pytest.raises(ValueError, match=message):
            resolve_placement("even", num_layers, num_stages, num_groups)


@hypothesis.given(case=placements())
def test_every_layer_stands_in_one_slot_and_every_stage_has_as_many(case):
    placement, num_groups = case
    layer_ids = slots(placement, num_groups)
    num_stages = len(placement) // num_groups
    assert len(layer_ids) == len(placement) * max(placement)
    assert sorted(layer for layer in layer_ids if layer >= 0) == list(range(sum(placement)))
    # Read back: group v of stage s holds the layers of place v S + s, in their order.
    width = max(placement)
    groups = [layer_ids[first : first + width] for first in range(0, len(layer_ids), width)]
    found = [groups[s * num_groups + v] for v in range(num_groups) for s in range(num_stages)]
    filled = [tuple(layer for layer in group if layer >= 0) for group in found]
    assert tuple(len(group) for group in filled) == placement
    assert sum(filled, ()) == tuple(range(sum(placement)))


@pytest.mark.parametrize(
    ("placement", "num_groups", "layer_ids"),
    [
        ((3,), 1, (0, 1, 2)),
        ((2, 2), 1, (0, 1, 2, 3)),
        ((1, 2), 1, (0, -1, 1, 2)),
        ((2, 3, 1), 1, (0, 1, -1, 2, 3, 4, 5, -1, -1)),
        ((1, 1, 1, 1), 2, (0, 2, 1, 3)),
        ((2, 1, 1, 2), 2, (0, 1, 3, -1, 2, -1, 4, 5)),
    ],
)
def test_slots_by_example(placement, num_groups, layer_ids):
    assert slots(placement, num_groups) == layer_ids


def test_numbers_are_taken_as_they_are():
    assert resolve_placement([2, 3, 3], 8, 3) == (2, 3, 3)
    assert resolve_placement((1, 1, 2, 1), 5, 2, 2) == (1, 1, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("even", 6, 4),
            r"num_layers=6 does not split evenly over stage=4; use 4 or 8 layers, stage=1, 2, 3, 6, "
            r"or a placement such as \(2, 2, 1, 1\)$",
        ),
        (
            ("even", 6, 2, 2),
            r"num_layers=6 does not split evenly over stage=2 x num_groups=2 = 4; use 4 or 8 layers, "
            r"stage=1, 3, or a placement such as \(2, 2, 1, 1\)$",
        ),
        (
            ("even", 5, 2, 2),
            r"num_layers=5 does not .* = 4; use 4 or 8 layers, or a placement such as \(2, 1, 1, 1\)$",
        ),
        (
            ("balanced", 4, 5),
            "stage=5 is more than num_layers=4; use stage=4 or fewer, or 5 layers$",
        ),
        (
            ("balanced", 7, 4, 2),
            "stage=4 x num_groups=2 = 8 is more than num_layers=7; use stage=3 or fewer, or 8 layers$",
        ),
        (("balanced", 2, 2, 3), "num_groups=3 = 6 is more than num_layers=2; use num_groups=2 or"),
        (("fair", 4, 2), r"placement='fair'; use \"balanced\", \"even\" or numbers"),
        (
            ((1, 2), 4, 2),
            r"placement=\(1, 2\) is 2 numbers with the sum 3; num_layers=4 on stage=2 needs 2 numbers "
            r"from 1 with the sum 4, such as \(2, 2\)$",
        ),
        (((2, 1, 1), 4, 2), r"placement=\(2, 1, 1\) is 3 numbers .* needs 2 numbers"),
        (((4, 0), 4, 2), r"placement=\(4, 0\) is 2 numbers with the sum 4; .* from 1 with"),
        (((5, -1), 4, 2), r"placement=\(5, -1\)"),
        (((), 4, 2), r"placement=\(\) is 0 numbers"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_placement(*arguments)
