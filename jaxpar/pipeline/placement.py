"""The placement of layers on pipeline stages."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.base.checks import nearest_multiples, require
from jaxpar.base.stage_names import NamedPlacement

# Where a unit goes from one virtual stage to the next: to the stage above, which after the last is the first
# in a ring; to the one below; nowhere.
UP, DOWN, STAYS = 1, -1, 0

# Costs that differ by less are the same: their sums are rounded.
_ROUNDING = 1e-9

# Of a part of a model: the cost of its forward and of its backward pass.
Passes = tuple[float, float]


class PartCosts(NamedTuple):
    """What each part of a model costs, in any unit: FLOPs, or seconds.

    Attributes:
      layers: of each.
      first, last: before the layers, and after them, on the stage where they run; (0, 0) for what all stages
        share. `last` has its backward pass at once: it counts as forward.
      speeds: of the device of each place, by which its costs are divided; () if all are equal.
      shared: what each place has of what all stages share. With equal speeds no stage waits for it.
    """

    layers: tuple[Passes, ...]
    first: Passes = (0.0, 0.0)
    last: Passes = (0.0, 0.0)
    speeds: tuple[float, ...] = ()
    shared: Passes = (0.0, 0.0)

    def of_places(self, placement: Sequence[int]) -> np.ndarray:
        """The costs of both passes in every place of a placement, [2, places]."""
        ends = np.cumsum((0, *placement))
        cost_2P = np.stack([np.diff(sums[ends]) for sums in self.sums()])
        cost_2P += np.reshape(self.shared, (2, 1))
        cost_2P[:, 0] += self.first
        cost_2P[0, -1] += sum(self.last)
        return cost_2P / (self.speeds or 1.0)

    def sums(self) -> list[np.ndarray]:
        """For both passes, what the layers before each cost, and at the end what all cost."""
        passes = np.asarray(self.layers, np.float64).reshape(-1, 2).T
        return [np.concatenate([[0.0], np.cumsum(each)]) for each in passes]


def balance(costs: PartCosts, num_places: int) -> list[tuple[int, ...]]:
    """Balances layers over stages: the numbers of layers per place with the shortest ticks, best first.

    Stages of a pipeline meet twice in a tick: after its forward part, which the head ends, and after its
    backward part. So a tick takes as long as the slowest place of the one part and the slowest of the other
    (`tick_cost`): where a head takes layers off its stage, the others' backward parts must not become much
    longer for it. Found are all placements for which neither part can be shorter unless the other is longer,
    so the first is optimal: by dynamic programming over (places, layers before them), in
    O(places layers^2) for each. Of equal ones it is the most even one, by the sum of squares, and then the
    one with more layers in the first places. A place may stay without layers.

    Args:
      costs: of the parts.
      num_places: stages, times the groups of layers on each.
    Returns:
      Placements, the one with the shortest ticks first.
    Raises:
      ValueError: there is no place, or a cost is negative or not a number.

    Example:
      costs = jaxpar.pipeline.placement.PartCosts(layers=((1, 2),) * 6, last=(2, 0))
      best, *others = jaxpar.pipeline.balance(costs, num_places=2)
    """
    parts = *costs.layers, costs.first, costs.last, costs.shared
    is_known = all(0 <= cost < np.inf for each in parts for cost in each)
    require(is_known, f"{costs}: must be finite.\nFix: use numbers from 0.")
    require(num_places > 0, f"num_places={num_places} for layers.\nFix: use 1 or more.")
    up_P, down_P = (_spans_of_places(costs, number, num_places) for number in (0, 1))
    found, limit = list[tuple[int, ...]](), np.inf
    while True:
        pairs = [*zip(up_P, down_P, strict=True)]
        down = _best([np.where(u < limit, d, np.inf) for u, d in pairs], np.maximum)[0][0]
        if down == np.inf:
            return sorted(found, key=lambda placement: tick_cost(costs, placement))
        down *= 1 + _ROUNDING
        up = _best([np.where(d <= down, u, np.inf) for u, d in pairs], np.maximum)[0][0]
        limit, up = up * (1 - _ROUNDING), up * (1 + _ROUNDING)
        found.append(
            _evenest([np.where((u <= up) & (d <= down), (u + d) ** 2, np.inf) for u, d in pairs])
        )


def tick_cost(costs: PartCosts, placement: Sequence[int]) -> float:
    """The cost of a tick in which every place has a unit each way."""
    return float(costs.of_places(placement).max(axis=1).sum())


@functools.lru_cache(maxsize=4096)
def balanced(costs: PartCosts, num_places: int) -> tuple[int, ...]:
    """The first placement of `balance`."""
    return balance(costs, num_places)[0]


def _spans_of_places(costs: PartCosts, number: int, num_places: int) -> list[np.ndarray]:
    """For every place [begin, end] -> what it costs with these layers, in the forward or backward part."""
    whole, sums = np.arange(len(costs.layers) + 1), costs.sums()[number]
    shared = costs.shared[number]
    cost_BE = np.where(whole < whole[:, None], np.inf, sums - sums[:, None] + shared)
    spans = [cost_BE] * num_places
    spans[0] = spans[0] + costs.first[number]
    spans[-1] = spans[-1] + sum(costs.last) * (number == 0)
    if costs.speeds:
        return [span / speed for span, speed in zip(spans, costs.speeds, strict=True)]
    return spans


def _best(cost_PBE: Sequence[np.ndarray], join: np.ufunc) -> list[np.ndarray]:
    """[place][begin] -> the least cost of all layers from that one on, in this place and those after it."""
    best_B = np.full(len(cost_PBE[0]), np.inf)
    best_B[-1] = 0.0
    best_PB = [best_B]
    for cost_BE in reversed(cost_PBE):
        best_PB.insert(0, join(cost_BE, best_PB[0]).min(axis=1))
    return best_PB


def _evenest(square_PBE: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The placement with the least sum, and then with more layers in the first places."""
    best_PB, placement, begin = _best(square_PBE, np.add), [], 0
    for square_BE, after_B in zip(square_PBE, best_PB[1:], strict=True):
        total_E = square_BE[begin] + after_B
        end = int(np.flatnonzero(total_E <= total_E.min() * (1 + _ROUNDING))[-1])
        placement.append(end - begin)
        begin = end
    return tuple(placement)


def resolve_placement(
    placement: str | Sequence[int] | NamedPlacement,
    costs: PartCosts,
    num_stages: int,
    num_groups: int = 1,
) -> tuple[int, ...]:
    """The number of layers on each stage; with several groups a stage, of each group, in the layers' order.

    Args:
      placement: "even" (the same number everywhere), "balanced" (by `balance`), the numbers themselves, e.g.
        (2, 3, 3), or what was read from words.
      costs: of the parts, for "balanced".
    Raises:
      ValueError: the numbers do not fit the layers and stages.
    """
    num_layers, num_places = len(costs.layers), num_stages * num_groups
    best, places = balanced(costs, num_places), f"stage={num_stages}"
    if num_groups > 1:
        places += f" x num_groups={num_groups} = {num_places}"
    if placement == "balanced":
        return best
    if placement == "even":
        require(
            num_layers % num_places == 0,
            f"num_layers={num_layers} does not split evenly over {places}.\nFix: use "
            f"{nearest_multiples(num_layers, num_places)} layers, or a placement such as {best}.",
        )
        return (num_layers // num_places,) * num_places
    assert not isinstance(placement, str)
    numbers = placement.layers if isinstance(placement, NamedPlacement) else tuple(placement)
    require(
        len(numbers) == num_places and sum(numbers) == num_layers and min(numbers) >= 0,
        f"placement={numbers} has {sum(numbers)} layers in {len(numbers)} places, num_layers={num_layers} on "
        f"{places} needs {num_layers} in {num_places}.\nFix: use such as {best}.",
    )
    return numbers


@dataclasses.dataclass(frozen=True)
class Route:
    """Virtual stages, groups of layers on stages, in the order in which a unit passes them.

    Attributes:
      stages: where each of them lies.
      is_ring: whether the last stage sends to the first.
    """

    stages: tuple[int, ...]
    is_ring: bool = False

    @property
    def num_stages(self) -> int:
        """S."""
        return max(self.stages) + 1

    @property
    def num_groups(self) -> int:
        """V, of layers on each stage."""
        return len(self.stages) // self.num_stages

    @property
    def groups(self) -> tuple[int, ...]:
        """Which group of its stage each virtual stage is."""
        return tuple(self.stages[:p].count(stage) for p, stage in enumerate(self.stages))

    def steps(self, way: int) -> list[int]:
        """In which direction a unit comes to each virtual stage on its way, `UP` and so on.

        Args:
          way: +1 from the first to the last, -1 back. The first of the steps means nothing.
        """
        stages = self.stages[::way]
        step = [now - before for before, now in zip((stages[0], *stages), stages, strict=False)]
        if self.is_ring and self.num_stages > 1:
            return [way * UP] * len(step)
        return step


def route_of(schedule: str, num_stages: int, num_groups: int) -> Route:
    """The virtual stages of a schedule, by its name; see `schedules.make_schedule`."""
    up = tuple(range(num_stages))
    if schedule == "v":
        return Route(up + up[::-1])
    return Route(up * num_groups, is_ring=num_groups > 1)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where the layers of a stack lie: a list of slots for every stage, and a stack for every kind.

    Every group of layers on a stage has as many slots as the fullest needs, and as many rows of each kind's
    stack, so that both split evenly over the `stage` axis: (1, 2) layers have slots (0, -1, 1, 2). The groups
    of a stage lie side by side: four layers on two stages in two groups have slots (0, 2, 1, 3) if they are
    interleaved, and (0, 3, 1, 2) if they go up and down.

    Attributes:
      placement: layers of each group, in the order of the layers.
      layers: the layer in each slot, -1 in empty ones.
      kinds: of the layer in each slot; 0 in empty ones.
      places: its row in the stack of its kind, counted from where the rows of its group begin.
      rows: for every kind, the layer in each row of its stack, -1 in empty ones.
    """

    placement: tuple[int, ...]
    layers: tuple[int, ...]
    kinds: tuple[int, ...]
    places: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def has_empty_slots(self) -> bool:
        """Whether a slot is without a layer."""
        return -1 in self.layers


def make_slots(
    placement: Sequence[int],
    stages: Sequence[int] | None = None,
    kind_of: Sequence[int] | None = None,
) -> Slots:
    """The slots of a placement.

    Args:
      placement: layers of each group, in the order of the layers.
      stages: where each group lies (`Route.stages`); None if each stage has one.
      kind_of: the kind of each layer, numbered from 0; None if all are of one.

    Example:
      slots = jaxpar.pipeline.make_slots((3, 2))  # three layers on stage 0, two on stage 1
    """
    stages = range(len(placement)) if stages is None else stages
    kind_of = [0] * sum(placement) if kind_of is None else list(kind_of)
    num_kinds = max(kind_of, default=0) + 1
    firsts = [sum(placement[:place]) for place in range(len(placement))]
    groups = [
        range(firsts[place], firsts[place] + placement[place])
        for place in sorted(range(len(placement)), key=lambda place: (stages[place], place))
    ]
    layers_of = [
        [[layer for layer in group if kind_of[layer] == kind] for kind in range(num_kinds)]
        for group in groups
    ]
    room = [max(map(len, of_kind), default=0) for of_kind in zip(*layers_of, strict=True)]
    layers, kinds, places = list[int](), list[int](), list[int]()
    rows: list[list[int]] = [[] for _ in range(num_kinds)]
    for group, own in zip(groups, layers_of, strict=True):
        empty = [0] * (max(placement) - len(group))
        layers += [*group, *(-1 for _ in empty)]
        kinds += [*(kind_of[layer] for layer in group), *empty]
        places += [*(own[kind_of[layer]].index(layer) for layer in group), *empty]
        for of_kind, mine, size in zip(rows, own, room, strict=True):
            of_kind += [*mine, *[-1] * (size - len(mine))]
    return Slots(
        tuple(placement), tuple(layers), tuple(kinds), tuple(places), tuple(map(tuple, rows))
    )
