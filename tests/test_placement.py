"""Placements: every layer on one stage, as evenly as can be, in slots that split evenly."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from test_equivalence import MODEL, make_settings

from jaxpar.pipeline.placement import (
    balance,
    balance_ticks,
    make_slots,
    resolve_placement,
    route_of,
    tick_cost,
)
from jaxpar.setup import Setup
from jaxpar.training.summary import describe_balance


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


def all_placements(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(np.diff((0, *cuts, num_layers)).tolist())


def loads(values, placement, first=0.0, last=0.0):
    """The sum of each stage's values, with those of the ends."""
    ends = np.cumsum(placement)
    sums = [sum(values[end - n : end]) for n, end in zip(placement, ends, strict=True)]
    sums[0] += first
    sums[-1] += last
    return sums


def assert_best(costs, num_stages, first, last, sizes, limit):
    """Of all placements that fit the smallest slowest stage, then the most even, then the first."""

    def key(placement):
        on = loads(costs, placement, first, last)
        return round(max(on), 9), round(sum(np.square(on)), 9), tuple(-n for n in placement)

    every = all_placements(len(costs), num_stages)
    fitting = [placement for placement in every if max(loads(sizes, placement)) <= limit]
    options = {"first_cost": first, "last_cost": last, "layer_bytes": sizes, "max_bytes": limit}
    if fitting:
        assert balance(costs, num_stages, **options) == min(fitting, key=key)
    else:
        with pytest.raises(ValueError, match=f"no placement of {len(costs)} layers"):
            balance(costs, num_stages, **options)


def test_balance_agrees_with_brute_force_on_1000_lists():
    rng = np.random.default_rng(0)
    for case in range(1000):
        num_layers = int(rng.integers(1, 10))
        num_stages = int(rng.integers(1, num_layers + 1))
        # Whole numbers tie often, and then the tie-break is looked at.
        costs, (first, last) = (
            (rng.integers(0, 6, n) if case % 2 else rng.random(n)).tolist() for n in (num_layers, 2)
        )
        sizes = rng.random(num_layers).tolist()
        limit = np.inf if case % 3 else float(rng.uniform(0.3, 1.2)) * sum(sizes)
        assert_best(costs, num_stages, first, last, sizes, limit)


def test_ticks_agree_with_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_layers = int(rng.integers(1, 10))
        num_stages = int(rng.integers(1, num_layers + 1))
        forward, backward, first_cost, head_cost = rng.uniform(0.1, 4, 4)
        layers = [forward] * num_layers, [backward] * num_layers
        ends = {"first_cost": first_cost, "head_cost": head_cost}
        every = [*all_placements(num_layers, num_stages)]
        found = balance_ticks(*layers, num_stages, **ends)
        costs = [tick_cost(placement, *layers, **ends) for placement in found]
        assert costs == sorted(costs)
        assert {*found} <= {*every}
        assert costs[0] == pytest.approx(min(tick_cost(p, *layers, **ends) for p in every))


def test_layers_that_differ_are_ranked_by_their_ticks():
    forward, backward = [1.0, 1.0, 4.0, 1.0], [2.0, 2.0, 2.0, 9.0]
    found = balance_ticks(forward, backward, 2)
    costs = [tick_cost(placement, forward, backward) for placement in found]
    assert found == [(3, 1), (2, 2)]
    assert costs == [6 + 9, 5 + 11]
    assert tick_cost((2, 2), forward, backward, head_cost=1.0) == 6.0 + 11.0


def test_a_head_takes_layers_off_the_last_stage():
    assert balance([1, 1, 1, 1], 2) == (2, 2)
    assert balance([1, 1, 1, 1], 2, last_cost=1.75) == (3, 1)
    assert balance([1, 1, 1, 1], 2, first_cost=1.75) == (1, 3)
    # One layer more on the first stage would cost its backward pass, and save a forward pass on the last.
    assert resolve_placement("balanced", 8, 2, 1, 2.0) == (4, 4)
    assert resolve_placement("balanced", 9, 2, 1, 2.0) == (5, 4)
    # With one layer more on each of three stages, the fourth has three forward passes less.
    assert resolve_placement("balanced", 16, 4, 1, 2.0) == (5, 5, 5, 1)
    # V = 14 H: a head is 14 H^2 multiply-adds, a layer 8 H^2.
    last = laid_out(num_layers=16, vocab_size=14 * 16, stages=4, head="last")
    assert (last.last_cost, last.placement) == (1.75, (5, 5, 5, 1))
    sharded = laid_out(num_layers=16, vocab_size=14 * 16, stages=4, head="sharded")
    assert (sharded.last_cost, sharded.placement) == (0.0, (4, 4, 4, 4))


def laid_out(num_layers, vocab_size, stages, **pipeline):
    task = dataclasses.replace(MODEL, num_layers=num_layers, vocab_size=vocab_size)
    settings = make_settings((1, stages, 1), task=task, **pipeline)
    return Setup.of(settings.task, settings.parallel).layout


def test_layers_that_cost_more_stand_with_fewer_others():
    costs = [1.0, 1.0, 1.0, 3.0, 3.0]
    assert resolve_placement("balanced", 5, 2, costs=costs) == (4, 1)
    assert resolve_placement("balanced", 5, 3, costs=costs) == (3, 1, 1)
    # A head of a mean layer, 1.8, on the last stage.
    assert resolve_placement("balanced", 5, 2, 1, 1.0, [3.0, 3.0, 1.0, 1.0, 1.0]) == (2, 3)


def test_what_training_says_of_the_balance():
    def said(mesh, num_layers=8, **pipeline):
        task = dataclasses.replace(MODEL, num_layers=num_layers, vocab_size=32 * 16)
        settings = make_settings(mesh, task=task, **pipeline)
        return describe_balance(Setup.of(settings.task, settings.parallel).layout)

    assert dict(said((1, 2, 1), head="last")) == {
        "work": "stage 0: 33%, stage 1: 67%; the head is that of 4.0 layers"
    }
    assert dict(said((1, 2, 1), head="last", placement=(2, 6))) == {
        "work": "stage 0: 17%, stage 1: 83%; the head is that of 4.0 layers",
        "warning": "stages wait for each other: a tick of placement=(2, 6) takes as long as 10.0 layers, of "
        "placement=(4, 4) as 8.0; a step would be up to 1.25 times as fast",
    }
    # A stage has the work of all its groups.
    groups = {"schedule": "interleaved", "num_groups": 2, "placement": (1, 2, 3, 2)}
    work, warning = said((1, 2, 1), **groups)
    assert work == ("work", "stage 0: 50%, stage 1: 50%")
    assert "stages wait for each other" in warning[1]
    assert said((2, 1, 4), head="last") == []


@pytest.mark.parametrize(
    ("costs", "stages", "options", "message"),
    [
        ([1, 2], 3, {}, "2 layers on 3 stages; use from 1 to 2"),
        ([1, 2], 0, {}, "2 layers on 0 stages"),
        ([1, -2], 1, {}, r"costs=\(1, -2\)"),
        ([1, float("nan")], 1, {}, "nan"),
        ([1, 2], 1, {"last_cost": -1.0}, "last_cost=-1.0"),
        ([1, 2], 1, {"layer_bytes": [3]}, "1 layer_bytes for 2 costs"),
        ([1, 2], 2, {"layer_bytes": [3, 9], "max_bytes": 8}, "keeps to max_bytes=8; .* has 9, all"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, stages, options, message):
    with pytest.raises(ValueError, match=message):
        balance(costs, stages, **options)


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


def interleaved(placement, num_groups):
    """Where groups lie: group v of stage s comes at place v S + s."""
    return route_of("interleaved", len(placement) // num_groups, num_groups).stages


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_groups_that_go_up_and_down_lie_side_by_side_on_their_stage(num_stages):
    route, S = route_of("v", num_stages, 2), num_stages
    assert route.stages == (*range(S), *reversed(range(S)))
    assert route.groups == (0,) * S + (1,) * S
    up, stays, down = [1] * (S - 1), [0], [-1] * (S - 1)
    assert route.steps(1)[1:] == up + stays + down
    assert route.steps(-1)[1:] == up + stays + down
    slots = make_slots((1,) * 2 * S, route.stages)
    assert slots.layers == tuple(n for s in range(S) for n in (s, 2 * S - 1 - s))


@hypothesis.given(case=placements())
def test_every_layer_stands_in_one_slot_and_every_stage_has_as_many(case):
    placement, num_groups = case
    num_stages = len(placement) // num_groups
    slots = make_slots(placement, interleaved(placement, num_groups))
    layer_ids = slots.layers
    assert slots.has_empty_slots == (-1 in layer_ids)
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
    slots = make_slots(placement, interleaved(placement, num_groups))
    assert slots.layers == layer_ids
    # With one kind of layer its stack is the slots themselves.
    assert slots.rows == (layer_ids,)


@hypothesis.given(case=placements(), data=st.data())
def test_every_kind_has_as_many_rows_in_every_group_and_slots_point_at_their_layers(case, data):
    placement, num_groups = case
    num_layers = sum(placement)
    kind_of = data.draw(st.lists(st.integers(0, 2), min_size=num_layers, max_size=num_layers))
    kind_of[:] = [sorted({*kind_of}).index(kind) for kind in kind_of]  # numbered without gaps
    slots = make_slots(placement, interleaved(placement, num_groups), kind_of)
    assert len(slots.rows) == max(kind_of) + 1
    for kind, rows in enumerate(slots.rows):
        assert len(rows) % len(placement) == 0
        held = [layer for layer in rows if layer >= 0]
        assert sorted(held) == [n for n in range(num_layers) if kind_of[n] == kind]
        # As few as the group with the most of them needs.
        of_group = np.reshape(rows, (len(placement), -1)) >= 0
        assert of_group.sum(1).max() == of_group.shape[1]
    width = max(placement)
    for slot, (layer, kind, place) in enumerate(
        zip(slots.layers, slots.kinds, slots.places, strict=True)
    ):
        if layer >= 0:
            assert kind == kind_of[layer]
            room = len(slots.rows[kind]) // len(placement)
            assert slots.rows[kind][slot // width * room + place] == layer
        else:
            assert (kind, place) == (0, 0)


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
            r"from 0 with the sum 4, such as \(2, 2\)$",
        ),
        (((2, 1, 1), 4, 2), r"placement=\(2, 1, 1\) is 3 numbers .* needs 2 numbers"),
        (((5, -1), 4, 2), r"placement=\(5, -1\) is 2 numbers with the sum 4; .* from 0 with"),
        (((), 4, 2), r"placement=\(\) is 0 numbers"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_placement(*arguments)
