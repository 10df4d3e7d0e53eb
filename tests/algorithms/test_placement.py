"""Placements: every layer on one stage, as evenly as can be, in slots that split evenly."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxpar import PipelineConfig
from jaxpar.pipeline import balance, make_slots
from jaxpar.pipeline.placement import PartCosts, resolve_placement, route_of, tick_cost


@st.composite
def places(draw):
    """(number of layers, stages, groups on each stage)."""
    return draw(st.integers(1, 64)), draw(st.integers(1, 8)), draw(st.integers(1, 4))


@st.composite
def placements(draw):
    """(layers of each group, groups on each stage), some layer in all."""
    num_stages, num_groups = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    size = num_stages * num_groups
    numbers = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any))
    return tuple(numbers), num_groups


def equal(num_layers, head=0.0):
    """Costs of equal layers, and of a head that costs so many of them."""
    return PartCosts(((1.0, 2.0),) * num_layers, last=(head, 2 * head))


def all_placements(num_layers, num_places):
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_places - 1):
        yield tuple(np.diff((0, *cuts, num_layers)).tolist())


def loads(costs, placement):
    """What every place has to do in the two parts of a tick, one layer after the other."""
    layers, up, down = iter(costs.layers), [], []
    for number in placement:
        own = [next(layers) for _ in range(number)]
        up.append(sum(forward for forward, _ in own))
        down.append(sum(backward for _, backward in own))
    up[0] += costs.first[0]
    down[0] += costs.first[1]
    up[-1] += sum(costs.last)
    return up, down


def test_balance_agrees_with_brute_force_on_500_models():
    rng = np.random.default_rng(0)
    for case in range(500):
        num_layers, num_places = int(rng.integers(1, 8)), int(rng.integers(1, 5))
        # Whole numbers tie often, and then the tie-break is looked at.
        draw = (lambda n: rng.integers(0, 6, n)) if case % 2 else rng.random
        first, last, *layers = map(tuple, draw((num_layers + 2, 2)).tolist())
        costs = PartCosts(tuple(layers), first, last)

        def tick(placement, costs=costs):
            up, down = loads(costs, placement)
            return max(up) + max(down)

        every = [*all_placements(num_layers, num_places)]
        found = balance(costs, num_places)
        assert {*found} <= {*every}
        ticks = [tick(placement) for placement in found]
        assert ticks == pytest.approx([tick_cost(costs, placement) for placement in found])
        assert ticks == pytest.approx(sorted(ticks))
        assert ticks[0] == pytest.approx(min(map(tick, every)))

        def key(placement, costs=costs):
            """Of placements whose slowest parts are as long the most even, then the first."""
            squares = sum(sum(pair) ** 2 for pair in zip(*loads(costs, placement), strict=True))
            return round(squares, 9), tuple(-number for number in placement)

        slowest = [tuple(round(max(each), 9) for each in loads(costs, p)) for p in every]
        for placement in found:
            own = tuple(round(max(each), 9) for each in loads(costs, placement))
            alike = [p for p, each in zip(every, slowest, strict=True) if each == own]
            assert placement == min(alike, key=key)
            # Neither part can be shorter unless the other is longer.
            assert not any(each != own and each <= own and each[1] <= own[1] for each in slowest)


def test_layers_that_differ_are_ranked_by_their_ticks():
    costs = PartCosts(((1.0, 2.0), (1.0, 2.0), (4.0, 2.0), (1.0, 9.0)))
    found = balance(costs, 2)
    assert found == [(3, 1), (2, 2)]
    assert [tick_cost(costs, placement) for placement in found] == [6 + 9, 5 + 11]
    assert tick_cost(costs._replace(last=(0.5, 0.5)), (2, 2)) == 6.0 + 11.0


@pytest.mark.parametrize(
    ("costs", "num_places", "expected"),
    [
        (equal(4), 2, (2, 2)),
        # One layer more on the first stage would cost its backward pass, and save a forward pass on the last.
        (equal(8, 2.0), 2, (4, 4)),
        (equal(9, 2.0), 2, (5, 4)),
        # With one layer more on each of three stages, the fourth has three forward passes less.
        (equal(16, 2.0), 4, (5, 5, 5, 1)),
        # A head as heavy as all layers stands alone, and so does what comes before them.
        (PartCosts(((2.0, 1.0),) * 4, last=(5.0, 5.0)), 3, (2, 2, 0)),
        (PartCosts(((1.0, 2.0),) * 4, first=(4.0, 8.0)), 3, (0, 2, 2)),
        (equal(3), 4, (1, 1, 1, 0)),
        (equal(1), 3, (1, 0, 0)),
    ],
)
def test_what_is_around_the_layers_takes_them_off_its_stage(costs, num_places, expected):
    assert resolve_placement("balanced", costs, num_places) == expected


@pytest.mark.parametrize(
    ("costs", "num_places", "message"),
    [
        (equal(2), 0, "num_places=0 for layers"),
        (PartCosts(((1, -2),)), 1, r"layers=\(\(1, -2\),\).*\nFix: use numbers from 0"),
        (PartCosts(((1, float("nan")),)), 1, "nan"),
        (PartCosts(((1, 2),), last=(-1.0, 0)), 1, r"last=\(-1.0, 0\)"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, num_places, message):
    with pytest.raises(ValueError, match=message):
        balance(costs, num_places)


@hypothesis.given(sizes=places())
def test_balanced_shares_differ_by_at_most_one_and_the_last_is_no_larger_one(sizes):
    num_layers, num_stages, num_groups = sizes
    placement = resolve_placement("balanced", equal(num_layers), num_stages, num_groups)
    assert len(placement) == num_stages * num_groups
    assert sum(placement) == num_layers
    assert max(placement) - min(placement) <= 1
    assert placement[-1] == min(placement)


@hypothesis.given(sizes=places())
def test_even_shares_are_the_balanced_ones_where_the_layers_divide(sizes):
    num_layers, num_stages, num_groups = sizes
    num_places = num_stages * num_groups
    if num_layers % num_places == 0:
        even = resolve_placement("even", equal(num_layers), num_stages, num_groups)
        assert even == (num_layers // num_places,) * num_places
    else:
        message = f"num_layers={num_layers} does not split evenly over stage={num_stages}"
        with pytest.raises(ValueError, match=message):
            resolve_placement("even", equal(num_layers), num_stages, num_groups)


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
    assert resolve_placement([2, 3, 3], equal(8), 3) == (2, 3, 3)
    assert resolve_placement((1, 1, 2, 1), equal(5), 2, 2) == (1, 1, 2, 1)
    assert resolve_placement((1, 1, 1, 0), equal(3), 4) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("placement", "sizes", "message"),
    [
        (
            "even",
            (6, 4),
            r"num_layers=6 does not split evenly over stage=4\.\nFix: use 4 or 8 layers, "
            r"or a placement such as \(2, 2, 1, 1\)\.$",
        ),
        (
            "even",
            (6, 2, 2),
            r"num_layers=6 does not split evenly over stage=2 x num_groups=2 = 4\.\nFix: use 4 or 8 layers, "
            r"or a placement such as \(2, 2, 1, 1\)\.$",
        ),
        (
            "even",
            (5, 2, 2),
            r"num_layers=5 does not .* = 4\.\nFix: use 4 or 8 layers, or .* such as \(2, 1, 1, 1\)\.$",
        ),
        (
            "even",
            (3, 4),
            r"over stage=4\.\nFix: use 4 layers, or .* such as \(1, 1, 1, 0\)\.$",
        ),
        (
            (1, 2),
            (4, 2),
            r"placement=\(1, 2\) has 3 layers in 2 places, num_layers=4 on stage=2 needs 4 in 2\.\n"
            r"Fix: use such as \(2, 2\)\.$",
        ),
        ((2, 1, 1), (4, 2), r"placement=\(2, 1, 1\) has 4 layers in 3 places, .* needs 4 in 2"),
        ((5, -1), (4, 2), r"placement=\(5, -1\) has 4 layers in 2 places, .* needs 4 in 2"),
        ((), (4, 2), r"placement=\(\) has 0 layers in 0 places"),
        (
            PipelineConfig(placement="first, 0-1 | 2, last").named_placement,
            (4, 3),
            r"placement=\(2, 1\) has 3 layers in 2 places, num_layers=4 on stage=3 needs 4 in 3\.\n"
            r"Fix: use such as \(2, 1, 1\)\.$",
        ),
    ],
)
def test_what_does_not_fit_is_refused(placement, sizes, message):
    num_layers, *stages = sizes
    with pytest.raises(ValueError, match=message):
        resolve_placement(placement, equal(num_layers), *stages)


def test_the_first_of_unequal_speed_is_the_best_by_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_layers, num_places = int(rng.integers(1, 8)), int(rng.integers(1, 5))
        first, last, shared, *layers = map(tuple, rng.random((num_layers + 3, 2)).tolist())
        speeds = tuple(rng.uniform(0.2, 4, num_places))
        costs = PartCosts(tuple(layers), first, last, speeds, shared)

        def tick(placement, costs=costs):
            ends = [sum(placement[:n]) for n in range(len(placement) + 1)]
            slowest = [0.0, 0.0]
            for at, speed in enumerate(costs.speeds):
                own = costs.layers[ends[at] : ends[at + 1]]
                for number in (0, 1):
                    cost = sum(layer[number] for layer in own) + costs.shared[number]
                    cost += costs.first[number] * (at == 0)
                    cost += sum(costs.last) * (at == len(placement) - 1 and number == 0)
                    slowest[number] = max(slowest[number], cost / speed)
            return sum(slowest)

        every = [p for p in np.ndindex(*[num_layers + 1] * num_places) if sum(p) == num_layers]
        assert tick(balance(costs, num_places)[0]) == pytest.approx(min(map(tick, every)))
