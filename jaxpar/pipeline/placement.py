"""Which layers stand on which pipeline stage."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

# Where a unit goes from one virtual stage to the next: to the stage above, which after the last is the first
# in a ring; to the one below; nowhere.
UP, DOWN, STAYS = 1, -1, 0

# Of a layer, forward and backward, where a forward pass costs 1.
LAYER_COST = 3.0

# Costs that differ by less are the same: their sums are rounded.
_ROUNDING = 1e-9


def balance(
    costs: Sequence[float],
    num_stages: int,
    *,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    layer_bytes: Sequence[float] | None = None,
    max_bytes: float = float("inf"),
) -> tuple[int, ...]:
    """The number of neighbouring layers on each stage that gives the slowest stage the least to do.

    Optimal, by dynamic programming over (stages, layers before them) in O(stages layers^2). Of several such
    placements it is the most even one, by the sum of squares, and then the one with more layers on the first
    stages.

    Args:
      costs: of each layer, in any unit: multiply-adds, or measured seconds.
      num_stages: each gets one layer or more.
      first_cost, last_cost: what the first and the last stage have to do in addition, such as an embedding
        and a head, in the same unit.
      layer_bytes: memory that each layer takes; None ignores memory.
      max_bytes: that the layers of one stage may take.
    Raises:
      ValueError: there are fewer layers than stages, a cost is negative or not a number, or no placement
        stays within `max_bytes`.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers on {num_stages} stages; use from 1 to {num_layers} stages"
        )
    if not all(0 <= cost < float("inf") for cost in (*costs, first_cost, last_cost)):
        raise ValueError(f"costs={tuple(costs)}, {first_cost=}, {last_cost=}: use numbers from 0")
    whole = np.arange(num_layers + 1)
    cost_FE = _spans(costs)  # of layers first ... end - 1
    cost_FE[0] += first_cost
    cost_FE[:, -1] += last_cost
    cost_FE[whole[:, None] >= whole] = np.inf  # a stage without a layer
    if layer_bytes is not None:
        if len(layer_bytes) != num_layers:
            raise ValueError(f"{len(layer_bytes)} layer_bytes for {num_layers} costs; give as many")
        cost_FE[_spans(layer_bytes) > max_bytes * (1 + _ROUNDING)] = np.inf
    slowest = _best(cost_FE, num_stages, np.maximum)[num_stages][0]
    if slowest == np.inf:
        raise ValueError(
            f"no placement of {num_layers} layers on {num_stages} stages keeps to {max_bytes=:,.0f}; the "
            f"largest layer has {max(layer_bytes or (0,)):,.0f}, all have {sum(layer_bytes or (0,)):,.0f}"
        )
    cost_FE[cost_FE > slowest * (1 + _ROUNDING)] = np.inf
    squares_FE = cost_FE**2
    best_SF = _best(squares_FE, num_stages, np.add)
    placement, first = [], 0
    for stages_left in range(num_stages, 0, -1):
        ends = squares_FE[first] + best_SF[stages_left - 1]
        end = int(np.flatnonzero(ends <= ends.min() * (1 + _ROUNDING))[-1])
        placement.append(end - first)
        first = end
    return tuple(placement)


def balance_ticks(
    forward: Sequence[float],
    backward: Sequence[float],
    num_stages: int,
    *,
    first_cost: float = 0.0,
    head_cost: float = 0.0,
) -> list[tuple[int, ...]]:
    """Placements by the length of their ticks, the one with the shortest first.

    Stages of a pipeline meet twice in a tick: after its forward part, which the head ends, and after its
    backward part. So a tick takes as long as the slowest stage of the one part and the slowest of the other
    (`tick_cost`): where a head takes layers off its stage, the others' backward parts must not become much
    longer for it. What is compared are the placements that `balance` gives for forward parts, and for both
    parts, with every number of layers on the fullest stage; for equal layers the first of them is optimal.

    Args:
      forward, backward: of each layer, in any unit.
      num_stages: each gets one layer or more.
      first_cost, head_cost: what the first and the last stage have to do in addition, in the forward part.
    Raises:
      ValueError: as of `balance`.
    """
    num_layers = len(forward)
    fewest = -(-num_layers // max(num_stages, 1))
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    placements = [
        balance(
            costs,
            num_stages,
            first_cost=first_cost,
            last_cost=head_cost,
            layer_bytes=[1.0] * num_layers,
            max_bytes=most,
        )
        for most in range(fewest, max(num_layers - num_stages + 1, fewest) + 1)
        for costs in (forward, both)
    ]
    return sorted(
        dict.fromkeys(placements),
        key=lambda p: tick_cost(p, forward, backward, first_cost, head_cost),
    )


def tick_cost(
    placement: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    first_cost: float = 0.0,
    head_cost: float = 0.0,
) -> float:
    """The cost of a tick in which every stage has a unit each way; arguments as of `balance_ticks`."""
    ends = np.cumsum((0, *placement))
    up, down = (np.diff(_spans(costs)[0][ends]) for costs in (forward, backward))
    up[0] += first_cost
    up[-1] += head_cost
    return float(up.max() + down.max())


@functools.lru_cache(maxsize=4096)
def _balanced(num_layers: int, num_places: int, last_cost: float) -> tuple[int, ...]:
    """Layers of equal cost, with what the last place has to do besides, in layers."""
    costs = [1.0] * num_layers, [LAYER_COST - 1.0] * num_layers
    return balance_ticks(*costs, num_places, head_cost=LAYER_COST * last_cost)[0]


def _spans(values: Sequence[float]) -> np.ndarray:
    """[first, end] -> the sum of values[first:end]."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    return sums[None, :] - sums[:, None]


def _best(cost_FE: np.ndarray, num_stages: int, join: np.ufunc) -> list[np.ndarray]:
    """[number of stages][first layer] -> the least cost of all layers from that one on, on so many stages."""
    best_F = np.full(len(cost_FE), np.inf)
    best_F[-1] = 0.0
    best_SF = [best_F]
    for _ in range(num_stages):
        best_SF.append(join(cost_FE, best_SF[-1][None]).min(axis=1))
    return best_SF


def resolve_placement(
    placement: str | Sequence[int],
    num_layers: int,
    num_stages: int,
    num_groups: int = 1,
    last_cost: float = 0.0,
    costs: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The number of layers on each stage; with several groups a stage, of each group, in the layers' order.

    Args:
      placement: "even" (the same number everywhere), "balanced" (by `balance_ticks`), or the numbers
        themselves, e.g. (2, 3, 3).
      last_cost: work that only the last stage has, such as a head, in (mean) layers; for "balanced".
      costs: of each layer, in any unit, where they differ; for "balanced".
    Raises:
      ValueError: the numbers do not fit the layers and stages.
    """
    num_places = num_stages * num_groups
    places = f"stage={num_stages}"
    if num_groups > 1:
        places += f" x num_groups={num_groups} = {num_places}"
    if num_places > num_layers:
        fewer = num_layers // num_groups
        fits = f"stage={fewer}" if fewer else f"num_groups={num_layers}"
        raise ValueError(
            f"{places} is more than num_layers={num_layers}; use {fits} or fewer, or {num_places} layers"
        )
    if costs is None:
        balanced = _balanced(num_layers, num_places, last_cost)
    else:
        mean = sum(costs) / num_layers
        balanced = balance(costs, num_places, last_cost=last_cost * mean)
    if placement == "even" and num_layers % num_places:
        below = num_layers // num_places * num_places
        stages = [s for s in range(1, num_layers + 1) if num_layers % (s * num_groups) == 0]
        raise ValueError(
            f"num_layers={num_layers} does not split evenly over {places}; use {below} or "
            f"{below + num_places} layers, "
            + (f"stage={', '.join(map(str, stages))}, " if stages else "")
            + f"or a placement such as {balanced}"
        )
    if placement == "even":
        return (num_layers // num_places,) * num_places
    if placement == "balanced":
        return balanced
    if isinstance(placement, str):
        raise ValueError(
            f'placement={placement!r}; use "balanced", "even" or numbers such as (2, 3, 3)'
        )
    if len(placement) != num_places or sum(placement) != num_layers or min(placement) < 0:
        raise ValueError(
            f"placement={tuple(placement)} is {len(placement)} numbers with the sum {sum(placement)}; "
            f"num_layers={num_layers} on {places} needs {num_places} numbers from 0 with the sum "
            f"{num_layers}, such as {balanced}"
        )
    return tuple(placement)


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
